"""``rotary_embedding``: positions as rotations of queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ._call import operator, part
from ._forward_mode import Tangent, added, linear_in
from ._registration import (
    check_one_device,
    fake_pointwise,
    reduce_to,
    register_fake,
    register_gradients,
)
from ._sharding import register_sharding
from ._vmap import batch_to_front

TABLE = (
    "rotary position embedding of queries or keys, in halves (GPT-NeoX, Llama) or in pairs of"
    " neighbours (GPT-J), in one pass",
    "floating; tables of the same dtype or float32",
    "yes, of the tables too, to any order",
)
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def rotary_embedding(
    input: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> Tensor:
    """Turns pairs of elements by angles whose cosines and sines are given.

    The rotary position embedding of queries and keys (https://arxiv.org/abs/2104.09864): of R
    elements, twice as many as ``cos`` has columns, x and y of each pair become ``x cos - y sin``
    and ``y cos + x sin``; what lies behind them is copied. It is computed in float32 (float64 for
    float64) and rounded once.

    A table of Hugging Face's transformers has each angle twice, side by side in halves: the first
    half of its columns is what belongs here.

    Args:
        input: Shape (..., L, D), any strides; float16, bfloat16, float32 or float64.
        cos: Shape (..., L, R / 2) with R <= D, of the dtype of ``input`` or float32. All but the
            last dimension broadcast to those of ``input``: (L, R / 2) serves all heads of
            (B, H, L, D), (B, 1, L, R / 2) gives each sequence positions of its own, and
            (L, 1, R / 2) is for (B, L, H, D).
        sin: The same shape and dtype.
        interleaved: Whether neighbours are a pair (x[2 i] and x[2 i + 1], as in GPT-J), or an
            element of the first half of R with that of the second (GPT-NeoX, Llama).

    Returns:
        The same shape and dtype, dense, with the dimensions in the order in which ``input`` has
        them in memory: queries that are a transposed view of a projection stay laid out so.
        Differentiable as often as wanted. The gradient of ``input`` is one pass of the same kernel,
        and keeps nothing but the tables; ``cos`` and ``sin`` have gradients too, by PyTorch's
        operators, and where one is wanted ``input`` is kept for it.

    Raises:
        RuntimeError: Shapes do not match, dtypes or devices differ, or a dtype is not supported.

    Example:
        >>> quarter = torch.tensor([[0.0, 1.0]])  # by 90 degrees, and not at all
        >>> rotary_embedding(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), quarter, 1 - quarter)
        tensor([[-3.,  2.,  1.,  4.]])
    """
    return torch.ops.pkg.rotary_embedding.default(input, cos, sin, interleaved=interleaved)


# The same by the negative angles: the gradient of the input.
_rotary_embedding_backward: Callable[[Tensor, Tensor, Tensor, bool], Tensor] = part(
    "rotary_embedding_backward"
)


@register_fake("rotary_embedding")
def _fake(input: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    return _fake_turned("rotary_embedding", input, cos, sin)


@register_fake("rotary_embedding_backward")
def _fake_backward(grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return _fake_turned("rotary_embedding_backward", grad, cos, sin)


def _fake_turned(name: str, input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    check_one_device(name, input, cos, sin)
    torch._check(1 <= cos.dim() <= input.dim(), lambda: f"{name}: cos has too many dimensions")
    torch._check(cos.shape == sin.shape, lambda: f"{name}: sin must have the shape of cos")
    torch._check(
        2 * cos.shape[-1] <= input.shape[-1], lambda: f"{name}: cos turns more than a row has"
    )
    for own, size in zip(cos.shape[-2::-1], input.shape[-2::-1], strict=False):
        torch._check(own == 1 or own == size, lambda: f"{name}: cos does not broadcast to the rows")
    return fake_pointwise(name, input, input, input.dtype)


def _pairs(tensor: Tensor, half: int, interleaved: bool) -> tuple[Tensor, ...]:
    """The two elements of each pair."""
    wide = tensor.narrow(-1, 0, 2 * half).to(torch.promote_types(tensor.dtype, torch.float32))
    if interleaved:
        return wide[..., ::2], wide[..., 1::2]
    return wide.narrow(-1, 0, half), wide.narrow(-1, half, half)


def _table_gradients(
    ctx: Any, grad: Tensor, input: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    half = cos.shape[-1]
    grad_x, grad_y = _pairs(grad, half, ctx.interleaved)
    x, y = _pairs(input, half, ctx.interleaved)
    of_sin = grad_y * x - grad_x * y
    return (
        reduce_to(grad_x * x + grad_y * y, cos) if ctx.needs_input_grad[1] else None,
        reduce_to(-of_sin if ctx.turned_back else of_sin, sin) if ctx.needs_input_grad[2] else None,
    )


def _save(ctx: Any, input: Tensor, cos: Tensor, sin: Tensor) -> None:
    of_tables = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    ctx.save_for_backward(cos, sin, *([input] if of_tables else []))


def _setup_context(
    ctx: Any, inputs: tuple[Tensor, ...], output: Tensor, keyword_only_inputs: dict[str, bool]
) -> None:
    ctx.interleaved, ctx.turned_back = keyword_only_inputs["interleaved"], False
    _save(ctx, *inputs)


def _setup_backward_context(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor
) -> None:
    *tensors, ctx.interleaved = inputs
    ctx.turned_back = True
    _save(ctx, *tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    cos, sin, *saved = ctx.saved_tensors
    of_input = of_cos = of_sin = None
    if ctx.needs_input_grad[0] and ctx.turned_back:
        of_input = rotary_embedding(grad, cos, sin, interleaved=ctx.interleaved)
    elif ctx.needs_input_grad[0]:
        of_input = _rotary_embedding_backward(grad, cos, sin, ctx.interleaved)
    if saved:
        of_cos, of_sin = _table_gradients(ctx, grad, saved[0], cos, sin)
    return of_input, of_cos, of_sin


def _double_backward(
    ctx: Any, grad_grad: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    return *_backward(ctx, grad_grad), None


def _tangent_of(name: str) -> Tangent:
    of_input, of_tables = linear_in(name, (0,)), linear_in(name, (1, 2))

    def tangent(values: Any, outputs: Any, tangents: Any) -> Tensor:
        terms = [] if tangents[0] is None else [of_input(values, outputs, tangents)]
        if tangents[1] is not None or tangents[2] is not None:
            # What is not turned does not depend on the tables.
            input, cos, *rest = values
            width = 2 * cos.shape[-1]
            turned = (input.narrow(-1, 0, width), cos, *rest)
            rest_of_row = input.shape[-1] - width
            terms.append(F.pad(of_tables(turned, outputs, tangents), (0, rest_of_row)))
        return added(terms)

    return tangent


def _batched(
    in_dims: Sequence[int | None], input: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The batch as the first of the leading dimensions."""
    input, cos, sin = batch_to_front((input, cos, sin), in_dims[:3])
    if in_dims[0] is None:
        batch = (cos if in_dims[1] is not None else sin).shape[0]
        input = input.expand(batch, *input.shape)
    cos, sin = torch.broadcast_tensors(cos, sin)
    return input, cos, sin


def _vmap(
    info: Any,
    in_dims: Sequence[int | None],
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, int]:
    return rotary_embedding(*_batched(in_dims, input, cos, sin), interleaved=interleaved), 0


def _vmap_backward(
    info: Any,
    in_dims: Sequence[int | None],
    grad: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
) -> tuple[Tensor, int]:
    return _rotary_embedding_backward(*_batched(in_dims, grad, cos, sin), interleaved), 0


register_gradients(
    "rotary_embedding",
    _backward,
    tangent=_tangent_of("rotary_embedding"),
    setup_context=_setup_context,
)
register_gradients(
    "rotary_embedding_backward",
    _double_backward,
    tangent=_tangent_of("rotary_embedding_backward"),
    setup_context=_setup_backward_context,
)
torch.library.register_vmap("pkg::rotary_embedding", _vmap)
torch.library.register_vmap("pkg::rotary_embedding_backward", _vmap_backward)
register_sharding("rotary_embedding", "input ... _, cos ... _, sin ... _ -> ... _")
register_sharding("rotary_embedding_backward", "grad ... _, cos ... _, sin ... _ -> ... _")
