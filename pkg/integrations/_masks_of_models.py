"""Which masks a model of transformers can take: those of ``sdpa``, or those of ``eager`` alone.

The masks of ``sdpa`` are booleans, or None where there is nothing to hide, or nothing but the
future and the layer says so itself (``is_causal``). A model whose attention cannot be chosen adds
its mask to the scores in code of its own, where booleans hide nothing, and takes None for nothing
to hide. transformers refuses ``"sdpa"`` for such a model, but any name that was registered is
accepted. So models get the masks of ``sdpa`` that say that they can take them; all others get those
of ``eager``, numbers to add, which mean the same to every attention.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

_can_be_chosen: dict[type, bool] = {}


def by_model(chosen: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
    """A function of masks that asks what the model of a configuration can take.

    Args:
        chosen: makes the masks of models whose attention can be chosen.
        eager: makes those of all others; transformers' ``eager_mask``.

    Returns:
        A function with their arguments and results.
    """
    # Not as a decorator: that would import PyTorch's compiler with this module.
    can_choose = torch.compiler.assume_constant_result(_can_choose)

    def mask(*arguments: Any, **options: Any) -> Any:
        config = options.get("config")
        make = chosen if config is not None and can_choose(type(config)) else eager
        return make(*arguments, **options)

    return mask


def _can_choose(config: type) -> bool:
    """Whether all models of a kind of configuration say that their attention can be chosen."""
    if config not in _can_be_chosen:
        models = list(_models_of(config))
        _can_be_chosen[config] = bool(models) and all(map(_says_so, models))
        if not _can_be_chosen[config]:
            names = ", ".join(sorted(model.__name__ for model in models)) or "no model"
            warnings.warn(
                f"attn_implementation='pkg': of the models with a {config.__name__} ({names}) not "
                "all say that their attention can be chosen, by _supports_sdpa or "
                "_supports_attention_backend. They get the masks of 'eager'; what attends in code "
                "of its own stays as it is",
                stacklevel=3,
            )
    return _can_be_chosen[config]


def _says_so(model: Any) -> bool:
    return bool(model._supports_sdpa or getattr(model, "_supports_attention_backend", False))


def _models_of(config: type) -> Iterator[type]:
    """The models that were defined for a kind of configuration, or for what it is derived from."""
    from transformers import PreTrainedModel

    models = [each for each in _below(PreTrainedModel) if isinstance(each.config_class, type)]
    for kind in config.__mro__:
        of_kind = [each for each in models if each.config_class is kind]
        if of_kind:
            yield from of_kind
            return


def _below(kind: Any) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)
