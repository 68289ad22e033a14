"""The way of a call from Python to a CPU kernel, as short as it may be.

An operator's autograd is written in Python, and PyTorch's dispatcher takes long to get there. So
the functions of ``pkg._C``, which the public functions call, ask first whether the dispatcher would
do nothing but enter the kernel, or record a gradient around it, and then do just that;
``csrc/python/thread_state.h`` says what they ask. All else goes through ``torch.ops``, errors
included: the kernel is then asked again and refuses in words.

Measured at 8 x 8, float32, on an Intel Xeon (Ice Lake, 2.8 GHz), one thread, PyTorch 2.13.0,
2026-11-22, with PyTorch's own nearest function beside it, in nanoseconds (others were at work on
the machine: the least of 320 batches of 2 to 30 calls):

====================================  =============  ============  =============
operator                              without grad   recording     and backward
====================================  =============  ============  =============
matmul (torch.mm)                     2420  2060     7930  5100    62820  43480
mul (torch.mul)                       1960  1570     7420  3060    54210  34450
muladd (torch.addcmul)                2070  1970     8070  3490    54860  48790
d_sigmoid (torch.sigmoid)             1890  1570     6760  2890    44600  32380
scaled_dot_product_attention          4330  7330     12890 10030   81760  67060
linear (torch.nn.functional.linear)   2510  3570     10690 5520    78960  50420
====================================  =============  ============  =============

What the parts take there, alone and in a loop: the questions about the thread 150, that about
autocast 90, whether a tensor requires grad 30, reading a tensor in place 15, letting go of the
interpreter's lock 60, telling observers 65, the result's memory 270 and its Python object 300.
Asking Python where a tensor lies and whether it is negated would take 125 a tensor more
(``csrc/python/tensor_words.h``).
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
