"""``int4_linear``: the affine map of a layer whose weight has values of four bits."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ._call import operator
from ._forward_mode import linear_in
from ._registration import check_one_device, register_fake, register_gradients
from ._sharding import register_sharding
from ._tensor_core_tiled_layout import check_scales, weight_shape
from ._vmap import each_slice
from .linear import check_rows, result_shape
from .matmul import matmul
from .unpack_tensor_core_tiled_layout import unpack_tensor_core_tiled_layout

TABLE = (
    "a linear layer with a weight of 4-bit values",
    "floating",
    "yes, of input and bias, to any order",
)
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def int4_linear(
    input: Tensor,
    packed_w: Tensor,
    scales_and_zeros: Tensor,
    group_size: int,
    inner_k_tiles: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Computes ``input @ weight.T + bias`` of a weight that stays packed.

    The weight is ``(q - 8) * scale + zero`` as a real number: it is not rounded to bfloat16, as
    :func:`pkg.ops.dequantize_tensor_core_tiled_layout` has to, and the result is rounded once.
    Sums are in float32, in float64 for a float64 input.

    On CUDA a float32 or float64 input of more than eight rows has the weight written out in its
    dtype for the time of the call where that is faster: ``out_features * in_features`` elements of
    memory. Nothing else writes it. A float16 or bfloat16 input is multiplied there by the whole
    numbers ``q - 8`` and by ones, in float32: an infinity in it may then give NaN, and sums beyond
    2**125 an infinity, where the weights themselves give neither.

    The CPU multiplies in integers where that is faster: an element of the input is then off by at
    most 2**-14.98 (bfloat16, float16) or 2**-22.98 (float32) of the largest magnitude among the 128
    columns that it is one of, and the result by so much times the sum of the weights' magnitudes
    there. What is small beside a large neighbour may so be left out altogether. That is any number
    of rows of half precision on an x86-64 processor, and of float32 with the libraries
    ``avx2_vnni``, ``avx512_vnni`` and ``avx512_bf16``; up to 12 rows of float32 with ``avx2`` and
    ``avx512``, 24 with ``baseline``; up to 4 of either with ``amx``; on Arm up to 12 of float32 and
    32 of half precision. More rows are multiplied in floating point, and so are those beside a NaN,
    an infinity, or 128 columns whose largest magnitude is neither 0 nor between 2**-60 and 2**60.
    A scale or zero that is NaN makes its outputs NaN; an infinite one makes them infinite or NaN,
    which of the two may depend on the number of rows.

    Gradients flow to ``input`` and ``bias``, to any order. The scales are constants.
    Autocast changes nothing: the dtype is that of ``input``.

    Args:
        input: Shape (..., in_features); float16, bfloat16, float32 or float64, any strides.
        packed_w: int32, shape (out_features / 8, in_features / (16 * inner_k_tiles), 32,
            inner_k_tiles / 2), as :func:`pkg.ops.pack_tensor_core_tiled_layout` returns it; best
            contiguous, since it is copied otherwise.
        scales_and_zeros: bfloat16, shape (in_features / group_size, out_features, 2): a scale
            and a zero for each group of input features of each output feature.
        group_size: 32, 64, 128 or 256; on the CPU one row is fastest with 128 or 256.
        inner_k_tiles: With which the weight was packed: 2, 4 or 8.
        bias: Shape (out_features,), of the dtype of ``input``, or None.

    Returns:
        Shape (..., out_features), contiguous, of the dtype of ``input``.

    Raises:
        RuntimeError: A shape, dtype or device does not match, ``group_size`` or
            ``inner_k_tiles`` is another number, or ``scales_and_zeros`` requires grad while
            gradients are recorded.

    Example:
        >>> w = torch.full((8, 32), 9, dtype=torch.int32)
        >>> packed = torch.ops.pkg.pack_tensor_core_tiled_layout(w, 2)
        >>> scales_and_zeros = torch.tensor([0.5, 0.25]).bfloat16().expand(1, 8, 2)
        >>> int4_linear(torch.ones(1, 32), packed, scales_and_zeros, 32, 2)[0, :2]
        tensor([24., 24.])
    """
    return torch.ops.pkg.int4_linear.default(
        input, packed_w, scales_and_zeros, group_size, inner_k_tiles, bias
    )


