"""Steps of optimizers by PyTorch's own fused kernels, under :func:`pkg.accelerate`.

PyTorch has a kernel of a whole step of Adam, AdamW, SGD and Adagrad on the CPU too, and takes it
only where ``fused=True`` asks for it; else a step is seven or more passes over all parameters,
gradients and moments. On a Zen 4 (2026-11-24, PyTorch 2.13, one thread, 10 million weights) a step
of AdamW took 19 ms, and 6.6 ms fused; of SGD with momentum 8.8 and 4.9; without momentum, where a
step is one pass in either way, the same.

So the functions that ``step`` of these optimizers call get another around them, once, which asks
for the fused kernel where the user has chosen neither way, and where it computes the same: it goes
over memory in order, and so wants every tensor of a parameter laid out alike. Nothing of an
optimizer changes, neither its groups nor what ``state_dict`` saves.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.optim
from torch import Tensor

from ._accelerate_counts import Route

_Function = Callable[..., None]

# The functional forms of optimizers, by the module of torch.optim that calls them, and how many of
# their first arguments are lists with a tensor for each parameter: parameters, gradients, moments.
# What follows these, of all but SGD, are steps, tensors of one element.
_LISTS = {"adam": 5, "sgd": 3, "adagrad": 3}
_HAS_STEPS = {"adam": True, "sgd": False, "adagrad": True}
# In half precision the fused SGD of PyTorch 2.13 and older leaves whole vectors of parameters as
# they were (pytorch#191763), and Adagrad's computes in that precision.
_WIDE = (torch.float32, torch.float64)
_DTYPES = {"adam": (*_WIDE, torch.bfloat16, torch.float16), "sgd": _WIDE, "adagrad": _WIDE}

route = Route()
"""A step of a group of parameters is one call."""

_is_registered = False


def register() -> None:
    """Puts the functions around PyTorch's, once; of a PyTorch that lacks one, it is left out."""
    global _is_registered
    if _is_registered:
        return
    _is_registered = True
    for name in _LISTS:
        # torch.optim deletes the names of its modules.
        module = sys.modules.get(f"torch.optim.{name}")
        function = getattr(module, name, None)
        if function is not None:
            # Of an import of this package that was forgotten.
            setattr(module, name, _choosing(name, getattr(function, "_before_pkg", function)))


def _choosing(name: str, function: _Function) -> _Function:
    """The functional form of an optimizer, with ``fused`` chosen where nobody has chosen."""
    lists = _LISTS[name]
    given_by_place = lists + _HAS_STEPS[name]

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> None:
        # Under torch.compile a step is compiled, which fuses it.
        if torch.compiler.is_compiling() or not route.is_on:
            return function(*args, **kwargs)
        fused = (
            len(args) == given_by_place
            and _is_free(kwargs)
            and _is_taken(name, args[:lists], kwargs)
            and all(_is_step(each) for steps in args[lists:] for each in steps)
        )
        if fused:
            kwargs["fused"] = True
        if not route.counts_calls or not args or not args[0]:
            function(*args, **kwargs)
        else:
            dtype = args[0][0].dtype
            route.run(f"optim.{name}", dtype, fused, lambda: function(*args, **kwargs))
        if fused:
            # The other ways raise the version by which autograd, and whatever is made of a
            # parameter, see that it was written.
            torch.autograd.graph.increment_version(args[0])
        return None

    step._before_pkg = function  # type: ignore[attr-defined]
    return step


def _is_free(options: dict[str, Any]) -> bool:
    """Whether the user has left the way to PyTorch, and asks for nothing that only others can."""
    return (
        # SGD does not hand ``differentiable`` on; of every optimizer gradients are on just for it.
        not torch.is_grad_enabled()
        and options.get("fused") is None
        and options.get("foreach") is None
        and not options.get("differentiable")
        and not options.get("capturable")
        and not options.get("has_complex")
        and not options.get("has_sparse_grad")
    )


def _is_taken(name: str, lists: Sequence[Sequence[Any]], options: dict[str, Any]) -> bool:
    """Whether the fused kernel computes the same, and in fewer passes over memory."""
    parameters, *others = lists
    if not parameters or (name == "sgd" and not options.get("momentum")):
        return False
    # Of a first step with momentum there is none yet, of Adam without amsgrad never a maximum.
    others = [each for each in others if each and any(one is not None for one in each)]
    dtype = parameters[0].dtype
    return dtype in _DTYPES[name] and all(
        _are_alike(tensors, dtype) for tensors in zip(parameters, *others, strict=True)
    )


def _is_step(step: Any) -> bool:
    """Whether the fused kernels count by it: what a state_dict brought may be of any dtype."""
    return isinstance(step, Tensor) and step.dtype in _WIDE and step.is_cpu


def _are_alike(tensors: tuple[Any, ...], dtype: torch.dtype) -> bool:
    """Whether the tensors of a parameter are plain, on the CPU, and dense in the same order."""
    for each in tensors:
        if type(each) is not Tensor and type(each) is not torch.nn.Parameter:
            return False
        if each.dtype is not dtype or not each.is_cpu or each.layout is not torch.strided:
            return False
    if all(each.is_contiguous() for each in tensors):
        return True
    first = tensors[0]
    return (
        first.ndim == 4
        and first.is_contiguous(memory_format=torch.channels_last)
        and all(each.stride() == first.stride() for each in tensors)
    )
