"""Unpacking a weight of four bits, beside shifting and reshaping it in tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pkg import ops

from ._quantised import INNER_K_TILES, SHAPES, Weight
from .harness import OURS, Case, Reference, copies_beyond_caches, in_turn


def _in_tensors(packed: Tensor) -> Tensor:
    tiles, supertiles, _, words = packed.shape
    shifts = 4 * torch.arange(4, device=packed.device).view(4, 1) + 16 * torch.arange(
        2, device=packed.device
    )
    values = (packed[..., None, None] >> shifts.int()) & 15
    # (tile, supertile, row, lane of four, word, j, h) to rows and columns.
    parts = values.view(tiles, supertiles, 8, 4, words, 4, 2).permute(0, 2, 1, 4, 5, 3, 6)
    return parts.reshape(tiles * 8, supertiles * words * 32)


def _case(rows: int, columns: int, device: torch.device) -> Case:
    weight = Weight.random(rows, columns, device)
    used = weight.values.nbytes + weight.packed.nbytes
    copies = range(copies_beyond_caches(weight.packed, used=used))
    packed = [(weight.packed.clone(),) for _ in copies]
    return Case(
        f"{rows} x {columns}",
        {
            OURS: in_turn(
                lambda each: ops.unpack_tensor_core_tiled_layout(each, INNER_K_TILES), packed
            ),
            "tensors": in_turn(_in_tensors, packed),
        },
        Reference(_in_tensors, weight.packed),
        used / 1e9,
        "GB/s",
        limit="memory",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Weights of real models."""
    for rows, columns in SHAPES:
        yield _case(rows, columns, device)
