"""How ``torch.fx`` sees this package's modules: each call is a node, as of PyTorch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Proxy, Tracer

from ..ops._arguments import check_tensor


def is_traced(*arguments: Any) -> bool:
    """Whether ``torch.fx`` traces one of the arguments, or of the elements of a pair in them."""
    return _first_proxy(arguments) is not None


def _first_proxy(arguments: tuple[Any, ...] | list[Any]) -> Proxy | None:
    for each in arguments:
        found = _first_proxy(each) if isinstance(each, (tuple, list)) else each
        if isinstance(found, Proxy):
            return found
    return None


def node_or_refusal(
    module: torch.nn.Module,
    name: str,
    argument: str,
    must_be: str,
    arguments: tuple[Any, ...],
    options: dict[str, Any] | None = None,
) -> Any:
    """What a module's ``forward`` returns for arguments that are not all tensors.

    ``torch.fx.symbolic_trace`` takes ``torch.nn``'s modules for leaves by where their class is
    defined, and would trace into ours, which look at dtypes and shapes.

    Args:
        module: The one that was called.
        name: Its class, in a refusal.
        argument: The first argument's name.
        must_be: What it has to be, in words.
        arguments: Those of the call, by position.
        options: And by keyword.

    Returns:
        The node of the call.

    Raises:
        TypeError: No argument stands for a tensor that is traced, or the module itself is what is
            traced.
    """
    proxy = _first_proxy(arguments)
    tracer = None if proxy is None else proxy.tracer
    if not isinstance(tracer, Tracer):
        return check_tensor(name, argument, arguments[0] if proxy is None else proxy, must_be)
    if tracer.root is module:
        raise TypeError(
            f"{name}: {argument} is of type Proxy: torch.fx is to trace into this module, which is "
            "a leaf, as those of torch.nn are; trace a model that contains it"
        )
    path = tracer.path_of_module(module)
    return tracer.create_proxy("call_module", path, arguments, options or {})
