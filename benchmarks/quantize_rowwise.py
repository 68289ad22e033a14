"""Quantising each row of an input, beside the same in PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from pkg import ops

from .harness import OURS, Case

SHAPES = ((1, 4096), (128, 4096), (4096, 4096))
DTYPES = (torch.float32, torch.bfloat16)


def _pytorch(input: Tensor) -> list[Tensor]:
    wide = input.float()
    scale = (wide.abs().amax(-1) / 127).to(input.dtype)
    values = (wide / scale.float()[:, None]).clamp_(-127, 127).round_().to(torch.int8)
    return [values, scale]


def _exact(input: Tensor) -> list[Tensor]:
    # Values are those of the scale as it was rounded, which decides between two neighbours.
    values, _ = _pytorch(input)
    return [values.double(), input.double().abs().amax(-1) / 127]


def _case(rows: int, inner: int, dtype: torch.dtype, device: torch.device) -> Case:
    input = torch.randn(rows, inner, device=device).to(dtype)
    return Case(
        f"{str(dtype).removeprefix('torch.')}, {rows} by {inner}",
        {OURS: partial(ops.quantize_rowwise, input), "PyTorch": partial(_pytorch, input)},
        partial(_exact, input),
        (input.nbytes + input.numel()) / 1e9,
        "GB/s",
        # Larger than a cache only in the last case.
        limit="memory" if input.nbytes > 32 << 20 else None,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """A row, a batch of rows, and a weight."""
    for dtype in DTYPES:
        for rows, inner in SHAPES:
            yield _case(rows, inner, dtype, device)
