"""What the constructors that take another module's parameters refuse."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized


def refuse_lazy(name: str, module: torch.nn.Module) -> None:
    """Refuses a module whose parameters are not there yet.

    Args:
        name: The function that was called.
        module: Its argument.

    Raises:
        ValueError: They are not.
    """
    if any(map(is_lazy, module.parameters())):
        raise ValueError(
            f"{name}: module is a {type(module).__name__} with parameters that have no shape "
            "before the first call; call it with an input first"
        )


def refuse_computed(name: str, module: torch.nn.Module, parameters: tuple[str, ...]) -> None:
    """Refuses a module of which something that is to be shared is no parameter.

    Args:
        name: The function that was called.
        module: Its argument.
        parameters: What is to be shared; each may be None.

    Raises:
        ValueError: There is such a one.
    """
    for each in parameters:
        if is_parametrized(module, each):
            raise ValueError(
                f"{name}: module's {each} is computed by a parametrization and is no parameter "
                "that could be shared; first call torch.nn.utils.parametrize."
                f"remove_parametrizations(module, {each!r}, leave_parametrized=True), or "
                "parametrize the new layer"
            )
        if not isinstance(getattr(module, each), torch.nn.Parameter | None):
            raise ValueError(
                f"{name}: module's {each} is no parameter that could be shared, as where a hook "
                "computes it; end that first, that of pruning by torch.nn.utils.prune."
                f"remove(module, {each!r}), or take pkg.replace_modules, which keeps hooks"
            )
