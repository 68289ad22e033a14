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


def vmap_dim_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor with its vmap dimension first, a view; repeated where it has none."""
    if dim is None:
        return tensor.unsqueeze(0).expand(size, *tensor.shape)
    return tensor.movedim(dim, 0)


def batch_to_front(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
    """Lays tensors out so that their vmap dimension broadcasts as the first.

    Args:
        tensors: Tensors of which some have a vmap dimension.
        dims: For each the index of that dimension, or None.

    Returns:
        The tensors with the vmap dimension first and then as many dimensions as
        the one with most has; those without a vmap dimension as they were.
    """
    ranks = [t.dim() - (d is not None) for t, d in zip(tensors, dims, strict=True)]
    rank = max(ranks)
    laid_out = []
    for tensor, dim, own in zip(tensors, dims, ranks, strict=True):
        if dim is None:
            laid_out.append(tensor)
            continue
        moved = tensor.movedim(dim, 0)
        laid_out.append(moved.reshape(moved.shape[:1] + (1,) * (rank - own) + moved.shape[1:]))
    return laid_out


def promoted_for_vmap(a: Tensor, b: Tensor, dims: Sequence[int | None]) -> tuple[Tensor, Tensor]:
    """Two tensors under vmap in the dtype that their logical ranks promote to.

    A tensor without dimensions counts less in type promotion; with its vmap
    dimension it would have one, so it is converted beforehand.
    """
    logical = [
        torch.empty(() if t.dim() == (d is not None) else (0,), dtype=t.dtype, device="meta")
        for t, d in zip((a, b), dims, strict=True)
    ]
    dtype = torch.result_type(*logical)
    if logical[0].dim() == logical[1].dim():
        return a, b  # the usual promotion is right
    return a.to(dtype), b.to(dtype)


def register_pointwise_vmap(name: str) -> None:
    """Registers vmap of a pointwise operator on one or two tensors and then other arguments."""
    operator: Callable[..., Any] = getattr(torch.ops.pkg, name).default

    def of_one(info: Any, in_dims: Sequence[int | None], *values: Any) -> tuple[Tensor, int | None]:
        return operator(*values), in_dims[0]

    def of_two(
        info: Any, in_dims: Sequence[int | None], a: Tensor, b: Tensor, *rest: Any
    ) -> tuple[Tensor, int]:
        a, b = promoted_for_vmap(a, b, in_dims[:2])
        a, b = batch_to_front((a, b), in_dims[:2])
        return operator(a, b, *rest), 0

    arguments = operator._schema.arguments  # type: ignore[attr-defined]
    has_two = len(arguments) > 1 and isinstance(arguments[1].type, torch.TensorType)
    torch.library.register_vmap(f"pkg::{name}", of_two if has_two else of_one)
