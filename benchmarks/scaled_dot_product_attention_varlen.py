"""Attention over a packed batch of sequences of random lengths, forward and backward.

PyTorch has no operator on packed tensors on the CPU. Its peers are a loop over the sequences, its
nested tensors (which are not causal there), and padding to the longest sequence with a mask, each
from packed tensors to packed tensors. On CUDA its ``varlen_attn`` is one in half precision.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from pkg import ops

from .harness import OURS, Case, Reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class Recipe:
    """The input of one case; the lengths are drawn evenly from a range."""

    dtype: torch.dtype
    sequences: int = 16
    shortest: int = 1
    longest: int = 1024
    heads: int = 8
    key_heads: int = 8
    size: int = 64
    causal: bool = False
    backward: bool = False

    @property
    def lengths(self) -> list[int]:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(
            self.shortest, self.longest + 1, (self.sequences,), generator=generator
        )
        lengths: list[int] = drawn.tolist()
        return lengths

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        tokens = f"{self.shortest} to {self.longest}"
        tokens = str(self.longest) if self.shortest == self.longest else tokens
        heads = str(self.heads)
        if self.key_heads != self.heads:
            heads = f"{self.heads} over {self.key_heads}"
        words = f"{dtype}, {self.sequences} of {tokens} tokens x {heads} x {self.size}"
        return f"{words}{' causal' * self.causal}{' with backward' * self.backward}"

    @property
    def padded_scores(self) -> int:
        """Where every sequence has the tokens of the longest."""
        return self.sequences * self.heads * max(self.lengths) ** 2

    @property
    def work(self) -> float:
        """In units of 1e9 operations, those on hidden keys left out."""
        scores = sum(n * (n + 1) // 2 if self.causal else n**2 for n in self.lengths)
        # The backward pass does five products where the forward pass does two.
        return 4 * self.heads * self.size * scores / 1e9 * (3.5 if self.backward else 1)


def _ours(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, causal: bool) -> Tensor:
    longest = int(offsets.diff().max())
    return ops.scaled_dot_product_attention_varlen(
        query, key, value, offsets, offsets, longest, longest, causal=causal
    )


def _looped(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, causal: bool) -> Tensor:
    outputs = []
    for begin, end in pairwise(offsets.tolist()):
        heads = (tensor[begin:end].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
        output = functional.scaled_dot_product_attention(
            *heads, is_causal=causal, enable_gqa=query.shape[1] != key.shape[1]
        )
        outputs.append(output.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def _padded(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, causal: bool) -> Tensor:
    lengths = offsets.diff()
    exists = torch.arange(int(lengths.max()), device=offsets.device) < lengths.unsqueeze(-1)
    mask = exists[:, None, None, :]
    if causal:
        length = exists.shape[1]
        mask = mask & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()

    def pad(tensor: Tensor) -> Tensor:
        padded = tensor.new_zeros(*exists.shape, *tensor.shape[1:])
        padded[exists] = tensor
        return padded.transpose(1, 2)

    heads = (pad(tensor) for tensor in (query, key, value))
    output: Tensor = functional.scaled_dot_product_attention(
        *heads, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2)[exists]


def _nested(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, causal: bool) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*prototype stage.*")
        heads = (
            torch.nested.nested_tensor_from_jagged(tensor, offsets).transpose(1, 2)
            for tensor in (query, key, value)
        )
        output = functional.scaled_dot_product_attention(*heads, is_causal=causal)
    values: Tensor = output.transpose(1, 2).values()
    return values


def _varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, causal: bool
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest = int(offsets.diff().max())
    window = (-1, 0 if causal else -1)
    result: Tensor = varlen_attn(
        query, key, value, offsets.int(), offsets.int(), longest, longest, window_size=window
    )
    return result


def _peers(recipe: Recipe, device: torch.device) -> dict[str, Attention]:
    peers: dict[str, Attention] = {OURS: _ours, "PyTorch": _looped}
    # With 4e9 scores, forward and backward, an illegal memory access ended the process (H100,
    # PyTorch 2.11) while the other peers alone were fine; whose it was is not known.
    if device.type != "cuda" or recipe.padded_scores < 1 << 31:
        peers["PyTorch padded"] = _padded
    if not recipe.causal and recipe.heads == recipe.key_heads:
        peers["PyTorch nested"] = _nested
    if device.type == "cuda" and recipe.dtype != torch.float32:
        peers["varlen_attn"] = _varlen_attn
    return peers


def _gradients(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, causal: bool
) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    output = attention(*leaves, offsets, causal)
    return torch.autograd.grad(output, leaves, torch.ones_like(output))


def _case(recipe: Recipe, device: torch.device) -> Case:
    lengths = recipe.lengths
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    heads = (recipe.heads, recipe.key_heads, recipe.key_heads)
    shapes = [(sum(lengths), count, recipe.size) for count in heads]
    inputs = [torch.randn(shape, device=device).to(recipe.dtype) for shape in shapes]

    def call(attention: Attention, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        if recipe.backward:
            return _gradients(attention, *tensors, offsets, recipe.causal)
        return attention(*tensors, offsets, recipe.causal)

    return Case(
        recipe.name,
        {
            peer: partial(call, attention, *inputs)
            for peer, attention in _peers(recipe, device).items()
        },
        Reference(partial(call, _looped), *inputs),
        recipe.work,
        "GFLOP/s",
        terms=max(lengths) + recipe.size,
        limit=str(recipe.dtype).removeprefix("torch."),
        kind="backward" if recipe.backward else "",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Cases of every dtype."""
    for dtype in DTYPES:
        plain = Recipe(dtype)
        yield _case(plain, device)
        yield _case(replace(plain, causal=True), device)
        yield _case(replace(plain, causal=True, backward=True), device)


def full_cases(device: torch.device) -> Iterator[Case]:
    """One long sequence, many short ones, grouped heads."""
    for dtype in DTYPES:
        for recipe in (
            Recipe(dtype, sequences=1, shortest=4096, longest=4096, causal=True),
            Recipe(dtype, sequences=512, longest=32, causal=True),
            Recipe(dtype, heads=32, key_heads=8, causal=True),
        ):
            for backward in (False, True):
                yield _case(replace(recipe, backward=backward), device)


def gpu_cases(device: torch.device) -> Iterator[Case]:
    """Longer sequences of wider heads."""
    plain = Recipe(torch.bfloat16, longest=4096, heads=16, key_heads=16, size=128, causal=True)
    for backward in (False, True):
        yield _case(replace(plain, backward=backward), device)
