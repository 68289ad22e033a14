"""A weight of four bits written out in bfloat16, beside the same on unpacked values."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pkg import ops

from ._quantised import GROUP_SIZE, INNER_K_TILES, SHAPES, Weight
from .harness import OURS, Case


def _case(rows: int, columns: int, device: torch.device) -> Case:
    weight = Weight.random(rows, columns, device)
    return Case(
        f"{rows} x {columns}",
        {
            OURS: lambda: ops.dequantize_tensor_core_tiled_layout(
                weight.packed, weight.scales_and_zeros, GROUP_SIZE, INNER_K_TILES
            ),
            "tensors": lambda: weight.matrix(torch.bfloat16),
        },
        lambda: weight.matrix(torch.float64),
        (weight.nbytes + 2 * rows * columns) / 1e9,
        "GB/s",
        limit="memory",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Weights of real models."""
    for rows, columns in SHAPES:
        yield _case(rows, columns, device)
