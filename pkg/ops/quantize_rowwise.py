"""``quantize_rowwise``: each row in small integers and a scale of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._call import operator
from ._inference import register_inference_only
from ._registration import register_fake
from ._sharding import register_sharding

TABLE = (
    "each row as integers of 8 or 4 bits and a scale of its own",
    "floating into int8 or packed int4",
    "no",
)
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def quantize_rowwise(input: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Symmetric quantisation by row, as :func:`pkg.ops.rowwise_scaled_linear_s8s4` takes it.

    The scale of a row is its largest magnitude over 127. With 4 bits it is the largest magnitude
    over 8, or the largest of the other sign over 7.5 if that is more, and it is **negative** where
    the largest is a positive value: that becomes -8, since int4 goes one step further down than up.
    The relative error of normal rows of 4096 is so 0.141, where the largest magnitude over 7 leaves
    0.159 and over 7.5 leaves 0.149 (``csrc/quantize_rowwise_scale.h`` has other rows).

    The scale is rounded to the dtype of ``input``; the values are the row over that scale, rounded
    to the nearest integer (half to even), and off by at most half a step, but for that rounding.
    The same bits on every device. A row that holds NaN or infinity, or nothing as large as the
    least scale, has values of zero beside such a scale: NaN, infinity of either sign, or zero. For
    inference alone.

    Args:
        input: Shape (..., K), any strides; float16, bfloat16, float32 or float64.
        bits: 8 or 4. With 4, K is even.

    Returns:
        The values, int8: shape (..., K), from -127 to 127; or, from -8 to 7, packed two to a
        byte as :func:`pkg.ops.pack_int4` does, shape (..., K / 2). And the scales, shape (...), of
        the dtype of ``input``.

    Raises:
        RuntimeError: ``input`` is not floating or has no dimensions, ``bits`` is neither 4 nor 8,
            K is odd with 4, or a gradient would have to be recorded.

    Example:
        >>> values, scale = quantize_rowwise(torch.tensor([[127.0, -3.0, 2.4]]))
        >>> values, scale
        (tensor([[127,  -3,   2]], dtype=torch.int8), tensor([1.]))
        >>> quantize_rowwise(torch.tensor([[2.0, -0.5]]), bits=4)
        (tensor([[40]], dtype=torch.int8), tensor([-0.2500]))
    """
    return torch.ops.pkg.quantize_rowwise.default(input, bits)


@register_fake("quantize_rowwise")
def _fake(input: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    torch._check(input.dim() > 0, lambda: "quantize_rowwise: input has no dimensions")
    torch._check(bits in (4, 8), lambda: f"quantize_rowwise: bits is {bits}; it must be 4 or 8")
    *leading, inner = input.shape
    if bits == 4:
        torch._check(
            inner % 2 == 0,
            lambda: (
                f"quantize_rowwise: input of shape {tuple(input.shape)} has {input.shape[-1]} "
                "elements in a row; with 4 bits there must be an even number of them, as a byte "
                "holds two"
            ),
        )
        inner //= 2
    values = input.new_empty((*leading, inner), dtype=torch.int8)
    return values, input.new_empty(leading)


def _vmap(
    info: Any, in_dims: Sequence[int | None], input: Tensor, bits: int = 8
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    # The batch is one more leading dimension.
    return quantize_rowwise(input.movedim(in_dims[0] or 0, 0), bits), (0, 0)


register_inference_only("quantize_rowwise", "detach what requires it")
torch.library.register_vmap("pkg::quantize_rowwise", _vmap)
register_sharding("quantize_rowwise", "input ... _ -> ... _, ...")
