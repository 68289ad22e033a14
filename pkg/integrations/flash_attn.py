"""The functions of flash-attn 2.8, on every device that the operators run on.

Names, order of arguments, layouts and meanings are those of the package flash-attn
(https://github.com/Dao-AILab/flash-attention): tensors are (batch, tokens, heads, size), causality
and windows are aligned to the last key, key heads are shared by neighbouring query heads. So code
that was written for it runs and trains on a CPU by another import::

    from pkg.integrations.flash_attn import flash_attn_func

Beyond it, all floating dtypes and every head size are taken, values may have a size of their own,
and results are deterministic whatever ``deterministic`` is.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from ..ops._arguments import check_indices, check_instance
from ..ops._attention import drawn_seed
from ..ops._registration import records_gradients
from ..ops.scaled_dot_product_attention import scaled_dot_product_attention
from ..ops.scaled_dot_product_attention_varlen import scaled_dot_product_attention_varlen
from ._key_value_cache import (
    KeyValueCache,
    attend_to_copy,
    decode,
    out_of_pages,
    with_infinity,
)
from ._rotary import Rotary, apply_rotary_emb

__all__ = [
    "apply_rotary_emb",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """Attention of sequences of one length, by :func:`pkg.ops.scaled_dot_product_attention`.

    Args:
        q: Shape (B, L, H, E); float16, bfloat16, float32 or float64, any strides.
        k: Shape (B, S, Hk, E), of the same dtype and device; H is a multiple of Hk.
        v: Shape (B, S, Hk, Ev), likewise.
        dropout_p: Probability with which a weight is dropped; 0 to evaluate.
        softmax_scale: Factor of the scores; ``1 / sqrt(E)`` by default.
        causal: Query i sees the keys 0 to ``i + S - L``; the last query sees all.
        window_size: Query i sees the keys from ``i + S - L - window_size[0]`` to
            ``i + S - L + window_size[1]`` alone; a negative number: no bound on that side.
        softcap: A scaled score s becomes ``softcap * tanh(s / softcap)``; 0 or less: it stays.
        alibi_slopes: Shape (H,) or (B, H), float32: ``-slope * |i + S - L - j|`` is added to the
            score of query i and key j.
        deterministic: Without effect: gradients always are.
        return_attn_probs: Also return what the last two results below are.

    Returns:
        Shape (B, L, H, Ev); zeros for a query without any key. With ``return_attn_probs`` a tuple
        of it, of the logarithm of each row's sum of exponentials, float32 (float64 for float64) of
        shape (B, H, L), infinite for a query without any key, and of the weights, of shape
        (B, H, L, S) and for tests alone: those that dropout took are negative, and without dropout
        they are left out, an empty tensor. As in flash-attn, the last two have no gradients.

    Raises:
        RuntimeError: Shapes do not fit, dtypes or devices differ or are not supported, an option
            is out of range, or ``alibi_slopes`` requires grad.

    Example:
        >>> q, k = torch.zeros(1, 2, 1, 4), torch.zeros(1, 3, 1, 4)
        >>> v = torch.tensor([1.0, 3.0, 8.0]).view(1, 3, 1, 1)
        >>> flash_attn_func(q, k, v, causal=True).flatten()
        tensor([2., 4.])
        >>> flash_attn_func(q, k, v, causal=True, window_size=(1, -1)).flatten()
        tensor([2.0000, 5.5000])
    """
    name = "flash_attn_func"
    _check_rank(name, 4, "(batch, tokens, heads, size)", q=q, k=k, v=v)
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise RuntimeError(
            f"{name}: q, k and v have batches of {q.shape[0]}, {k.shape[0]} and {v.shape[0]}; they "
            "must be equal"
        )
    left, right, softcap = _rules(window_size, causal, softcap)
    query, key, value = (each.transpose(1, 2) for each in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    if not return_attn_probs:
        output = scaled_dot_product_attention(
            *(query, key, value, None, dropout_p),
            scale=softmax_scale,
            enable_gqa=grouped,
            window_left=left,
            window_right=right,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
        )
        return output.transpose(1, 2)
    seed = drawn_seed(q, dropout_p)
    output, log_sum_exp, _ = torch.ops.pkg.scaled_dot_product_attention_forward.default(
        *(query, key, value, None, seed, dropout_p, False, softmax_scale, grouped, False),
        *(alibi_slopes, left, right, softcap),
    )
    log_sum_exp = log_sum_exp.detach()
    weights = q.new_empty(0)
    if seed is not None:
        options = (softmax_scale, left, right, softcap, alibi_slopes)
        weights = _weights(query, key, log_sum_exp, *options)
        kept = torch.ops.pkg.attention_dropout_mask.default(
            seed, weights.shape[0] * weights.shape[1], *weights.shape[2:], dropout_p
        )
        weights = torch.where(kept.view(weights.shape), weights, -weights)
    return output.transpose(1, 2), with_infinity(log_sum_exp), weights


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """:func:`flash_attn_func` with keys and values in one tensor, read in place.

    Args:
        q: Shape (B, L, H, E).
        kv: Shape (B, S, 2, Hk, E): keys and values.
        dropout_p: As there, and so are all that follow.
        softmax_scale: Factor of the scores.
        causal: Whether queries see no later keys.
        window_size: How far they see, to the left and to the right.
        softcap: Bound of the scores.
        alibi_slopes: Slopes of the distance.
        deterministic: Without effect.
        return_attn_probs: Whether to return three tensors.

    Returns:
        What :func:`flash_attn_func` does.

    Raises:
        RuntimeError: As there.
    """
    k, v = _unpacked("flash_attn_kvpacked_func", "kv", kv, 2, 5)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_func(q, k, v, *options, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """:func:`flash_attn_func` with queries, keys and values in one tensor, read in place.

    Args:
        qkv: Shape (B, L, 3, H, E): queries, keys and values.
        dropout_p: As there, and so are all that follow.
        softmax_scale: Factor of the scores.
        causal: Whether queries see no later keys.
        window_size: How far they see, to the left and to the right.
        softcap: Bound of the scores.
        alibi_slopes: Slopes of the distance.
        deterministic: Without effect.
        return_attn_probs: Whether to return three tensors.

    Returns:
        What :func:`flash_attn_func` does.

    Raises:
        RuntimeError: As there.
    """
    q, k, v = _unpacked("flash_attn_qkvpacked_func", "qkv", qkv, 3, 5)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_func(q, k, v, *options, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> _Result:
    """Attention within each sequence of a packed batch.

    :func:`pkg.ops.scaled_dot_product_attention_varlen` says what of it is checked.

    Args:
        q: Shape (total_q, H, E).
        k: Shape (total_k, Hk, E); with ``block_table`` (pages, page size, Hk, E).
        v: Shape (total_k, Hk, Ev); with ``block_table`` (pages, page size, Hk, Ev).
        cu_seqlens_q: Shape (B + 1,), int32 or int64: where the queries of each sequence begin, and
            where the last one ends. Tokens in front of the first and behind the last, such as
            padding, belong to no sequence: their outputs and gradients are zeros.
        cu_seqlens_k: The same of keys and values.
        max_seqlen_q: At least the most queries of a sequence. Of a longer one the first so many
            are computed, and the tokens beyond belong to no sequence.
        max_seqlen_k: The same of keys and values.
        dropout_p: As for :func:`flash_attn_func`, and so are the following, with L and S those of
            the sequence.
        softmax_scale: Factor of the scores.
        causal: Whether queries see no later keys.
        window_size: How far they see, to the left and to the right.
        softcap: Bound of the scores.
        alibi_slopes: Shape (H,) or (B, H): slopes of the distance.
        deterministic: Without effect.
        return_attn_probs: Whether to return three tensors.
        block_table: Shape (B, pages of a sequence), int32 or int64: the pages in which the keys of
            a sequence lie. They are copied out of them, once, before attention begins.

    Returns:
        Shape (total_q, H, Ev). With ``return_attn_probs`` a tuple of it, of the logarithms of the
        sums, of shape (H, total_q), and of the weights, of shape
        (B, H, max_seqlen_q, max_seqlen_k), zero beyond a sequence, or empty without dropout.

    Raises:
        RuntimeError: As for :func:`flash_attn_func`, or a page that a sequence needs does not
            exist; on the CPU also if offsets decrease or lie outside the tokens.

    Example:
        >>> v = torch.tensor([1.0, 3.0, 8.0]).view(3, 1, 1)
        >>> starts = torch.tensor([0, 2, 3])  # a sequence of two tokens and one of one
        >>> q = k = torch.zeros(3, 1, 4)
        >>> flash_attn_varlen_func(q, k, v, starts, starts, 2, 2).flatten()
        tensor([2., 2., 8.])
    """
    name = "flash_attn_varlen_func"
    _check_rank(name, 3, "(tokens, heads, size)", q=q)
    if block_table is None:
        _check_rank(name, 3, "(tokens, heads, size)", k=k, v=v)
    else:
        _check_rank(name, 4, "(pages, page size, heads, size)", k=k, v=v)
        k, v = out_of_pages(name, k, v, cu_seqlens_k.diff(), block_table)
        cu_seqlens_k = cu_seqlens_k - cu_seqlens_k[:1]
    left, right, softcap = _rules(window_size, causal, softcap)
    sides = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    if not return_attn_probs:
        return scaled_dot_product_attention_varlen(
            *(*sides, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale),
            window_left=left,
            window_right=right,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
        )
    seed = drawn_seed(q, dropout_p)
    output, log_sum_exp, _ = torch.ops.pkg.scaled_dot_product_attention_varlen_forward.default(
        *(*sides, seed, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, False, False),
        *(alibi_slopes, left, right, softcap),
    )
    log_sum_exp = log_sum_exp.detach()
    weights = q.new_empty(0)
    if seed is not None:
        batch = (len(cu_seqlens_q) - 1, q.shape[1])
        kept = torch.ops.pkg.attention_dropout_mask.default(
            seed, batch[0] * batch[1], max_seqlen_q, max_seqlen_k, dropout_p
        ).view(*batch, max_seqlen_q, max_seqlen_k)
        starts, rules = (cu_seqlens_q, cu_seqlens_k), (softmax_scale, left, right, softcap)
        weights = _weights_of_sequences(q, k, log_sum_exp, starts, kept, rules, alibi_slopes)
    return output, with_infinity(log_sum_exp), weights


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """:func:`flash_attn_varlen_func` with keys and values in one tensor, read in place.

    Args:
        q: Shape (total_q, H, E).
        kv: Shape (total_k, 2, Hk, E): keys and values.
        cu_seqlens_q: As there, and so are all that follow.
        cu_seqlens_k: Where the keys of each sequence begin.
        max_seqlen_q: The most queries of a sequence.
        max_seqlen_k: The most keys of one.
        dropout_p: Probability with which a weight is dropped.
        softmax_scale: Factor of the scores.
        causal: Whether queries see no later keys.
        window_size: How far they see, to the left and to the right.
        softcap: Bound of the scores.
        alibi_slopes: Slopes of the distance.
        deterministic: Without effect.
        return_attn_probs: Whether to return three tensors.

    Returns:
        What :func:`flash_attn_varlen_func` does.

    Raises:
        RuntimeError: As there.
    """
    k, v = _unpacked("flash_attn_varlen_kvpacked_func", "kv", kv, 2, 4)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        *options,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:
    """:func:`flash_attn_varlen_func` with queries, keys and values in one tensor, read in place.

    Args:
        qkv: Shape (total, 3, H, E): queries, keys and values.
        cu_seqlens: Shape (B + 1,), int32 or int64: where each sequence begins, and the end.
        max_seqlen: At least the most tokens of a sequence.
        dropout_p: As there, and so are all that follow.
        softmax_scale: Factor of the scores.
        causal: Whether queries see no later keys.
        window_size: How far they see, to the left and to the right.
        softcap: Bound of the scores.
        alibi_slopes: Slopes of the distance.
        deterministic: Without effect.
        return_attn_probs: Whether to return three tensors.

    Returns:
        What :func:`flash_attn_varlen_func` does.

    Raises:
        RuntimeError: As there.
    """
    q, k, v = _unpacked("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 3, 4)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options, return_attn_probs
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends new keys and values to a cache, in place, and attends to all that it then holds.

    Up to 15 queries of a sequence go through :func:`pkg.ops.decode_attention`, which reads the
    cache where it lies. With ``cache_leftpad`` it reads it key by key, as pages of one key, which
    is slower. More queries, ``return_softmax_lse``, and several queries that are not causal but
    have a window or slopes, cost one copy of the keys and values that are attended to.

    Args:
        q: Shape (B, L, H, E).
        k_cache: Shape (B or more, S, Hk, E); with ``block_table`` (pages, page size, Hk, E), a page
            of any size.
        v_cache: The same with a last dimension Ev of its own.
        k: Shape (B, L_new, Hk, E): keys to be written behind those that the cache holds.
        v: Shape (B, L_new, Hk, Ev), together with ``k``.
        rotary_cos: Shape (positions, R / 2), together with ``rotary_sin`` and ``k``: the first R
            elements of the new keys are turned by their place in the cache, those of query i by the
            place ``cache_seqlens + i``, and by ``cache_seqlens`` alone where it is neither causal
            nor has a window.
        rotary_sin: Likewise.
        cache_seqlens: A number, or shape (B,) and int32 or int64: how many places of the cache are
            filled, without those of ``k``. By default all are, and then there can be no ``k``.
        cache_batch_idx: Shape (B,), integers: which row of the cache belongs to each sequence. Not
            with ``block_table``.
        cache_leftpad: Shape (B,), integers: how many of the first places of the cache are not to be
            seen, from 0 to all of them. Not with ``block_table``.
        block_table: Shape (B, pages of a sequence), int32 or int64.
        softmax_scale: As for :func:`flash_attn_func`, and so are the following.
        causal: Whether queries see no later keys.
        window_size: How far they see, to the left and to the right.
        softcap: Bound of the scores.
        rotary_interleaved: Whether neighbouring elements are turned together, or else those of the
            first and of the second half of the R.
        alibi_slopes: Shape (H,) or (B, H): slopes of the distance.
        num_splits: Without effect: the keys are split among the threads as pays.
        return_softmax_lse: Whether to return the logarithms of the sums too.

    Returns:
        Shape (B, L, H, Ev). With ``return_softmax_lse`` a tuple of it and of the logarithms of the
        sums of exponentials, of shape (B, H, L), infinite for a query without any key.

    Raises:
        RuntimeError: Shapes do not fit, dtypes or devices differ, arguments that exclude or need
            one another are given, a gradient would have to be recorded, or, on the CPU, the cache
            or the rotary tables have no room for the new keys, a page or row that is needed does
            not exist, or ``cache_leftpad`` is negative or more than there is. On CUDA, where
            looking would wait for the device, new keys without a place are not written, and a
            negative ``cache_leftpad`` is 0; with 16 queries and more, whose keys are copied, it is
            waited for, after they were.
        TypeError: ``cache_seqlens`` is neither a whole number nor a tensor.

    Example:
        >>> q, cache = torch.zeros(1, 1, 1, 2), torch.zeros(1, 4, 1, 2)
        >>> new = torch.ones(1, 1, 1, 2)
        >>> flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=1).flatten()
        tensor([0.5000, 0.5000])
        >>> cache[0, :, 0, 0]
        tensor([0., 1., 0., 0.])
    """
    name = "flash_attn_with_kvcache"
    _check_rank(name, 4, "(batch, tokens, heads, size)", q=q, k_cache=k_cache, v_cache=v_cache)
    if records_gradients((q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, alibi_slopes)):
        raise RuntimeError(
            f"{name}: an argument requires grad, and this function is for inference alone; call it "
            "within torch.no_grad(), or flash_attn_func where a gradient is needed"
        )
    _check_rows(name, len(q), block_table, "cache_batch_idx", cache_batch_idx)
    _check_rows(name, len(q), block_table, "cache_leftpad", cache_leftpad)
    cache = KeyValueCache(name, q, k_cache, v_cache, block_table, cache_batch_idx)
    lengths = cache.lengths(cache_seqlens, appends=k is not None)
    left_out = None if cache_leftpad is None else cache.left_out(cache_leftpad)
    left, right, cap = _rules(window_size, causal, softcap)
    _check_scores(name, q, softcap, alibi_slopes)
    if k is not None or v is not None:
        if k is None or v is None:
            raise RuntimeError(f"{name}: of k and v only one is given; they go together")
        turn = None
        if rotary_cos is not None or rotary_sin is not None:
            turn = Rotary(name, rotary_cos, rotary_sin, rotary_interleaved, "rotary_")
        q = _append(cache, lengths, q, k, v, turn, moves=left >= 0 or right >= 0)
        lengths = lengths + k.shape[1]
    elif rotary_cos is not None or rotary_sin is not None:
        raise RuntimeError(
            f"{name}: rotary_cos or rotary_sin is given without k; they turn new keys"
        )
    if left_out is not None:
        lengths = cache.leave_out(left_out, lengths)
    options = (softmax_scale, left, right, cap, alibi_slopes)
    if not return_softmax_lse:
        output = decode(q, cache, lengths, *options)
        if output is not None:
            return output
    output, log_sum_exp = attend_to_copy(name, q, cache, lengths, *options)
    return (output, log_sum_exp) if return_softmax_lse else output


