"""The plain, obviously right version of each operator, which everything is compared to.

Each takes the operator's arguments and runs in any dtype. In float64 it gives what the operator
should give exactly; in a lower dtype, what plain PyTorch makes of it.
"""

from __future__ import annotations

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
    excluded = (scores == -torch.inf).all(-1, keepdim=True)
    # A row without a key gets weights of zero; the softmax alone would make them NaN.
    weights = torch.softmax(scores.masked_fill(excluded, 0), -1).masked_fill(excluded, 0)
    if kept is not None:
        weights = torch.where(kept, weights / (1 - dropout_p), 0) if dropout_p < 1 else weights * 0
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return weights.to(value.dtype) @ value


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
