"""The public functions enter a kernel without the dispatcher only where that changes nothing.

And tensors of CUDA pass the dispatcher with the kernel's key alone only there, which is tried with
tensors of the CPU whose kernels are as though they had no short way.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from absent_device import cuda_tensor
from operator_collection import INFERENCE_ONLY, operator_classes, public_operators
from resident_memory import least_growth, needs_resident_bytes
from samples import normal
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pkg
from pkg.ops._call import direct_call
from pkg.testing import Sample, same_bits

# What writes to an argument is tested in test_direct_writes.py.
OPERATORS = [name for name in public_operators() if name != "add_out"]


def direct(name: str, way: Callable[[str], Any], has_autocast: bool) -> Callable[..., Any]:
    """The short way into a CPU kernel."""
    return direct_call(name, way("otherwise"), record=way("record"), has_autocast=has_autocast)


def below_autograd(name: str, way: Callable[[str], Any], has_autocast: bool) -> Callable[..., Any]:
    """The way of tensors of CUDA, for tensors of the CPU."""
    call: Callable[..., Any] = pkg._C._call_below_autograd(
        name, "CPU", way("otherwise"), way("record"), has_autocast=has_autocast
    )
    return call


@pytest.fixture(params=[direct, below_autograd])
def way_of(request: pytest.FixtureRequest) -> Callable[..., str]:
    """Which way a call takes: ``kernel``, ``record`` or ``otherwise``."""
    symbols = getattr(request.node, "callspec", None)
    if request.param is below_autograd and symbols and symbols.params.get("symbols") == SYMBOLS[1]:
        pytest.skip("where nothing tells of observers, all calls take the long way")

    def function(name: str, *args: Any, has_autocast: bool = False) -> str:
        taken: list[str] = []

        def way(label: str) -> Callable[..., None]:
            return lambda *_: taken.append(label)

        result = request.param(name, way, has_autocast)(*args)
        assert (result is None) == (len(taken) == 1)
        return taken[0] if taken else "kernel"

    return function


def arguments_of(operator: str) -> tuple[Any, ...]:
    return next(sample.args for sample in samples_of(operator) if not sample.kwargs)


def samples_of(operator: str) -> list[Sample]:
    samples = [s.converted(torch.float32) for s in operator_classes()[operator]().samples()]
    return [sample for sample in samples if not sample.random]


def results_of(returned: Any) -> list[Tensor]:
    return list(returned) if isinstance(returned, tuple) else [returned]


def dispatched(operator: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(torch.ops.pkg, operator).default
    return function


class DispatchMode(TorchDispatchMode):
    """Collects the operators that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    """Collects the functions that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    """A tensor with a will of its own."""


SYMBOLS = ("looked up", "missing")
# Of no plain tensor; PyTorch 2.10 excludes such a key during a backward pass.
PRE_DISPATCH = torch._C.DispatchKeySet(torch._C.DispatchKey.PreDispatch)


@pytest.fixture(params=SYMBOLS)
def symbols(request: pytest.FixtureRequest) -> Iterator[None]:
    """With what PyTorch exports and does not promise, and as where a PyTorch lacks it."""
    pkg._C._use_unstable_symbols(request.param == SYMBOLS[0])
    yield
    pkg._C._use_unstable_symbols(True)


@pytest.mark.skipif(sys.platform != "linux", reason="looked up on Linux alone")
def test_unpromised_symbols_are_found() -> None:
    """Where they are not, every small call takes longer, and nothing else tells of it."""
    assert all(pkg._C._use_unstable_symbols(True).values())
    assert not any(pkg._C._use_unstable_symbols(False).values())
    assert all(pkg._C._use_unstable_symbols(True).values())


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_plain_call_does_not_pass_the_dispatcher(
    operator: str, symbols: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without this the rest of the file would prove nothing.
    function, args = getattr(pkg.ops, operator), arguments_of(operator)
    expected = results_of(dispatched(operator)(*args))
    monkeypatch.setattr(torch._ops.OpOverload, "__call__", None)
    for state in (nullcontext(), torch.no_grad(), torch.inference_mode()):
        with state:
            results = results_of(function(*args))
            assert all(map(same_bits, results, expected))
    if operator in INFERENCE_ONLY:
        return
    leaf = args[0].clone().requires_grad_()
    results = results_of(function(leaf, *args[1:]))
    assert all(map(same_bits, [result.detach() for result in results], expected))
    (gradient,) = torch.autograd.grad(sum(result.sum() for result in results), leaf)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("operator", OPERATORS)
def test_results_and_gradients_are_those_of_the_dispatched_operator(operator: str) -> None:
    functions = (getattr(pkg.ops, operator), dispatched(operator))
    has_gradients = operator not in INFERENCE_ONLY | {"int4_linear"}
    for sample in samples_of(operator):
        results, gradients = [], []
        for function in functions:
            own = sample.copy()
            with torch.no_grad():
                results.append(results_of(function(*own.args, **own.kwargs)))
            if has_gradients and not sample.values_only:
                differentiable = [t for t in own.tensors if t is not own.kwargs.get("alibi_slopes")]
                leaves = [t.requires_grad_() for t in differentiable if t.is_floating_point()]
                total = sum(r.sum() for r in results_of(function(*own.args, **own.kwargs)))
                gradients.append(torch.autograd.grad(total, leaves, allow_unused=True))
        for direct, wanted in zip(*results, strict=True):
            assert same_bits(direct, wanted), str(sample)
            assert direct.stride() == wanted.stride(), str(sample)
        for direct, wanted in zip(*gradients, strict=True) if gradients else ():
            assert same_bits(direct, wanted), str(sample)


def test_what_a_tensor_is_decides(way_of: Callable[..., str], symbols: None) -> None:
    a = normal(4, 4).float()
    complex_tensor = torch.complex(a, a)
    plain = {
        "a tensor": a,
        "a parameter": torch.nn.Parameter(a, requires_grad=False),
        "a view": a.mT[1:, ::2].expand(2, 3, 2),
        "without elements": a[:0],
        "without dimensions": a[0, 0],
        "of integers": a.long(),
        "made in inference mode": torch.inference_mode()(a.clone)(),
    }
    others = {
        "of a subclass": a.as_subclass(Subclass),
        "sparse": a.to_sparse(),
        "compressed": a.to_sparse_csr(),
        "of another layout": a.to_mkldnn(),
        "of another device": a.to("meta"),
        "complex": complex_tensor,
        "conjugated": complex_tensor.conj(),
        "negated": complex_tensor.conj().imag,
        "negated, out of its graph": complex_tensor.conj().imag.data,
        "zero without memory": torch._efficientzerotensor(4, 4),
        "a part of such a one": torch._efficientzerotensor(5, 4)[1:],
        "of a float8 dtype": a.to(torch.float8_e5m2),
        "quantised": torch.quantize_per_tensor(a, 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([a, a[1:]]),
        "functional": torch._to_functional_tensor(a),
    }
    for description, tensor in plain.items():
        assert way_of("mul", tensor, tensor) == "kernel", description
    for description, tensor in others.items():
        assert way_of("mul", tensor, a) == "otherwise", description
        assert way_of("mul", a, tensor) == "otherwise", description


@pytest.mark.parametrize(
    ("state", "way"),
    [
        (nullcontext, "kernel"),
        (torch.no_grad, "kernel"),
        (torch.inference_mode, "kernel"),
        (DispatchMode, "otherwise"),
        (FunctionMode, "otherwise"),
        (FakeTensorMode, "otherwise"),
        (torch.profiler.profile, "otherwise"),
        (torch.autograd.profiler.profile, "otherwise"),
        (torch.autograd.forward_ad.dual_level, "otherwise"),
        (lambda: torch.device("cpu"), "otherwise"),
        (torch._C._AutoDispatchBelowAutograd, "kernel"),
        (lambda: torch._C._ExcludeDispatchKeyGuard(PRE_DISPATCH), "kernel"),
    ],
)
def test_what_the_thread_is_in_decides(
    way_of: Callable[..., str],
    state: Callable[[], AbstractContextManager[Any]],
    way: str,
    symbols: None,
) -> None:
    a = normal(4, 4).float()
    with state():
        assert way_of("mul", a, a) == way
    assert way_of("mul", a, a) == "kernel"


@pytest.mark.skipif(sys.platform != "linux", reason="the words are found on Linux alone")
@pytest.mark.parametrize("state", [DispatchMode, FunctionMode, enable_python_dispatcher])
def test_the_state_of_another_thread_does_not_decide(
    way_of: Callable[..., str],
    state: Callable[[], AbstractContextManager[Any]],
) -> None:
    a = normal(4, 4).float()

    def within() -> str:
        with state():
            return way_of("mul", a, a)

    with ThreadPoolExecutor(1) as another:
        assert another.submit(way_of, "mul", a, a).result() == "kernel"
        with state():
            assert way_of("mul", a, a) == "otherwise"
            assert another.submit(way_of, "mul", a, a).result() == "kernel"
        assert another.submit(within).result() == "otherwise"
        assert way_of("mul", a, a) == "kernel"


def test_transforms_and_tracing_decide(way_of: Callable[..., str], symbols: None) -> None:
    a = normal(4, 4).float()
    ways = []

    def function(x: Tensor) -> Tensor:
        ways.append(way_of("mul", x, x))
        ways.append(way_of("mul", a, a))
        return x * x

    torch.func.vmap(function)(a)
    torch.func.grad(lambda x: function(x).sum())(a)
    torch.func.jvp(function, (a,), (a,))
    torch.func.functionalize(function)(a)
    torch.jit.trace(function, (a,), check_trace=False)
    make_fx(function)(a)
    make_fx(function, pre_dispatch=True)(a)
    assert ways == ["otherwise"] * 14


def test_autocast_decides_where_the_operator_has_a_rule(
    way_of: Callable[..., str], symbols: None
) -> None:
    a = normal(4, 4).float()
    with torch.autocast("cpu"):
        assert way_of("mul", a, a) == "kernel"
        assert way_of("matmul", a, a, None, has_autocast=True) == "otherwise"
        assert pkg.ops.matmul(a, a).dtype == torch.bfloat16
        assert pkg.ops.scaled_dot_product_attention(a, a, a).dtype == torch.bfloat16
        assert pkg.ops.mul(a, a).dtype == torch.float32
        with torch.autocast("cpu", enabled=False):
            assert way_of("matmul", a, a, None, has_autocast=True) == "kernel"
            assert pkg.ops.matmul(a, a).dtype == torch.float32
    assert way_of("matmul", a, a, None, has_autocast=True) == "kernel"


def test_a_gradient_is_recorded_where_autograd_is_on(
    way_of: Callable[..., str], symbols: None
) -> None:
    a = normal(4, 4).float().requires_grad_()
    plain = a.detach()
    assert way_of("mul", a, plain) == way_of("mul", plain, a) == "record"
    assert way_of("mul", torch.nn.Parameter(plain), plain) == "record"
    with torch.no_grad():
        assert way_of("mul", a, plain) == "kernel"
    with torch._C._AutoDispatchBelowAutograd():
        assert way_of("mul", a, plain) == "otherwise"
        assert not pkg.ops.mul(a, plain).requires_grad


@contextmanager
def autocast_of_cuda() -> Iterator[None]:
    """``torch.autocast``, which turns nothing on where there is no GPU."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_a_gradient_is_not_recorded_past_the_autocast_of_cuda(symbols: None) -> None:
    a = normal(4, 4).float().requires_grad_()
    there = cuda_tensor()
    leaf = there.detach().requires_grad_()

    def way_of(name: str, *args: Any, has_autocast: bool = False) -> str:
        way: str = direct(name, lambda label: lambda *_: label, has_autocast)(*args)
        return way

    def way(*tensors: Tensor) -> str:
        return way_of("matmul", *tensors, None, has_autocast=True)

    of_cuda = [(leaf, there), (there, leaf), (a, there), (leaf, a)]
    assert {way(*tensors) for tensors in of_cuda} == {"record"}
    with autocast_of_cuda():
        assert {way(*tensors) for tensors in of_cuda} == {"otherwise"}
        assert way(a, a) == "record"
        assert way_of("mul", leaf, there) == "record"  # which has no rule
        torch.set_autocast_enabled("cuda", False)
        assert {way(*tensors) for tensors in of_cuda} == {"record"}
    with torch.autocast("cpu"):
        assert {way(*tensors) for tensors in [*of_cuda, (a, a)]} == {"otherwise"}