def _check_rows(
    name: str, batch: int, block_table: Tensor | None, argument: str, given: Tensor | None
) -> None:
    """Of what there is one of for each row of a cache without pages."""
    if given is None:
        return
    check_indices(name, argument, given, batch, "the batch of q")
    if block_table is not None:
        raise RuntimeError(
            f"{name}: {argument} and block_table are both given; a paged cache has no {argument}"
        )


def _check_scores(name: str, q: Tensor, softcap: float, slopes: Tensor | None) -> None:
    """Refuses what the operators would refuse when new keys have been written already."""
    if not math.isfinite(softcap):
        raise RuntimeError(f"{name}: softcap is {softcap}; it must be finite")
    if slopes is None:
        return
    is_fit = slopes.shape in (q.shape[2:3], (q.shape[0], q.shape[2]))
    if not is_fit or slopes.dtype not in (torch.float32, q.dtype) or slopes.device != q.device:
        raise RuntimeError(
            f"{name}: alibi_slopes is {slopes.dtype} of shape {list(slopes.shape)} on "
            f"{slopes.device}; it must be torch.float32 or {q.dtype} of shape [{q.shape[2]}] or "
            f"{[q.shape[0], q.shape[2]]} on {q.device}"
        )


def _append(
    cache: KeyValueCache,
    lengths: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Rotary | None,
    *,
    moves: bool,
) -> Tensor:
    """Writes new keys and values behind those of the cache; the queries, turned as the keys are.

    All queries of a sequence are turned as the first new key; where ``moves``, each as its own.
    """
    where = cache.places_of_new(lengths, k, v)
    if turn is not None:
        k = turn(k, where[0])
        steps = torch.arange(q.shape[1], device=q.device) * int(moves)
        q = turn(q, lengths[:, None] + steps)
    cache.write(where, k, v)
    return q


