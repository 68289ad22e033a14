"""``linear``: the affine map of a layer and its activation, in one operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ._call import operator, part
from ._forward_mode import added, have_tangents
from ._registration import (
    below_autograd,
    check_one_device,
    fake_pointwise,
    library,
    recording,
    records_gradients,
    register_fake,
    register_gradients,
    register_lower_precision_autocast,
    register_recording,
)
from ._sharding import Description, register_sharding
from ._vmap import batch_to_front
from .matmul import matmul

ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")
"""What may follow the product."""


TABLE = (
    '`torch.nn.functional.linear` and then `"relu"`, `"gelu"`, `"gelu_tanh"` or `"silu"`,'
    " while the sums are in registers",
    "floating",
    "yes, to any order",
)
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Computes :func:`torch.nn.functional.linear` and an activation of its result.

    The bias is added and the activation applied while the sums of the product are in
    registers, in float32 (float64 for float64), and the result is rounded once. The
    gradient of the activation is one pass too; those of the operands are products by
    :func:`pkg.ops.matmul`, that of the bias a sum over the rows.

    Args:
        input: Shape (..., in_features); float16, bfloat16, float32 or float64, any strides.
        weight: Shape (out_features, in_features) or (in_features,), of the same dtype and
            device.
        bias: Shape (out_features,), or () where ``weight`` has one dimension.
        activation: None; ``"relu"``; ``"gelu"``, x Φ(x); ``"gelu_tanh"``, its approximation
            by the hyperbolic tangent (https://arxiv.org/abs/1606.08415); or ``"silu"``,
            x σ(x).

    Returns:
        Shape (..., out_features), contiguous; without out_features where ``weight`` has one
        dimension.

    Raises:
        RuntimeError: Shapes do not match, dtypes or devices differ, a dtype is not supported,
            or there is no such activation.

    Example:
        >>> linear(torch.tensor([1.0, -2.0]), torch.eye(2), activation="relu")
        tensor([1., 0.])
    """
    return torch.ops.pkg.linear.default(input, weight, bias, activation)


# The gradient of the activation's result times its derivative, in one pass, given the activation's
# argument or, for relu, its result.
_activation_backward: Callable[[Tensor, Tensor, str], Tensor] = part("linear_activation_backward")


def _keeps_pre_activation(activation: str | None) -> bool:
    """Whether the derivative needs the activation's argument: relu's is known from its result."""
    return activation not in (None, "relu")


def result_shape(
    name: str, input: Tensor, columns: int | torch.SymInt | None, bias: Tensor | None
) -> list[Any]:
    """For fake kernels: the shape of a result with ``columns`` output features."""
    torch._check(
        input.dim() >= 1,
        lambda: f"{name}: input has no dimensions; it needs at least one, of in_features",
    )
    if bias is None:
        pass
    elif columns is None:
        torch._check(
            bias.dim() == 0,
            lambda: (
                f"{name}: bias has shape {tuple(bias.shape)} but must have no dimensions, as "
                "weight has only one"
            ),
        )
    else:
        torch._check(
            bias.dim() == 1 and bias.shape[0] == columns,
            lambda: (
                f"{name}: bias has shape {tuple(bias.shape)} but must have shape ({columns},), "
                "one element for each output feature"
            ),
        )
    return [*input.shape[:-1], *([] if columns is None else [columns])]


def check_rows(
    name: str, input: Tensor, argument: str, weight: Tensor, inner: int | torch.SymInt
) -> None:
    """For fake kernels: rows of input have as many elements as those of the weight."""
    torch._check(
        input.shape[-1] == inner,
        lambda: (
            f"{name}: input of shape {tuple(input.shape)} and {argument} of shape "
            f"{tuple(weight.shape)} do not match: a row of input has {input.shape[-1]} elements "
            f"and one of the weight {inner}"
        ),
    )


def check_activation(name: str, activation: str | None) -> None:
    """For fake kernels: there is such an activation."""
    torch._check(
        activation in ACTIVATIONS,
        lambda: (
            f"{name}: activation is '{activation}'; supported are None, 'relu', 'gelu', "
            "'gelu_tanh' and 'silu'"
        ),
    )


