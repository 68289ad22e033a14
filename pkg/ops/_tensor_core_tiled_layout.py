"""Shapes of the tensor-core tiled layout, for fake kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

INNER_K_TILES = (2, 4, 8)
GROUP_SIZES = (32, 64, 128, 256)


def weight_shape(name: str, packed_w: Tensor, inner_k_tiles: int) -> tuple[Any, Any]:
    """Rows and columns of a packed weight."""
    check_inner_k_tiles(name, inner_k_tiles)
    supertile, words = 16 * inner_k_tiles, inner_k_tiles // 2
    torch._check(
        packed_w.dim() == 4 and packed_w.shape[2] == 32 and packed_w.shape[3] == words,
        lambda: (
            f"{name}: packed_w has shape {tuple(packed_w.shape)}; with inner_k_tiles "
            f"{inner_k_tiles} it must have shape (rows / 8, columns / {supertile}, 32, {words}), "
            "as pack_tensor_core_tiled_layout returns it"
        ),
    )
    return packed_w.shape[0] * 8, packed_w.shape[1] * supertile


def check_inner_k_tiles(name: str, inner_k_tiles: int) -> None:
    """There is such a layout."""
    torch._check(
        inner_k_tiles in INNER_K_TILES,
        lambda: f"{name}: inner_k_tiles is {inner_k_tiles}; it must be 2, 4 or 8",
    )


def check_scales(
    name: str,
    packed_w: Tensor,
    scales_and_zeros: Tensor,
    group_size: int,
    shape: tuple[Any, Any],
) -> None:
    """The scales are those of a weight of this shape."""
    rows, columns = shape
    torch._check(
        group_size in GROUP_SIZES,
        lambda: f"{name}: group_size is {group_size}; it must be 32, 64, 128 or 256",
    )
    torch._check(
        columns % group_size == 0,
        lambda: (
            f"{name}: packed_w of shape {tuple(packed_w.shape)} has {columns} columns, not a "
            f"multiple of group_size {group_size}"
        ),
    )
    expected = (columns // group_size, rows, 2)
    torch._check(
        scales_and_zeros.shape == expected,
        lambda: (
            f"{name}: scales_and_zeros has shape {tuple(scales_and_zeros.shape)}; for {rows} rows "
            f"of {columns} columns in groups of {group_size} it must have shape {expected}, "
            "(columns / group_size, rows, 2)"
        ),
    )
