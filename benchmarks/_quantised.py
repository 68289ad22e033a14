"""Weights of four bits, for the benchmarks of all operators that take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pkg import ops

GROUP_SIZE = 128
INNER_K_TILES = 8
# Of a layer of Llama 7B, and of one of GPT-2 small.
SHAPES = ((4096, 4096), (3072, 768))


@dataclass(frozen=True)
class Weight:
    """A weight in the forms in which it is compared: rows are output features."""

    values: Tensor
    packed: Tensor
    scales_and_zeros: Tensor

    @classmethod
    def random(cls, rows: int, columns: int, device: torch.device) -> Weight:
        values = torch.randint(0, 16, (rows, columns), dtype=torch.int32, device=device)
        pairs = torch.rand(columns // GROUP_SIZE, rows, 2, device=device) * 0.01
        return cls(
            values, ops.pack_tensor_core_tiled_layout(values, INNER_K_TILES), pairs.bfloat16()
        )

    @property
    def nbytes(self) -> int:
        """Of the packed weight."""
        return self.packed.nbytes + self.scales_and_zeros.nbytes


def matrix(values: Tensor, scales_and_zeros: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight itself, from its values of four bits."""
    wide = torch.promote_types(dtype, torch.float32)
    scales, zeros = scales_and_zeros.to(wide).repeat_interleave(GROUP_SIZE, 0).unbind(-1)
    return ((values - 8) * scales.mT + zeros.mT).to(dtype)
