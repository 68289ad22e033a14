"""What the attention operators share."""

from __future__ import annotations

import torch
from torch import Tensor

from ._sharding import Description


def drawn_seed(query: Tensor, dropout_p: float) -> Tensor | None:
    """Of PyTorch's generator, so that ``torch.manual_seed`` repeats it; None without dropout."""
    if not dropout_p > 0.0:
        return None
    limit = torch.iinfo(torch.int64).max
    return torch.randint(limit, (1,), dtype=torch.int64, device=query.device)


def new_output(query: Tensor, lead: torch.Size, value_size: int) -> Tensor:
    """An output with the strides that ``csrc/scaled_dot_product_attention.h`` gives it."""
    rows = query.shape[-2]
    heads_inside = (
        query.dim() == len(lead) + 2 >= 3
        and query.shape[-3] > 1
        and rows > 1
        and query.stride(-3) < query.stride(-2)
    )
    if heads_inside:
        return query.new_empty((*lead[:-1], rows, lead[-1], value_size)).transpose(-3, -2)
    return query.new_empty((*lead, rows, value_size))


def has_residual(query: Tensor | Description, keeps_residual: bool) -> bool:
    """Whether the forward operator returns what rounding took off its output."""
    return keeps_residual and query.dtype in (torch.float16, torch.bfloat16)


def refuse_derivatives_of_slopes(what: str, has_it: bool) -> None:
    if has_it:
        raise RuntimeError(
            f"scaled_dot_product_attention: alibi_slopes {what}, and there are no derivatives by "
            "it; pass alibi_slopes.detach(), or the bias as attn_mask"
        )


def refuse_distributed_dropout(dropout_seed: Description | None) -> None:
    """What is dropped depends on a seed, of which each process has drawn its own."""
    if dropout_seed is not None:
        raise RuntimeError(
            "scaled_dot_product_attention: dropout_p is not 0 and query is a DTensor; take the "
            "tensors' to_local(), of which each process drops its own, or a dropout_p of 0"
        )
