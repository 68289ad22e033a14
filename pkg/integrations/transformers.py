"""``attn_implementation="pkg"`` for the models of Hugging Face's transformers.

:func:`register` makes the name known; any model that lets its attention be chosen takes it::

    import pkg
    pkg.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="pkg")

What a mask means, and when there is none, follows transformers' own ``sdpa``
(``transformers/integrations/sdpa_attention.py`` and ``masking_utils.py``), so a model computes what
it computes with that. Beyond it, scores may be soft-capped (Gemma 2) and attention may have sinks
(gpt-oss), for which transformers otherwise has ``eager`` alone on a CPU; and keys are never
repeated for the query heads that share them. Where a mask is nothing but causality and a sliding
window, as long as no key that a query sees is padding, it is not read: the keys out of the window
are skipped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.scaled_dot_product_attention import scaled_dot_product_attention
from ._masks_of_models import by_model
from ._sinks import attention_with_sinks, may_have_derivatives
from ._window_mask import window_of, with_windows

NAME = "pkg"
"""What ``attn_implementation`` is to be."""

_OLDEST = "4.53"

# Of what models pass besides, what changes the result; all else is for flash-attn or for records.
_REFUSED = {
    "sinks": "a sink for every query; choose attn_implementation='eager'",
    "head_mask": "a mask of heads; choose attn_implementation='eager'",
    "output_attentions": (
        "the attention weights, which are never held; choose attn_implementation='eager'"
    ),
    "cache": "a paged cache; choose attn_implementation='sdpa'",
}


def register() -> None:
    """Makes ``attn_implementation="pkg"`` known to transformers, for this process.

    Registers a function of attention and one of masks: with the first alone transformers would
    give no masks, and causality would be lost without a word. May be called again.

    A model for which transformers refuses ``"sdpa"``, since its attention cannot be chosen,
    computes what it computes with ``"eager"``; a warning says so.

    Raises:
        ImportError: transformers is not there, or older than 4.53, the first to let both be
            registered.

    Example:
        >>> import transformers  # doctest: +SKIP
        >>> register()  # doctest: +SKIP
        >>> config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=64)  # doctest: +SKIP
        >>> model = transformers.AutoModelForCausalLM.from_config(
        ...     config, attn_implementation="pkg"
        ... )  # doctest: +SKIP
    """
    name = "pkg.integrations.transformers.register"
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"{name}: transformers cannot be imported ({error}); install {_OLDEST} or newer: "
            f"pip install 'transformers>={_OLDEST}'"
        ) from error
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import (
            AttentionMaskInterface,
            eager_mask,
            sdpa_mask,
            sliding_window_causal_mask_function,
        )
    except ImportError as error:
        raise ImportError(
            f"{name}: transformers is {transformers.__version__}, where attention and its masks "
            f"cannot both be registered ({error}); it must be {_OLDEST} or newer"
        ) from error
    AttentionInterface.register(NAME, attention)
    masks = with_windows(sdpa_mask, sliding_window_causal_mask_function)
    AttentionMaskInterface.register(NAME, by_model(masks, eager_mask))


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for a layer's attention; see :func:`register`.

    Args:
        module: The layer, of which only ``is_causal`` is read.
        query: Shape (B, heads, L, E).
        key: Shape (B, key heads, S, E); the heads of the query are a multiple of them.
        value: Shape (B, key heads, S, Ev).
        attention_mask: What the function of masks gave: of a shape that broadcasts to
            (B, heads, L, S), boolean and True where a key takes part, or numbers to add. It may
            have more than S columns, the first of which count. None: nothing is hidden but by
            causality.
        dropout: Probability with which a weight is dropped.
        scaling: Factor of the scores; ``1 / sqrt(E)`` by default.
        is_causal: Whether query i sees keys 0 to i alone, where there is no mask and L > 1; by
            default ``module.is_causal``, and True where the module has none.
        position_bias: Numbers to add to the scores, of a shape that broadcasts to theirs; may
            require grad.
        softcap: A scaled score s becomes ``softcap * tanh(s / softcap)``; None: it stays.
        s_aux: Shape (heads,), attention sinks: a score for each head that takes part in the
            softmax and has no value; may require grad.
        options: What else a model passes. Sliding windows and padding are in the mask already (a
            mask that is known to be a window, as those of :func:`register` are, is not read);
            what cannot be done is refused, and the rest changes no result.

    Returns:
        Shape (B, L, heads, Ev), contiguous, and None in the place of the attention weights.

    Raises:
        RuntimeError: ``attention_mask`` is neither boolean nor floating; and what the operator
            raises.
        ValueError: ``options`` ask for what only eager attention can do; the message names it.
    """
    _refuse(options, s_aux is not None and bool(softcap))
    queries, keys = query.shape[2], key.shape[2]
    window_left = -1
    window = None if position_bias is not None else window_of(attention_mask, queries, keys)
    if window is not None and (
        s_aux is None or not may_have_derivatives((query, key, value, s_aux))
    ):
        key, value = (each[:, :, window.begin : window.end] for each in (key, value))
        attention_mask, is_causal, keys = None, False, window.end - window.begin
        window_left = window.left if queries > 1 else -1  # a single query sees all that are left
    if attention_mask is not None:
        attention_mask = _fitting(attention_mask, query, keys)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # In this order: with torch.compile's dynamic shapes the first is no plain bool.
    is_causal = queries > 1 and attention_mask is None and is_causal
    if is_causal and keys > queries:
        # The rest is a static cache's, not yet filled.
        key, value, keys = key[:, :, :queries], value[:, :, :queries], queries
    if position_bias is not None:
        position_bias = position_bias[..., :keys]
        attention_mask = _with_bias(position_bias, attention_mask, is_causal, queries, query.dtype)
        is_causal = False
    arguments = (query, key, value)
    rules = (attention_mask, dropout, is_causal)
    grouped = key.shape[1] != query.shape[1]
    if s_aux is None:
        output = scaled_dot_product_attention(
            *arguments,
            *rules,
            scale=scaling,
            enable_gqa=grouped,
            window_left=window_left,
            window_right=0 if window_left >= 0 else -1,
            softcap=softcap or 0.0,
        )
    else:
        output = attention_with_sinks(
            *(*arguments, s_aux, *rules),
            scale=scaling,
            enable_gqa=grouped,
            window_left=window_left,
        )
    return output.transpose(1, 2).contiguous(), None


