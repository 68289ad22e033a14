"""The plain, obviously right version of each operator, which everything is compared to.

Each takes the operator's arguments and runs in any dtype. In float64 it gives what the operator
should give exactly; in a lower dtype, what plain PyTorch makes of it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def mul(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def muladd(a: Tensor, b: Tensor, c: float) -> Tensor:
    dtype = torch.result_type(a, b)
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    return a.to(dtype) * b.to(dtype) + c


def add_out(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    out.copy_(a + b)


def d_sigmoid(z: Tensor) -> Tensor:
    # sigmoid(-z) is 1 - sigmoid(z) without the cancellation.
    return torch.sigmoid(z) * torch.sigmoid(-z)


def d_sigmoid_backward(grad: Tensor, z: Tensor) -> Tensor:
    above, below = torch.sigmoid(z), torch.sigmoid(-z)
    return grad * (above * below * (below - above))


def matmul(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    dtype = out_dtype or a.dtype
    if not dtype.is_floating_point:
        return torch.matmul(a.double(), b.double()).to(dtype)  # exact below 2**53
    return torch.matmul(a.to(dtype), b.to(dtype))


def attention_scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The scaled and masked scores, of shape (..., L, S)."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    # Without a head dimension every score is zero, whatever the scale.
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    scores = query @ key.mT * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is None:
        return scores
    if attn_mask.dtype == torch.bool:
        return scores.masked_fill(~attn_mask, -torch.inf)
    return scores + attn_mask


class _AttendToValues(torch.autograd.Function):
    """Softmax of the scores, dropout, product with the values; with FlashAttention-2's gradient.

    Its formulas (arXiv 2307.08691, algorithm 2) on whole matrices: P = exp(S - L) from the rounded
    log-sum-exp L, dP = dO V^T, D = rowsum(dO O), dS = P (dP - D). Autograd of the softmax keeps P,
    and sums P dP for D, whose rounding errors are those of dP and cancel in part: as a measure of
    error it would ask for another algorithm.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, value: Tensor, factors: Tensor) -> Tensor:
        excluded = (scores == -torch.inf).all(-1, keepdim=True)
        # A row without a key gets weights of zero; the softmax alone would make them NaN.
        weights = torch.softmax(scores.masked_fill(excluded, 0), -1).masked_fill(excluded, 0)
        return (weights * factors).to(value.dtype) @ value

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        scores, value, factors, output = ctx.saved_tensors
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        excluded = (scores == -torch.inf).all(-1, keepdim=True)
        log_sum_exp = torch.logsumexp(wide.masked_fill(excluded, 0), -1, keepdim=True)
        # An infinite score leaves no weight that is a number, also where exp(-inf) would be 0.
        log_sum_exp = log_sum_exp.masked_fill(log_sum_exp.isinf(), torch.nan)
        weights = (wide - log_sum_exp).exp().masked_fill(excluded, 0).to(scores.dtype)
        products = grad @ value.mT * factors
        grad_scores = weights * (products - (grad * output).sum(-1, keepdim=True))
        grad_value = (weights * factors).to(value.dtype).mT @ grad
        return (
            grad_scores.sum_to_size(scores.shape).to(scores.dtype),
            grad_value.sum_to_size(value.shape),
            None,
        )


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    kept: Tensor | None = None,
) -> Tensor:
    """Attention by its definition; ``kept`` says which weights dropout leaves, in (..., L, S)."""
    scores = attention_scores(query, key, attn_mask, is_causal, scale, enable_gqa)
    factors = scores.new_ones(())
    if kept is not None:
        # Everything is dropped at 1, where the survivors' factor has no value.
        factors = kept.to(scores.dtype) / (1 - dropout_p) if dropout_p < 1 else factors * 0
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return _AttendToValues.apply(scores, value, factors)


