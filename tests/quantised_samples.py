"""Weights of four bits, for the tests of all operators that take them."""

from __future__ import annotations

import torch
from samples import normal
from torch import Tensor

INNER_K_TILES = (2, 4, 8)
GROUP_SIZES = (32, 64, 128, 256)


def values(rows: int, columns: int, seed: int = 0) -> Tensor:
    """int32 values from 0 to 15."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.int32)


def words(rows: int, columns: int, inner_k_tiles: int, seed: int = 0) -> Tensor:
    """A packed weight of random bits: every word is one."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows // 8, columns // (16 * inner_k_tiles), 32, inner_k_tiles // 2)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).int()


def scales_and_zeros(rows: int, columns: int, group_size: int, seed: int = 0) -> Tensor:
    """bfloat16: scales around 0.1, and zeros as large as the largest value times that."""
    pairs = normal(columns // group_size, rows, 2, seed=seed) * torch.tensor([0.05, 0.4])
    return (pairs + torch.tensor([0.1, 0.0])).bfloat16()


def terms(pairs: Tensor, group_size: int) -> Tensor:
    """What a weight's two terms reach: a whole number up to 8 times the scale, and the zero."""
    scales, zeros = pairs.double().abs().repeat_interleave(group_size, 0).unbind(-1)
    return (8 * scales + zeros).mT


def fixed_point_bound(input: Tensor, weight: Tensor) -> Tensor:
    """What a few rows in integers may be off: an element by so much of the largest of its 128."""
    unit = 2.0 ** (-22.98 if input.dtype == torch.float32 else -14.98)
    inputs = input.double().abs()
    chunks = torch.stack([part.amax(-1) for part in inputs.split(128, -1)], -1)
    weights = torch.stack([part.abs().sum(-1) for part in weight.split(128, -1)], -1)
    return unit * chunks @ weights.mT


def error_bound(
    input: Tensor, weight: Tensor, largest: Tensor, bias: Tensor | None, exact: Tensor
) -> Tensor:
    """What an element of the result may be off, from the roundings that there are.

    u is the roundoff of the sums, in float64 or float32. Sum of K products, with bias: at most
    (K + 4) u times the sum of the magnitudes of the terms, since the kernels that sum by groups
    have the two of a weight apart (:func:`terms`): the conversion of a group's sum, its scaling,
    and the additions. A few rows in fixed point, and one rounding of the result.
    """
    dtype = input.dtype
    u = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    magnitudes = input.double().abs() @ largest.mT
    bound = (input.shape[-1] + 4) * u * magnitudes
    if bias is not None:
        bound = bound + 2 * u * bias.double().abs()
    if dtype != torch.float64:
        bound = bound + fixed_point_bound(input, weight)
    bound = bound + torch.finfo(dtype).eps / 2 * (exact.abs() + bound)
    if dtype == torch.float64:  # the reference has errors of its own
        bound = 2 * bound
    return bound + torch.finfo(dtype).smallest_normal
