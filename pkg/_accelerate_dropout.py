"""Dropout under :func:`pkg.accelerate`: PyTorch's ``bernoulli_``, the same draws sooner.

``torch.nn.functional.dropout`` multiplies by what ``bernoulli_`` of one probability makes. On
Intel's processors that is MKL's. On every other PyTorch makes element after element, two words of
its generator each, and with one thread however many there are. Here whole blocks of those words are
made at a time, and chunks of blocks by all threads (``csrc/cpu/accelerate/bernoulli.cpp``).
Elements and generator are to the last bit what they would be. :func:`draws_as_pytorch` tries that,
the first time, and where it is not so ``bernoulli_`` stays PyTorch's. Nanoseconds an element by
PyTorch, here with one thread and with two (Zen 3, 2026-11-29, PyTorch 2.13, float32):

    elements    4096    16384    131072    1048576
    PyTorch     7.4     7.1      7.7 to 11 8.6 to 11
    here        2.5     1.3      1.8, 0.8  1.1, 0.9

Attention with dropout, which PyTorch computes by its formula on the CPU, gains by these draws. Not
chosen: ``pkg.ops.scaled_dot_product_attention`` in its place, in most cases 1.1 to 1.8 times as
fast again. It drops other weights, and so a checkpoint whose forward pass and recomputation differ
in what is accelerated would have the gradients of another mask, without a word.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pkg import _C

from . import _accelerate_routes, _loader
from ._accelerate_counts import Route

_Kernel = Callable[..., Any]

BERNOULLI = "bernoulli_.float"
LEAST_ELEMENTS = 4096
"""With fewer the way through Python takes as long as PyTorch's loop."""


route = Route()
_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
_BITS = 53  # of a number that is drawn


def bernoulli_kernel() -> _Kernel | None:
    """What draws here or else calls PyTorch's; None where PyTorch draws otherwise."""
    theirs = _accelerate_routes.original(BERNOULLI)
    if theirs is None or not draws_as_pytorch(theirs):
        return None
    ours = _bernoulli_kernel(theirs)
    return _C._bernoulli_kernel(ours, theirs, _accelerate_routes.CPU_KEYS, LEAST_ELEMENTS)


def _bernoulli_kernel(theirs: _Kernel) -> _Kernel:
    def kernel(self: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
        if not route.is_on:
            theirs(_accelerate_routes.CPU_KEYS, self, p, generator=generator)
        elif (
            self.dtype not in _DTYPES
            or self.numel() == 0
            or not self.is_contiguous()
            or self.data_ptr() == 0  # its storage was freed
            or not 0 <= p <= 1
        ):
            route.run(
                *("bernoulli_", self.dtype, False),
                lambda: theirs(_accelerate_routes.CPU_KEYS, self, p, generator=generator),
            )
        else:
            route.run("bernoulli_", self.dtype, True, lambda: draw(self, p, generator))
        return self

    return kernel


def draw(self: Tensor, p: float, generator: torch.Generator | None = None) -> None:
    """What ``bernoulli_`` does.

    Args:
        self: Contiguous, on the CPU, of a dtype of 1, 2, 4 or 8 bytes; not empty.
        p: The probability of a one.
        generator: Of the CPU; PyTorch's default one if None.
    """
    source = torch.default_generator if generator is None else generator
    left, states = _C._draw(source, self.numel(), *_addresses())
    _loader.cpu_library.pkg_accelerate_bernoulli(
        *(left, ctypes.c_int64(self.numel()), states),
        ctypes.c_int64(math.ceil(math.ldexp(p, _BITS))),
        *(_one(self.dtype), self.element_size(), ctypes.c_void_p(self.data_ptr())),
    )


@functools.cache
def _addresses() -> list[int | None]:
    """Of what moves a generator on in the CPU library."""
    names = ("pkg_accelerate_draw_bytes", "pkg_accelerate_draw")
    found = [getattr(_loader.cpu_library, name) for name in names]
    return [ctypes.cast(each, ctypes.c_void_p).value for each in found]


@functools.cache
def _one(dtype: torch.dtype) -> ctypes.c_uint64:
    """The bits of 1 in a dtype."""
    bits = torch.ones(1, dtype=dtype, device="cpu").view(torch.uint8).tolist()
    return ctypes.c_uint64(int.from_bytes(bits, "little"))


def draws_as_pytorch(theirs: _Kernel) -> bool:
    """Whether elements and generator are the same, of a draw that begins within a pair of words."""
    made = []
    for ours in (True, False):
        generator = torch.Generator().manual_seed(2**40 + 7)
        torch.empty(1, dtype=torch.int32, device="cpu").random_(generator=generator)  # a word
        elements = torch.empty(1500, device="cpu")
        if ours:
            if generator.get_state().numel() != 5056:
                return False
            draw(elements, 0.3, generator)
        else:
            theirs(_accelerate_routes.CPU_KEYS, elements, 0.3, generator=generator)
        made.append((elements, generator.get_state()))
    return all(torch.equal(*pair) for pair in zip(*made, strict=True))
