"""Packing a weight and using it once, beside PyTorch's transposing copy and a product with it.

What lies where in a packed weight is not said, so its use is what can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from pkg import ops

from ._linear import DTYPES
from .harness import OURS, Case

SHAPES = ((768, 3072), (4096, 4096))


def _ours(row: Tensor, weight: Tensor) -> Tensor:
    return ops.packed_linear(row, ops.pack_linear_weight(weight), len(weight))


def _pytorch(row: Tensor, weight: Tensor) -> Tensor:
    return F.linear(row, weight.mT.contiguous().mT)


def _case(row: Tensor, weight: Tensor) -> Case:
    outputs, inputs = weight.shape
    return Case(
        f"{str(weight.dtype).removeprefix('torch.')}, {inputs} to {outputs}",
        {OURS: lambda: _ours(row, weight), "PyTorch": lambda: _pytorch(row, weight)},
        lambda: F.linear(row.double(), weight.double()),
        3 * weight.nbytes / 1e9,  # the weight is read, written, and read again
        "GB/s",
        terms=inputs,
        limit="memory",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Weights of real models."""
    for dtype in DTYPES:
        for inputs, outputs in SHAPES:
            row = torch.randn(1, inputs, device=device).to(dtype)
            yield _case(row, torch.randn(outputs, inputs, device=device).to(dtype))
