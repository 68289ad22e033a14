"""Derivatives of attention that have no kernel: dense ones, in O(L S) memory, of any order.

Of attention and of its gradients, for reverse mode over these and for forward mode over both, by
PyTorch's operators and :func:`pkg.ops.matmul`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._registration import reduce_to
from .matmul import matmul


def leading_shape(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> torch.Size:
    """The leading dimensions that the inputs broadcast to, the query's heads last."""
    key_lead, value_lead = key.shape[:-2], value.shape[:-2]
    if enable_gqa:
        key_lead = torch.Size((*key_lead[:-1], query.shape[-3]))
        value_lead = torch.Size((*value_lead[:-1], query.shape[-3]))
    lead: torch.Size = torch.broadcast_shapes(query.shape[:-2], key_lead, value_lead)
    return lead


def _grouped(tensor: Tensor, group: int) -> Tensor:
    """Key or value heads repeated for the query heads that share them."""
    if group == 1:
        return tensor
    *lead, heads, length, size = tensor.shape
    repeated = tensor.unsqueeze(-3).expand(*lead, heads, group, length, size)
    # Not by flatten(), for which batched tangents have no rule.
    return repeated.reshape(*lead, heads * group, length, size)


def _summed_over_group(gradient: Tensor, group: int, key_heads: int) -> Tensor:
    if group == 1:
        return gradient
    *lead, _, length, size = gradient.shape
    return gradient.reshape(*lead, key_heads, group, length, size).sum(-3)


def _dropout_factors(
    seed: Tensor | None, lead: torch.Size, weights: Tensor, dropout_p: float
) -> Tensor | float:
    """What dropout multiplies the weights by, of shape (*lead, L, S)."""
    if seed is None or dropout_p == 0.0:
        return 1.0
    if dropout_p == 1.0:
        return 0.0
    rows, columns = weights.shape[-2:]
    kept: Tensor = torch.ops.pkg.attention_dropout_mask.default(
        seed, lead.numel(), rows, columns, dropout_p
    )
    return kept.reshape(*lead, rows, columns).to(weights.dtype) / (1.0 - dropout_p)


def _hidden_by_place(
    scores: Tensor, is_causal: bool, window_left: int, window_right: int
) -> Tensor | None:
    """Which keys causality and the window hide, of shape (L, S)."""
    rows, columns = scores.shape[-2:]
    if not is_causal and window_left < 0 and window_right < 0:
        return None
    column = torch.arange(columns, device=scores.device)
    row = torch.arange(rows, device=scores.device).unsqueeze(-1)
    distance = column - (row + columns - rows)
    hidden = column > row if is_causal else torch.zeros_like(column > row)
    if window_left >= 0:
        hidden = hidden | (distance < -window_left)
    if window_right >= 0:
        hidden = hidden | (distance > window_right)
    return hidden


def _alibi_bias(scores: Tensor, slopes: Tensor) -> Tensor:
    """ALiBi's bias, of the shape of the slopes and (L, S)."""
    rows, columns = scores.shape[-2:]
    own = torch.arange(columns - rows, columns, device=scores.device).unsqueeze(-1)
    distance = (own - torch.arange(columns, device=scores.device)).abs().to(scores.dtype)
    return -slopes.to(scores.dtype)[..., None, None] * distance


def _weights(scores: Tensor, hidden: Tensor | None, attn_mask: Tensor | None) -> Tensor:
    """The attention weights before dropout; 0 throughout in a row without any key."""
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        else:
            scores = scores + attn_mask
    excluded = (scores == -torch.inf).all(-1, keepdim=True)
    weights: Tensor = torch.softmax(scores.masked_fill(excluded, 0.0), -1)
    return weights.masked_fill(excluded, 0.0)


class Call(NamedTuple):
    """The arguments of ``scaled_dot_product_attention_forward``, but for what it is to keep."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    dropout_seed: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    alibi_slopes: Tensor | None
    window_left: int
    window_right: int
    softcap: float


class _Dense:
    """A call with its weights as the forward pass had them, O(L S) memory."""

    def __init__(self, call: Call) -> None:
        query, key, value = call.query, call.key, call.value
        lead = leading_shape(query, key, value, call.enable_gqa)
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.key_heads = key.shape[-3] if call.enable_gqa else 0
        self.group = query.shape[-3] // self.key_heads if self.key_heads else 1
        # Without a head dimension every score is zero, whatever the scale.
        self.scale = max(query.shape[-1], 1) ** -0.5 if call.scale is None else call.scale
        self.softcap = call.softcap
        self.query = query.to(self.dtype)
        self.key, self.value = self.of_keys(key), self.of_keys(value)
        scores = matmul(self.query, self.key.mT) * self.scale
        # The tanh of capped scores, and their derivative by those that are not.
        self.share = torch.tanh(scores / self.softcap) if self.softcap else None
        self.slope = 1.0 if self.share is None else 1.0 - self.share * self.share
        if self.share is not None:
            scores = self.share * self.softcap
        if call.alibi_slopes is not None:
            scores = scores + _alibi_bias(scores, call.alibi_slopes)
        hidden = _hidden_by_place(scores, call.is_causal, call.window_left, call.window_right)
        self.weights = _weights(scores, hidden, call.attn_mask)
        self.factors = _dropout_factors(call.dropout_seed, lead, self.weights, call.dropout_p)

    def of_keys(self, tensor: Tensor) -> Tensor:
        """Key, value or what belongs to one, for each head of the query."""
        return _grouped(tensor.to(self.dtype), self.group)


def _softmax_gradient(weights: Tensor, gradient: Tensor) -> Tensor:
    return weights * (gradient - (weights * gradient).sum(-1, keepdim=True))


class Directions(NamedTuple):
    """Of the inputs: what their gradients are multiplied by."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None