def test_a_gradient_on_a_device_without_kernels_is_recorded_by_the_dispatcher(
    way_of: Callable[..., str], symbols: None
) -> None:
    """Where there are rules of autocast: whether its own is on is not asked."""
    leaf = torch.empty(4, 4, device="meta", requires_grad=True)
    assert way_of("matmul", leaf, leaf, None, has_autocast=True) == "otherwise"
    assert way_of("mul", leaf, leaf) == "record"


@pytest.mark.parametrize(
    "args",
    [
        (torch.ones(2), torch.ones(3), 0.5),
        (torch.ones(2), None, 0.5),
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(2), "0.5"),
        (torch.ones(2), torch.ones(2), torch.complex64),
        (torch.ones(2), torch.ones(2), 2**80 * 10**300),
    ],
)
def test_what_a_kernel_does_not_take_is_left_to_the_dispatcher(
    way_of: Callable[..., str], args: tuple[Any, ...]
) -> None:
    assert way_of("muladd", *args) == "otherwise"


def test_a_whole_number_is_a_float(way_of: Callable[..., str]) -> None:
    assert way_of("muladd", torch.ones(2), torch.ones(2), 1) == "kernel"


@pytest.mark.parametrize("count", [0, 1, 2, 4, 20])
def test_a_call_by_position_has_all_arguments(way_of: Callable[..., str], count: int) -> None:
    with pytest.raises(TypeError, match=f"muladd takes 3 arguments but {count} were given"):
        way_of("muladd", *(torch.ones(2),) * count)


