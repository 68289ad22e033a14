"""`muladd` beside the two operators that it replaces."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pkg import ops

from ._pointwise import pointwise_cases
from .harness import Case

ADDEND = 0.5


def _ours(a: Tensor, b: Tensor) -> Tensor:
    return ops.muladd(a, b, ADDEND)


def _pytorch(a: Tensor, b: Tensor) -> Tensor:
    return a * b + ADDEND


def cases(device: torch.device) -> Iterator[Case]:
    """Cases of every size and dtype."""
    return pointwise_cases(device, 2, _ours, _pytorch)
