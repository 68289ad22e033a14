"""The cache of keys and values of ``flash_attn_with_kvcache``: where things lie, and both ways."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops._arguments import INDICES, bounds, check_indices, check_instance, check_range
from ..ops.decode_attention import decode_attention

# From so many queries of a sequence on, packing its cache and multiplying blocks is faster.
_MANY_QUERIES = 16


class KeyValueCache:
    """A cache of keys and values, in pages: a contiguous one has a page for each sequence."""

    def __init__(
        self,
        name: str,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        block_table: Tensor | None,
        rows: Tensor | None,
    ) -> None:
        batch = len(q)
        self.name, self.keys, self.values, self.batch = name, keys, values, batch
        self.page_size = keys.shape[1]
        self.is_paged = block_table is not None
        if keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
            raise RuntimeError(
                f"{name}: k_cache is {keys.dtype} of shape {list(keys.shape)} and v_cache "
                f"{values.dtype} of {list(values.shape)}; but for the last dimension they must be "
                "equal"
            )
        # None where sequence b has page b: the first rows of the cache.
        self.table = block_table
        if rows is not None:
            self.table = rows[:, None]
        elif block_table is not None:
            is_fit = block_table.dim() == 2 and len(block_table) == batch
            if not is_fit or block_table.dtype not in INDICES:
                raise RuntimeError(
                    f"{name}: block_table is {block_table.dtype} of shape "
                    f"{list(block_table.shape)}; it must be int32 or int64 and (batch, pages of a "
                    f"sequence) with a batch of {batch}, that of q"
                )
        elif len(keys) < batch:
            raise RuntimeError(
                f"{name}: k_cache has {len(keys)} rows and q a batch of {batch}; without "
                "cache_batch_idx it must have at least as many"
            )
        self.room = self.page_size * (1 if self.table is None else self.table.shape[1])
        self._check_query(q)

    def _check_query(self, q: Tensor) -> None:
        """Refuses queries that cannot attend to this cache, before anything is written to it."""
        heads, size = self.keys.shape[2:]
        is_alike = (q.dtype, q.device, q.shape[3]) == (self.keys.dtype, self.keys.device, size)
        if not is_alike or q.shape[2] % max(heads, 1):
            raise RuntimeError(
                f"{self.name}: q is {q.dtype} of shape {list(q.shape)} on {q.device}; it must be "
                f"{self.keys.dtype} on {self.keys.device}, with a multiple of {heads} heads of "
                f"size {size}, as k_cache has them"
            )

    def lengths(self, given: int | Tensor | None, appends: bool) -> Tensor:
        """How many places of each sequence are filled, int64 of shape (B,)."""
        device = self.keys.device
        if given is None:
            if appends:
                raise RuntimeError(
                    f"{self.name}: k is given without cache_seqlens, which says where to write it"
                )
            given = self.room
        must_be = "a whole number, or a tensor of one for each sequence"
        check_instance(self.name, "cache_seqlens", given, (int, torch.SymInt, Tensor), must_be)
        if not isinstance(given, Tensor):
            return torch.full((self.batch,), given, dtype=torch.int64, device=device)
        check_indices(self.name, "cache_seqlens", given, self.batch, "the batch of q")
        return given.long()

    def places_of_new(self, lengths: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where the new keys go: the place in the sequence, its page and the place on that.

        Each is of shape (B, L_new). On the CPU all exist.
        """
        for argument, tensor, cache in (("k", k, self.keys), ("v", v, self.values)):
            expected = (self.batch, k.shape[1], *cache.shape[2:])
            if tensor.shape != expected or tensor.dtype != cache.dtype:
                raise RuntimeError(
                    f"{self.name}: {argument} is {tensor.dtype} of shape {list(tensor.shape)}; it "
                    f"must be {cache.dtype} of shape {list(expected)}, as q, k and the cache say"
                )
            if any(n > 1 and s == 0 for n, s in zip(cache.shape, cache.stride(), strict=True)):
                raise RuntimeError(
                    f"{self.name}: {argument}_cache is of shape {list(cache.shape)} and strides "
                    f"{list(cache.stride())}, several elements in one place of memory; it cannot "
                    "be written to so: clone it"
                )
        places = lengths[:, None] + torch.arange(k.shape[1], device=lengths.device)
        is_on_cpu = places.device.type == "cpu"
        if is_on_cpu:
            found = f"{self.name}: cache_seqlens and k want places of a sequence"
            if not self.room and places.numel():
                raise RuntimeError(f"{found}, for which the cache has no room")
            check_range(places, 0, self.room - 1, found)
        sequences = torch.arange(self.batch, device=places.device)[:, None].expand_as(places)
        if self.table is None or not self.room:
            return places, sequences, places
        entries = (places // self.page_size).clamp(0, self.table.shape[1] - 1)
        pages = self.table.long()[sequences, entries]
        if is_on_cpu:
            argument = "block_table" if self.is_paged else "cache_batch_idx"
            found = (
                f"{self.name}: {argument} puts new keys on {'pages' if self.is_paged else 'rows'}"
            )
            check_range(pages, 0, len(self.keys) - 1, found)
        return places, pages, places % self.page_size

    def write(self, where: tuple[Tensor, Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        """Writes new keys and values, in place, where :meth:`places_of_new` says.

        Those on pages that do not exist are left out.
        """
        places, pages, on_page = where
        index = (pages, on_page)
        if places.device.type == "cpu":
            self.keys.index_put_(index, k)
            self.values.index_put_(index, v)
            return
        exists = (places >= 0) & (places < self.room) & (pages >= 0) & (pages < len(self.keys))
        write_where(exists, index, (self.keys, k), (self.values, v))

    def left_out(self, leftpad: Tensor) -> Tensor:
        """How many of the first places are not the sequence's, int64 of shape (B,)."""
        if leftpad.device.type == "cpu":
            found = f"{self.name}: cache_leftpad leaves out numbers of places"
            check_range(leftpad, 0, self.room, found)
        return leftpad.long().clamp(min=0)

    def leave_out(self, leftpad: Tensor, lengths: Tensor) -> Tensor:
        """From here on what :meth:`left_out` says is; how long the sequence is without it.

        A page is one key then.
        """
        if lengths.device.type == "cpu":
            found = f"{self.name}: cache_seqlens has numbers of places"
            check_range(lengths, 0, self.room, found)
        lengths = lengths.clamp(0, self.room)
        rows = torch.arange(self.batch, device=lengths.device)[:, None]
        if self.table is not None:
            rows = self.table.long()
        places = leftpad[:, None] + torch.arange(self.room, device=lengths.device)
        # What lies beyond is never read, since the lengths end before.
        self.table = rows * self.page_size + places.clamp(max=self.room - 1)
        self.keys = self.keys.reshape(-1, 1, *self.keys.shape[2:])
        self.values = self.values.reshape(-1, 1, *self.values.shape[2:])
        self.page_size = 1
        return (lengths - leftpad).clamp(min=0)


def write_where(exists: Tensor, index: Sequence[Tensor], *writes: tuple[Tensor, Tensor]) -> None:
    """Writes new elements to caches where they exist, without waiting for the device.

    What is left out repeats the first write that is not, or what is there if all are left out.

    Args:
        exists: Shape (B, L_new), bool.
        index: Pages and places on them, each of shape (B, L_new).
        writes: Caches, of shape (pages, page size, Hk, E), and what is new of each, of shape
            (B, L_new, Hk, E).
    """
    if not exists.numel():
        return
    exists = exists.flatten()
    at = tuple(each.flatten().where(exists, 0) for each in index)
    source = torch.arange(len(exists), device=exists.device)
    source = source.where(exists, exists.int().argmax())
    to = tuple(each[source] for each in at)
    for cache, new in writes:
        if cache.numel():
            there = torch.where(exists[:, None, None], new.flatten(0, 1), cache[at])
            cache.index_put_(to, there[source])


def decode(
    q: Tensor,
    cache: KeyValueCache,
    lengths: Tensor,
    scale: float | None,
    left: int,
    right: int,
    softcap: float,
    slopes: Tensor | None,
) -> Tensor | None:
    """The way that reads the cache where it lies, or None where that one cannot be gone."""
    queries = q.shape[1]
    if queries >= _MANY_QUERIES:
        return None
    # The last query has no keys behind it.
    is_causal = right == 0 or queries == 1
    if not is_causal and (left >= 0 or right >= 0 or slopes is not None):
        return None
    query = q.transpose(1, 2)
    if not is_causal:
        # Queries that all see the same are as many heads.
        query = query.reshape(len(q), q.shape[2] * queries, 1, q.shape[-1])
    keys, values = cache.keys.transpose(1, 2), cache.values.transpose(1, 2)
    output = decode_attention(
        query,
        keys,
        values,
        lengths,
        cache.table,
        scale,
        window_left=left,
        softcap=softcap,
        alibi_slopes=slopes,
    )
    if not is_causal:
        output = output.reshape(len(q), q.shape[2], queries, values.shape[-1])
    return output.transpose(1, 2)


def attend_to_copy(
    name: str,
    q: Tensor,
    cache: KeyValueCache,
    lengths: Tensor,
    scale: float | None,
    left: int,
    right: int,
    softcap: float,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The way that packs the keys of all sequences: output and logarithms of the sums."""
    batch, queries = q.shape[:2]
    table = cache.table
    if table is None:
        table = torch.arange(batch, device=q.device)[:, None]
    keys, values = out_of_pages(name, cache.keys, cache.values, lengths, table)
    zero = lengths.new_zeros(1)
    starts = torch.cat((zero, lengths.cumsum(0)))
    rows = torch.arange(batch + 1, device=q.device) * queries
    output, log_sum_exp, _ = torch.ops.pkg.scaled_dot_product_attention_varlen_forward.default(
        *(q.flatten(0, 1), keys, values, rows, starts, None),
        *(queries, int(lengths.max()) if batch else 0, 0.0, scale, False, False),
        *(slopes, left, right, softcap),
    )
    log_sum_exp = log_sum_exp.unflatten(1, (batch, queries)).transpose(0, 1)
    return output.unflatten(0, (batch, queries)), with_infinity(log_sum_exp)


def out_of_pages(
    name: str, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values of all sequences, one behind the other, copied out of their pages.

    Args:
        name: What was called, for errors.
        k: Shape (pages, page size, Hk, E).
        v: Shape (pages, page size, Hk, Ev).
        lengths: Shape (B,), int32 or int64: how many keys each sequence has.
        table: Shape (B, pages of a sequence), int32 or int64; entries that the length does not need
            are not read.

    Returns:
        Shapes (total, Hk, E) and (total, Hk, Ev).

    Raises:
        RuntimeError: Shapes do not fit, or a length or a page is out of range. Looking at them
            waits for the device, as the size of the result does.
    """
    lengths, page_size = lengths.long(), k.shape[1]
    _check_pages(name, k, v, lengths, table)
    sequences = torch.repeat_interleave(
        torch.arange(len(lengths), device=k.device), lengths.to(k.device)
    )
    first = (lengths.cumsum(0) - lengths).to(k.device)
    places = torch.arange(len(sequences), device=k.device) - first[sequences]
    pages = table.long()[sequences, places // max(page_size, 1)]
    index = pages * page_size + places % max(page_size, 1)
    return k.flatten(0, 1)[index], v.flatten(0, 1)[index]


def _check_pages(name: str, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor) -> None:
    if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
        raise RuntimeError(
            f"{name}: keys are of shape {list(k.shape)} and values of {list(v.shape)}; with "
            "block_table they must be (pages, page size, heads, head size), and differ in the last "
            "alone"
        )
    if table.dim() != 2 or len(table) != len(lengths):
        raise RuntimeError(
            f"{name}: block_table is of shape {list(table.shape)}; it must be (sequences, pages of "
            f"a sequence), of {len(lengths)} sequences"
        )
    shortest, longest = bounds(lengths) if len(lengths) else (0, 0)
    if shortest < 0 or longest > k.shape[1] * table.shape[1]:
        raise RuntimeError(
            f"{name}: sequences have {shortest} to {longest} keys; none can have fewer than 0, and "
            f"{table.shape[1]} pages of {k.shape[1]} hold no more than their product"
        )
    if longest > 0:
        lengths = lengths.to(table.device)
        is_used = torch.arange(table.shape[1], device=table.device) * k.shape[1] < lengths[:, None]
        found = f"{name}: block_table has pages in use"
        check_range(table.where(is_used, 0), 0, len(k) - 1, found)


def with_infinity(log_sum_exp: Tensor) -> Tensor:
    """Infinite where there are no keys, and in float32: what flash-attn gives."""
    return log_sum_exp.masked_fill(log_sum_exp == -math.inf, math.inf)