def test_what_writes_to_an_argument_does_not_pass_below_autograd() -> None:
    call = below_autograd("add_out", lambda label: lambda *_: label, False)
    assert call(torch.ones(2), torch.ones(2), torch.zeros(2)) == "otherwise"


@pytest.mark.parametrize("operator", OPERATORS)
def test_results_below_autograd_are_those_of_the_dispatched_operator(operator: str) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("not the way below autograd")

    call = below_autograd(operator, lambda _: refuse, False)
    parameters = dispatched(operator)._schema.arguments  # type: ignore[attr-defined]
    for sample in samples_of(operator):
        with torch.no_grad():
            expected = results_of(dispatched(operator)(*sample.args, **sample.kwargs))
            given = dict(zip((each.name for each in parameters), sample.args, strict=False))
            given |= sample.kwargs
            values = [given.get(each.name, each.default_value) for each in parameters]
            results = results_of(call(*values))
        for result, wanted in zip(results, expected, strict=True):
            assert same_bits(result, wanted), str(sample)
            assert result.stride() == wanted.stride(), str(sample)


def attention_calls() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Of either function of attention the arguments but dropout's, and its options."""
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    query, packed = torch.randn(2, 3, 4), torch.randn(5, 2, 4)
    return {
        "scaled_dot_product_attention": ((query, query, query, None), {"scale": 0.3}),
        "scaled_dot_product_attention_varlen": (
            (packed, packed, packed, starts, starts, 3, 3),
            {"softcap": 2.0},
        ),
    }


