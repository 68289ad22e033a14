"""A small GPT whose matrix products, attention and rotations are given to it.

The network is GPT-2's (Radford et al., 2019) without biases: normalisation before each half of a
block, one matrix for the embedding and for the output. Positions are rotations of the queries and
keys (Su et al., arXiv 2104.09864), with which so small a model learns several times faster than
with learned positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


class KeyValueCache:
    """Keys and values of the tokens already read, of one layer, so that none is computed twice.

    Args:
        capacity: tokens that it can hold.

    Attributes:
        keys: (batch, heads, capacity, head size), of which the first ``length`` tokens are there.
        values: the same.
        lengths: int32 (batch,), the length of each sequence: all are as long as the first.
        length: that one.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add keys and values (batch, heads, tokens, head size)."""
        if self.length == 0:
            shape = (*key.shape[:2], self.capacity, key.size(3))
            self.keys, self.values = key.new_empty(shape), value.new_empty(shape)
            self.lengths = torch.zeros(len(key), dtype=torch.int32, device=key.device)
        start, self.length = self.length, self.length + key.size(2)
        self.keys[:, :, start : self.length] = key
        self.values[:, :, start : self.length] = value
        self.lengths.fill_(self.length)


def attention_to_slices(query: Tensor, cache: KeyValueCache) -> Tensor:
    """What PyTorch has for a single query (batch, heads, 1, head size) and a cache."""
    keys, values = cache.keys[:, :, : cache.length], cache.values[:, :, : cache.length]
    return functional.scaled_dot_product_attention(query, keys, values)


@dataclass(frozen=True)
class Operators:
    """The operators that a model computes with.

    Attributes:
        name: what the reports call them.
        linear: ``(input (..., in), weight (out, in)) -> (..., out)``.
        linear_gelu: the same, and GELU of its result.
        attention: the signature of ``torch.nn.functional.scaled_dot_product_attention``.
        rotation: ``(heads (..., tokens, size), cosine, sine (tokens, size / 2))``: each element of
            the first half turned with that of the second.
        decoding: attention of a single query to all that a cache holds.
    """

    name: str
    linear: Callable[[Tensor, Tensor], Tensor]
    linear_gelu: Callable[[Tensor, Tensor], Tensor]
    attention: Callable[..., Tensor]
    rotation: Callable[[Tensor, Tensor, Tensor], Tensor]
    decoding: Callable[[Tensor, KeyValueCache], Tensor] = attention_to_slices


def pytorch_operators() -> Operators:
    """PyTorch's own operators."""

    def linear_gelu(input: Tensor, weight: Tensor) -> Tensor:
        return functional.gelu(functional.linear(input, weight))

    def rotation(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        left, right = heads.chunk(2, -1)
        turned = (left * cosine - right * sine, left * sine + right * cosine)
        return torch.cat(turned, -1).to(heads.dtype)

    attention = functional.scaled_dot_product_attention
    return Operators("PyTorch", functional.linear, linear_gelu, attention, rotation)


def pkg_operators() -> Operators:
    """The operators of ``pkg``; every matrix product of the model is one ``pkg.ops.linear``.

    GELU is computed while the sums of its product are in registers. New tokens attend to the
    cache where it is, without slices of it.
    """
    from pkg import ops

    def linear_gelu(input: Tensor, weight: Tensor) -> Tensor:
        return ops.linear(input, weight, activation="gelu")

    def decoding(query: Tensor, cache: KeyValueCache) -> Tensor:
        return ops.decode_attention(query, cache.keys, cache.values, cache.lengths)

    attention = ops.scaled_dot_product_attention
    return Operators("pkg", ops.linear, linear_gelu, attention, ops.rotary_embedding, decoding)


@dataclass(frozen=True)
class Config:
    """The shape of a model: everything that decides the shapes of its weights."""

    vocabulary_size: int
    context: int
    layers: int
    heads: int
    width: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} cannot be shared by {self.heads} heads")
        if self.width // self.heads % 2:
            raise ValueError(f"a head's share of the width, {self.width // self.heads}, is odd")


