"""Quantising whole models."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from .nn.int4_linear import Int4Linear, is_finite, why_not_int4
from .ops._arguments import check_instance

Filter = Callable[[torch.nn.Module, str], bool]


def _is_linear(module: torch.nn.Module, name: str) -> bool:
    """The modules that are replaced unless said otherwise."""
    return isinstance(module, torch.nn.Linear)


def quantize_(
    model: torch.nn.Module, group_size: int = 128, filter: Filter | None = None
) -> torch.nn.Module:
    """Replaces linear layers of a model by :class:`pkg.nn.Int4Linear`, in place.

    A layer that cannot be quantised stays as it is, and one warning names each of them and says
    why: ``in_features`` that are no multiple of ``group_size``, ``out_features`` that are none of
    8, a weight that another module uses too (as an embedding does that is tied to the output), or
    that is not finite. A layer that occurs in several places is quantised once.

    What is saved of the quantised model is loaded by a model that was quantised in the same way,
    whatever its weights were::

        torch.save(pkg.quantize_(model).state_dict(), file)
        pkg.quantize_(new_model).load_state_dict(torch.load(file))

    The new model may be on the meta device, where it takes no memory and no time to quantise; load
    with ``assign=True`` then.

    Args:
        model: Any module; best in evaluation mode. If it is itself a layer to be replaced, its
            replacement is returned.
        group_size: 32, 64, 128 or 256: the smaller, the nearer the weights are to the original,
            and the more memory the scales take.
        filter: ``(module, qualified name) -> bool``: which modules to replace. They need a
            ``weight`` (out_features, in_features), and compute ``input @ weight.T + bias``. By
            default every :class:`torch.nn.Linear`.

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
    replaced: dict[torch.nn.Module, torch.nn.Module] = {}
    skipped: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        if not wanted(module, name):
            continue
        reason = _why_not(module, group_size, owners)
        if reason is None:
            replaced[module] = Int4Linear.from_linear(module, group_size)
        else:
            skipped[name] = reason
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in replaced:
                setattr(parent, name, replaced[child])
    if skipped:
        reasons = "; ".join(f"{name or 'the model'}: {why}" for name, why in skipped.items())
        warnings.warn(f"not quantised: {reasons}", stacklevel=2)
    return replaced.get(model, model)


def _owners(model: torch.nn.Module) -> dict[Tensor, int]:
    """How many modules have each parameter."""
    count: dict[Tensor, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            count[parameter] = count.get(parameter, 0) + 1
    return count


def _why_not(module: torch.nn.Module, group_size: int, owners: dict[Tensor, int]) -> str | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        return "it has no weight that is a floating matrix"
    if owners.get(weight, 1) > 1:
        return "its weight is another module's too"
    reason = why_not_int4(weight.shape[1], weight.shape[0], group_size)
    if reason is None and not is_finite(weight):
        return "its weight has values that are infinite or NaN"
    return reason