@register_fake("int4_linear")
def _fake(
    input: Tensor,
    packed_w: Tensor,
    scales_and_zeros: Tensor,
    group_size: int,
    inner_k_tiles: int,
    bias: Tensor | None = None,
) -> Tensor:
    tensors = [input, packed_w, scales_and_zeros, *([] if bias is None else [bias])]
    check_one_device("int4_linear", *tensors)
    rows, columns = weight_shape("int4_linear", packed_w, inner_k_tiles)
    check_scales("int4_linear", packed_w, scales_and_zeros, group_size, (rows, columns))
    shape = result_shape("int4_linear", input, rows, bias)
    check_rows("int4_linear", input, "packed_w", packed_w, columns)
    return input.new_empty(shape)


def weight_of(
    packed_w: Tensor,
    scales_and_zeros: Tensor,
    group_size: int,
    inner_k_tiles: int,
    dtype: torch.dtype,
) -> Tensor:
    """The weight in a dtype, rounded once to it (in float64 not at all), as a matrix."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = unpack_tensor_core_tiled_layout(packed_w, inner_k_tiles)
    groups = (values - 8).unflatten(-1, (values.shape[-1] // group_size, group_size)).to(wide)
    scales, zeros = scales_and_zeros.to(wide).transpose(0, 1).unsqueeze(-1).unbind(-2)
    weight: Tensor = (groups * scales + zeros).flatten(-2).to(dtype)
    return weight


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, packed_w, scales_and_zeros, ctx.group_size, ctx.inner_k_tiles, _ = inputs
    if scales_and_zeros.requires_grad:
        raise _refusal_of_scales("requires grad")
    ctx.save_for_backward(packed_w, scales_and_zeros)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    packed_w, scales_and_zeros = ctx.saved_tensors
    grad_input = grad_bias = None
    if ctx.needs_input_grad[0]:
        weight = weight_of(
            packed_w, scales_and_zeros, ctx.group_size, ctx.inner_k_tiles, grad.dtype
        )
        grad_input = matmul(grad, weight)
    if ctx.needs_input_grad[5]:
        grad_bias = grad.reshape(prod(grad.shape[:-1]), grad.shape[-1]).sum(0)
    return grad_input, None, None, None, None, grad_bias


_tangent_of_floats = linear_in("int4_linear", (0, 5))


def _tangent(values: Any, outputs: Any, tangents: Any) -> Tensor:
    if tangents[2] is not None:
        raise _refusal_of_scales("has a tangent")
    result: Tensor = _tangent_of_floats(values, outputs, tangents)
    return result


def _refusal_of_scales(what: str) -> RuntimeError:
    return RuntimeError(
        f"int4_linear: scales_and_zeros {what}, and derivatives are those by input and bias "
        "alone; pass scales_and_zeros.detach()"
    )


def _vmap(
    info: Any,
    in_dims: Sequence[int | None],
    input: Tensor,
    packed_w: Tensor,
    scales_and_zeros: Tensor,
    group_size: int,
    inner_k_tiles: int,
    bias: Tensor | None = None,
) -> tuple[Tensor, int]:
    of_input, of_weight, of_scales, *_ = in_dims
    of_bias = in_dims[5] if len(in_dims) > 5 else None
    if of_weight is None and of_scales is None and of_bias is None:
        # The batch is one more leading dimension.
        moved = input.movedim(of_input or 0, 0)
        return int4_linear(moved, packed_w, scales_and_zeros, group_size, inner_k_tiles, bias), 0
    return each_slice(
        torch.ops.pkg.int4_linear.default,
        *(info, in_dims, input, packed_w, scales_and_zeros, group_size, inner_k_tiles, bias),
    )


def _sharding(group_size: int, inner_k_tiles: int, **_: Any) -> str:
    return (
        f"input ... i, packed_w o/8 i/{16 * inner_k_tiles} _ _, "
        f"scales_and_zeros i/{group_size} o _, + bias o -> ... o"
    )


register_gradients("int4_linear", _backward, tangent=_tangent, setup_context=_setup_context)
torch.library.register_vmap("pkg::int4_linear", _vmap)
register_sharding("int4_linear", _sharding)
