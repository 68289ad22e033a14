"""The strides that a pointwise operator gives its result: the rule of PyTorch's TensorIterator.

``csrc/host/pointwise.h`` has it for the kernels; this is for tracing. PyTorch's own functions on
meta and fake tensors keep to it only in dimensions of more than one element.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

_CHANNELS_LAST = (0, 2, 3, 1)


def result_strides(*tensors: Tensor) -> list[int]:
    """The strides of a new result, dense, with its dimensions in the order of the inputs'.

    Args:
        tensors: Inputs of plain sizes and strides whose shapes broadcast.

    Returns:
        A stride for each dimension of the broadcast shape.
    """
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    if all(tensor.shape == shape for tensor in tensors):
        alike = _strides_of_alike(shape, [tensor.stride() for tensor in tensors])
        if alike is not None:
            return alike
    broadcast = [_broadcast_strides(tensor, shape) for tensor in tensors]
    return _in_order(shape, _order_of_dims(shape, broadcast))


def strides_after_number(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides of ``tensor + 1.0``, where ``tensor`` has these."""
    return _in_order(shape, _order_of_dims(shape, [strides])) if shape else []


def _in_order(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Dense strides for dimensions in this order, the outermost first."""
    strides = [0] * len(shape)
    is_contiguous = all(outer < inner for outer, inner in pairwise(order))
    stride = 1
    for d in reversed(order):
        strides[d] = stride
        # Outside an empty dimension they are zero, but not those of a contiguous tensor.
        stride *= max(shape[d], 1) if is_contiguous else shape[d]
    return strides


def _strides_of_alike(
    shape: Sequence[int], candidates: Sequence[Sequence[int]]
) -> list[int] | None:
    """What inputs of one shape give that are all contiguous, channels last, or dense and equal."""

    def all_have(expected: Sequence[int]) -> bool:
        return all(
            size == 1 or own == wanted
            for strides in candidates
            for size, own, wanted in zip(shape, strides, expected, strict=True)
        )

    contiguous = _in_order(shape, range(len(shape)))
    if prod(shape) == 0 or all_have(contiguous):
        return contiguous
    if len(shape) == len(_CHANNELS_LAST):
        channels_last = _in_order(shape, _CHANNELS_LAST)
        if all_have(channels_last):
            return channels_last
    first = candidates[0]
    dense = _in_order(shape, sorted(range(len(shape)), key=first.__getitem__, reverse=True))
    alike = all(tuple(strides) == tuple(first) for strides in candidates)
    return list(first) if alike and all_have(dense) else None


def _broadcast_strides(tensor: Tensor, shape: Sequence[int]) -> list[int]:
    missing = len(shape) - tensor.dim()
    own = zip(tensor.shape, tensor.stride(), shape[missing:], strict=True)
    return [0] * missing + [
        0 if size == 1 and wanted != 1 else stride for size, stride, wanted in own
    ]


def _order_of_dims(shape: Sequence[int], operands: Sequence[Sequence[int]]) -> list[int]:
    """The order of the dimensions by stride, the outermost first.

    An insertion sort, because the comparison is not transitive where operands do not tell.
    """

    def compare(inner: int, outer: int) -> int:
        for strides in operands:
            if strides[inner] == 0 or strides[outer] == 0:
                continue
            if strides[inner] != strides[outer]:
                return -1 if strides[inner] < strides[outer] else 1
            if shape[inner] > shape[outer]:
                return 1
        return 0

    order = list(reversed(range(len(shape))))
    for i in range(1, len(order)):
        moved = i
        for below in range(i - 1, -1, -1):
            comparison = compare(order[below], order[moved])
            if comparison > 0:
                order[below], order[moved] = order[moved], order[below]
                moved = below
            elif comparison < 0:
                break
    return order[::-1]
