"""``lltm``: the recurrent cell of PyTorch's tutorial on C++ extensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ._call import operator, part
from ._forward_mode import have_tangents, tangent_by
from ._registration import (
    below_autograd,
    check_one_device,
    library,
    recording,
    records_gradients,
    register_fake,
    register_gradients,
    register_lower_precision_autocast,
    register_recording,
)
from ._sharding import Description, register_sharding
from ._vmap import each_slice, vmap_dim_first

_Two = tuple[Tensor, Tensor]
_Three = tuple[Tensor, Tensor, Tensor]
_Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


TABLE = (
    "a step of the recurrent cell of PyTorch's tutorial on C++ extensions, its gates "
    "activated while their sums are in the cache; the module is `pkg.nn.LLTM`",
    "floating",
    "yes, to any order",
)
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def lltm(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes one step of an LLTM, a long-long-term-memory cell.

    The cell is that of PyTorch's tutorial "Custom C++ and CUDA Extensions" (Goldsborough,
    https://docs.pytorch.org/tutorials/advanced/cpp_extension.html). With the gates
    ``[old_h, input] @ weights.T + bias`` split in three, g0, g1 and g2:

    - ``new_cell = old_cell + elu(g2) * sigmoid(g0)``
    - ``new_h = tanh(new_cell) * sigmoid(g1)``

    ``old_h`` and ``input`` are never copied beside each other, and the gates are activated while
    the sums of the product are in the cache, in float32 (float64 for float64). The gradients of
    all gates and of the bias are one pass; the others are products with them.

    Args:
        input: Shape (B, F); float16, bfloat16, float32 or float64, any strides.
        weights: Shape (3H, H + F), of the same dtype and device, as all others.
        bias: Shape (3H,) or (1, 3H).
        old_h: Shape (B, H).
        old_cell: Shape (B, H).

    Returns:
        ``new_h`` and ``new_cell``, each of shape (B, H), contiguous.

    Raises:
        RuntimeError: Shapes do not match, dtypes or devices differ, or a dtype is not supported.

    Example:
        >>> zeros = torch.zeros(1, 2)
        >>> bias = torch.tensor([0.0, 0, 9, 9, 2, 2])  # half of elu(2) goes into the cell
        >>> new_h, new_cell = lltm(torch.ones(1, 3), torch.zeros(6, 5), bias, zeros, zeros)
        >>> new_cell
        tensor([[1., 1.]])
    """
    return torch.ops.pkg.lltm.default(input, weights, bias, old_h, old_cell)


_lltm_backward: Callable[..., _Five] = part("lltm_backward")


def fake_states(name: str, rank: int, *tensors: Tensor) -> tuple[Any, ...]:
    """For fake kernels: the shape of the states, of one step or of all.

    Args:
        name: The operator.
        rank: How many dimensions ``input`` has.
        tensors: input, weights, bias, old_h and old_cell.
    """
    check_one_device(name, *tensors)
    input, weights, _, old_h, _ = tensors
    torch._check(input.dim() == rank, lambda: f"{name}: input must have {rank} dimensions")
    hidden = old_h.shape[1]
    torch._check(
        weights.shape[1] == hidden + input.shape[-1],
        lambda: f"{name}: weights do not match input and old_h",
    )
    return (*input.shape[:-1], hidden)


@register_fake("lltm")
def _fake(input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor) -> _Two:
    shape = fake_states("lltm", 2, input, weights, bias, old_h, old_cell)
    return input.new_empty(shape), input.new_empty(shape)