def second_derivatives(
    call: Call, upstream: Tensor, directions: Directions
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of the gradients times directions, from the definition.

    By the gradient of the output, query, key, value and mask. Those by the inputs are the tangents
    of the gradients too, in these directions: they are the second derivatives of one number.

    With P the weights, M dropout's factors, G the gradient of the output, the first
    backward pass is A = M (G V^T), D = rowsum(P A), dS = P (A - D),
    dQ = scale dS K, dK = scale dS^T Q, dV = (M P)^T G. Here each of these is taken
    backward in turn; gradients to output and log-sum-exp flow to the inputs that
    they are functions of. Where scores are capped, S = c t with t = tanh(S' / c), and
    dS' = dS (1 - t^2) takes the place of dS in dQ and dK.
    """
    dense = _Dense(call)
    given, upstream = upstream, upstream.to(dense.dtype)
    query, key, value, scale = dense.query, dense.key, dense.value, dense.scale
    weights, factors, share, slope = dense.weights, dense.factors, dense.share, dense.slope
    grad_query = directions.query.to(dense.dtype)
    grad_key, grad_value = dense.of_keys(directions.key), dense.of_keys(directions.value)

    grad_weights = matmul(upstream, value.mT) * factors
    delta = (weights * grad_weights).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - delta)

    # Of dS, from dQ, dK and the mask's gradient.
    of_grad_products = scale * (matmul(grad_query, key.mT) + matmul(query, grad_key.mT))
    of_grad_scores = of_grad_products * slope
    if directions.attn_mask is not None:
        of_grad_scores = of_grad_scores + directions.attn_mask
    total = (of_grad_scores * weights).sum(-1, keepdim=True)
    of_products = factors * weights * (of_grad_scores - total)
    of_weights = (
        of_grad_scores * (grad_weights - delta)
        - grad_weights * total
        + matmul(upstream, grad_value.mT) * factors
    )
    of_scores = _softmax_gradient(weights, of_weights)

    of_capped = of_scores * slope
    if share is not None:
        # The derivative of 1 - t^2 by S'.
        bend = slope * share * (-2.0 / dense.softcap)
        of_capped = of_capped + of_grad_products * grad_scores * bend
    grad_capped = grad_scores * slope

    of_upstream = matmul(weights * factors, grad_value) + matmul(of_products, value)
    of_query = scale * (matmul(grad_capped, grad_key) + matmul(of_capped, key))
    of_key = scale * (matmul(grad_capped.mT, grad_query) + matmul(of_capped.mT, query))
    of_value = matmul(of_products.mT, upstream)
    of_mask = None
    if call.attn_mask is not None and call.attn_mask.is_floating_point():
        of_mask = reduce_to(of_scores, call.attn_mask)
    return (
        reduce_to(of_upstream, given),
        reduce_to(of_query, call.query),
        reduce_to(_summed_over_group(of_key, dense.group, dense.key_heads), call.key),
        reduce_to(_summed_over_group(of_value, dense.group, dense.key_heads), call.value),
        of_mask,
    )


def output_tangent(call: Call, tangents: Sequence[Tensor | None]) -> Tensor:
    """The output's tangent of those of query, key, value and mask, None where one has none."""
    of_query, of_key, of_value, of_mask = tangents
    dense = _Dense(call)
    of_scores = torch.zeros_like(dense.weights)
    if of_query is not None:
        of_scores = of_scores + matmul(of_query.to(dense.dtype), dense.key.mT)
    if of_key is not None:
        of_scores = of_scores + matmul(dense.query, dense.of_keys(of_key).mT)
    of_scores = of_scores * (dense.scale * dense.slope)
    if of_mask is not None:
        of_scores = of_scores + of_mask
    # The softmax's matrix of derivatives is symmetric.
    of_weights = _softmax_gradient(dense.weights, of_scores)
    output = matmul(of_weights * dense.factors, dense.value)
    if of_value is not None:
        output = output + matmul(dense.weights * dense.factors, dense.of_keys(of_value))
    return output.to(call.query.dtype)
