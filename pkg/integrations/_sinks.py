"""Attention with sinks: a score for each head that takes part in the softmax and has no value."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ops._attention import drawn_seed
from ..ops._autocast import dtype_under_autocast
from ..ops._forward_mode import may_be_forward_mode
from ..ops._registration import records_gradients
from ..ops.scaled_dot_product_attention import scaled_dot_product_attention


def may_have_derivatives(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a gradient is recorded or a tangent may be pushed, at some level of torch.func."""
    return records_gradients(tensors) or may_be_forward_mode()


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
) -> Tensor:
    """:func:`pkg.ops.scaled_dot_product_attention` of four dimensions, with sinks.

    Where no gradient is recorded and no transform of ``torch.func`` or ``torch.vmap`` is at work,
    the output is scaled: with L the logarithm of a row's sum of exponentials without the sink s,
    the weights with it are ``exp(L) / (exp(L) + exp(s))`` times those without. Else there is one
    key more, of zeros and two ones, before the others, and every query has two elements more, that
    make the sink of it: a copy of all three operands.

    Args:
        query: Shape (B, heads, L, E).
        key: Shape (B, key heads, S, E).
        value: Shape (B, key heads, S, Ev).
        sinks: Shape (heads,), floating; may require grad.
        attn_mask: As there, and so are all that follow.
        dropout_p: Probability with which a weight is dropped; a sink never is.
        is_causal: Whether query i sees keys 0 to i alone; of as many keys as queries then.
        scale: Factor of the scores, not of the sinks.
        enable_gqa: Whether key and value may have fewer heads.
        window_left: How many keys before its own a query sees, which is the last key for the last
            query, and none behind it; -1: as the other arguments say. Not where
            :func:`may_have_derivatives` of the tensors.

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
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # Before a sink is rounded to it.
    dtype = dtype_under_autocast(query)
    query, key, value = (each.to(dtype) for each in (query, key, value))
    if may_have_derivatives((query, key, value, sinks, attn_mask)):
        if window_left >= 0:
            raise RuntimeError(
                f"attention with sinks: window_left is {window_left} where there may be "
                "derivatives; it must be -1 then, and the window be in attn_mask"
            )
        return _with_a_key(
            query, key, value, sinks, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    seed = drawn_seed(query, dropout_p)
    output, log_sum_exp, _ = torch.ops.pkg.scaled_dot_product_attention_forward.default(
        *(query, key, value, attn_mask, seed, dropout_p, is_causal, scale, enable_gqa, False),
        *(None, window_left, 0 if window_left >= 0 else -1, 0.0),
    )
    share = torch.sigmoid(log_sum_exp - sinks.to(log_sum_exp.dtype)[:, None])
    scaled: Tensor = output * share.unsqueeze(-1)
    return scaled.to(query.dtype)


def _with_a_key(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    enable_gqa: bool,
) -> Tensor:
    # The sink, rounded to the query's dtype, and the rest of it, which has twice the digits.
    # One that is infinite, or is so once it is scaled, takes all of the weight or none as the
    # largest number does.
    most = torch.finfo(query.dtype).max
    exact = (sinks.to(torch.promote_types(query.dtype, torch.float32)) / scale).clamp(-most, most)
    high = exact.to(query.dtype)
    low = (exact.detach() - high.detach()).to(query.dtype)
    elements = torch.stack((high, low), -1)[:, None].expand(*query.shape[:3], 2)
    query = torch.cat((query, elements), -1)
    if attn_mask is not None and attn_mask.shape[-1] == 1:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], key.shape[-2])
    key, value = pad(key, (0, 2, 1, 0)), pad(value, (0, 0, 1, 0))
    one = torch.zeros_like(key[..., :1, :])
    one[..., -2:] = 1.0
    key = torch.cat((one, key[..., 1:, :]), -2)
    if attn_mask is not None:
        fill = 1.0 if attn_mask.dtype == torch.bool else 0.0
        attn_mask = pad(attn_mask, (1, 0), value=fill)
    return scaled_dot_product_attention(
        *(query, key, value, attn_mask, dropout_p),
        scale=scale,
        enable_gqa=enable_gqa,
        # Causality counted from the last key, which leaves the sink to every query.
        window_right=0 if is_causal else -1,
    )
