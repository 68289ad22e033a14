"""Packing values of four bits, beside PyTorch's packing for the CPU and a formula in tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pkg import ops

from ._quantised import INNER_K_TILES, SHAPES, Weight
from .harness import OURS, Case, Reference, copies_beyond_caches, in_turn


def _in_tensors(values: Tensor) -> Tensor:
    """The layout by reshaping: lane t = 4 r + c has columns 8 j + 2 c + h of each block of 32."""
    rows, columns = values.shape
    words = INNER_K_TILES // 2
    parts = values.view(rows // 8, 8, columns // (32 * words), words, 4, 4, 2)
    shifts = 4 * torch.arange(4, device=values.device).view(4, 1, 1) + 16 * torch.arange(
        2, device=values.device
    )
    nibbles = (parts << shifts.int()).sum((-3, -1))
    packed = nibbles.permute(0, 2, 1, 4, 3).reshape(rows // 8, -1, 32, words)
    return packed.int()


def _case(rows: int, columns: int, device: torch.device) -> Case:
    weight = Weight.random(rows, columns, device)
    used = weight.values.nbytes + weight.packed.nbytes
    copies = range(copies_beyond_caches(weight.values, used=used))
    values = [(weight.values.clone(),) for _ in copies]
    return Case(
        f"{rows} x {columns}",
        {
            OURS: in_turn(
                lambda each: ops.pack_tensor_core_tiled_layout(each, INNER_K_TILES), values
            ),
            "tensors": in_turn(_in_tensors, values),
        },
        Reference(_in_tensors, weight.values),
        used / 1e9,
        "GB/s",
        limit="memory",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Weights of real models."""
    for rows, columns in SHAPES:
        yield _case(rows, columns, device)