def _rules(window_size: tuple[int, int], causal: bool, softcap: float) -> tuple[int, int, float]:
    """The two sides and the bound of scores as the operators take them."""
    check_instance("flash_attn", "softcap", softcap, (int, float), "a number, 0 for none")
    try:
        left, right = (max(operator.index(side), -1) for side in window_size)
    except (TypeError, ValueError):
        raise TypeError(
            f"flash_attn: window_size is {window_size!r}; it must be two whole numbers, how many "
            "keys are seen to the left and to the right, negative for all"
        ) from None
    # flash-attn takes what is negative for none.
    return left, 0 if causal else right, max(softcap, 0.0)


def _sequence(cu_seqlens: Tensor, index: int, longest: int) -> slice:
    """Where a sequence lies, without what of it is too long to be computed."""
    begin, end = int(cu_seqlens[index]), int(cu_seqlens[index + 1])
    return slice(begin, min(end, begin + longest))


def _weights(
    query: Tensor,
    key: Tensor,
    log_sum_exp: Tensor,
    scale: float | None,
    left: int,
    right: int,
    softcap: float,
    slopes: Tensor | None,
) -> Tensor:
    """The weights before dropout, (B, H, L, S), by the definition."""
    with torch.no_grad():
        wide = log_sum_exp.dtype
        group = query.shape[1] // max(key.shape[1], 1)
        key = key.repeat_interleave(group, 1)
        scores = query.to(wide) @ key.to(wide).mT
        scores = scores * (max(query.shape[-1], 1) ** -0.5 if scale is None else scale)
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        rows, columns = scores.shape[-2:]
        row = torch.arange(rows, device=query.device)[:, None] + columns - rows
        distance = torch.arange(columns, device=query.device) - row
        if slopes is not None:
            scores = scores - slopes[..., None, None].to(wide) * distance.abs()
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if left >= 0:
            hidden |= distance < -left
        if right >= 0:
            hidden |= distance > right
        weights = (scores - log_sum_exp[..., None]).exp().masked_fill(hidden, 0.0)
        return weights.to(query.dtype)