def attention_log_sum_exp(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The logarithm of the sum of the exponentials of each row of scores, of shape (..., L)."""
    return attention_scores(query, key, attn_mask, is_causal, scale, enable_gqa).logsumexp(-1)


def packed_sequences(*offsets: Tensor) -> list[list[slice]]:
    """Of each sequence of a packed batch, where it lies in each of the tensors."""
    edges = [[slice(*pair) for pair in pairwise(each.tolist())] for each in offsets]
    return [list(sides) for sides in zip(*edges, strict=True)]


def scaled_dot_product_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    kept: Tensor | None = None,
) -> Tensor:
    """Sequence by sequence; ``kept`` has the shape (B, Hq, max_seqlen_q, max_seqlen_k)."""
    outputs = [query.new_zeros(0, query.shape[1], value.shape[2])]
    for index, (rows, columns) in enumerate(packed_sequences(cu_seqlens_q, cu_seqlens_k)):
        q, k, v = (t.transpose(0, 1) for t in (query[rows], key[columns], value[columns]))
        scores = (q.shape[1], k.shape[1])
        mask = None
        if is_causal:
            mask = torch.ones(scores, dtype=torch.bool, device=q.device).tril(scores[1] - scores[0])
        own = None if kept is None else kept[index, :, : scores[0], : scores[1]]
        output = scaled_dot_product_attention(
            q, k, v, mask, dropout_p, scale=scale, enable_gqa=True, kept=own
        )
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def packed_log_sum_exp(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The log-sum-exp of each query of a packed batch, of shape (Hq, total_q)."""
    sums = [query.new_zeros(query.shape[1], 0)]
    for rows, columns in packed_sequences(cu_seqlens_q, cu_seqlens_k):
        q, k = query[rows].transpose(0, 1), key[columns].transpose(0, 1)
        mask = None
        if is_causal:
            mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
            mask = mask.tril(k.shape[1] - q.shape[1])
        sums.append(attention_log_sum_exp(q, k, mask, scale=scale, enable_gqa=True))
    return torch.cat(sums, -1)


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_lengths: Tensor,
    block_table: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Row by row: the keys that it sees are gathered, and nothing else is looked at."""
    batch, heads, rows, head_size = query.shape
    scale = max(head_size, 1) ** -0.5 if scale is None else scale
    output = query.new_zeros(batch, heads, rows, value_cache.shape[-1])
    for b, length in enumerate(cache_lengths.tolist()):
        keys, values = (
            cache[b]
            if block_table is None
            else torch.cat([cache[p] for p in block_table[b].tolist() if 0 <= p < len(cache)], 1)
            for cache in (key_cache, value_cache)
        )
        for row in range(rows):
            seen = max(length - rows + row + 1, 0)
            for head in range(heads if seen else 0):
                of_head = head * keys.shape[0] // heads
                scores = keys[of_head, :seen] @ query[b, head, row] * scale
                weights = torch.softmax(scores, 0)
                output[b, head, row] = weights @ values[of_head, :seen]
    return output


def activated(x: Tensor, name: str | None) -> Tensor:
    if name is None:
        return x
    if name == "relu":
        return torch.relu(x)
    if name == "silu":
        return torch.nn.functional.silu(x)
    return torch.nn.functional.gelu(x, approximate="none" if name == "gelu" else "tanh")


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    return linear_forward(input, weight, bias, activation)[0]


def linear_forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """The output, and the activation's argument where the derivative needs it."""
    if weight.dim() == 1 and bias is not None:  # PyTorch takes no bias there
        sums = torch.nn.functional.linear(input, weight) + bias
    else:
        sums = torch.nn.functional.linear(input, weight, bias)
    kept = activation not in (None, "relu")
    return activated(sums, activation), sums if kept else sums.new_empty(0)


def linear_activation_backward(grad: Tensor, saved: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return torch.ops.aten.threshold_backward(grad, saved, 0)
    if activation == "gelu":
        density = 0.3989422804014327 * torch.exp(-0.5 * saved * saved)
        return grad * (0.5 * torch.erfc(saved * -(0.5**0.5)) + saved * density)
    # x sigmoid(v). PyTorch's own formulas have 1 - sigmoid(v), or 1 - tanh(v / 2)**2, which cancel
    # so much in float64 too that they are no reference.
    v, slope = saved, torch.ones_like(saved)
    if activation == "gelu_tanh":
        scale = 1.5957691216057308  # sqrt(8 / pi)
        v = scale * (saved + 0.044715 * saved**3)
        slope = scale * (1 + 3 * 0.044715 * saved**2)
    above, below = torch.sigmoid(v), torch.sigmoid(-v)
    return grad * (above + saved * (above * below) * slope)


def packed_linear(
    input: Tensor,
    weight: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Of a weight that lies in the corner of a tensor as large as a packed one."""
    return linear(input, weight[:out_features, : input.shape[-1]], bias, activation)
