"""What the operators' rules for vmap share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def each_slice(
    operator: Callable[..., Any],
    info: Any,
    in_dims: Sequence[int | None],
    *arguments: Any,
    out_dims: Sequence[int | None] | None = None,
) -> tuple[Any, Any]:
    """A rule for vmap: calls an operator with one slice after the other and stacks the results.

    For what cannot be one larger call. With the operator bound by :func:`functools.partial` it is
    what ``torch.library.register_vmap`` takes. Of no slices one of zeros is computed, which gives
    the shapes and dtypes of the results, and a graph in which they depend on the arguments.

    Args:
        operator: Returns a tensor or a tuple of tensors.
        info: What vmap gives a rule: of it ``batch_size``.
        in_dims: The vmap dimension of each argument, or None. Those at the end may be left out,
            as the dispatcher leaves out arguments that are defaults.
        arguments: The operator's.
        out_dims: Of an operator that returns a tuple, None for each result that does not depend
            on the slice, and 0 for the others; 0 for all by default.

    Returns:
        The results and the vmap dimension of each.
    """
    size = info.batch_size
    dims = (*in_dims, *(None,) * (len(arguments) - len(in_dims)))
    results = [
        operator(*(_slice(each, dim, index) for each, dim in zip(arguments, dims, strict=True)))
        for index in range(max(size, 1))
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results)[:size], 0
    if out_dims is None:
        out_dims = (0,) * len(results[0])
    stacked = (
        parts[0] if dim is None else torch.stack(parts)[:size]
        for parts, dim in zip(zip(*results, strict=True), out_dims, strict=True)
    )
    return tuple(stacked), tuple(out_dims)


def _slice(argument: Any, dim: int | None, index: int) -> Any:
    """One slice of an argument that has a vmap dimension; zeros where there is none."""
    if dim is None:
        return argument
    if argument.shape[dim] == 0:
        return argument.sum(dim, dtype=argument.dtype)
    return argument.select(dim, index)


def batch_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor with its vmap dimension first, a view; repeated where it has none."""
    if dim is None:
        return tensor.unsqueeze(0).expand(size, *tensor.shape)
    return tensor.movedim(dim, 0)
