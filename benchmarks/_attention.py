"""What the benchmark of attention is made of: inputs of every kind, and the cases on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pkg import ops

from .harness import OURS, Case, ForeignCall, Reference, copies_beyond_caches, each_in_turn

Attention = Callable[..., Tensor]
FUNCTIONS: dict[str, Attention] = {
    OURS: ops.scaled_dot_product_attention,
    "PyTorch": functional.scaled_dot_product_attention,
}
DROPOUT = 0.1
WINDOW = 128
# The exact result of more scores than this is that of one head: the others take seconds.
MOST_SCORES = 1 << 24

# (rows, columns, heads, device) to a mask.
Mask = Callable[[int, int, int, torch.device], Tensor]


def _boolean(shape: Callable[[int, int, int], tuple[int, ...]]) -> Mask:
    def make(rows: int, columns: int, heads: int, device: torch.device) -> Tensor:
        return torch.rand(shape(rows, columns, heads), device=device) < 0.8

    return make


def _float(rows: int, columns: int, heads: int, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, device=device)


def _alibi(rows: int, columns: int, heads: int, device: torch.device) -> Tensor:
    """Of Press and others, arXiv 2108.12409, of both sides: a slope for each head."""
    slopes = 2.0 ** (torch.arange(1, heads + 1, device=device) * (-8 / heads))
    return -slopes[:, None, None] * _distance(rows, columns, device).abs()


def _window(rows: int, columns: int, heads: int, device: torch.device) -> Tensor:
    """A row sees its own key and those before it, as many as the window has in all."""
    distance = _distance(rows, columns, device)
    return (distance >= 0) & (distance < WINDOW)


def _distance(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.arange(rows, device=device)[:, None] - torch.arange(columns, device=device)


MASKS: dict[str, Mask] = {
    "boolean mask": _boolean(lambda rows, columns, heads: (rows, columns)),
    "boolean mask of every head": _boolean(lambda rows, columns, heads: (1, heads, rows, columns)),
    "boolean mask for all heads": _boolean(lambda rows, columns, heads: (1, 1, rows, columns)),
    "boolean mask of the keys": _boolean(lambda rows, columns, heads: (1, 1, 1, columns)),
    "float mask": _float,
    "learnable float mask": _float,
    "ALiBi": _alibi,
    f"window of {WINDOW}": _window,
}


@dataclass(frozen=True)
class Recipe:
    """A call of attention, by its sizes and kinds.

    Attributes:
        dtype: of all tensors.
        rows: queries.
        columns: keys; as many as queries where it is None.
        batch: matrices of each head.
        heads: of the query.
        key_heads: of key and value, each for as many heads of the query; all where it is None.
        size: of a head.
        value_size: of a head of the value, where that is another.
        mask: one of ``MASKS``.
        causal: a row sees the keys up to its own.
        dropout: with it.
        backward: forward and backward.
        heads_inside: memory is (batch, rows, heads, size), as linear layers leave it.
    """

    dtype: torch.dtype
    rows: int = 1024
    columns: int | None = None
    batch: int = 1
    heads: int = 8
    key_heads: int | None = None
    size: int = 64
    value_size: int | None = None
    mask: str | None = None
    causal: bool = False
    dropout: bool = False
    backward: bool = False
    heads_inside: bool = False

    @property
    def keys(self) -> int:
        return self.columns or self.rows

    @property
    def decodes(self) -> bool:
        """One query against a cache, which is to be read from memory."""
        return self.rows == 1

    @property
    def name(self) -> str:
        """The dtype, the sizes, and what is not plain."""
        heads = f"{self.heads}:{self.key_heads}" if self.key_heads else f"{self.heads}"
        sizes = f"{self.size}:{self.value_size}" if self.value_size else f"{self.size}"
        shape = f"{self.batch}x{heads}x{self.rows}x{sizes}"
        words = [shape, " causal" * self.causal, " with backward" * self.backward]
        if self.decodes:
            words = [f"{self.batch}x{heads}x{sizes}, one query, {self.keys} keys"]
        elif self.columns:
            words.append(f", {self.columns} keys")
        words += [f", {self.mask}"] if self.mask else []
        words += [", dropout"] * self.dropout + [", heads inside"] * self.heads_inside
        return f"{_name(self.dtype)}, {''.join(words)}"

    @property
    def plain(self) -> str | None:
        """The name of the case without anything special, which this one is to be as fast as."""
        rows = self.rows if self.mask == f"window of {WINDOW}" else Recipe.rows
        plain = Recipe(self.dtype, rows, backward=self.backward)
        like_others = self.size in (64, 128) and not self.key_heads and not self.value_size
        special = self.mask or self.dropout or self.heads_inside or self.columns or not like_others
        return plain.name if special and not self.decodes else None

    @property
    def kind(self) -> str:
        """What decides whether a peer takes a slow path."""
        masked = self.mask or self.dropout or self.key_heads or self.value_size
        return f"{self.backward}, {self.decodes}, {masked}"

    @property
    def scores(self) -> float:
        """How many a head has that count."""
        if self.mask == f"window of {WINDOW}":
            return WINDOW * self.rows - WINDOW * (WINDOW - 1) / 2
        return self.rows * self.keys / (2 if self.causal else 1)

    @property
    def work(self) -> float:
        """Operations: two products forward, five backward. Decoding: bytes of keys and values."""
        sizes = self.size + (self.value_size or self.size)
        if self.decodes:
            elements = self.batch * (self.key_heads or self.heads) * self.keys * sizes
            return elements * self.dtype.itemsize
        products = 2 * self.batch * self.heads * self.scores * sizes
        return products * (3.5 if self.backward else 1)

    def case(self, device: torch.device) -> Case:
        """This call by ours and by PyTorch."""
        given = inputs(self, device)
        copies = copies_beyond_caches(*given.tensors[1:]) if self.decodes else 1
        groups = [given, *(given.map(torch.clone) for _ in range(copies - 1))]
        exact_inputs, part = given, None
        scores = self.batch * self.heads * self.rows * self.keys
        if scores > MOST_SCORES and self.plain is None and not self.decodes:
            exact_inputs, part = given.last_head(), _last_head
        reference: Attention = functional.scaled_dot_product_attention
        if self.dropout:
            reference = _with_the_next_dropout
        return Case(
            self.name,
            {
                peer: each_in_turn([group.call(function) for group in groups])
                for peer, function in FUNCTIONS.items()
            },
            exact_inputs.reference(reference),
            self.work / 1e9,
            "GB/s" if self.decodes else "GFLOP/s",
            terms=self.keys + self.size,
            limit="memory" if self.decodes else _name(self.dtype),
            zentorch=_zentorch(self, given, copies),
            part=part,
            beside=self.plain,
            kind=self.kind,
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Inputs:
    """The tensors of a call, and the call.

    Attributes:
        tensors: query, key, value.
        mask: or None.
        grad: of the output, where gradients are wanted.
        learns_mask: its gradient is wanted too.
        options: of the call.
    """

    tensors: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None = None
    grad: Tensor | None = None
    learns_mask: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """With another form of each floating tensor."""

        def new(tensor: Tensor | None) -> Any:
            floating = tensor is not None and tensor.is_floating_point()
            return function(tensor) if floating else tensor

        query, key, value = map(new, self.tensors)
        mask, grad = new(self.mask), new(self.grad)
        return Inputs((query, key, value), mask, grad, self.learns_mask, self.options)

    def last_head(self) -> Inputs:
        """One head alone, of inputs that have nothing special."""
        query, key, value = map(_last_head, self.tensors)
        grad = None if self.grad is None else _last_head(self.grad)
        return Inputs((query, key, value), None, grad, False, self.options)

    def reference(self, attention: Attention) -> Reference:
        """What this call gives by another way to attention, in any dtype."""

        def compute(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor | None) -> Any:
            tensors = (query, key, value)
            return Inputs(tensors, *rest, self.learns_mask, self.options).call(attention)()

        return Reference(compute, *self.tensors, self.mask, self.grad)

    def call(self, attention: Attention) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        """A function that computes the output, or the gradients."""
        options = {**self.options, "attn_mask": self.mask}
        if self.grad is None:
            return partial(attention, *self.tensors, **options)
        leaves = [tensor.detach().requires_grad_() for tensor in self.tensors]
        wanted = list(leaves)
        if self.learns_mask and self.mask is not None:
            options["attn_mask"] = self.mask.detach().requires_grad_()
            wanted.append(options["attn_mask"])

        def train() -> tuple[Tensor, ...]:
            return torch.autograd.grad(attention(*leaves, **options), wanted, self.grad)

        return train


def _last_head(tensor: Tensor) -> Tensor:
    return tensor[:, -1:]


def inputs(recipe: Recipe, device: torch.device) -> Inputs:
    """Random tensors for a call."""

    def random(heads: int, length: int, size: int) -> Tensor:
        shape = (recipe.batch, heads, length, size)
        if recipe.heads_inside:
            shape = (recipe.batch, length, heads, size)
        tensor = torch.randn(shape, device=device).to(recipe.dtype)
        return tensor.transpose(1, 2) if recipe.heads_inside else tensor

    key_heads, value_size = recipe.key_heads or recipe.heads, recipe.value_size or recipe.size
    mask = None
    if recipe.mask:
        mask = MASKS[recipe.mask](recipe.rows, recipe.keys, recipe.heads, device)
        mask = mask if mask.dtype == torch.bool else mask.to(recipe.dtype)
    options: dict[str, Any] = {"is_causal": True} if recipe.causal else {}
    options |= {"dropout_p": DROPOUT} if recipe.dropout else {}
    options |= {"enable_gqa": True} if recipe.key_heads else {}
    return Inputs(
        (
            random(recipe.heads, recipe.rows, recipe.size),
            random(key_heads, recipe.keys, recipe.size),
            random(key_heads, recipe.keys, value_size),
        ),
        mask,
        random(recipe.heads, recipe.rows, value_size) if recipe.backward else None,
        recipe.mask == "learnable float mask",
        options,
    )


def _with_the_next_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Plain attention that drops what the next call of ours will drop, which is left to draw."""
    device = query.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed = torch.randint(torch.iinfo(torch.int64).max, (1,), device=device)
    lead, rows, columns = query.shape[:-2], query.shape[-2], key.shape[-2]
    kept = torch.ops.pkg.attention_dropout_mask(seed, lead.numel(), rows, columns, dropout_p)
    weights = torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, -1)
    weights = weights * kept.reshape(*lead, rows, columns) / (1 - dropout_p)
    return weights.to(value.dtype) @ value


def _zentorch(recipe: Recipe, given: Inputs, copies: int) -> ForeignCall | None:
    """It has no gradients, no boolean masks, and other random numbers."""
    mask = given.mask
    if recipe.backward or recipe.dropout or (mask is not None and mask.dtype == torch.bool):
        return None
    keywords: dict[str, Any] = {} if mask is None else {"attn_mask": mask}
    return ForeignCall(
        "zentorch_sdpa", given.tensors, {**keywords, "is_causal": recipe.causal}, copies
    )
