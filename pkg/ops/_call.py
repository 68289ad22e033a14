"""The way of a call from Python to a CPU kernel, as short as it may be.

An operator's autograd is written in Python, and PyTorch's dispatcher takes long to get there. So
the functions of ``pkg._C``, which the public functions call, ask first whether the dispatcher would
do nothing but enter the kernel, or record a gradient around it, and then do just that;
``csrc/python/thread_state.h`` says what they ask. All else goes through ``torch.ops``, errors
included: the kernel is then asked again and refuses in words.

Where an operator writes to an argument, this way adds one to that tensor's version, as the kernel
between autograd and the device does: ``add_out`` of 64 elements takes 660 ns, 7700 through the
dispatcher, and ``torch.add`` with ``out=`` 1060 (Zen 4, PyTorch 2.13.0, 2026-11-26).

Measured at 8 x 8, float32, on an AMD EPYC (Zen 4), one thread, PyTorch 2.13.0, 2026-11-24, with
PyTorch's own nearest function beside it, in nanoseconds (medians of 30 to 40 alternating batches):

====================================  =============  ============  =============
operator                              without grad   recording     and backward
====================================  =============  ============  =============
matmul (torch.mm)                     1202  1343     4498  2379    40113  29222
mul (torch.mul)                        975  1169     4007  2097    32096  23197
muladd (torch.addcmul)                1072  1516     4496  2434    35159  34368
d_sigmoid (torch.sigmoid)              931  1071     3625  1815    27144  19842
scaled_dot_product_attention          2764  5256     9354  6979    61405  50613
linear (torch.nn.functional.linear)   1240  3031     6400  4763    54878  47839
====================================  =============  ============  =============

``matmul`` of n by n, PyTorch's and NumPy's, under ``no_grad``: float32 1109, 1431 and 913 for
n = 8, 1609, 2301 and 1605 for n = 32; float64 976, 1421, 926 and 2330, 4325, 2171; bfloat16, which
NumPy lacks, 1069, 1595 and 1413, 14908. Of the first, 127 are the Python function around the call.
Where the symbols of ``csrc/python/unstable_symbols.h`` are missing, a call takes 1715 in the place
of 1080. Of recording, PyTorch's ``apply`` of an autograd function takes some 2600 whatever it
computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from pkg import _C

_Function = TypeVar("_Function", bound=Callable[..., Any])


def operator(function: _Function) -> _Function:
    """Lets the public function of an operator take the short way: a decorator.

    The function's body is what ``torch.compile`` traces: one call of the operator that has the
    function's name and parameters, through ``torch.ops``. Where nothing is compiled the function
    of ``pkg._C`` is called in its stead, with the same arguments.

    A function of the same parameters is compiled from text, since one of ``*args`` would take a
    tenth of a microsecond more, a twentieth of a small call.
    """
    name, code = function.__name__, function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    by_keyword = names[code.co_argcount :]
    parameters = ", ".join(
        [*names[: code.co_argcount], *(["*", *by_keyword] if by_keyword else [])]
    )
    passed = ", ".join([*names[: code.co_argcount], *(f"{each}={each}" for each in by_keyword)])
    text = (
        "def make(is_dynamo_compiling, traced, call):\n"
        f"    def {name}({parameters}):\n"
        "        if is_dynamo_compiling():\n"
        f"            return traced({passed})\n"
        f"        return call({', '.join(names)})\n"
        f"    return {name}\n"
    )
    made: dict[str, Any] = {}
    exec(compile(text, f"<the short way of {name}>", "exec"), function.__globals__, made)
    short = made["make"](is_dynamo_compiling, function, _C._by_position(name))
    short.__defaults__, short.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return functools.update_wrapper(short, function)  # type: ignore[return-value]


def part(name: str) -> Callable[..., Any]:
    """An operator that is a part of another, as a function of its arguments by position."""
    traced, call = in_order(name), _C._by_position(name)

    def function(*values: Any) -> Any:
        return traced(*values) if is_dynamo_compiling() else call(*values)

    return function


def in_order(name: str) -> Callable[..., Any]:
    """The operator of ``torch.ops`` as a function of its arguments by position."""
    operator = getattr(torch.ops.pkg, name).default
    arguments = operator._schema.arguments
    keywords = [argument.name for argument in arguments if argument.kwarg_only]
    if not keywords:
        return operator
    positional = len(arguments) - len(keywords)

    def call(*values: Any) -> Any:
        return operator(
            *values[:positional], **dict(zip(keywords, values[positional:], strict=True))
        )

    return call


def direct_call(
    name: str,
    otherwise: Callable[..., Any],
    *,
    record: Callable[..., Any] | None = None,
    is_observed: bool = True,
    is_checked: bool = True,
    has_autocast: bool = False,
) -> Callable[..., Any]:
    """A function that enters the operator's CPU kernel without PyTorch's dispatcher.

    For what runs inside the dispatcher; a public function is made by :func:`operator`.

    Args:
        name: The operator, without its namespace.
        otherwise: What to call where the dispatcher has more to do than to enter the
            kernel, and where the kernel refuses its arguments.
        record: What to call where it has but to record a gradient; ``otherwise`` by default.
        is_observed: False inside the dispatcher, which has told PyTorch's observers of the call.
        is_checked: False where the thread is known to be in no mode, transform or profile.
        has_autocast: Whether autocast changes the operator.

    Returns:
        A function of the operator's arguments, all by position. It is ``otherwise`` itself
        where the library has no kernel of the name.
    """
    return _C._inner_call(name, otherwise, record, is_observed, is_checked, has_autocast)
