"""What autocast makes of an input."""

from __future__ import annotations

import torch
from torch import Tensor


def dtype_under_autocast(input: Tensor) -> torch.dtype:
    """The dtype to compute in: autocast's where it is enabled, which leaves float64 alone."""
    device = input.device.type
    # PyTorch's question raises on the meta device, which has no autocast.
    if input.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return input.dtype
    return torch.get_autocast_dtype(device)
