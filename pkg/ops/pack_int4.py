"""``pack_int4`` and ``unpack_int4``: two values a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import check_range, check_tensor

_LEAST, _MOST = -8, 7


def pack_int4(values: Tensor) -> Tensor:
    """Packs integers from -8 to 7 two to a byte, in two's complement.

    Plain PyTorch, for weights that are packed once. ``torch.compile`` and ``torch.export`` take the
    check of the values with them: the program refuses them when it runs, on a CUDA device by an
    assertion in the device's code.

    Args:
        values: Shape (..., K) with an even K, of any integer dtype.

    Returns:
        Shape (..., K / 2), int8: the even column in the low four bits, the odd one after it in
        the high four.

    Raises:
        RuntimeError: ``values`` is not of an integer dtype, has no dimensions or an odd K, or a
            value lies outside of the range.
        TypeError: ``values`` is no tensor.

    Example:
        >>> pack_int4(torch.tensor([1, 2, -1, -8]))
        tensor([ 33, -113], dtype=torch.int8)
    """
    check_tensor("pack_int4", "values", values, "a tensor of an integer dtype")
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise RuntimeError(f"pack_int4: values is {values.dtype}; it must be of an integer dtype")
    if values.dim() == 0 or values.shape[-1] % 2:
        raise RuntimeError(
            f"pack_int4: values has shape {tuple(values.shape)}; its last dimension must be even, "
            "as a byte holds two values"
        )
    if values.device.type != "meta":
        check_range(_comparable(values), _LEAST, _MOST, "pack_int4: values has elements")
    values = values.to(torch.int8)
    return (values[..., ::2] & 15) | (values[..., 1::2] << 4)


def _comparable(values: Tensor) -> Tensor:
    """The values in a dtype that PyTorch compares with -8; those of uint64 up to int64's most."""
    if values.dtype.is_signed:
        return values
    wide = values.long()
    return wide.masked_fill(wide < 0, torch.iinfo(torch.int64).max)


def unpack_int4(packed: Tensor) -> Tensor:
    """Takes bytes of two int4 values apart: the inverse of :func:`pack_int4`.

    Args:
        packed: Shape (..., K / 2), int8 or uint8.

    Returns:
        Shape (..., K), int8, from -8 to 7.

    Raises:
        RuntimeError: ``packed`` is of another dtype or has no dimensions.
        TypeError: ``packed`` is no tensor.

    Example:
        >>> unpack_int4(torch.tensor([33, -113], dtype=torch.int8))
        tensor([ 1,  2, -1, -8], dtype=torch.int8)
    """
    check_tensor("unpack_int4", "packed", packed, "a tensor of int8 or uint8")
    if packed.dtype not in (torch.int8, torch.uint8):
        raise RuntimeError(f"unpack_int4: packed is {packed.dtype}; it must be int8 or uint8")
    if packed.dim() == 0:
        raise RuntimeError("unpack_int4: packed has no dimensions")
    packed = packed.view(torch.int8)
    return torch.stack(((packed << 4) >> 4, packed >> 4), dim=-1).flatten(-2)
