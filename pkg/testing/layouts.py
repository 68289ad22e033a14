"""The same values in memory laid out in every way that a view can have, between sentinels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

_MARGIN = 64
"""Elements of sentinel before and after a tensor: one 512-bit vector of bytes, many of floats."""


@dataclass(frozen=True)
class Guarded:
    """A tensor inside a larger buffer filled with sentinels.

    A sentinel is a byte of ones: NaN in every floating dtype, so that a stray read spoils a result
    as surely as a stray write is seen.
    """

    tensor: Tensor
    buffer: Tensor
    before: Tensor

    def assert_untouched(self, name: str) -> None:
        """Raise AssertionError if a single byte of the buffer has changed."""
        same = torch.equal(_bytes(self.buffer), _bytes(self.before))
        if not same:
            raise AssertionError(f"{name} was modified{self._where(self.before)}")

    def assert_untouched_around(self, name: str) -> None:
        """Raise AssertionError if a byte that is no element of the tensor has changed."""
        allowed = self.before.clone()
        _view_like(allowed, self.tensor).copy_(self.tensor.detach())
        same = torch.equal(_bytes(self.buffer), _bytes(allowed))
        if not same:
            raise AssertionError(f"a write outside {name}{self._where(allowed)}")

    def _where(self, expected: Tensor) -> str:
        changed = (_bytes(self.buffer) != _bytes(expected)).nonzero().flatten()
        start = self.tensor.storage_offset() * self.tensor.element_size()
        return f": {len(changed)} bytes, the first {int(changed[0]) - start} bytes from its start"


def guarded(tensor: Tensor, strides: Sequence[int] | None = None, misalign: int = 0) -> Guarded:
    """Copy ``tensor`` into a sentinel-filled buffer.

    Args:
        tensor: the values.
        strides: strides of the copy, in elements, not negative; contiguous if not given. Along a
            stride of zero the values must be equal.
        misalign: elements by which the first one lies behind an address that is a multiple of 64
            bytes. PyTorch aligns an allocation to 64 bytes, and so promises more than a view keeps.

    Example:
        >>> inside = guarded(torch.arange(6.0).reshape(2, 3), strides=(7, 2), misalign=1)
        >>> inside.tensor.tolist()
        [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        >>> inside.assert_untouched("the input")
    """
    if strides is None:
        strides = _contiguous(tensor.shape)
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, strides, strict=True))
    length = 2 * _MARGIN + misalign + (extent if tensor.numel() else 0)
    buffer = torch.empty(length, dtype=tensor.dtype, device=tensor.device)
    _bytes(buffer).fill_(1 if tensor.dtype == torch.bool else 0xFF)
    view = buffer.as_strided(tensor.shape, strides, _MARGIN + misalign)
    distinct, values = view, tensor.detach()
    for axis, stride in enumerate(strides):
        if stride == 0 and tensor.shape[axis] > 1:
            distinct, values = distinct.narrow(axis, 0, 1), values.narrow(axis, 0, 1)
    distinct.copy_(values)
    return Guarded(view.requires_grad_(tensor.requires_grad), buffer, buffer.clone())


@dataclass(frozen=True)
class Layout:
    """A way to lay out a tensor of any size."""

    name: str
    strides: Callable[[Sequence[int]], list[int]]
    misalign: int = 0

    def place(self, tensor: Tensor) -> Guarded:
        """Copy ``tensor`` into a sentinel-filled buffer in this layout."""
        return guarded(tensor, self.strides(tensor.shape), self.misalign)


def _contiguous(shape: Sequence[int]) -> list[int]:
    return [prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape))]


def _permuted(shape: Sequence[int], order: Sequence[int], step: int = 1, pad: int = 0) -> list[int]:
    """Strides for dimensions laid out in ``order``, the last of it with stride ``step``."""
    strides = [0] * len(shape)
    stride = step
    for axis in reversed(order):
        strides[axis] = stride
        stride = stride * max(shape[axis], 1) + pad
    return strides


def _transposed(shape: Sequence[int]) -> list[int]:
    order = list(range(len(shape)))
    order[-2:] = reversed(order[-2:])
    return _permuted(shape, order)


def _reversed(shape: Sequence[int]) -> list[int]:
    return _permuted(shape, list(range(len(shape)))[::-1])


def _heads_inside(shape: Sequence[int]) -> list[int]:
    """The second and third dimension from the end swapped, as a projection's heads come."""
    order = list(range(len(shape)))
    order[-3:-1] = reversed(order[-3:-1])
    return _permuted(shape, order)


TRANSPOSED = Layout("transposed", _transposed)

LAYOUTS = (
    Layout("contiguous", _contiguous),
    Layout("misaligned by one element", _contiguous, misalign=1),
    Layout("misaligned by three elements", _contiguous, misalign=3),
    Layout("rows padded", lambda shape: _permuted(shape, range(len(shape)), pad=5)),
    Layout("every other element", lambda shape: _permuted(shape, range(len(shape)), step=2, pad=3)),
    TRANSPOSED,
    Layout("dimensions reversed, misaligned", _reversed, misalign=1),
    Layout("second and third last dimension swapped", _heads_inside),
)
"""Layouts that keep the values of any tensor."""


def expanded(tensor: Tensor, axis: int) -> Guarded:
    """``tensor`` with its first slice along ``axis`` repeated through a stride of zero."""
    repeated = tensor.detach().narrow(axis, 0, 1).expand_as(tensor)
    strides = _contiguous(tensor.shape)
    strides[axis] = 0
    return guarded(repeated.requires_grad_(tensor.requires_grad), strides)


def _view_like(buffer: Tensor, tensor: Tensor) -> Tensor:
    return buffer.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _bytes(buffer: Tensor) -> Tensor:
    return buffer.detach().view(torch.uint8)
