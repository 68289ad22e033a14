"""``lltm_sequence``: the cell of :func:`pkg.ops.lltm`, step after step."""

from __future__ import annotations

import torch
from torch import Tensor

from ._call import operator
from ._registration import (
    register_fake,
    register_lower_precision_autocast,
)
from ._sharding import register_sharding
from .lltm import fake_states, register_through_forward, vmap_rule

_Two = tuple[Tensor, Tensor]


TABLE = (
    "all steps of a sequence: weights packed once, the input multiplied for many steps at a time",
    "floating",
    "yes, to any order",
)
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def lltm_sequence(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes all steps of an LLTM over a sequence; see :func:`pkg.ops.lltm` for the cell.

    Each step begins with the state and the cell of the one before. The weights are packed once
    for all steps, and the input is multiplied by its part of them many steps at a time: what
    remains of each step is the product with the state. Backward, too, only the state's gradient
    goes step by step; those of the input and of the weights are one product each.

    Args:
        input: Shape (T, B, F); float16, bfloat16, float32 or float64, any strides.
        weights: Shape (3H, H + F), of the same dtype and device, as all others.
        bias: Shape (3H,) or (1, 3H).
        old_h: Shape (B, H): what the first step begins with.
        old_cell: Shape (B, H), likewise.

    Returns:
        ``hidden`` and ``cells`` after each step, each of shape (T, B, H), contiguous.

    Raises:
        RuntimeError: Shapes do not match, dtypes or devices differ, or a dtype is not supported.

    Example:
        >>> zeros = torch.zeros(1, 2)
        >>> bias = torch.tensor([0.0, 0, 9, 9, 2, 2])  # half of elu(2) goes into the cell
        >>> inputs = torch.ones(3, 1, 1)
        >>> hidden, cells = lltm_sequence(inputs, torch.zeros(6, 3), bias, zeros, zeros)
        >>> cells[:, 0, 0]
        tensor([1., 2., 3.])
    """
    return torch.ops.pkg.lltm_sequence.default(input, weights, bias, old_h, old_cell)


@register_fake("lltm_sequence")
def _fake(input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor) -> _Two:
    shape = fake_states("lltm_sequence", 3, input, weights, bias, old_h, old_cell)
    return input.new_empty(shape), input.new_empty(shape)


register_through_forward("lltm_sequence", rank=3)
torch.library.register_vmap("pkg::lltm_sequence", vmap_rule(torch.ops.pkg.lltm_sequence.default))
register_lower_precision_autocast("lltm_sequence")
register_sharding("lltm_sequence", "input _ b _, old_h b _, old_cell b _ -> _ b _, _ b _")
