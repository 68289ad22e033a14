"""A weight of four bits written out in bfloat16, beside the same on unpacked values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pkg import ops

from ._quantised import GROUP_SIZE, INNER_K_TILES, SHAPES, Weight, matrix
from .harness import OURS, Case, Reference, copies_beyond_caches, in_turn


def _ours(packed: Tensor, scales_and_zeros: Tensor) -> Tensor:
    return ops.dequantize_tensor_core_tiled_layout(
        packed, scales_and_zeros, GROUP_SIZE, INNER_K_TILES
    )


def _case(rows: int, columns: int, device: torch.device) -> Case:
    weight = Weight.random(rows, columns, device)
    used = weight.nbytes + 2 * rows * columns
    copies = range(copies_beyond_caches(weight.packed, used=used))
    pairs = [(weight.packed.clone(), weight.scales_and_zeros.clone()) for _ in copies]
    # The values of four bits are int32 here: fewer copies are as large.
    all_values = [weight.values.clone() for _ in copies[: copies_beyond_caches(weight.values)]]
    return Case(
        f"{rows} x {columns}",
        {
            OURS: in_turn(_ours, pairs),
            "tensors": in_turn(
                matrix, [(each, weight.scales_and_zeros, torch.bfloat16) for each in all_values]
            ),
        },
        Reference(matrix, weight.values, weight.scales_and_zeros, torch.bfloat16),
        used / 1e9,
        "GB/s",
        limit="memory",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Weights of real models."""
    for rows, columns in SHAPES:
        yield _case(rows, columns, device)