class Rotation(nn.Module):
    """Turns each pair of channels by an angle that grows with the position.

    Args:
        turn: of :class:`Operators`, its ``rotation``.
        context: positions that there are.
        size: of a head; even.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(
        self, turn: Callable[[Tensor, Tensor, Tensor], Tensor], context: int, size: int
    ) -> None:
        super().__init__()
        self.turn = turn
        # Wavelengths from 2 pi to as many positions as a model of this size ever sees.
        frequencies = 1000.0 ** -(torch.arange(size // 2) / (size // 2))
        angles = torch.outer(torch.arange(context), frequencies)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, heads: Tensor, start: int) -> Tensor:
        """Turn (..., tokens, size), whose first token is at position `start`."""
        end = start + heads.size(-2)
        return self.turn(heads, self.cosine[start:end], self.sine[start:end])


class Linear(nn.Module):
    """``input @ weight.T`` with the given operators; the weight is (out, in)."""

    def __init__(self, operators: Operators, inputs: int, outputs: int, deviation: float) -> None:
        super().__init__()
        self.operators = operators
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * deviation)

    def forward(self, input: Tensor) -> Tensor:
        return self.operators.linear(input, self.weight)


class Block(nn.Module):
    """Attention, then a perceptron; each adds to what passes through."""

    def __init__(self, operators: Operators, config: Config) -> None:
        super().__init__()
        width = config.width
        # GPT-2's: what is added to the residual stream 2 * layers times keeps its variance.
        residual_deviation = 0.02 / (2 * config.layers) ** 0.5
        self.operators = operators
        self.heads = config.heads
        self.rotation = Rotation(operators.rotation, config.context, width // config.heads)
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention_input = Linear(operators, width, 3 * width, 0.02)
        self.attention_output = Linear(operators, width, width, residual_deviation)
        self.perceptron_norm = nn.LayerNorm(width, bias=False)
        self.perceptron_input = Linear(operators, width, 4 * width, 0.02)
        self.perceptron_output = Linear(operators, 4 * width, width, residual_deviation)

    def attend(self, stream: Tensor, cache: KeyValueCache | None) -> Tensor:
        joined = self.attention_input(stream).unflatten(-1, (3, self.heads, -1))
        query, key, value = (part.transpose(1, 2) for part in joined.unbind(2))
        start = 0 if cache is None else cache.length
        query, key = self.rotation(query, start), self.rotation(key, start)
        if cache is not None:
            cache.append(key, value)
        if start:
            attended = self.operators.decoding(query, cache)
        else:
            attended = self.operators.attention(query, key, value, is_causal=True)
        return self.attention_output(attended.transpose(1, 2).flatten(-2))

    def forward(self, stream: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        stream = stream + self.attend(self.attention_norm(stream), cache)
        return stream + self.perceptron_output(self.hidden(self.perceptron_norm(stream)))

    def hidden(self, input: Tensor) -> Tensor:
        """GELU of the perceptron's first layer."""
        layer = self.perceptron_input
        if isinstance(layer, Linear):
            return self.operators.linear_gelu(input, layer.weight)
        return functional.gelu(layer(input))  # a layer with weights of four bits


class GPT(nn.Module):
    """Predicts each character from those before it.

    Args:
        operators: what to compute with; the weights do not depend on it.
        config: the shape of the model.
    """

    def __init__(self, operators: Operators, config: Config) -> None:
        super().__init__()
        self.operators = operators
        self.config = config
        self.characters = nn.Parameter(torch.randn(config.vocabulary_size, config.width) * 0.02)
        self.blocks = nn.ModuleList(Block(operators, config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)

    def new_caches(self) -> list[KeyValueCache]:
        """Empty caches, one a layer, for :meth:`forward`."""
        return [KeyValueCache(self.config.context) for _ in self.blocks]

    def forward(self, tokens: Tensor, caches: list[KeyValueCache] | None = None) -> Tensor:
        """Logits (batch, tokens, vocabulary) of the characters that follow each token.

        Args:
            tokens: int64 (batch, tokens).
            caches: of the tokens before these, which are added to them. The first call on empty
                caches takes any number of tokens, later calls one.
        """
        stream = functional.embedding(tokens, self.characters)
        for layer, block in enumerate(self.blocks):
            stream = block(stream, caches[layer] if caches else None)
        return self.operators.linear(self.norm(stream), self.characters)

    def token_losses(self, tokens: Tensor) -> Tensor:
        """Cross-entropy in nats, (batch, context), of ``tokens``, int64 (batch, context + 1)."""
        logits = self(tokens[:, :-1])
        # At least float32: the softmax of bfloat16 logits would decide the loss's second digit.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
