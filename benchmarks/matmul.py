"""Matrix multiplication: squares, and one row against a large weight, as in decoding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pkg import ops

from .harness import OURS, Case

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SQUARES = (8, 64, 256, 1024)
# PyTorch needs seconds for one float16 product of 1024 on a CPU.
LARGEST_HALF_SQUARE = 256
ROW = 4096


def _product(a: Tensor, b: Tensor, name: str, work: float, unit: str) -> Case:
    return Case(
        f"{str(a.dtype).removeprefix('torch.')}, {name}",
        {OURS: lambda: ops.matmul(a, b), "PyTorch": lambda: torch.matmul(a, b)},
        lambda: a.double() @ b.double(),
        work,
        unit,
        terms=a.size(-1),
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Cases of every dtype."""
    for dtype in DTYPES:
        for n in SQUARES:
            if dtype == torch.float16 and device.type == "cpu" and n > LARGEST_HALF_SQUARE:
                continue
            a, b = torch.randn(2, n, n, device=device).to(dtype)
            yield _product(a, b, f"n = {n}", 2 * n**3 / 1e9, "GFLOP/s")
    for dtype in DTYPES:
        row = torch.randn(1, ROW, device=device).to(dtype)
        weight = torch.randn(ROW, ROW, device=device).to(dtype)
        work = weight.numel() * weight.element_size() / 1e9
        yield _product(row, weight.mT, f"one row, {ROW}x{ROW}", work, "GB/s")
