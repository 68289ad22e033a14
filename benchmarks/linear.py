"""A linear layer and its activation beside PyTorch's two operators, forward and in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from pkg import ops

from ._linear import GPT2, LLAMA, ROWS, Layer, forward_case, layers, pytorch
from .harness import OURS, Case, Reference


def _gradients(
    function: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    activation: str | None,
) -> Callable[[], Tensor]:
    """A forward and a backward pass, for the gradients of input, weight and bias."""
    tensors = (input, weight, bias)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]

    def train() -> Tensor:
        output = function(*leaves, activation)
        gradients = torch.autograd.grad(output, leaves, torch.ones_like(output))
        return torch.cat([gradient.flatten() for gradient in gradients])

    return train


def _training_case(layer: Layer) -> Case:
    rows, (outputs, inputs) = len(layer.input), layer.weight.shape
    return Case(
        f"{layer}, forward and backward",
        {
            OURS: _gradients(ops.linear, *layer.arguments),
            "PyTorch": _gradients(pytorch, *layer.arguments),
        },
        Reference(lambda *arguments: _gradients(pytorch, *arguments)(), *layer.arguments),
        6 * rows * inputs * outputs / 1e9,
        "GFLOP/s",
        terms=max(rows, inputs),
        limit=str(layer.input.dtype).removeprefix("torch."),
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Layers of GPT-2 small and of Llama 8B."""
    for layer in layers(device):
        yield forward_case(layer, lambda each: partial(ops.linear, *each.arguments))
    for dtype in (torch.float32, torch.bfloat16):
        yield _training_case(Layer.random(max(ROWS), (*GPT2[:2], "gelu"), dtype, device))


def gpu_cases(device: torch.device) -> Iterator[Case]:
    """Many rows of the layer of Llama 8B, forward and in training."""
    for dtype in (torch.bfloat16, torch.float32):
        layer = Layer.random(4096, LLAMA, dtype, device)
        yield forward_case(layer, lambda each: partial(ops.linear, *each.arguments))
        yield _training_case(layer)
