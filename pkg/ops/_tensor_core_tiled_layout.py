"""Shapes of the tensor-core tiled layout, for fake kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

INNER_K_TILES = (2, 4, 8)
GROUP_SIZES = (32, 64, 128, 256)


def weight_shape(name: str, packed_w: Tensor, inner_k_tiles: int) -> tuple[Any, Any]:
    """Rows and columns of a packed weight."""
    torch._check(
        inner_k_tiles in INNER_K_TILES, lambda: f"{name}: inner_k_tiles is {inner_k_tiles}"
    )
    torch._check(packed_w.dim() == 4, lambda: f"{name}: packed_w must have four dimensions")
    torch._check(
        packed_w.shape[3] == inner_k_tiles // 2,
        lambda: f"{name}: packed_w is not of inner_k_tiles {inner_k_tiles}",
    )
    return packed_w.shape[0] * 8, packed_w.shape[1] * (16 * inner_k_tiles)