def _refuse(options: dict[str, Any], caps_sinks: bool) -> None:
    """Raises ValueError where a model asks for what only eager attention can do."""
    for option, what in _REFUSED.items():
        if options.get(option) is not None and options[option] is not False:
            raise ValueError(f"attn_implementation='pkg': {option} is given, which asks for {what}")
    if caps_sinks:
        raise ValueError(
            "attn_implementation='pkg': s_aux and softcap are both given, which asks for sinks "
            "beside capped scores; choose attn_implementation='eager'"
        )


def _fitting(mask: Tensor, query: Tensor, keys: int) -> Tensor:
    """The mask without surplus columns, in a dtype that the operator takes."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise RuntimeError(
            f"attn_implementation='pkg': attention_mask is {mask.dtype}; it must be boolean, True "
            "where a key takes part, or floating, numbers to add to the scores"
        )
    if mask.shape[-1] > keys:
        mask = mask[..., :keys]
    if mask.dtype == torch.bool or mask.dtype in (query.dtype, torch.float32):
        return mask
    return mask.to(query.dtype)


def _with_bias(
    bias: Tensor, mask: Tensor | None, is_causal: bool, queries: int, dtype: torch.dtype
) -> Tensor:
    """The bias and the mask as one. Hidden keys get the lowest finite score, as with ``sdpa``."""
    if mask is None:
        if not is_causal:
            return bias
        keys = bias.shape[-1]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=bias.device).tril()
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(dtype).min)
    return bias + mask
