"""Hostile inputs, shared by the tests of all operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGRAL = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

SIZES = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
"""Around the widths of vectors, of cache lines and of small tiles."""

SPECIAL = (
    *(0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf")),
    *(1e-40, -1e-40, 3e-324, 1e-7, 6e-8),  # denormal in float32, float64, float16
    *(6e4, 7e4, -7e4, 3e38, 4e38, -1e300, 1.7e308),  # huge: at the ends of each range
)
"""Values that are special in one dtype or another, as float64."""


def around(*tiles: int) -> list[int]:
    """One less, equal and one more than each tile size."""
    return sorted({tile + step for tile in tiles for step in (-1, 0, 1)})


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal values as a float64 template, the same on every run."""
    generator = torch.Generator().manual_seed(hash((shape, seed)) & 0xFFFFFFFF)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def powers(first: int, last: int, count: int) -> Tensor:
    """Powers of two from one exponent to another, as float64."""
    return torch.exp2(torch.linspace(first, last, count).round().double())


def every_pair(values: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Two float64 vectors in which each value meets each."""
    column = torch.tensor(values, dtype=torch.float64)
    pairs = torch.cartesian_prod(column, column)
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()


def of_dtype(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Values that use the range of ``dtype``: all of a small integer's, a wide one's middle."""
    if dtype.is_floating_point:
        return normal(*shape, seed=seed).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    limits = torch.iinfo(dtype)
    low, high = max(limits.min, -(2**40)), min(limits.max, 2**40)
    return torch.randint(low, high + 1, shape, generator=generator).to(dtype)


def pairs(dtypes: Iterable[torch.dtype]) -> list[tuple[torch.dtype, torch.dtype]]:
    """Every ordered pair of dtypes."""
    dtypes = list(dtypes)
    return [(first, second) for first in dtypes for second in dtypes]


def whole_numbers(dtype: torch.dtype, *shape: int, seed: int) -> Tensor:
    """Values whose sums of up to 2048 products are exact in float32, in whatever order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)
