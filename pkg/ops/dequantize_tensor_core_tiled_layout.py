"""``dequantize_tensor_core_tiled_layout``: a quantised weight as a matrix of bfloat16."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._call import operator
from ._inference import register_inference_only
from ._registration import check_one_device, register_fake
from ._sharding import register_sharding
from ._tensor_core_tiled_layout import check_scales, weight_shape
from ._vmap import each_slice

TABLE = (
    "`(q - 8) * scale + zero` for each value of a packed weight",
    "int32 and bfloat16 into bfloat16",
    "no",
)
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def dequantize_tensor_core_tiled_layout(
    packed_w: Tensor, scales_and_zeros: Tensor, group_size: int, inner_k_tiles: int
) -> Tensor:
    """Computes ``(q - 8) * scale + zero`` for each value q of a packed weight.

    Rounded once to bfloat16, to nearest even, as torchao's fused multiply-add rounds it: the same
    bits on every device, but for those of a NaN.

    Args:
        packed_w: int32, shape (rows / 8, columns / (16 * inner_k_tiles), 32, inner_k_tiles / 2),
            as :func:`pkg.ops.pack_tensor_core_tiled_layout` returns it; any strides.
        scales_and_zeros: bfloat16, shape (columns / group_size, rows, 2): a scale and a zero for
            each group of columns of each row; any strides.
        group_size: 32, 64, 128 or 256.
        inner_k_tiles: With which the weight was packed: 2, 4 or 8.

    Returns:
        bfloat16, shape (rows, columns).

    Raises:
        RuntimeError: A shape, dtype or device does not match, ``group_size`` or
            ``inner_k_tiles`` is another number, or the scales require grad while gradients are
            recorded.

    Example:
        >>> w = torch.full((8, 32), 10, dtype=torch.int32)
        >>> packed = torch.ops.pkg.pack_tensor_core_tiled_layout(w, 2)
        >>> scales_and_zeros = torch.tensor([0.5, 3.0]).bfloat16().expand(1, 8, 2)
        >>> dequantize_tensor_core_tiled_layout(packed, scales_and_zeros, 32, 2)[0, :2]
        tensor([4., 4.], dtype=torch.bfloat16)
    """
    return torch.ops.pkg.dequantize_tensor_core_tiled_layout.default(
        packed_w, scales_and_zeros, group_size, inner_k_tiles
    )


@register_fake("dequantize_tensor_core_tiled_layout")
def _fake(
    packed_w: Tensor, scales_and_zeros: Tensor, group_size: int, inner_k_tiles: int
) -> Tensor:
    name = "dequantize_tensor_core_tiled_layout"
    check_one_device(name, packed_w, scales_and_zeros)
    shape = weight_shape(name, packed_w, inner_k_tiles)
    check_scales(name, packed_w, scales_and_zeros, group_size, shape)
    return scales_and_zeros.new_empty(shape)


def _sharding(group_size: int, inner_k_tiles: int, **_: Any) -> str:
    return f"packed_w o/8 i/{16 * inner_k_tiles} _ _, scales_and_zeros i/{group_size} o _ -> o i"


register_inference_only("dequantize_tensor_core_tiled_layout", "pass scales_and_zeros.detach()")
torch.library.register_vmap(
    "pkg::dequantize_tensor_core_tiled_layout",
    partial(each_slice, torch.ops.pkg.dequantize_tensor_core_tiled_layout.default),
)
register_sharding("dequantize_tensor_core_tiled_layout", _sharding)