@register_fake("linear")
def _fake(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    check_one_device("linear", input, weight, *([] if bias is None else [bias]))
    check_activation("linear", activation)
    torch._check(
        weight.dim() in (1, 2),
        lambda: (
            f"linear: weight has shape {tuple(weight.shape)} but must have shape (out_features, "
            "in_features) or (in_features,)"
        ),
    )
    columns = weight.shape[0] if weight.dim() == 2 else None
    shape = result_shape("linear", input, columns, bias)
    check_rows("linear", input, "weight", weight, weight.shape[-1])
    return input.new_empty(shape)


@register_fake("linear_forward")
def _fake_forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    output = _fake(input, weight, bias, activation)
    kept = _keeps_pre_activation(activation)
    return output, torch.empty_like(output) if kept else output.new_empty(0)


@register_fake("linear_activation_backward")
def _fake_activation_backward(grad: Tensor, saved: Tensor, activation: str) -> Tensor:
    return fake_pointwise("linear_activation_backward", saved, grad, saved.dtype)


def _autograd(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Records a call through the operator that keeps what the gradient needs."""
    # In forward mode too: the other operator has the formula.
    tensors = (input, weight, bias)
    if records_gradients(tensors) or have_tangents(tensors):
        forward = torch.ops.pkg.linear_forward.default
        output: Tensor = forward(input, weight, bias, activation)[0]
        return output
    result: Tensor = below_autograd("linear", linear, input, weight, bias, activation)
    return result


def _record(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The same with the dispatcher left out."""
    output: Tensor = _record_forward(input, weight, bias, activation)[0]
    return output


def _as_rows(tensor: Tensor) -> Tensor:
    """A matrix of the tensor's rows; reshape(-1, ...) could not count rows without elements."""
    if tensor.dim() == 2:
        return tensor
    return tensor.reshape(prod(tensor.shape[:-1]), tensor.shape[-1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, weight, _, activation = inputs
    ctx.activation, ctx.weight_is_vector = activation, weight.dim() == 1
    of_input, of_weight, _, _ = ctx.needs_input_grad
    ctx.saves = of_input or of_weight or activation is not None
    ctx.set_materialize_grads(False)
    result, pre_activation = output
    saved = pre_activation if _keeps_pre_activation(activation) else result
    ctx.save_for_backward(
        input if of_weight else None,
        weight if of_input else None,
        *([] if activation is None else [saved]),
    )


def _backward(
    ctx: Any, grad_output: Tensor | None, grad_pre_activation: Tensor | None
) -> tuple[Tensor | None, ...]:
    # Of a bias alone nothing is saved, and autograd may come again.
    kept: Sequence[Any] = ctx.saved_tensors if ctx.saves else (None, None)
    input, weight, *saved = kept
    grad = grad_output
    if grad is not None and saved:
        grad = _activation_backward(grad, saved[0], ctx.activation)
    if grad_pre_activation is not None and _keeps_pre_activation(ctx.activation):
        grad = grad_pre_activation if grad is None else grad + grad_pre_activation
    if grad is None:
        return None, None, None, None
    if ctx.weight_is_vector:
        grad = grad.unsqueeze(-1)
    rows = _as_rows(grad)
    grad_input = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_input = matmul(grad, weight.unsqueeze(0) if ctx.weight_is_vector else weight)
    if ctx.needs_input_grad[1]:
        grad_weight = matmul(rows.mT, _as_rows(input))
        if ctx.weight_is_vector:
            grad_weight = grad_weight.squeeze(0)
    if ctx.needs_input_grad[2]:
        # PyTorch's sum adds halves in float32, in an order that does not change.
        grad_bias = rows.sum(0)
        if ctx.weight_is_vector:
            grad_bias = grad_bias.reshape(())
    return grad_input, grad_weight, grad_bias, None


def _tangent(values: Any, outputs: Any, tangents: Any) -> tuple[Tensor, Tensor]:
    input, weight, _, activation = values
    of_input, of_weight, of_bias, _ = tangents
    # A copy: the result's tangent may be written to.
    terms = [] if of_bias is None else [of_bias.expand(outputs[0].shape).clone()]
    if of_input is not None:
        terms.append(linear(of_input, weight))
    if of_weight is not None:
        terms.append(linear(input, of_weight))
    total = added(terms)
    if _keeps_pre_activation(activation):
        return _activation_backward(total, outputs[1], activation), total
    if activation is not None:
        total = _activation_backward(total, outputs[0], activation)
    return total, torch.zeros_like(outputs[1])


def _setup_activation_context(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    grad, saved, ctx.activation = inputs
    ctx.save_for_backward(grad, saved)


def _activation_double_backward(
    ctx: Any, grad_grad: Tensor
) -> tuple[Tensor | None, Tensor | None, None]:
    grad, saved = ctx.saved_tensors
    grad_of_grad = grad_of_saved = None
    if ctx.needs_input_grad[0]:
        grad_of_grad = _activation_backward(grad_grad, saved, ctx.activation)
    if ctx.needs_input_grad[1] and _keeps_pre_activation(ctx.activation):
        grad_of_saved = _bent(grad_grad, grad, saved, ctx.activation)
    return grad_of_grad, grad_of_saved, None


def _bent(factor: Tensor, grad: Tensor, saved: Tensor, activation: str) -> Tensor:
    """Two factors and the activation's second derivative at ``saved``.

    A dozen roundings in a row: in the next wider type they cost no digit of the result.
    """
    half = saved.dtype in (torch.float16, torch.bfloat16)
    wide = torch.float32 if half else torch.float64
    slope = _second_derivative(saved.to(wide), activation)
    return (factor.to(wide) * grad.to(wide) * slope).to(saved.dtype)


def _activation_tangent(values: Any, outputs: Any, tangents: Any) -> Tensor:
    grad, saved, activation = values
    of_grad, of_saved, _ = tangents
    terms = [] if of_grad is None else [_activation_backward(of_grad, saved, activation)]
    if of_saved is not None and _keeps_pre_activation(activation):
        terms.append(_bent(of_saved, grad, saved, activation))
    return added(terms) if terms else torch.zeros_like(saved)


def _second_derivative(x: Tensor, activation: str) -> Tensor:
    if activation == "gelu":
        # x Φ(x), with Φ' = φ and φ' = -x φ: (2 - x²) φ(x), without an infinite x² times zero.
        root = torch.exp(-0.25 * x * x)
        return (2 * root.square() - (x * root).square()) * 0.3989422804014327
    # x σ(v), with v' = slope, v'' = bend, σ' = σ(v) σ(-v) and σ'' = σ' (1 - 2 σ(v)).
    scale, cubic = 1.5957691216057308, 0.044715
    if activation == "gelu_tanh":
        v = scale * (x + cubic * x * x * x)
        slope, bend = scale * (1 + 3 * cubic * x * x), scale * 6 * cubic * x
    else:
        v, slope, bend = x, torch.ones_like(x), torch.zeros_like(x)
    gate = torch.sigmoid(v) * torch.sigmoid(-v)
    return gate * (2 * slope + x * (bend - slope * slope * torch.tanh(v / 2)))


def activated(x: Tensor, activation: str | None) -> Tensor:
    """The activation of :func:`linear` by PyTorch's functions."""
    if activation == "relu":
        return F.relu(x)
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="none" if activation == "gelu" else "tanh") if activation else x


def _with_batched_weight(
    in_dims: Sequence[int | None],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """Output and activation's argument under vmap of weight or bias, dimension 0 the batch's."""
    _check_slices(in_dims, input, weight, bias, activation)
    if in_dims[0] is not None:
        input = input.movedim(in_dims[0], 0)
    batch, lead = [], list(input.shape[:-1])
    if in_dims[0] is not None:
        batch, lead = lead[:1], lead[1:]
    rows = input.reshape(*batch, prod(lead), input.shape[-1])
    if in_dims[1] is not None:
        weight = weight.movedim(in_dims[1], 0)
    one_dimension = weight.dim() - (in_dims[1] is not None) == 1
    matrix = weight.unsqueeze(-2) if one_dimension else weight
    half = input.dtype in (torch.float16, torch.bfloat16)
    sums = matmul(rows, matrix.mT, out_dtype=torch.float32 if half else None)
    if bias is not None:
        if in_dims[2] is not None:
            bias = bias.movedim(in_dims[2], 0)
            bias = bias.reshape(bias.shape[0], 1, sums.shape[-1])
        sums = sums + bias
    shape = [sums.shape[0], *lead, *([] if one_dimension else [sums.shape[-1]])]
    sums = sums.reshape(shape)
    return activated(sums, activation).to(input.dtype), sums.to(input.dtype)


def _check_slices(
    in_dims: Sequence[int | None],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
) -> None:
    """Refuses what the operator refuses of a slice, which other functions would compute."""
    slices = [
        # A batch may have no slice to take.
        each if each is None or dim is None else each.new_empty(each.movedim(dim, 0).shape[1:])
        for each, dim in zip((input, weight, bias), in_dims, strict=False)
    ]
    for name, each in (("weight", slices[1]), ("bias", slices[2])):
        torch._check(
            each is None or each.dtype == input.dtype,
            lambda name=name, each=each: (
                f"linear: {name} is {each.dtype} but input is {input.dtype}; convert one of them"
            ),
        )
    _fake(slices[0], slices[1], slices[2], activation)


def _vmap(
    info: Any,
    in_dims: Sequence[int | None],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, int]:
    in_dims = [*in_dims, None, None]
    if in_dims[1] is None and in_dims[2] is None:
        # The batch is one more leading dimension.
        return linear(input.movedim(in_dims[0] or 0, 0), weight, bias, activation), 0
    return _with_batched_weight(in_dims, input, weight, bias, activation)[0], 0


def _vmap_forward(
    info: Any,
    in_dims: Sequence[int | None],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int | None]]:
    if in_dims[1] is None and in_dims[2] is None:
        forward = torch.ops.pkg.linear_forward.default
        results = forward(input.movedim(in_dims[0] or 0, 0), weight, bias, activation)
    else:
        results = _with_batched_weight(in_dims, input, weight, bias, activation)
    output, pre_activation = results
    if _keeps_pre_activation(activation):
        return (output, pre_activation), (0, 0)
    return (output, output.new_empty(0)), (0, None)


def _vmap_activation_backward(
    info: Any, in_dims: Sequence[int | None], grad: Tensor, saved: Tensor, activation: str
) -> tuple[Tensor, int]:
    grad, saved = torch.broadcast_tensors(*batch_to_front((grad, saved), in_dims[:2]))
    return _activation_backward(grad, saved, activation), 0


def _sharding(
    input: Description, weight: Description, bias: Description | None, activation: str | None
) -> str:
    # Only of the sum itself may there be summands.
    inner = "_" if activation else "i"
    if len(weight.shape) == 1:
        return f"input ... {inner}, weight {inner}, + bias ... -> ..."
    return f"input ... {inner}, weight o {inner}, + bias o -> ... o"


def _sharding_forward(
    input: Description, weight: Description, bias: Description | None, activation: str | None
) -> str:
    line = _sharding(input, weight, bias, activation)
    kept = line.partition("->")[2] if _keeps_pre_activation(activation) else "0"
    return f"{line}, {kept}"


library.impl("linear", _autograd, "Autograd")
register_gradients("linear_forward", _backward, tangent=_tangent, setup_context=_setup_context)
_record_forward = recording("linear_forward")
register_gradients(
    "linear_activation_backward",
    _activation_double_backward,
    tangent=_activation_tangent,
    setup_context=_setup_activation_context,
)
torch.library.register_vmap("pkg::linear", _vmap)
torch.library.register_vmap("pkg::linear_forward", _vmap_forward)
torch.library.register_vmap("pkg::linear_activation_backward", _vmap_activation_backward)
register_lower_precision_autocast("linear")
register_recording("linear", _record)
register_sharding("linear", _sharding)
register_sharding("linear_forward", _sharding_forward)
register_sharding("linear_activation_backward", "grad ..., saved ... -> ...")
