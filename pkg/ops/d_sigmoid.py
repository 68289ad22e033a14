"""``d_sigmoid``: the derivative of the logistic function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._call import operator, part
from ._forward_mode import added
from ._registration import fake_pointwise, register_fake, register_gradients
from ._sharding import register_sharding
from ._vmap import batch_to_front, register_pointwise_vmap
from .mul import mul

TABLE = (
    "`(1 - sigmoid(z)) * sigmoid(z)`, exact to the last digits for large `z` too",
    "floating",
    "yes, to any order",
)
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def d_sigmoid(z: Tensor) -> Tensor:
    """Computes the derivative of the sigmoid, ``(1 - σ(z)) σ(z)``, in one pass.

    It is computed from ``exp(-|z|)``, so no digits cancel for large ``|z|``.

    Args:
        z: Any shape; float16, bfloat16, float32 or float64.

    Returns:
        The derivative, of the shape and dtype of ``z``. Differentiable as often
        as wanted.

    Raises:
        RuntimeError: ``z`` is not floating.

    Example:
        >>> d_sigmoid(torch.tensor([0.0, 2.0, -2.0]))
        tensor([0.2500, 0.1050, 0.1050])
    """
    return torch.ops.pkg.d_sigmoid.default(z)


# grad times the derivative of d_sigmoid at z, in one pass.
_d_sigmoid_backward = part("d_sigmoid_backward")


@register_fake("d_sigmoid")
def _fake(z: Tensor) -> Tensor:
    return fake_pointwise("d_sigmoid", z, z, z.dtype)


@register_fake("d_sigmoid_backward")
def _fake_backward(grad: Tensor, z: Tensor) -> Tensor:
    return fake_pointwise("d_sigmoid_backward", z, grad, z.dtype)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    (z,) = ctx.saved_tensors
    return _d_sigmoid_backward(grad, z)


def _double_backward(ctx: Any, grad_grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    grad, z = ctx.saved_tensors
    grad_of_grad = grad_of_z = None
    if ctx.needs_input_grad[0]:
        grad_of_grad = _d_sigmoid_backward(grad_grad, z)
    if ctx.needs_input_grad[1]:
        grad_of_z = _bent(grad_grad, grad, z)
    return grad_of_grad, grad_of_z


def _bent(factor: Tensor, grad: Tensor, z: Tensor) -> Tensor:
    """Two factors and the second derivative of d_sigmoid at ``z``.

    The difference in it cancels, which costs no digit of the result in the next wider type:
    float32 is computed in float64, and float64, which has none, as it is.
    """
    half = z.dtype in (torch.float16, torch.bfloat16)
    wide = torch.float32 if half else torch.float64
    return mul(mul(factor.to(wide), grad.to(wide)), _second_derivative(z.to(wide))).to(z.dtype)


def _second_derivative(z: Tensor) -> Tensor:
    # With d = σ(1 - σ) and t = 1 - 2σ: d' = d t and d'' = d (t² - 2 d).
    d = d_sigmoid(z)
    t = -torch.tanh(z / 2)
    return mul(d, mul(t, t) - 2 * d)


def _tangent(values: Any, outputs: Any, tangents: Any) -> Tensor:
    return _d_sigmoid_backward(tangents[0], values[0])


def _backward_tangent(values: Any, outputs: Any, tangents: Any) -> Tensor:
    grad, z = values
    of_grad, of_z = tangents
    terms = [] if of_grad is None else [_d_sigmoid_backward(of_grad, z)]
    if of_z is not None:
        terms.append(_bent(of_z, grad, z))
    return added(terms)


def _vmap_backward(
    info: Any, in_dims: Sequence[int | None], grad: Tensor, z: Tensor
) -> tuple[Tensor, int]:
    grad, z = torch.broadcast_tensors(*batch_to_front((grad, z), in_dims))
    return _d_sigmoid_backward(grad, z), 0


register_gradients("d_sigmoid", _backward, tangent=_tangent)
register_gradients("d_sigmoid_backward", _double_backward, tangent=_backward_tangent)
register_pointwise_vmap("d_sigmoid")
torch.library.register_vmap("pkg::d_sigmoid_backward", _vmap_backward)
register_sharding("d_sigmoid", "z ... -> ...")
register_sharding("d_sigmoid_backward", "grad ..., z ... -> ...")
