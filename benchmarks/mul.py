"""`mul` beside ``torch.mul``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pkg import ops

from ._pointwise import pointwise_cases
from .harness import Case


def cases(device: torch.device) -> Iterator[Case]:
    """Cases of every size and dtype."""
    return pointwise_cases(device, 2, ops.mul, torch.mul)
