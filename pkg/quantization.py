"""Quantising whole models."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import TypeVar, overload

import torch
from torch import Tensor
from torch.nn import MultiheadAttention
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from .nn.int4_linear import Int4Linear, can_be_scaled, why_not_int4
from .nn.linear import Linear, activation_of
from .ops._arguments import check_instance, is_kept_otherwise

_Module = TypeVar("_Module", bound=torch.nn.Module)
Filter = Callable[[torch.nn.Module, str], bool]

# What computes `input @ weight.T + bias` and, apart from an activation, nothing else.
_FORWARDS = (torch.nn.Linear.forward, Linear.forward)
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
# From which share on it is said that parameters stay floating which no linear layer has.
_LARGE_SHARE = 0.1
_MOST_NAMES = 4

# These dictionaries a layer that is quantised keeps, the objects themselves: a hook's handle
# removes it from the one where it was registered.
_CARRIED_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
)
_STATE_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def _is_linear(module: torch.nn.Module, name: str) -> bool:
    """The modules that are replaced unless said otherwise."""
    return isinstance(module, torch.nn.Linear)


@overload
def quantize_(
    model: torch.nn.Linear, group_size: int = 128, filter: Filter | None = None
) -> torch.nn.Module: ...
@overload
def quantize_(model: _Module, group_size: int = 128, filter: Filter | None = None) -> _Module: ...
def quantize_(
    model: torch.nn.Module, group_size: int = 128, filter: Filter | None = None
) -> torch.nn.Module:
    """Replaces linear layers of a model by :class:`pkg.nn.Int4Linear`, in place.

    A layer that cannot be quantised stays as it is, and one warning names each of them and says
    why: ``in_features`` that are no multiple of ``group_size``, ``out_features`` that are none of
    8, a weight that another module uses too (as an embedding does that is tied to the output, and
    :class:`torch.nn.MultiheadAttention` that of its ``out_proj``), that a hook computes, or that is
    not finite, an activation, hooks on its state, one that :func:`torch.compile` has compiled, or,
    without a ``filter``, a ``forward``, parameters, buffers or modules of its own. A layer that
    occurs in several places is quantised once. Its other hooks go with it.

    Only linear layers are quantised. Another warning says how much else stays floating where that
    is a tenth or more of the elements of matrices, embeddings not counted: experts in parameters of
    three dimensions, ``Conv1D`` of transformers' GPT-2, convolutions, the inner projections of
    :class:`torch.nn.MultiheadAttention`.

    :class:`torch.nn.TransformerEncoderLayer` whose layers are quantised no longer takes PyTorch's
    fused way in inference, which multiplies by floating weights: its ``activation_relu_or_gelu``
    is set to 0, and ``use_nested_tensor`` of a :class:`torch.nn.TransformerEncoder` to False.

    What is saved of the quantised model is loaded by a model that was quantised in the same way,
    whatever its weights were::

        torch.save(pkg.quantize_(model).state_dict(), file)
        pkg.quantize_(new_model).load_state_dict(torch.load(file))

    The new model may be on the meta device, where it takes no memory and no time to quantise; load
    with ``assign=True`` then.

    ``torch.compile`` and ``torch.export`` take a quantised model. ``torch.jit.script`` does not,
    nor does ``torch.onnx.export``: ONNX has no operator for quantised layers.

    Adapters (LoRA) are trained on a quantised model, through which gradients flow, while they stay
    floating themselves: quantise before they are added, or leave them out, as those of peft::

        pkg.quantize_(
            model,
            filter=lambda module, name: type(module) is torch.nn.Linear and "lora_" not in name,
        )

    They cannot be merged into four bits: ``merge_and_unload()`` is for the model as it was.

    Args:
        model: Any module; best in evaluation mode. If it is itself a layer to be replaced, its
            replacement is returned.
        group_size: 32, 64, 128 or 256: the smaller, the nearer the weights are to the original,
            and the more memory the scales take.
        filter: ``(module, qualified name) -> bool``: which modules to replace. They need a
            ``weight`` (out_features, in_features), and compute ``input @ weight.T + bias``: what
            else their ``forward`` does is lost. By default every :class:`torch.nn.Linear` whose
            ``forward`` is that class's or :class:`pkg.nn.Linear`'s.

    Returns:
        The model.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``group_size`` is another number.

    Example:
        >>> import pkg
        >>> model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU())
        >>> pkg.quantize_(model, group_size=64)
        Sequential(
          (0): Int4Linear(in_features=128, out_features=256, bias=True, group_size=64)
          (1): ReLU()
        )
    """
    check_instance("quantize_", "model", model, torch.nn.Module, "a torch.nn.Module")
    problem = why_not_int4(group_size, 8, group_size)
    if problem is not None:
        raise ValueError(problem)
    wanted = filter or _is_linear
    owners = _owners(model)
    # Their weights are read by the parent, which calls no module.
    read = {each.out_proj for each in model.modules() if isinstance(each, MultiheadAttention)}
    compiled = _compiled(model)
    matrices = _matrices(model)
    replaced: dict[torch.nn.Module, torch.nn.Module] = {}
    skipped: dict[str, str] = {}
    named: set[Tensor] = set()
    for name, module in list(model.named_modules()):
        if not wanted(module, name):
            continue
        reason = _why_not_layer(module) if filter is None else None
        if module in read:
            reason = "torch.nn.MultiheadAttention reads its weight"
        elif module in compiled:
            reason = "torch.compile has compiled it: quantise before"
        reason = reason or _why_not(module, group_size, owners)
        if reason is None and filter is None:
            reason = _why_not_with_all(module)
        if reason is None:
            replaced[module] = _quantised(module, group_size)
        else:
            skipped[name] = reason
            named.update(module.parameters())
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in replaced:
                setattr(parent, name, replaced[child])
    _end_fused_encoders(model, set(replaced.values()))
    if skipped:
        reasons = "; ".join(f"{name or 'the model'}: {why}" for name, why in skipped.items())
        warnings.warn(f"not quantised: {reasons}", stacklevel=2)
    model = replaced.get(model, model)
    if filter is not None:
        if not replaced and not skipped:
            warnings.warn("nothing was quantised: filter takes no module", stacklevel=2)
    else:
        words = _what_is_left(model, matrices, named, nothing=not replaced and not skipped)
        if words is not None:
            warnings.warn(words, stacklevel=2)
    return model


def _quantised(module: torch.nn.Module, group_size: int) -> Int4Linear:
    """What takes a module's place, with its hooks."""
    new = Int4Linear.from_linear(module, group_size)
    for name in _CARRIED_HOOKS:
        new.__dict__[name] = module.__dict__[name]
    return new