@pytest.mark.parametrize("operator", attention_calls())
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_attention_below_autograd_enters_the_kernel_of_the_operator_it_is_made_of(
    operator: str, dropout_p: float
) -> None:
    """Not its own Python, which would come there by autograd's."""

    def refuse(*_: Any) -> None:
        raise AssertionError("not the way below autograd")

    given, options = attention_calls()[operator]
    given = (*given, dropout_p)
    missing = dispatched(operator)._schema.arguments[len(given) :]  # type: ignore[attr-defined]
    values = [options.get(each.name, each.default_value) for each in missing]
    call = below_autograd(operator, lambda _: refuse, False)
    torch.manual_seed(0)
    expected = dispatched(operator)(*given, **options)
    torch.manual_seed(0)
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        result = call(*given, *values)
    finally:
        sys.setprofile(None)
    assert same_bits(result, expected)
    assert entered == ["_below_autograd", "drawn_seed"]


@pytest.mark.parametrize("operator", attention_calls())
def test_what_a_kernel_below_autograd_refuses_takes_the_long_way(operator: str) -> None:
    given, _ = attention_calls()[operator]
    missing = dispatched(operator)._schema.arguments[len(given) :]  # type: ignore[attr-defined]
    call = below_autograd(operator, lambda label: lambda *_: label, False)
    values = [each.default_value for each in missing]
    assert call(given[0], given[1].double(), *given[2:], *values) == "otherwise"


