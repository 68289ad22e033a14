"""accelerate() takes gelu and silu of PyTorch, forward and backward, where its table says so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import accelerate_tables
import pytest
import torch
from torch import Tensor, nn

import pkg
from pkg import _accelerate_activations, _accelerate_routes, _accelerate_table
from pkg.accelerate import Report
from pkg.testing import Sample, expect

aten = torch.ops.aten
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
CURVES: dict[str, tuple[str, dict[str, str]]] = {
    "gelu": ("gelu", {"approximate": "none"}),
    "gelu tanh": ("gelu", {"approximate": "tanh"}),
    "silu": ("silu", {}),
}
ENOUGH = 4096


@pytest.fixture(autouse=True)
def all_taken() -> Iterator[None]:
    with accelerate_tables.in_use(2.0):
        with pkg.accelerate():
            pass
        if "accelerate" not in registered_at("gelu"):
            pytest.skip("this PyTorch's activations cannot be called in C++")
        yield


def registered_at(name: str) -> str:
    """Where the CPU kernel of an operator was registered."""
    lines = torch._C._dispatch_dump(f"aten::{name}").splitlines()
    return next(line for line in lines if line.startswith("CPU:"))


def calls(report: Report) -> dict[str, tuple[int, int]]:
    return {each.operator: (each.taken, each.left) for each in report.counts}


def ours(call: Callable[[], Any], operator: str, is_taken: bool = True) -> Any:
    """What a call gives under accelerate(), which takes it or leaves it."""
    with pkg.accelerate(report=True) as block:
        result = call()
        assert calls(block.report()) == {operator: (int(is_taken), int(not is_taken))}
    return result


def forward(curve: str, x: Tensor) -> Tensor:
    name, words = CURVES[curve]
    result: Tensor = getattr(aten, name)(x, **words)
    return result


def backward(curve: str, grad: Tensor, x: Tensor) -> Tensor:
    name, words = CURVES[curve]
    result: Tensor = getattr(aten, f"{name}_backward")(grad, x, **words)
    return result


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return (3 * torch.randn(shape, dtype=torch.float64)).to(dtype)


LAYOUTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "contiguous": lambda dtype: numbers(64, 65, dtype=dtype),
    "a tail": lambda dtype: numbers(ENOUGH + 13, dtype=dtype),
    "transposed": lambda dtype: numbers(65, 64, dtype=dtype).t(),
    "channels last": lambda dtype: numbers(2, 16, 12, 13, dtype=dtype).contiguous(
        memory_format=torch.channels_last
    ),
    "slices": lambda dtype: numbers(70, 130, dtype=dtype)[1:, 3:100],
    "steps": lambda dtype: numbers(70, 260, dtype=dtype)[:, ::2],
    "expanded": lambda dtype: numbers(1, 130, dtype=dtype).expand(40, 130),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("curve", CURVES)
def test_results_and_strides(curve: str, layout: str, dtype: torch.dtype) -> None:
    x, other = LAYOUTS[layout](dtype), LAYOUTS["contiguous"](dtype)
    name = CURVES[curve][0]
    for grad in (LAYOUTS[layout](dtype), other.flatten()[0].expand(x.shape)):

        def run(sample: Sample) -> list[Tensor]:
            x, grad = sample.args
            return [forward(curve, x), backward(curve, grad, x)]

        sample = Sample((x, grad), {})
        theirs = run(sample)
        with pkg.accelerate(report=True) as block:
            found = run(sample)
            assert calls(block.report()) == {name: (1, 0), f"{name}_backward": (1, 0)}
        assert [each.stride() for each in found] == [each.stride() for each in theirs]
        if dtype == torch.float64:
            assert_few_roundings_apart(found, theirs, x, grad)
            continue
        for index, (wanted, actual) in enumerate(zip(expect(run, sample), found, strict=True)):
            wanted.compare(actual, str(index))


def assert_few_roundings_apart(
    found: list[Tensor], theirs: list[Tensor], x: Tensor, grad: Tensor
) -> None:
    """In float64, of whose results there are none with more digits.

    Each is a sum of terms of less than ten roundings: up to the size of x, and of the gradient
    times x and the slope of the hyperbolic tangent's argument, where PyTorch takes its square
    off 1.
    """
    slope = 1 + x.abs() ** 2
    for actual, expected, size in zip(
        found, theirs, (x, grad * (1 + x.abs() * slope)), strict=True
    ):
        assert ((actual - expected).abs() <= 20 * 2**-53 * size.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("curve", CURVES)
def test_what_is_special(curve: str, dtype: torch.dtype) -> None:
    far = torch.finfo(dtype).max
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, far, -far, 1e-30, -1e-30])
    x = special.to(dtype).repeat(ENOUGH // len(special) + 1)
    grad = torch.ones_like(x)
    theirs = forward(curve, x), backward(curve, grad, x)
    name = CURVES[curve][0]
    found = (
        ours(lambda: forward(curve, x), name),
        ours(lambda: backward(curve, grad, x), f"{name}_backward"),
    )
    torch.testing.assert_close(found, theirs, equal_nan=True)


@pytest.mark.parametrize("curve", CURVES)
def test_in_place_and_into_memory_of_the_caller(curve: str) -> None:
    name, words = CURVES[curve]
    x, grad = numbers(64, 65, dtype=torch.float32), numbers(64, 65, dtype=torch.float32)
    result = ours(lambda: forward(curve, x), name)
    gradient = ours(lambda: backward(curve, grad, x), f"{name}_backward")

    changed, out = x.clone(), torch.empty_like(x)
    version = changed._version
    assert ours(lambda: getattr(aten, f"{name}_")(changed, **words), name) is changed
    assert changed._version == version + 1
    assert torch.equal(changed, result)
    assert ours(lambda: getattr(aten, name).out(x, **words, out=out), name) is out
    assert torch.equal(out, result)

    into = getattr(aten, f"{name}_backward").grad_input
    for place in (torch.empty_like(x), x.clone()):
        read = place if torch.equal(place, x) else x
        call = lambda read=read, place=place: into(grad, read, **words, grad_input=place)  # noqa: E731
        assert ours(call, f"{name}_backward") is place
        assert torch.equal(place, gradient)


def test_what_is_left_to_pytorch() -> None:
    x = numbers(64, 65, dtype=torch.float32)
    whole = numbers(2 * ENOUGH, dtype=torch.float32)
    left: dict[str, Callable[[], Tensor]] = {
        "no elements": lambda: aten.silu(x[:0]),
        "to be resized": lambda: aten.silu.out(x, out=torch.empty(0)),
        "strided": lambda: aten.silu.out(x, out=torch.empty(65, 64).t()),
        "complex numbers": lambda: aten.silu(torch.complex(x, x)),
    }
    for name, call in left.items():
        theirs = call()
        result = ours_or_uncounted(call)
        assert torch.equal(result, theirs), name
        assert result.stride() == theirs.stride(), name
    mixed = lambda: aten.silu_backward(x, x.double())  # noqa: E731
    assert torch.equal(ours(mixed, "silu_backward", is_taken=False), mixed())
    overlapping = lambda: aten.silu.out(whole[:ENOUGH], out=whole[1 : ENOUGH + 1])  # noqa: E731
    refused = pytest.raises(RuntimeError, match=r"overlap|memory location")
    with refused, pkg.accelerate():
        overlapping()
    with pytest.raises(RuntimeError, match="approximate"), pkg.accelerate():
        aten.gelu(x, approximate="cubic")
    with pytest.raises(RuntimeError, match="dtype Double"), pkg.accelerate():
        aten.silu.out(x, out=torch.empty_like(x, dtype=torch.float64))


def ours_or_uncounted(call: Callable[[], Tensor]) -> Tensor:
    """The result of a call that is left to PyTorch, counted or of a dtype without a count."""
    with pkg.accelerate(report=True) as block:
        result = call()
        assert all(taken == 0 for taken, _ in calls(block.report()).values())
    return result


def test_a_model_trains_as_before() -> None:
    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.SiLU(inplace=True), nn.Linear(64, 8)
        )
        model(torch.randn(128, 8)).square().mean().backward()
        return [each.grad for each in model.parameters() if each.grad is not None]

    theirs = gradients()
    with pkg.accelerate(report=True) as block:
        found = gradients()
        counts = calls(block.report())
    taken = {"gelu": 1, "gelu_backward": 1, "silu": 1, "silu_backward": 1}
    assert {name: counts[name][0] for name in taken} == taken
    torch.testing.assert_close(found, theirs)


def test_second_derivatives_and_vmap() -> None:
    x = numbers(64, 65, dtype=torch.float64).requires_grad_()
    with pkg.accelerate():
        for curve in CURVES:
            (first,) = torch.autograd.grad(forward(curve, x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
            step = 1e-5
            ahead, behind = (
                backward(curve, torch.ones_like(x), x.detach() + d) for d in (step, -step)
            )
            torch.testing.assert_close(second, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)
            each = torch.func.vmap(lambda row, curve=curve: forward(curve, row))(x)
            torch.testing.assert_close(each, forward(curve, x))


REGISTERED = """
import torch
import pkg
from pkg import _accelerate_activations, _accelerate_routes, _accelerate_table

