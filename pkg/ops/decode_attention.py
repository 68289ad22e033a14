"""``decode_attention``: a few queries against a cache of keys and values, as in generating text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._attention import new_output
from ._call import operator
from ._inference import register_inference_only
from ._registration import (
    check_one_device,
    register_fake,
    register_lower_precision_autocast,
)
from ._sharding import Description, register_sharding
from ._vmap import each_slice, vmap_dim_first

TABLE = (
    "attention of the newest queries of each sequence to its cache of keys and values, "
    "contiguous or in pages, for generating text",
    "floating",
    "no",
)
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_lengths: Tensor,
    block_table: Tensor | None = None,
    scale: float | None = None,
    window_left: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Attention of the newest queries of each sequence to all that its cache holds.

    Query i of the L of a sequence sees the keys 0 to ``cache_lengths[b] - L + i``: the cache
    already holds the queries' own keys, and the last query sees all of them. What lies in the
    cache beyond a sequence's length is never read. The keys are split among the threads
    (Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html), so one sequence keeps
    all of them busy. Any strides will do, those with a contiguous last dimension are read in place:
    flash-attn's (batch, keys, heads, size) is ``cache.transpose(1, 2)``. Half precision is
    accumulated in float32. For inference alone.

    Args:
        query: Shape (B, heads, L, E); float16, bfloat16, float32 or float64. L is meant to be 1 to
            8, and may be any; from about 16 on :func:`pkg.ops.scaled_dot_product_attention` is
            faster.
        key_cache: Shape (B or more, key heads, S, E), of the same dtype and device. The query's
            heads are a multiple of the key heads, each of which serves as many neighbouring query
            heads. With ``block_table``: (pages, key heads, page size, E), a page of any size.
        value_cache: The same with a last dimension Ev of its own.
        cache_lengths: Shape (B,), int32 or int64: how many keys of each sequence there are, those
            of the queries included. Fewer than L leave the first queries without any key.
        block_table: Shape (B, pages of a sequence), int32 or int64: the pages in which the keys of
            a sequence lie. Entries beyond what the length needs are never read.
        scale: Factor of the scores; ``1 / sqrt(E)`` by default.
        window_left: How many keys before its own a query sees; -1: all. Those before are not
            read, nor are their entries in ``block_table``.
        softcap: Scores, scaled, become ``softcap * tanh(score / softcap)``; 0: they stay as they
            are.
        alibi_slopes: Shape (heads,) or (B, heads), float32 or ``query``'s dtype: to the score of a
            key that lies n before the query's own ``-slope * n`` is added, behind the cap.

    Returns:
        Shape (B, heads, L, Ev). A query without any key gets zeros. Where ``query`` is a
        transposed view of (B, L, heads, E) the result is one too, and contiguous otherwise.

    Raises:
        RuntimeError: Shapes do not fit, dtypes or devices differ or are not supported, a gradient
            would have to be recorded, or, on the CPU, a length or the number of a page is out of
            range. On CUDA, where looking at them would wait for the device, a length is taken to
            be the nearest possible, and keys on a page that does not exist take no part.

    Example:
        >>> keys = torch.zeros(1, 1, 4, 2)
        >>> values = torch.tensor([[1.0], [3.0], [5.0], [float("nan")]]).view(1, 1, 4, 1)
        >>> decode_attention(torch.ones(1, 1, 2, 2), keys, values, torch.tensor([3])).view(2)
        tensor([2., 3.])
        >>> pages = values.view(2, 1, 2, 1)
        >>> table = torch.tensor([[1, 0]])
        >>> decode_attention(
        ...     torch.ones(1, 1, 1, 2), keys.view(2, 1, 2, 2), pages, torch.tensor([1]), table
        ... ).view(1)
        tensor([5.])
    """
    return torch.ops.pkg.decode_attention.default(
        *(query, key_cache, value_cache, cache_lengths, block_table, scale),
        *(window_left, softcap, alibi_slopes),
    )


@register_fake("decode_attention")
def _fake(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_lengths: Tensor,
    block_table: Tensor | None = None,
    scale: float | None = None,
    window_left: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    tensors = (query, key_cache, value_cache, cache_lengths, block_table, alibi_slopes)
    check_one_device("decode_attention", *(t for t in tensors if t is not None))
    torch._check(
        query.dim() == key_cache.dim() == value_cache.dim() == 4,
        lambda: "decode_attention: query and caches must have four dimensions",
    )
    torch._check(
        query.shape[3] == key_cache.shape[3],
        lambda: "decode_attention: query and key_cache differ in their last dimension",
    )
    return new_output(query, query.shape[:2], value_cache.shape[3])


def _vmap(
    info: Any,
    in_dims: Sequence[int | None],
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_lengths: Tensor,
    block_table: Tensor | None = None,
    scale: float | None = None,
    window_left: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, int]:
    operator = torch.ops.pkg.decode_attention.default
    dims = (*in_dims, *(None,) * (9 - len(in_dims)))
    of_query, of_keys, of_values, of_lengths, of_table, *_, of_slopes = dims
    options = (scale, window_left, softcap, alibi_slopes)
    arguments = (query, key_cache, value_cache, cache_lengths, block_table, *options)
    if block_table is None or of_keys is not None or of_values is not None:
        return each_slice(operator, info, in_dims, *arguments)
    # Pages that all share: the batches are one larger batch.
    size = info.batch_size
    query = vmap_dim_first(query, of_query, size)
    batches = query.shape[:2]
    cache_lengths, block_table = (
        vmap_dim_first(tensor, dim, size).flatten(0, 1)
        for tensor, dim in ((cache_lengths, of_lengths), (block_table, of_table))
    )
    if alibi_slopes is not None:
        if alibi_slopes.dim() - (of_slopes is not None) == 2:
            alibi_slopes = vmap_dim_first(alibi_slopes, of_slopes, size).flatten(0, 1)
        elif of_slopes is not None:  # of the heads alone
            alibi_slopes = alibi_slopes.movedim(of_slopes, 0).unsqueeze(1)
            alibi_slopes = alibi_slopes.expand(*batches, -1).flatten(0, 1)
    options = (scale, window_left, softcap, alibi_slopes)
    query = query.flatten(0, 1)
    output = operator(query, key_cache, value_cache, cache_lengths, block_table, *options)
    return output.unflatten(0, batches), 0


def _sharding(
    query: Description,
    key_cache: Description,
    block_table: Description | None,
    alibi_slopes: Description | None,
    **_: Any,
) -> str:
    # A cache may hold more sequences than there are queries; those are not split then.
    is_split = block_table is not None or key_cache.shape[0] == query.shape[0]
    batch = "b" if is_split else "_"
    cached = "_" if block_table is not None else batch
    slopes = "h" if alibi_slopes and len(alibi_slopes.shape) == 1 else f"{batch} h"
    return (
        f"query {batch} h _ _, key_cache {cached} ?h _ _, value_cache {cached} ?h _ _, "
        f"cache_lengths {batch}, block_table {batch} _, alibi_slopes {slopes} -> {batch} h _ _"
    )


register_inference_only(
    "decode_attention", "call pkg.ops.scaled_dot_product_attention where one is needed"
)
torch.library.register_vmap("pkg::decode_attention", _vmap)
register_lower_precision_autocast("decode_attention", keeps=("alibi_slopes",))
register_sharding("decode_attention", _sharding)