@register_fake("lltm_forward")
def _fake_forward(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> _Three:
    shape = fake_states("lltm_forward", input.dim(), input, weights, bias, old_h, old_cell)
    gates = (*shape[:-1], weights.shape[0])
    return input.new_empty(shape), input.new_empty(shape), input.new_empty(gates)


@register_fake("lltm_backward")
def _fake_backward(
    grad_hidden: Tensor | None,
    grad_cells: Tensor | None,
    grad_gates: Tensor | None,
    gates: Tensor,
    hidden: Tensor,
    cells: Tensor,
    input: Tensor,
    weights: Tensor,
    old_h: Tensor,
    needs_input: bool,
    needs_weights: bool,
    needs_old_h: bool,
) -> _Five:
    tensors = (grad_hidden, grad_cells, grad_gates, gates, hidden, cells, input, weights, old_h)
    check_one_device("lltm_backward", *(tensor for tensor in tensors if tensor is not None))
    return (
        input.new_empty(input.shape if needs_input else 0),
        input.new_empty(weights.shape if needs_weights else 0),
        input.new_empty(weights.shape[:1]),
        input.new_empty(old_h.shape if needs_old_h else 0),
        input.new_empty(old_h.shape),
    )


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: _Three) -> None:
    input, weights, bias, old_h, _ = inputs
    hidden, cells, gates = output
    ctx.bias_is_vector = bias.dim() == 1
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gates, hidden, cells, input, weights, old_h)


def _backward(
    ctx: Any, grad_hidden: Tensor | None, grad_cells: Tensor | None, grad_gates: Tensor | None
) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    if grad_hidden is None and grad_cells is None and grad_gates is None:
        return (None,) * 5
    gradients = _lltm_backward(
        grad_hidden, grad_cells, grad_gates, *ctx.saved_tensors, needs[0], needs[1], needs[3]
    )
    if ctx.bias_is_vector and all(needs):
        return gradients
    return (
        gradients[0] if needs[0] else None,
        gradients[1] if needs[1] else None,
        (gradients[2] if ctx.bias_is_vector else gradients[2].unsqueeze(0)) if needs[2] else None,
        gradients[3] if needs[3] else None,
        gradients[4] if needs[4] else None,
    )


