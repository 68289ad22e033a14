"""First and second derivatives of an operator at once, for comparing it with PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def derivatives(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    draw: Callable[[Tensor, int], Tensor],
    *,
    may_leave_out: bool = False,
) -> list[Tensor]:
    """The result, the gradients of all inputs, and theirs with respect to all they depend on.

    Args:
        function: The operator.
        inputs: Its arguments.
        draw: Makes a tensor like another, from a seed: what gradients are multiplied by.
        may_leave_out: Whether the result may be independent of an input, whose gradient is zero.
    """
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    upstream = draw(output, 10).requires_grad_()
    gradients = torch.autograd.grad(
        output, leaves, upstream, create_graph=True, materialize_grads=may_leave_out
    )
    directions = [draw(gradient, 11 + index) for index, gradient in enumerate(gradients)]
    recorded = [(g, d) for g, d in zip(gradients, directions, strict=True) if g.requires_grad]
    second = torch.autograd.grad(
        [gradient for gradient, _ in recorded],
        [*leaves, upstream],
        [direction for _, direction in recorded],
        materialize_grads=True,  # a gradient that does not depend on an input
    )
    return [output.detach(), *(gradient.detach() for gradient in gradients), *second]
