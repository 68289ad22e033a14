"""What :mod:`pkg.accelerate` registers with PyTorch, and the CPU library's side of it.

Each of PyTorch's operators here gets a CPU kernel that asks ours first, which declines where
PyTorch's is faster or the call is none for it, and then calls PyTorch's. Autograd, autocast,
``torch.compile`` and subclasses of tensors sit above that key and know nothing of it.

The kernels are registered once and stay: PyTorch's dispatcher does not expect its tables to change
while other threads run operators. A switch in the CPU library turns them off.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from pkg import _C

from . import _accelerate_activations, _accelerate_convolutions, _loader
from ._accelerate_counts import Counts

OPERATORS = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "_addmm_activation",
    "_int_mm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_flash_attention_forward",
    "_flash_attention_backward",
    *_accelerate_convolutions.OPERATORS,
    *_accelerate_activations.OPERATORS,
)
"""Of ``aten``, in the order of ``AtenOperator`` in csrc/accelerate.h."""
DTYPES = ("float64", "float32", "float16", "bfloat16", "int8")
"""In the order of ``type_index`` in csrc/cpu/accelerate/routes.cpp."""

HIDDEN = ("nothing", "causal", "mask")
"""By what keys are hidden, in the order of ``Hidden`` in csrc/cpu/accelerate/routes.h."""

PRODUCTS = OPERATORS[:6]
_ATTENTION = OPERATORS[6]

ATTENTION_OFF, ATTENTION_BY_TABLE, ATTENTION_ALWAYS = range(3)
"""Which calls of attention are taken: ``AttentionMode`` of csrc/cpu/accelerate/routes.h."""
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
"""What the dispatcher gives a CPU kernel of PyTorch's, which makes nothing of it."""
NOT_MEASURED = -1.0
"""Where a table lacks large sizes: ``kNotMeasured`` of csrc/cpu/accelerate/routes.h."""

calls_pytorch_in_cpp = True
"""For tests of what is registered where PyTorch does not have what kernels in C++ need."""

_Kernel = Callable[..., Any]
_lock = threading.Lock()
_libraries: list[torch.library.Library] = []
_takes_activations = False  # the table that is in use
_are_activations_registered = False
_attention_mode = ATTENTION_OFF


def switch(is_on: bool, takes_time: bool, attention: int | None = None) -> None:
    """Turns the kernels on or off, attention's perhaps otherwise, and the clock of a report."""
    global _attention_mode
    if attention is None:
        attention = ATTENTION_BY_TABLE if is_on else ATTENTION_OFF
    _attention_mode = attention
    _loader.cpu_library.pkg_accelerate_switch(int(is_on), attention, int(takes_time))


def attention_is_on() -> bool:
    """Whether attention's kernels are on, for some calls at the least."""
    return _attention_mode != ATTENTION_OFF


def attention_is_by_table() -> bool:
    """Whether attention's kernels are on for the calls that the table takes, and no others."""
    return _attention_mode == ATTENTION_BY_TABLE


def count_taken(operator: str, dtype: torch.dtype, nanoseconds: int) -> None:
    """Counts a call that ran in an operator of this package, for which PyTorch has no kernel."""
    place = OPERATORS.index(operator), _place_of(dtype)
    _loader.cpu_library.pkg_accelerate_count_taken(*place, ctypes.c_int64(nanoseconds))


def attention_gain(dtype: torch.dtype, queries: int, keys: int, hidden: str) -> float:
    """PyTorch's time divided by ours of attention; 0 where it is left to PyTorch.

    Args:
        dtype: of the tensors.
        queries: how many.
        keys: how many.
        hidden: by what some of them are: ``"nothing"``, ``"causal"`` or ``"mask"``.
    """
    gain = _loader.cpu_library.pkg_accelerate_attention_gain
    gain.restype = ctypes.c_float
    place, sizes = HIDDEN.index(hidden), map(ctypes.c_int64, (queries, keys))
    return float(gain(_place_of(dtype), place, *sizes))


def _place_of(dtype: torch.dtype) -> int:
    return DTYPES.index(str(dtype).removeprefix("torch."))


@functools.cache
def measured_sizes() -> list[tuple[int, ...]]:
    """The sizes that the table has, as csrc/cpu/accelerate/routes.h says them.

    Rows of a product, its columns and the dimension that is summed over, queries and keys of
    attention.
    """
    function = _loader.cpu_library.pkg_accelerate_sizes
    function.restype = ctypes.c_int64
    sizes = ctypes.POINTER(ctypes.c_int64)()
    found = []
    for which in range(5):
        count = function(which, ctypes.byref(sizes))
        found.append(tuple(sizes[:count]))
    return found