def _plain_forward(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> _Three:
    """What ``lltm_forward`` computes, by PyTorch's operators in the next wider type."""
    dtype, is_cell, size = input.dtype, input.dim() == 2, old_h.shape[-1]
    input, weights, bias, state, cell = (
        each.to(_wider(dtype)) for each in (input, weights, bias, old_h, old_cell)
    )
    steps = []
    for given in input.unsqueeze(0) if is_cell else input:
        gates = torch.cat([state, given], -1) @ weights.mT + bias
        in_gate, out_gate, candidate = gates.unflatten(-1, (3, size)).unbind(-2)
        cell = cell + F.elu(candidate) * torch.sigmoid(in_gate)
        state = torch.tanh(cell) * torch.sigmoid(out_gate)
        steps.append((state, cell, gates))
    if not steps:
        states = old_h.new_empty(0, *old_h.shape)
        return states, states, bias.new_empty(0, len(old_h), len(weights), dtype=dtype)
    hidden, cells, gates = (
        (parts[0] if is_cell else torch.stack(parts)).to(dtype)
        for parts in zip(*steps, strict=True)
    )
    return hidden, cells, gates


def _wider(dtype: torch.dtype) -> torch.dtype:
    """A few dozen roundings in a row cost no digit of a result of ``dtype`` in this one."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.float64


def _plain_backward(
    grad_hidden: Tensor,
    grad_cells: Tensor,
    grad_gates: Tensor,
    gates: Tensor,
    hidden: Tensor,
    cells: Tensor,
    input: Tensor,
    weights: Tensor,
    old_h: Tensor,
) -> _Five:
    """What ``lltm_backward`` computes, by PyTorch's operators, and of a sequence."""
    size = old_h.shape[-1]
    in_gate, out_gate, candidate = gates.unflatten(-1, (3, size)).unbind(-2)
    states = torch.cat([old_h.unsqueeze(0), hidden[:-1]]) if len(hidden) else hidden
    opened, closing = torch.sigmoid(out_gate), torch.sigmoid(-out_gate)
    squashed = torch.tanh(cells)
    of_cell = F.elu(candidate) * torch.sigmoid(in_gate) * torch.sigmoid(-in_gate)
    of_candidate = torch.sigmoid(in_gate) * torch.exp(candidate.clamp(max=0))
    through = opened * (1 - squashed * squashed)
    grad_h, grad_cell = torch.zeros_like(old_h), torch.zeros_like(old_h)
    all_gates = []
    for step in reversed(range(len(gates))):
        grad_h = grad_h + grad_hidden[step]
        grad_cell = grad_cell + grad_cells[step] + grad_h * through[step]
        parts = (
            grad_cell * of_cell[step],
            grad_h * squashed[step] * opened[step] * closing[step],
            grad_cell * of_candidate[step],
        )
        all_gates.append(torch.cat(parts, -1) + grad_gates[step])
        grad_h = all_gates[-1] @ weights[:, :size]
    total = torch.stack(all_gates[::-1]) if all_gates else gates
    rows = total.flatten(0, 1)
    sources = torch.cat([states, input], -1).flatten(0, 1)
    return total @ weights[:, size:], rows.mT @ sources, rows.sum(0), grad_h, grad_cell


def _setup_backward_context(ctx: Any, inputs: tuple[Any, ...], output: _Five) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.needs = (inputs[9], inputs[10], True, inputs[11], True)
    ctx.set_materialize_grads(False)


def _inputs_of_plain_backward(tensors: Sequence[Any]) -> list[Tensor]:
    """Those of ``lltm_backward``, of a step as of a sequence of one, in the next wider type."""
    *optional, gates, hidden, cells, input, weights, old_h = tensors
    wide = _wider(gates.dtype)

    def widened(tensor: Tensor | None, like: Tensor) -> Tensor:
        value = torch.zeros_like(like, dtype=wide) if tensor is None else tensor.to(wide)
        return value.unsqueeze(0) if gates.dim() == 2 else value

    return [
        *map(widened, optional, (cells, cells, gates)),
        *(widened(each, each) for each in (gates, hidden, cells, input)),
        *(weights.to(wide), old_h.to(wide)),
    ]


def _double_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """The derivative of :func:`_plain_backward`."""
    saved = ctx.saved_tensors
    dtype = saved[3].dtype
    inputs = _inputs_of_plain_backward(saved)
    outputs, pull_back = torch.func.vjp(_plain_backward, *inputs)  # type: ignore[misc]
    given = [
        torch.zeros_like(output)
        if gradient is None or not needed
        else gradient.to(output.dtype).reshape(output.shape)
        for gradient, output, needed in zip(gradients, outputs, ctx.needs, strict=True)
    ]
    of_inputs = pull_back(tuple(given))
    return (
        *(
            of_input.to(dtype).reshape(tensor.shape) if needed and tensor is not None else None
            for of_input, tensor, needed in zip(
                of_inputs, saved, ctx.needs_input_grad, strict=False
            )
        ),
        *(None,) * 3,
    )


def _backward_to_be_pushed(*values: Any) -> tuple[Tensor, ...]:
    """``lltm_backward`` by PyTorch's operators."""
    tensors, (needs_input, needs_weights, needs_old_h) = values[:9], values[9:]
    input, weights, old_h = tensors[6:]
    shapes = (input.shape, weights.shape, weights.shape[:1], old_h.shape, old_h.shape)
    needed = (needs_input, needs_weights, True, needs_old_h, True)
    results = _plain_backward(*_inputs_of_plain_backward(tensors))
    return tuple(
        result.to(input.dtype).reshape(shape) if need else input.new_empty(0)
        for result, shape, need in zip(results, shapes, needed, strict=True)
    )


def register_through_forward(name: str, rank: int) -> None:
    """Registers the autograd kernel of an operator that records through ``lltm_forward``.

    Args:
        name: The operator; it takes the arguments of ``lltm_forward``, whose first two results
            are its own.
        rank: How many dimensions ``input`` has, of which ``lltm_forward`` takes two or three.
    """
    operator = getattr(torch.ops.pkg, name).default

    def alone(*tensors: Tensor) -> _Two:
        result: _Two = below_autograd(name, operator, *tensors)
        return result

    def through(forward: Callable[..., _Three], tensors: tuple[Tensor, ...]) -> _Two:
        if tensors[0].dim() != rank:
            return alone(*tensors)  # which refuses them
        try:
            hidden, cells, _ = forward(*tensors)
        except RuntimeError:
            alone(*tensors)  # what is refused is refused in this operator's name
            raise
        return hidden, cells

    def kernel(*tensors: Tensor) -> _Two:
        # In forward mode too: the other operator has the formula.
        if records_gradients(tensors) or have_tangents(tensors):
            return through(torch.ops.pkg.lltm_forward.default, tensors)
        return alone(*tensors)

    def record(*tensors: Tensor) -> _Two:
        return through(recording("lltm_forward"), tensors)

    library.impl(name, kernel, "Autograd")
    register_recording(name, record)


def vmap_rule(operator: Callable[..., Any]) -> Callable[..., Any]:
    """A vmap rule that makes one larger batch where the slices share weights and bias."""

    def rule(
        info: Any,
        in_dims: Sequence[int | None],
        input: Tensor,
        weights: Tensor,
        bias: Tensor,
        old_h: Tensor,
        old_cell: Tensor,
    ) -> Any:
        if in_dims[1] is not None or in_dims[2] is not None:
            # Weights of their own for each slice make products of their own.
            return each_slice(operator, info, in_dims, input, weights, bias, old_h, old_cell)
        size = info.batch_size

        def merged(tensor: Tensor, dim: int | None) -> Tensor:
            return vmap_dim_first(tensor, dim, size).movedim(0, -3).flatten(-3, -2)

        results = operator(
            merged(input, in_dims[0]),
            weights,
            bias,
            merged(old_h, in_dims[3]),
            merged(old_cell, in_dims[4]),
        )
        *lead, batch, _ = vmap_dim_first(input, in_dims[0], size).shape[1:]
        split = (result.unflatten(-2, (size, batch)) for result in results)
        return tuple(split), (len(lead),) * len(results)

    return rule


def _sharding_forward(input: Description, **_: Any) -> str:
    states = "b _" if len(input.shape) == 2 else "_ b _"
    return f"input {states}, old_h b _, old_cell b _ -> {states}, {states}, {states}"


def _sharding_backward(
    input: Description, needs_input: bool, needs_weights: bool, needs_old_h: bool, **_: Any
) -> str:
    states = "b _" if len(input.shape) == 2 else "_ b _"
    of_states = ("grad_hidden", "grad_cells", "grad_gates", "gates", "hidden", "cells", "input")
    results = (
        "= input" if needs_input else "0",
        "= weights" if needs_weights else "0",
        "_",  # of the bias
        "b _" if needs_old_h else "0",
        "b _",
    )
    return (
        f"{', '.join(f'{name} {states}' for name in of_states)}, old_h b _ -> {', '.join(results)}"
    )


register_through_forward("lltm", rank=2)
register_gradients(
    "lltm_forward", _backward, tangent=tangent_by(_plain_forward), setup_context=_setup_context
)
register_gradients(
    "lltm_backward",
    _double_backward,
    tangent=tangent_by(_backward_to_be_pushed),
    setup_context=_setup_backward_context,
)
torch.library.register_vmap("pkg::lltm", vmap_rule(torch.ops.pkg.lltm.default))
torch.library.register_vmap("pkg::lltm_forward", vmap_rule(torch.ops.pkg.lltm_forward.default))
torch.library.register_vmap(
    "pkg::lltm_backward", partial(each_slice, torch.ops.pkg.lltm_backward.default)
)
register_lower_precision_autocast("lltm")
register_sharding("lltm", "input b _, old_h b _, old_cell b _ -> b _, b _")
register_sharding("lltm_forward", _sharding_forward)
register_sharding("lltm_backward", _sharding_backward)
