"""What the benchmarks of a linear layer have in common: its shapes, and PyTorch's way to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .harness import OURS, Case, Reference, copies_beyond_caches, in_turn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of GPT-2 small and of Llama 8B: the layer before each one's activation.
GPT2, LLAMA = (768, 3072, "gelu_tanh"), (4096, 14336, "silu")
ROWS = (16, 512)


@dataclass(frozen=True)
class Layer:
    """A layer and its input: PyTorch takes it in two steps, or three."""

    input: Tensor
    weight: Tensor
    bias: Tensor
    activation: str | None

    @classmethod
    def random(
        cls,
        rows: int,
        shape: tuple[int, int, str | None],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Layer:
        in_features, out_features, activation = shape
        return cls(
            torch.randn(rows, in_features, device=device).to(dtype),
            (torch.randn(out_features, in_features, device=device) / in_features**0.5).to(dtype),
            torch.randn(out_features, device=device).to(dtype),
            activation,
        )

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, str | None]:
        return self.input, self.weight, self.bias, self.activation

    def __str__(self) -> str:
        rows, (outputs, inputs) = len(self.input), self.weight.shape
        dtype = str(self.input.dtype).removeprefix("torch.")
        words = f"{rows} {'row' if rows == 1 else 'rows'}, {inputs} to {outputs}"
        return f"{dtype}, {words}" + (f", {self.activation}" if self.activation else "")


def pytorch(input: Tensor, weight: Tensor, bias: Tensor, activation: str | None) -> Tensor:
    result = F.linear(input, weight, bias)
    if activation == "relu":
        return F.relu(result)
    if activation == "silu":
        return F.silu(result)
    if activation in ("gelu", "gelu_tanh"):
        return F.gelu(result, approximate="none" if activation == "gelu" else "tanh")
    return result


def layers(device: torch.device) -> Iterator[Layer]:
    """Those that both benchmarks have."""
    for dtype in DTYPES:
        for rows in ROWS:
            if dtype == torch.float16 and device.type == "cpu" and rows == max(ROWS):
                continue  # seconds a call by PyTorch
            yield Layer.random(rows, GPT2, dtype, device)
    for activation in (None, "relu", "gelu"):
        yield Layer.random(max(ROWS), (*GPT2[:2], activation), torch.float32, device)
    for dtype in DTYPES:
        yield Layer.random(1, LLAMA, dtype, device)


def forward_case(layer: Layer, ours: Callable[[Layer], Callable[[], Tensor]]) -> Case:
    """A layer, called. One row is bound by reading the weight, which is in no cache then."""
    rows, (outputs, inputs) = len(layer.input), layer.weight.shape
    from_memory = rows == 1
    copies = copies_beyond_caches(layer.weight) if from_memory else 1
    all_layers = [layer]
    for _ in range(copies - 1):
        all_layers.append(Layer(layer.input, layer.weight.clone(), layer.bias, layer.activation))
    prepared = [ours(each) for each in all_layers]
    return Case(
        str(layer),
        {
            OURS: in_turn(_call, [(each,) for each in prepared]),
            "PyTorch": in_turn(pytorch, [each.arguments for each in all_layers]),
        },
        Reference(pytorch, *layer.arguments),
        (layer.weight.nbytes if from_memory else 2 * rows * inputs * outputs) / 1e9,
        "GB/s" if from_memory else "GFLOP/s",
        terms=inputs,
        limit="memory" if from_memory else str(layer.input.dtype).removeprefix("torch."),
    )


def _call(function: Callable[[], Tensor]) -> Tensor:
    return function()