def enough() -> list[float]:
    """From which ratios on a call is taken over.

    With one thread the ratio that is expected of the call, and the least of those measured around
    it; then both with several threads.
    """
    return _floats(_loader.cpu_library.pkg_accelerate_enough, 4)


def table() -> list[float]:
    """The ratios that decide."""
    return _floats(_loader.cpu_library.pkg_accelerate_ratios, ratio_count())


def put(ratios: Sequence[float], least: Sequence[float]) -> None:
    """Has calls decided by other ratios from now on, those of other threads too.

    Args:
        ratios: As many as ``table()`` has.
        least: As ``enough()`` has them.
    """
    global _takes_activations
    count = activation_count()
    with_threads = ratios[-2 * count : -count], ratios[-count:]
    _takes_activations = any(
        max(each) >= enough for each, enough in zip(with_threads, least[::2], strict=True)
    )
    places = ctypes.c_float * ratio_count(), ctypes.c_float * 4
    _loader.cpu_library.pkg_accelerate_put(places[0](*ratios), places[1](*least))


def ratio_count() -> int:
    """How many ratios a table has."""
    function = _loader.cpu_library.pkg_accelerate_ratio_count
    function.restype = ctypes.c_int64
    return int(function())


def _floats(function: Any, count: int) -> list[float]:
    function.restype = ctypes.POINTER(ctypes.c_float)
    return list(function()[:count])


def take_counts() -> list[Counts]:
    """What was counted since the last time, of all that was called."""
    numbers = (ctypes.c_int64 * (len(OPERATORS) * len(DTYPES) * 4))()
    _loader.cpu_library.pkg_accelerate_counters(numbers)
    parts = [list(numbers[i : i + 4]) for i in range(0, len(numbers), 4)]
    names = [(operator, dtype) for operator in OPERATORS for dtype in DTYPES]
    found = [Counts(*name, part) for name, part in zip(names, parts, strict=True)]
    for counts in found:
        if counts.operator in _accelerate_convolutions.OPERATORS:
            counts.saved = None  # no table has them
    return [counts for counts in found if counts.taken or counts.left]


def register() -> None:
    """Registers the kernels, the first time; warns of another package's.

    Those of activations once the table that is in use takes any.
    """
    with _lock:
        _register_activations()
        if _libraries:
            return
        others = _others()
        for name, place in others.items():
            warnings.warn(
                f"pkg.accelerate: another package has registered a CPU kernel of aten::{name} of "
                f"its own ({place}); what pkg leaves alone goes on to that one. If it accelerates "
                "too, or is a second copy of pkg, use only one of them",
                stacklevel=3,
            )
        kernels = dict(_kernels())
        library = torch.library.Library("aten", "IMPL")
        _libraries.append(library)
        _in_silence(lambda: _register_all(library, kernels, others))


def _register_all(
    library: torch.library.Library, kernels: dict[str, _Kernel], others: dict[str, str]
) -> None:
    # In C++ what our kernels leave alone goes to PyTorch's own, past another package's.
    _C._let_products_call_shim(not others)
    for name, kernel in kernels.items():
        if name in others or not _register_compiled(name):
            library.impl(name, kernel, "CPU", allow_override=True)
    if _accelerate_convolutions.are_needed():
        for name in _accelerate_convolutions.OPERATORS:
            # Else they stay PyTorch's: by way of Python those of float32 would lose.
            if name not in others:
                _register_compiled(name)
    from . import _accelerate_dropout, _accelerate_multihead, _accelerate_multihead_nested

    bernoulli = _accelerate_dropout.bernoulli_kernel()
    if bernoulli is not None and not _registered_elsewhere((_accelerate_dropout.BERNOULLI,)):
        library.impl(_accelerate_dropout.BERNOULLI, bernoulli, "CPU", allow_override=True)
    nested = _accelerate_multihead_nested.kernel()
    if nested is not None:
        key = _accelerate_multihead_nested.KEY
        library.impl(_accelerate_multihead.OPERATOR, nested, key, allow_override=True)


def _register_activations() -> None:
    global _are_activations_registered
    if _are_activations_registered or not _takes_activations:
        return
    _are_activations_registered = True
    others = _registered_elsewhere(_accelerate_activations.OVERLOADS)

    def register_all() -> None:
        for name in _accelerate_activations.OVERLOADS:
            if name not in others:
                _register_compiled(name)

    _in_silence(register_all)


