"""`d_sigmoid` beside the three operators that it replaces."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pkg import ops

from ._pointwise import pointwise_cases
from .harness import Case


def _pytorch(z: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(z)
    return (1 - sigmoid) * sigmoid


def cases(device: torch.device) -> Iterator[Case]:
    """Cases of every size and dtype."""
    return pointwise_cases(device, 1, ops.d_sigmoid, _pytorch)
