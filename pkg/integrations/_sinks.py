"""Attention with sinks: a score for each head that takes part in the softmax and has no value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _AttentionWithSinks(torch.autograd.Function):
    """Attention of which each row's sum of exponentials has one term more, that of the sink.

    With L the logarithm of the sum without it and s the sink, L' = log(exp L + exp s), every weight
    is multiplied by exp(L - L'), and so is the output. That is all that the backward pass of
    FlashAttention-2 (https://arxiv.org/abs/2307.08691, algorithm 2) asks for: it makes the weights
    anew from the logarithm, P' = exp(S - L'), and D = rowsum(dO * O') from the output. The sink's
    own gradient is that of a score whose value is zero: -exp(s - L') D, summed over all rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        sinks: Tensor,
        seed: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        left: int,
        right: int,
        softcap: float,
    ) -> Tensor:
        options = (dropout_p, is_causal, scale, enable_gqa)
        extras = (None, left, right, softcap)
        output, log_sum_exp, residual = torch.ops.pkg.scaled_dot_product_attention_forward.default(
            query, key, value, mask, seed, *options, True, *extras
        )
        column = sinks.to(log_sum_exp.dtype)[:, None]
        with_sink = torch.logaddexp(log_sum_exp, column)
        wide = output.to(log_sum_exp.dtype)
        if residual.dim() > 1:  # what rounding took off the output
            wide = wide + residual
        wide = wide * (log_sum_exp - with_sink).exp().unsqueeze(-1)
        result: Tensor = wide.to(query.dtype)
        residual = (wide - result).to(query.dtype) if residual.dim() > 1 else residual
        ctx.save_for_backward(query, key, value, mask, sinks, seed, result, with_sink, residual)
        ctx.options, ctx.extras = options, extras
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, sinks, seed, output, with_sink, residual = ctx.saved_tensors
        gradients = torch.ops.pkg.scaled_dot_product_attention_backward.default(
            *(grad, query, key, value, mask, seed, output, with_sink, residual),
            *(*ctx.options, ctx.needs_input_grad[3], *ctx.extras),
        )
        grad_sinks = None
        if ctx.needs_input_grad[4]:
            wide = output.to(with_sink.dtype)
            if residual.dim() > 1:
                wide = wide + residual
            share = (sinks.to(with_sink.dtype)[:, None] - with_sink).exp()
            delta = (grad * wide).sum(-1)
            grad_sinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
        needed = ctx.needs_input_grad[:4]
        of_inputs = (g if need else None for g, need in zip(gradients, needed, strict=True))
        return (*of_inputs, grad_sinks, *(None,) * 8)


def attention_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> Tensor:
    """:func:`pkg.ops.scaled_dot_product_attention` of four dimensions, with sinks.

    Args:
        query: Shape (B, heads, L, E).
        key: Shape (B, key heads, S, E).
        value: Shape (B, key heads, S, Ev).
        sinks: Shape (heads,), floating; may require grad.
        attn_mask: As there, and so are all that follow.
        dropout_p: Probability with which a weight is dropped; a sink never is.
        is_causal: Whether query i sees keys 0 to i alone.
        scale: Factor of the scores, not of the sinks.
        enable_gqa: Whether key and value may have fewer heads.
        window_left: How many keys before its own a query sees.
        window_right: How many behind.
        softcap: Bound of the scores, not of the sinks.

    Returns:
        Shape (B, heads, L, Ev).

    Raises:
        RuntimeError: As there; or ``sinks`` is of another shape.

    Example:
        >>> zeros, sink = torch.zeros(1, 1, 1, 2), torch.zeros(1)
        >>> attention_with_sinks(zeros, zeros, torch.ones(1, 1, 1, 1), sink).item()
        0.5
    """
    if sinks.shape != (query.shape[1],):
        raise RuntimeError(
            f"attention with sinks: they are of shape {list(sinks.shape)}; they must be "
            f"[{query.shape[1]}], one for each head of the query"
        )
    seed = None
    if dropout_p > 0.0:
        limit = torch.iinfo(torch.int64).max
        seed = torch.randint(limit, (1,), dtype=torch.int64, device=query.device)
    apply: Callable[..., Tensor] = _AttentionWithSinks.apply
    return apply(
        *(query, key, value, attn_mask, sinks, seed, dropout_p, is_causal, scale, enable_gqa),
        *(window_left, window_right, softcap),
    )
