"""Putting our modules into whole models, and taking them out."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch
from torch.nn.utils.parametrize import is_parametrized

from .nn.linear import FLOATING, Linear, activation_of
from .nn.multihead_attention import MultiheadAttention
from .ops._arguments import check_instance, is_kept_otherwise

_OURS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.Linear: Linear,
    torch.nn.MultiheadAttention: MultiheadAttention,
}
_Module = TypeVar("_Module", bound=torch.nn.Module)

# Attributes that our modules have and PyTorch's have not.
_OF_OURS = {"activation", "_packed"}
# Of a module that was replaced: what it was.
_REPLACES = "_pkg_replaces"


def replace_modules(model: _Module) -> _Module:
    """Makes PyTorch's modules in a model ours, in place, where there is one of ours.

    :class:`torch.nn.Linear` becomes :class:`pkg.nn.Linear`, :class:`torch.nn.MultiheadAttention`
    becomes :class:`pkg.nn.MultiheadAttention`. Each module stays the object that it is and only
    changes its class: parameters, ties between them, buffers, hooks, mode, names and what an
    optimiser holds are untouched, and ``state_dict`` is what it was. :func:`restore_modules` takes
    ours out again.

    Modules of a subclass, of which nobody knows what else it does, parametrised ones, those whose
    weights are not of a floating dtype, are sparse, or are of a tensor subclass with a way of its
    own to keep them, as torchao's quantised ones are, and those that have attributes of the names
    that ours need, ``activation`` or ``_packed``, stay as they are. Code that asks for the exact
    type, ``type(module) is torch.nn.Linear``, sees the change; ``isinstance`` does not. What
    PyTorch's fused inference path of ``torch.nn.TransformerEncoderLayer`` computes, it computes
    without calling any module. ``torch.fx.symbolic_trace`` makes a node of each call, as of
    PyTorch's modules; ``torch.jit.script`` does not compile ours, and ``torch.onnx.export`` has no
    operator for them: restore the model's before.

    Args:
        model: Any module, itself one of these too.

    Returns:
        The model.

    Raises:
        TypeError: ``model`` is no module.

    Example:
        >>> import pkg
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
        >>> type(pkg.replace_modules(model)[0]) is pkg.nn.Linear
        True
        >>> type(pkg.restore_modules(model)[0]) is torch.nn.Linear
        True
    """
    check_instance("replace_modules", "model", model, torch.nn.Module, "a torch.nn.Module")
    for module in model.modules():
        original = type(module)
        if original in _OURS and _can_be_ours(module):
            if original is torch.nn.Linear:
                module.__dict__["activation"] = None  # before a call of ours could ask for it
            module.__dict__[_REPLACES] = original
            module.__class__ = _OURS[original]
    return model


def _can_be_ours(module: torch.nn.Module) -> bool:
    """Whether ours computes the same of its parameters, and needs none of the names it has."""
    is_plain = all(
        each.layout == torch.strided and each.dtype in FLOATING and not is_kept_otherwise(each)
        for each in module.parameters()
    )
    return is_plain and not _OF_OURS & module.__dict__.keys()


def restore_modules(model: _Module) -> _Module:
    """Undoes :func:`replace_modules`, in place; modules that were ours before stay ours.

    A packed weight is given up. ``torch.jit.script`` and ``torch.onnx.export`` want PyTorch's
    modules: restore a model before them.

    A module whose class has been changed since, as parametrizations and FSDP's ``fully_shard`` do,
    or one that was given an activation, stays as it is, and one warning names each of them: this
    function restores it once that is undone.

    Args:
        model: Any module.

    Returns:
        The model.

    Raises:
        TypeError: ``model`` is no module.
    """
    check_instance("restore_modules", "model", model, torch.nn.Module, "a torch.nn.Module")
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        original = module.__dict__.get(_REPLACES)
        if original is None:
            continue
        if type(module) not in (original, _OURS[original]):
            skipped[name] = _why_not_restored(module)
            continue
        activation = activation_of(module)
        if activation is not None:
            skipped[name] = f"it applies {activation!r} since, which a torch.nn.Linear would not"
            continue
        for ours in _OF_OURS if original is torch.nn.Linear else ():
            module.__dict__.pop(ours, None)
        del module.__dict__[_REPLACES]
        module.__class__ = original
    if skipped:
        reasons = "; ".join(f"{name or 'the model'}: {why}" for name, why in skipped.items())
        warnings.warn(f"not restored: {reasons}", stacklevel=2)
    return model


def _why_not_restored(module: torch.nn.Module) -> str:
    """What was done to a module since it was replaced, and how to undo it, in words."""
    remedy = "undo that first, or restore before it"
    if is_parametrized(module):
        parametrizations: Any = module.parametrizations
        names = ", ".join(parametrizations)
        remedy = f"first call torch.nn.utils.parametrize.remove_parametrizations for its {names}"
    return f"replace_modules made it ours, and then it became a {type(module).__name__}; {remedy}"
