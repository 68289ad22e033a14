"""Packing a weight, beside PyTorch's transposing copy.

What lies where in a packed weight is not said, so what is verified is a product with it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from pkg import ops

from ._linear import DTYPES
from .harness import OURS, Case, Reference, copies_beyond_caches, in_turn

SHAPES = ((768, 3072), (4096, 4096))


def _transposed(weight: Tensor) -> Tensor:
    return weight.mT.contiguous()


def _case(row: Tensor, weight: Tensor) -> Case:
    outputs, inputs = weight.shape
    used = 2 * weight.nbytes  # read and written
    copies = copies_beyond_caches(weight, used=used)
    weights = [(weight,), *((weight.clone(),) for _ in range(copies - 1))]
    return Case(
        f"{str(weight.dtype).removeprefix('torch.')}, {inputs} to {outputs}",
        {
            OURS: in_turn(ops.pack_linear_weight, weights),
            "PyTorch": in_turn(_transposed, weights),
        },
        Reference(F.linear, row, weight),
        used / 1e9,
        "GB/s",
        terms=inputs,
        limit="memory",
        part=lambda packed: ops.packed_linear(row, packed, outputs),
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Weights of real models."""
    for dtype in DTYPES:
        for inputs, outputs in SHAPES:
            row = torch.randn(1, inputs, device=device).to(dtype)
            yield _case(row, torch.randn(outputs, inputs, device=device).to(dtype))
