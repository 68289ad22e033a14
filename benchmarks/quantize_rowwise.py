"""Quantising each row of an input, beside the same in PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pkg import ops

from .harness import OURS, Case, Reference, copies_beyond_caches, in_turn

SHAPES = ((1, 4096), (128, 4096), (4096, 4096))
DTYPES = (torch.float32, torch.bfloat16)


def _pytorch(input: Tensor) -> list[Tensor]:
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    return _quantized(wide, (wide.abs().amax(-1) / 127).to(input.dtype))


def _exact(input: Tensor) -> list[Tensor]:
    """By a tensor: divided by a number, CUDA tensors are multiplied by its reciprocal."""
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    largest = wide.abs().amax(-1)
    return _quantized(wide, (largest / torch.full_like(largest, 127)).to(input.dtype))


def _quantized(wide: Tensor, scale: Tensor) -> list[Tensor]:
    values = (wide / scale.to(wide.dtype)[:, None]).clamp_(-127, 127).round_().to(torch.int8)
    return [values, scale]


def _case(rows: int, inner: int, dtype: torch.dtype, device: torch.device) -> Case:
    input = torch.randn(rows, inner, device=device).to(dtype)
    used = input.nbytes + input.numel()
    large = rows == SHAPES[-1][0]
    copies = copies_beyond_caches(input, used=used) if large else 1
    inputs = [(input,), *((input.clone(),) for _ in range(copies - 1))]
    return Case(
        f"{str(dtype).removeprefix('torch.')}, {rows} by {inner}",
        {OURS: in_turn(ops.quantize_rowwise, inputs), "PyTorch": in_turn(_pytorch, inputs)},
        Reference(_exact, input),
        used / 1e9,
        "GB/s",
        limit="memory" if large else None,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """A row, a batch of rows, and a weight."""
    for dtype in DTYPES:
        for rows, inner in SHAPES:
            yield _case(rows, inner, dtype, device)


def gpu_cases(device: torch.device) -> Iterator[Case]:
    """The input of a layer of Llama 8B, and its weight."""
    for shape in ((SHAPES[-1][0], 14336), (14336, SHAPES[-1][1])):
        yield _case(*shape, torch.bfloat16, device)