def activation_count() -> int:
    """How many ratios of activations a table has for one number of threads; they are its last."""
    passes, floating = 2, len(DTYPES) - 1
    return passes * floating * len(_accelerate_activations.CURVES)


def _register_compiled(name: str) -> bool:
    """False where Python has to register the operator, as all of them before PyTorch 2.13."""
    from . import _accelerate_multihead

    schema = _schema(name)
    is_known = all(str(each.type) == "Tensor" for each in schema.returns)
    if not calls_pytorch_in_cpp or not is_known:
        return False
    if name == _accelerate_multihead.OPERATOR and not _accelerate_multihead.define_for_cpp():
        return False
    register = _loader.cpu_library.pkg_accelerate_register
    register.restype = ctypes.c_bool
    return bool(register(name.encode(), len(schema.returns)))


def _schema(name: str) -> torch.FunctionSchema:
    operator, _, overload = name.partition(".")
    schema: torch.FunctionSchema = getattr(
        getattr(torch.ops.aten, operator), overload or "default"
    )._schema
    return schema


def original(name: str, key: str = "CPU") -> _Kernel | None:
    """PyTorch's kernel, which takes a key set before the arguments; None where it has none."""
    try:
        kernel: _Kernel = torch.library.get_kernel(f"aten::{name}", key).call_boxed
    except (RuntimeError, ValueError):
        return None
    return kernel


def _kernels() -> Iterator[tuple[str, _Kernel]]:
    """By operator a kernel that calls ours, or else PyTorch's."""
    for operator, name in enumerate(OPERATORS[:8]):
        for overload in (name, f"{name}.out"):
            theirs = original(overload)
            if theirs is None:
                continue
            if name in PRODUCTS:
                yield overload, _C._product_kernel(operator, theirs, CPU_KEYS)
            else:
                make = _attention_kernel if name == _ATTENTION else _backward_kernel
                yield overload, make(theirs)
    from . import _accelerate_multihead, _accelerate_varlen

    yield from _accelerate_varlen.kernels()
    yield from _accelerate_multihead.kernels()


def _attention_kernel(theirs: _Kernel) -> _Kernel:
    ours = _C._accelerated_attention

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Any:
        if dropout_p == 0.0:
            results = ours(query, key, value, attn_mask, is_causal, scale)
            if results is not None:
                return results
        return theirs(
            CPU_KEYS, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )

    return kernel


def _backward_kernel(theirs: _Kernel) -> _Kernel:
    ours = _C._accelerated_attention

    def kernel(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        dropout_p: float,
        is_causal: bool,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Any:
        if dropout_p == 0.0:
            of_backward = (grad_out, out, logsumexp)
            results = ours(query, key, value, attn_mask, is_causal, scale, *of_backward)
            if results is not None:
                return results
        return theirs(
            *(CPU_KEYS, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal),
            attn_mask=attn_mask,
            scale=scale,
        )

    return kernel


def _others() -> dict[str, str]:
    """Operators of which another package has registered a CPU kernel, and where."""
    from . import _accelerate_multihead

    curves = _accelerate_activations.OPERATORS
    known = [operator for operator in OPERATORS if operator not in curves]
    ours = (overload for operator in known for overload in (operator, f"{operator}.out"))
    return _registered_elsewhere((*ours, _accelerate_multihead.OPERATOR))


def _registered_elsewhere(names: Iterable[str]) -> dict[str, str]:
    """Of these operators those of which another package has registered a CPU kernel, and where."""
    found = {}
    for name in names:
        for line in torch._C._dispatch_dump(f"aten::{name}").splitlines():
            place = re.match(r"(?:NestedTensor)?CPU: registered at (\S+)", line)
            if place and "/aten/src/ATen/" not in place[1]:
                found[name] = place[1]
    return found


class _Quiet:
    """PyTorch warns of each kernel that is replaced, on C++'s stderr.

    Inside a handler of ``__torch_function__`` such warnings are Python's, and can be caught.
    """

    task: ClassVar[Callable[[], None]]

    @classmethod
    def __torch_function__(cls, *_: object) -> None:
        cls.task()


def _in_silence(task: Callable[[], None]) -> None:
    quiet = type("_QuietTask", (_Quiet,), {"task": staticmethod(task)})
    if not torch._C._is_torch_function_enabled():
        task()  # it warns
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.neg(quiet())
