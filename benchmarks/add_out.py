"""`add_out` beside ``torch.add(..., out=...)``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pkg import ops

from ._pointwise import pointwise_cases
from .harness import Case


def _ours(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    ops.add_out(a, b, out=out)
    return out


def cases(device: torch.device) -> Iterator[Case]:
    """Cases of every size and dtype."""
    return pointwise_cases(device, 2, _ours, torch.add, into_output=True)
