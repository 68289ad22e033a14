"""What the operators' registrations share: gradients, vmap and autocast.

Each operator's own module says what it computes; PyTorch keeps what is
registered here for the life of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

library = torch.library.Library("pkg", "IMPL")

_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def reduce_to(gradient: Tensor, like: Tensor) -> Tensor:
    """Sums a gradient over the dimensions that ``like`` was broadcast in, in its dtype."""
    if gradient.shape != like.shape:
        gradient = gradient.sum_to_size(like.shape)
    return gradient.to(like.dtype)


def register_lower_precision_autocast(name: str) -> None:
    """Under autocast, casts the operator's floating tensors to the autocast dtype.

    The rule of PyTorch's matmul and attention. float64 stays as it is, as there.
    """
    operator = getattr(torch.ops.pkg, name).default

    def register_for(device: str, key: str) -> None:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def autocast(*args: Any, **kwargs: Any) -> Any:
            dtype = torch.get_autocast_dtype(device)

            def cast(value: Any) -> Any:
                castable = (
                    isinstance(value, Tensor)
                    and value.is_floating_point()
                    and value.dtype != torch.float64
                    and value.device.type == device
                )
                return value.to(dtype) if castable else value

            with torch._C._ExcludeDispatchKeyGuard(keys):
                return operator(
                    *(cast(value) for value in args),
                    **{key: cast(value) for key, value in kwargs.items()},
                )

        library.impl(name, autocast, key)

    for device, key in _AUTOCAST_KEYS.items():
        register_for(device, key)


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
    """vmap of a pointwise operator on tensors (a, b) and other arguments."""
    operator: Callable[..., Any] = getattr(torch.ops.pkg, name).default

    def rule(
        info: Any, in_dims: Sequence[int | None], a: Tensor, b: Tensor, *rest: Any
    ) -> tuple[Tensor, int]:
        a, b = promoted_for_vmap(a, b, in_dims[:2])
        a, b = batch_to_front((a, b), in_dims[:2])
        return operator(a, b, *rest), 0

    torch.library.register_vmap(f"pkg::{name}", rule)