def test_calls_take_the_long_way_where_nothing_tells_of_observers() -> None:
    call = below_autograd("mul", lambda label: lambda *_: label, False)
    a = torch.ones(2)
    pkg._C._use_unstable_symbols(False)
    try:
        assert call(a, a) == "otherwise"
    finally:
        pkg._C._use_unstable_symbols(True)


def test_observers_make_calls_take_the_long_way(tmp_path: Path) -> None:
    """They are told of no call that begins below the dispatcher's first key."""
    taken = []
    call = below_autograd("mul", lambda label: lambda *_: taken.append(label), False)
    a = torch.ones(2)
    observer = torch.profiler.ExecutionTraceObserver()
    observer.register_callback(str(tmp_path / "trace.json"))
    with torch.profiler.profile(execution_trace_observer=observer):
        call(a, a)
    assert taken == ["otherwise"]
    assert call(a, a) is not None


@pytest.mark.parametrize("operator", OPERATORS)
def test_modes_and_profilers_see_the_operator(operator: str, symbols: None) -> None:
    function, args = getattr(pkg.ops, operator), arguments_of(operator)
    seen: list[list[Any]] = []
    for call in (function, dispatched(operator)):
        with FunctionMode() as functions:
            call(*args)
        with DispatchMode() as operators:
            call(*args)
        with torch.profiler.profile(record_shapes=True) as profile:
            call(*args)
        events = [(event.name, event.input_shapes) for event in profile.events()]
        own = [event for event in events if event[0].startswith("pkg::")]
        assert own
        seen.append([functions.names, operators.names, own])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("operator", OPERATORS)
def test_observers_see_the_operator(operator: str, symbols: None, tmp_path: Path) -> None:
    # Unlike a profiler this one cannot be asked after, so every call tells of itself.
    args, file = arguments_of(operator), tmp_path / "trace.json"
    has_parts = operator.startswith("scaled_dot_product_attention")
    kernel = f"pkg::{operator}_forward" if has_parts else f"pkg::{operator}"
    public = getattr(pkg.ops, operator)
    for function in (public, dispatched(operator)):
        observer = torch.profiler.ExecutionTraceObserver().register_callback(str(file))
        observer.start()
        function(*args)
        observer.stop()
        observer.unregister_callback()
        names = [node["name"] for node in json.loads(file.read_text())["nodes"]]
        # An operator that autograd passes on is told of once more on its way.
        assert names.count(kernel) == 1 or (function is not public and kernel in names)


@pytest.mark.tracing
@pytest.mark.parametrize("operator", OPERATORS)
def test_graphs_hold_the_operator(operator: str) -> None:
    function, args = getattr(pkg.ops, operator), arguments_of(operator)
    tensors = [a for a in args if isinstance(a, Tensor)]

    class Module(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Any:
            given = iter(inputs)
            return function(*(next(given) if isinstance(a, Tensor) else a for a in args))

    expected = results_of(function(*args))
    traced = torch.jit.trace(Module(), tuple(tensors))
    assert f"pkg::{operator}" in str(traced.graph)
    assert all(map(same_bits, results_of(traced(*tensors)), expected))
    compiled = torch.compile(Module(), fullgraph=True, backend="aot_eager")
    assert all(map(same_bits, results_of(compiled(*tensors)), expected))
    for graph in (
        make_fx(Module())(*tensors),
        torch.export.export(Module(), tuple(tensors)).graph_module,
        torch.export.export(Module(), tuple(tensors), strict=True).graph_module,
    ):
        assert any(str(node.target).startswith(f"pkg.{operator}") for node in graph.graph.nodes)


@needs_resident_bytes
@pytest.mark.long
def test_a_hundred_thousand_calls_do_not_grow_the_process() -> None:
    a, b = normal(4, 4).float(), normal(4, 4).float().requires_grad_()
    refused = direct_call("mul", lambda *_: None)

    def call(count: int) -> None:
        for _ in range(count):
            pkg.ops.matmul(a, a)
            pkg.ops.matmul(a, b)
            pkg.ops.scaled_dot_product_attention(a, a, a)
            refused(a, a[:3])

    call(2_000)
    assert least_growth(lambda: call(10_000)) < 10_000 * 40