def places():
    dumps = (torch._C._dispatch_dump(f"aten::{name}") for name in _accelerate_activations.OVERLOADS)
    return sum("accelerate" in dump for dump in dumps)

ratios = [0.0] * len(_accelerate_routes.table())
_accelerate_table.put({"ratios": ratios})
with pkg.accelerate():
    assert places() == 0
ratios[-1] = 2.0
_accelerate_table.put({"ratios": ratios})
with pkg.accelerate():
    assert places() == len(_accelerate_activations.OVERLOADS), places()
"""


def test_registered_only_where_the_table_takes_one() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", REGISTERED], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""


def test_the_table_decides_by_curve_pass_and_dtype() -> None:
    count = _accelerate_routes.activation_count()
    x = numbers(64, 65, dtype=torch.float32)
    ratios = [2.0] * len(_accelerate_routes.table())
    # Of one thread and of several: passes, dtypes, curves.
    places = [
        (which, dtype, curve)
        for which in ("forward", "backward")
        for dtype in _accelerate_routes.DTYPES[:-1]
        for curve in _accelerate_activations.CURVES
    ]
    assert len(places) == count
    for start in (-2 * count, -count):
        ratios[start + places.index(("forward", "float32", "gelu tanh"))] = 0.9
        ratios[start + places.index(("backward", "float32", "silu"))] = 0.9
    _accelerate_table.put({"ratios": ratios})
    for curve, (name, _) in CURVES.items():
        ours(lambda curve=curve: forward(curve, x), name, curve != "gelu tanh")
        ours(lambda curve=curve: backward(curve, x, x), f"{name}_backward", curve != "silu")