def _end_fused_encoders(model: torch.nn.Module, new: set[torch.nn.Module]) -> None:
    """Takes PyTorch's fused encoders, which read weights, the slower way that calls modules."""
    ended: set[torch.nn.Module] = set()
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoderLayer) and (
            getattr(module, "linear1", None) in new or getattr(module, "linear2", None) in new
        ):
            module.activation_relu_or_gelu = 0
            ended.add(module)
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoder) and not ended.isdisjoint(module.layers):
            module.use_nested_tensor = False


def _owners(model: torch.nn.Module) -> dict[Tensor, int]:
    """How many modules have each parameter."""
    count: dict[Tensor, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            count[parameter] = count.get(parameter, 0) + 1
    return count


def _compiled(model: torch.nn.Module) -> set[torch.nn.Module]:
    """The modules that are compiled themselves, not as a part of others.

    What stands for such a module calls a method of the very object.
    """
    compiled = {each for each in model.modules() if each._compiled_call_impl is not None}
    frames = sys.modules.get("torch._dynamo.eval_frame")  # slow to import
    if frames is not None:
        wrappers = (each for each in model.modules() if isinstance(each, frames.OptimizedModule))
        compiled.update(each._orig_mod for each in wrappers)
    return compiled


def _matrices(model: torch.nn.Module) -> dict[Tensor, int]:
    """Of each floating parameter with two and more dimensions, but for embeddings, the elements."""
    embeddings = {
        parameter
        for module in model.modules()
        if isinstance(module, _EMBEDDINGS)
        for parameter in module.parameters(recurse=False)
    }
    return {
        parameter: parameter.numel()
        for parameter in model.parameters()
        if not is_lazy(parameter)
        and parameter.dim() >= 2
        and parameter.is_floating_point()
        and parameter not in embeddings
    }


def _what_is_left(
    model: torch.nn.Module, before: dict[Tensor, int], named: set[Tensor], *, nothing: bool
) -> str | None:
    """What stays floating without being a linear layer's, in words; None where it is little.

    Args:
        model: As it is now.
        before: The matrices that it had.
        named: Parameters of layers of which it was said that they stay.
        nothing: Whether the model has no linear layer.
    """
    left = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter in before and parameter not in named
    }
    elements, total = sum(map(before.__getitem__, left.values())), sum(before.values())
    if nothing and not elements:
        if any(isinstance(module, Int4Linear) for module in model.modules()):
            return "nothing was quantised: the model's linear layers are Int4Linear already"
        return "nothing was quantised: the model has no torch.nn.Linear"
    if not elements or elements < _LARGE_SHARE * total:
        return None
    names = sorted(left, key=lambda name: -before[left[name]])[:_MOST_NAMES]
    listed = ", ".join(f"{name} {tuple(left[name].shape)}" for name in names)
    more = f" and {len(left) - len(names)} more" if len(left) > len(names) else ""
    return (
        f"{'nothing' if nothing else 'not all'} was quantised: {elements:,} of {total:,} elements "
        f"({elements / total:.0%}, embeddings not counted) stay floating in {len(left)} parameters "
        f"that are no torch.nn.Linear's, the only layer that is quantised: {listed}{more}"
    )


