"""Packing the weights of whole models."""

from __future__ import annotations

import warnings
from typing import TypeVar

import torch

from .nn.linear import Linear, why_not_packed
from .ops._arguments import check_instance

_Module = TypeVar("_Module", bound=torch.nn.Module)


def pack_weights_(model: _Module) -> _Module:
    """Packs the weight of every :class:`pkg.nn.Linear` of a model, for inference on frozen weights.

    What :meth:`pkg.nn.Linear.pack_weight` says of one layer is true of them all: **until the model
    is unpacked, its weights must not be modified**; what the calls after a write would multiply by
    is the old weight. ``model.train()`` unpacks it, and so do ``load_state_dict`` and every move;
    ``model.train().eval()`` if nothing else is wanted. It takes as much memory again as those
    weights.

    A layer that cannot be packed goes on with the weight itself, and one warning names each of them
    and says why; so does one for a model without such a layer.

    Args:
        model: In evaluation mode.

    Returns:
        The model.

    Raises:
        RuntimeError: The model is in training mode.
        TypeError: ``model`` is no module.

    Example:
        >>> import pkg
        >>> model = torch.nn.Sequential(pkg.nn.Linear(3, 4, activation="relu"), pkg.nn.Linear(4, 2))
        >>> _ = pkg.pack_weights_(model.eval())
        >>> with torch.inference_mode():
        ...     model(torch.ones(5, 3)).shape
        torch.Size([5, 2])
    """
    check_instance("pack_weights_", "model", model, torch.nn.Module, "a torch.nn.Module")
    if model.training:
        raise RuntimeError("pack_weights_: the model is in training mode; call eval() first")
    layers = {name: each for name, each in model.named_modules() if isinstance(each, Linear)}
    if not layers:
        warnings.warn(
            "nothing was packed: the model has no pkg.nn.Linear; pkg.replace_modules(model) makes "
            "those of PyTorch ours",
            stacklevel=2,
        )
    skipped: dict[str, str] = {}
    for name, layer in layers.items():
        reason = why_not_packed(layer)
        if reason is None:
            layer.pack_weight()
        else:
            skipped[name] = reason
    if skipped:
        reasons = "; ".join(f"{name or 'the model'}: {why}" for name, why in skipped.items())
        warnings.warn(f"not packed: {reasons}", stacklevel=2)
    return model
