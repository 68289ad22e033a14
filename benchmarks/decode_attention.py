"""Attention of the newest queries to a cache of keys and values, beside PyTorch's attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from pkg import ops

from .harness import OURS, Case, Reference, copies_beyond_caches, in_turn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAGE = 16


@dataclass(frozen=True)
class Cache:
    """Sequences whose caches have room for as many keys as the longest has.

    Attributes:
        query: (B, heads, L, E)
        key: (B, key heads, S, E)
        value: (B, key heads, S, E)
        filled: How many keys of each sequence there are.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    filled: tuple[int, ...]

    def copy(self) -> Cache:
        return Cache(self.query, self.key.clone(), self.value.clone(), self.filled)

    @property
    def lengths(self) -> Tensor:
        return torch.tensor(self.filled, device=self.key.device, dtype=torch.int32)

    @property
    def gigabytes(self) -> float:
        """Of keys and values that are not unused."""
        element = self.key.element_size() * (self.key.shape[-1] + self.value.shape[-1])
        return sum(self.filled) * self.key.shape[1] * element / 1e9

    @property
    def mask(self) -> Tensor | None:
        """Which keys each query sees, as PyTorch's attention has to be told; None for all."""
        rows, keys = self.query.shape[2], self.key.shape[2]
        if rows == 1 and min(self.filled) == keys:
            return None
        rows_behind = torch.arange(rows - 1, -1, -1, device=self.key.device)
        ends = self.lengths[:, None] - rows_behind
        seen = torch.arange(keys, device=self.key.device) < ends[..., None]
        return seen[:, None]


def _cache(
    lengths: list[int],
    heads: tuple[int, int],
    rows: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Cache:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    return Cache(
        random(len(lengths), heads[0], rows, size),
        random(len(lengths), heads[1], max(lengths), size),
        random(len(lengths), heads[1], max(lengths), size),
        tuple(lengths),
    )


def _ours(cache: Cache) -> Callable[[], Tensor]:
    return partial(ops.decode_attention, cache.query, cache.key, cache.value, cache.lengths)


def _ours_paged(cache: Cache) -> Callable[[], Tensor]:
    batch, _, keys, _ = cache.key.shape
    table = torch.randperm(batch * keys // PAGE, device=cache.key.device)

    def pages(tensor: Tensor) -> Tensor:
        cut = tensor.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1)
        return torch.empty_like(cut).index_copy_(0, table, cut)

    return partial(
        ops.decode_attention,
        cache.query,
        pages(cache.key),
        pages(cache.value),
        cache.lengths,
        table.view(batch, -1).int(),
    )


def _pytorch(cache: Cache) -> Callable[[], Tensor]:
    return partial(
        functional.scaled_dot_product_attention,
        cache.query,
        cache.key,
        cache.value,
        cache.mask,
        enable_gqa=cache.query.shape[1] != cache.key.shape[1],
    )


def _case(name: str, cache: Cache, paged: bool = False) -> Case:
    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _pytorch(Cache(query, key, value, cache.filled))()

    used = round(cache.gigabytes * 1e9)  # not what is beyond the filled part
    copies = copies_beyond_caches(cache.key, cache.value, used=used)
    caches = [cache, *(cache.copy() for _ in range(copies - 1))]
    makers = {OURS: _ours_paged if paged else _ours, "PyTorch": _pytorch}
    peers = {
        peer: in_turn(lambda call: call(), [(make(each),) for each in caches])
        for peer, make in makers.items()
    }
    dtype = str(cache.query.dtype).removeprefix("torch.")
    return Case(
        f"{dtype}, {name}",
        peers,
        Reference(plain, cache.query, cache.key, cache.value),
        cache.gigabytes,
        "GB/s",
        terms=max(cache.filled) + cache.query.shape[-1],
        limit="memory",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """One query of many heads, groups that share a key head, several queries, pages."""
    for dtype in DTYPES:
        cache = _cache([4096] * 8, (8, 8), 1, 64, dtype, device)
        yield _case("8x8, one query, 4096 keys", cache)
    for dtype in DTYPES:
        lengths = [4096 - 512 * b for b in range(8)]
        cache = _cache(lengths, (32, 8), 1, 128, dtype, device)
        yield _case("32 heads on 8, 512 to 4096 keys x 128", cache)
    cache = _cache([4096] * 8, (8, 8), 4, 64, torch.bfloat16, device)
    yield _case("8x8, 4 queries, 4096 keys", cache)
    cache = _cache([4096] * 8, (8, 8), 1, 64, torch.bfloat16, device)
    yield _case(f"8x8, one query, 4096 keys, pages of {PAGE}", cache, paged=True)
    cache = _cache([16384], (1, 1), 1, 128, torch.bfloat16, device)
    yield _case("one head, one query, 16384 keys x 128", cache)


def gpu_cases(device: torch.device) -> Iterator[Case]:
    """Grouped heads of Llama 8B: a batch, and one long sequence."""
    for dtype in DTYPES:
        cache = _cache([8192] * 16, (32, 8), 1, 128, dtype, device)
        yield _case("16x32 heads on 8, one query, 8192 keys x 128", cache)
    cache = _cache([65536], (32, 8), 1, 128, torch.bfloat16, device)
    yield _case("32 heads on 8, one query, 65536 keys x 128", cache)
    cache = _cache([8192] * 16, (32, 8), 4, 128, torch.bfloat16, device)
    yield _case("16x32 heads on 8, 4 queries, 8192 keys x 128", cache)
    cache = _cache([8192] * 16, (32, 8), 1, 128, torch.bfloat16, device)
    yield _case(f"16x32 heads on 8, 8192 keys x 128, pages of {PAGE}", cache, paged=True)