def _why_not_layer(module: torch.nn.Module) -> str | None:
    """What keeps a linear layer that nobody asked for by a filter from being replaced, in words."""
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if type(module).forward not in _FORWARDS:
        return f"{type(module).__qualname__} has a forward of its own"
    return None


def _why_not_with_all(module: torch.nn.Module) -> str | None:
    """What of a layer that nobody asked for by a filter would be lost, in words."""
    if is_parametrized(module):
        return None
    parts = (module._parameters, module._buffers, module._modules)
    more = sorted(set().union(*parts) - {"weight", "bias"})
    return f"it has {', '.join(more)} besides, which would be lost" if more else None


def _why_not(module: torch.nn.Module, group_size: int, owners: dict[Tensor, int]) -> str | None:
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and is_lazy(weight):
        return "its weight has no shape before the first call"
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        return "it has no weight that is a floating matrix"
    if is_kept_otherwise(weight):
        return f"its weight is a {type(weight).__name__}, which keeps its values in its own way"
    activation = activation_of(module)
    if activation is not None:
        return f"it applies {activation!r}, which Int4Linear does not"
    if owners.get(weight, 1) > 1:
        return "its weight is another module's too"
    for name in ("weight", "bias"):
        if name in module.__dict__ and module._forward_pre_hooks:
            return f"a hook computes its {name}"
    # Those of a parametrisation go with it: what is quantised is the weight that it computes.
    if not is_parametrized(module) and any(module.__dict__[name] for name in _STATE_HOOKS):
        return "it has hooks on its state_dict"
    reason = why_not_int4(weight.shape[1], weight.shape[0], group_size)
    if reason is None and not can_be_scaled(weight):
        return "its weight has values that are infinite or NaN, or above 2**126"
    return reason
