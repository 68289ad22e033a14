"""A small GPT whose layers are shared by several processes: tensor parallelism.

Of each pair of layers the first is split by its outputs and the second by its inputs (Megatron-LM,
Shoeybi et al., arXiv 1909.08053), so that the processes exchange one sum for each pair: every
process has some of the heads, and some of the neurons of the perceptron. What is small, the
normalisations and the embedding, every process has.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

import pkg

from .model import Config, Rotation

STYLES = {
    "query": ColwiseParallel,
    "key": ColwiseParallel,
    "value": ColwiseParallel,
    "attention_output": RowwiseParallel,
    "perceptron_input": ColwiseParallel,
    "perceptron_output": RowwiseParallel,
}


class Block(nn.Module):
    """Attention, then a perceptron; each adds to what passes through."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.head_size = width // config.heads
        self.rotation = Rotation(pkg.ops.rotary_embedding, config.context, self.head_size)
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.query, self.key, self.value, self.attention_output = (
            pkg.nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.perceptron_norm = nn.LayerNorm(width, bias=False)
        self.perceptron_input = pkg.nn.Linear(width, 4 * width, bias=False, activation="gelu")
        self.perceptron_output = pkg.nn.Linear(4 * width, width, bias=False)
        for name in STYLES:
            nn.init.normal_(getattr(self, name).weight, std=0.02)
        for last in (self.attention_output, self.perceptron_output):
            last.weight.data /= (2 * config.layers) ** 0.5

    def attend(self, stream: Tensor) -> Tensor:
        """The heads of this process: as many as its share of the weights makes."""
        query, key, value = (
            layer(stream).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = self.rotation(query, 0), self.rotation(key, 0)
        attended = pkg.ops.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_output(attended.transpose(1, 2).flatten(-2))

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.attend(self.attention_norm(stream))
        hidden = self.perceptron_input(self.perceptron_norm(stream))
        return stream + self.perceptron_output(hidden)


class ParallelGPT(nn.Module):
    """Predicts each character from those before it.

    Args:
        config: the shape of the model, all processes' shares together.
        mesh: the processes; the weights are those that the first of them draws.
    """

    def __init__(self, config: Config, mesh: DeviceMesh) -> None:
        super().__init__()
        self.characters = nn.Parameter(torch.randn(config.vocabulary_size, config.width) * 0.02)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        pkg.integrations.distributed.register()
        for block in self.blocks:
            parallelize_module(block, mesh, {name: style() for name, style in STYLES.items()})

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, tokens, vocabulary) of the characters that follow each token."""
        stream = functional.embedding(tokens, self.characters)
        for block in self.blocks:
            stream = block(stream)
        return pkg.ops.linear(self.norm(stream), self.characters)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy in nats of ``tokens``, int64 (batch, context + 1)."""
        return functional.cross_entropy(self(tokens[:, :-1]).mT, tokens[:, 1:])
