"""A linear layer whose weight was packed beforehand (pkg.nn.Linear.pack_weight), and PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from pkg import ops

from ._linear import Layer, forward_case, layers
from .harness import Case


def _packed(layer: Layer) -> Callable[[], Tensor]:
    packed = ops.pack_linear_weight(layer.weight)
    outputs = len(layer.weight)
    return partial(ops.packed_linear, layer.input, packed, outputs, layer.bias, layer.activation)


def cases(device: torch.device) -> Iterator[Case]:
    """Layers of GPT-2 small and of Llama 8B."""
    for layer in layers(device):
        yield forward_case(layer, _packed)
