"""``rowwise_scaled_linear_s8s4``: rows of int8 times a weight of int4, in integers, then scaled."""

from __future__ import annotations

import torch
from torch import Tensor

from ._call import operator
from ._rowwise_scaled_linear import register

TABLE = (
    "a linear layer in integers, exact, then scaled by row and by column",
    "int8 times packed int4; scales and bias floating",
    "no",
)
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def rowwise_scaled_linear_s8s4(
    input: Tensor,
    input_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The product ``input @ weight.T`` in integers, scaled by row and by column.

    The sums of products are exact; they are multiplied by ``input_scale[..., None]``, then by
    ``weight_scale``, and ``bias`` is added, in float32, or in float64 where a scale, the bias or
    the output is that. The result is rounded once to ``out_dtype``. The arithmetic is that of
    torchao's operator of the same name. Autocast does not change it. For inference alone.

    Args:
        input: Shape (..., K), int8, any strides and leading dimensions. K is even, and at most
            2097150: so far the sums are exact in int32 whatever the values.
        input_scale: Shape (...), the leading dimensions of ``input``; float16, bfloat16, float32
            or float64, independently of the other floating arguments.
        weight: Shape (N, K / 2), two int4 values a byte as :func:`pkg.ops.pack_int4` packs them:
            the even column in the low four bits, two's complement; int8 or uint8, any strides,
            fastest where a row is contiguous.
        weight_scale: Shape (N,), (N, 1) or (1, N), floating, any strides.
        bias: Shape (N,), floating, or None.
        out_dtype: Any of the floating dtypes; that of ``input_scale`` by default.

    Returns:
        Shape (..., N), contiguous.

    Raises:
        RuntimeError: Shapes do not match, K is odd or too large, dtypes are not supported, devices
            differ, or a gradient would have to be recorded.

    Example:
        >>> import pkg
        >>> values = torch.tensor([[1, -128]], dtype=torch.int8)
        >>> weight = pkg.ops.pack_int4(torch.tensor([[7, -8], [1, 0]]))
        >>> scales = torch.tensor([0.5]), torch.tensor([1.0, 2.0])
        >>> rowwise_scaled_linear_s8s4(values, scales[0], weight, scales[1])
        tensor([[515.5000,   1.0000]])
    """
    return torch.ops.pkg.rowwise_scaled_linear_s8s4.default(
        input, input_scale, weight, weight_scale, bias, out_dtype
    )


register("rowwise_scaled_linear_s8s4", values_of_byte=1)