def _weights_of_sequences(
    q: Tensor,
    k: Tensor,
    log_sum_exp: Tensor,
    starts: tuple[Tensor, Tensor],
    kept: Tensor,
    rules: tuple[float | None, int, int, float],
    alibi_slopes: Tensor | None,
) -> Tensor:
    """The weights of a packed batch in the shape of ``kept``, negative where it is False."""
    weights = q.new_zeros(kept.shape)
    for b in range(len(kept)):
        rows, columns = (
            _sequence(offsets, b, longest)
            for offsets, longest in zip(starts, kept.shape[2:], strict=True)
        )
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b]
        query, key = q[rows].transpose(0, 1)[None], k[columns].transpose(0, 1)[None]
        part = _weights(query, key, log_sum_exp[None, :, rows], *rules, slopes)[0]
        counts = part.shape[1:]
        part = torch.where(kept[b, :, : counts[0], : counts[1]], part, -part)
        weights[b, :, : counts[0], : counts[1]] = part
    return weights


def _unpacked(name: str, argument: str, tensor: Tensor, count: int, rank: int) -> Any:
    """Views of the tensors that one holds, along its dimension -3."""
    layout = "(batch, tokens," if rank == 5 else "(tokens,"
    if tensor.dim() != rank or tensor.shape[-3] != count:
        raise RuntimeError(
            f"{name}: {argument} is of shape {list(tensor.shape)}; it must be "
            f"{layout} {count}, heads, size)"
        )
    return tensor.unbind(-3)


def _check_rank(name: str, rank: int, layout: str, **tensors: Tensor) -> None:
    for argument, tensor in tensors.items():
        if tensor.dim() != rank:
            raise RuntimeError(
                f"{name}: {argument} is of shape {list(tensor.shape)}; it must be {layout}"
            )
