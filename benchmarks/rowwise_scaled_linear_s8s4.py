"""A linear layer in integers, rows of int8 times a weight of int4, beside what PyTorch has."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pkg import ops

from ._rowwise_scaled_linear import rowwise_scaled_cases, rowwise_scaled_gpu_cases
from .harness import Case


def cases(device: torch.device) -> Iterator[Case]:
    """One row, a few and many."""
    return rowwise_scaled_cases(ops.rowwise_scaled_linear_s8s4, 8, device)


def gpu_cases(device: torch.device) -> Iterator[Case]:
    """Many rows of a wider layer."""
    return rowwise_scaled_gpu_cases(ops.rowwise_scaled_linear_s8s4, 8, device)
