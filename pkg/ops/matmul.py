"""``matmul``: the matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ._call import operator
from ._factors import Unsaved, factors
from ._forward_mode import linear_in
from ._registration import (
    check_one_device,
    reduce_to,
    register_fake,
    register_gradients,
    register_lower_precision_autocast,
)
from ._sharding import Description, register_sharding

TABLE = (
    "`torch.matmul`, any strides, half precision accumulated in float32",
    "floating; int8 into int32",
    "yes",
)
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def matmul(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Multiplies matrices with the semantics of :func:`torch.matmul`.

    Any strides are read in place. The algorithm is that of Goto and van de Geijn
    (https://doi.org/10.1145/1356052.1356053): blocks of the operands are packed
    into panels that stay in the caches, and a register-tiled kernel runs over
    them. Half precision is accumulated in float32.

    Args:
        a: Shape (..., M, K) or (K,); float16, bfloat16, float32, float64 or int8.
        b: Shape (..., K, N) or (K,), of the same dtype and device. Batch
            dimensions broadcast.
        out_dtype: None for the inputs' dtype; float32 may be asked for with
            half-precision inputs, and int32 must be with int8 inputs.

    Returns:
        Shape (..., M, N), contiguous; without M or N where that input is 1-D.

    Raises:
        RuntimeError: The inner dimensions differ, the batch dimensions do not
            broadcast, dtypes or devices differ, or a dtype is not supported.

    Example:
        >>> matmul(torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[1., 2.],
                [3., 4.]])
    """
    return torch.ops.pkg.matmul.default(a, b, out_dtype=out_dtype)


@register_fake("matmul")
def _fake(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    check_one_device("matmul", a, b)
    torch._check(a.dim() >= 1 and b.dim() >= 1, lambda: "matmul: an operand has no dimensions")
    inner = b.shape[0] if b.dim() == 1 else b.shape[-2]
    torch._check(a.shape[-1] == inner, lambda: "matmul: inner dimensions differ")
    shape = [*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])]
    if a.dim() > 1:
        shape.append(a.shape[-2])
    if b.dim() > 1:
        shape.append(b.shape[-1])
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


def _gradient(operand: Tensor | Unsaved, left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``, with columns contiguous where those of ``operand`` are.

    The gradient of ``weight`` in ``input @ weight.mT`` is then laid out as ``weight``, where
    autograd would copy another one.
    """
    if operand.stride(-2) == 1 and operand.stride(-1) != 1:
        return matmul(right.mT, left.mT).mT
    return matmul(left, right)


def _gradient_of_a(grad: Tensor, a: Tensor | Unsaved, b: Tensor) -> Tensor:
    """Gradient of ``a`` for operands of at least two dimensions."""
    return reduce_to(_gradient(a, grad, b.mT), a)


def _gradient_of_b(grad: Tensor, a: Tensor, b: Tensor | Unsaved) -> Tensor:
    """Gradient of ``b`` for operands of at least two dimensions."""
    if b.dim() == 2 and a.dim() > 2:
        # One matrix for the whole batch: sum over it inside the product.
        # Not by reshape(-1, ...), which cannot count rows without elements, nor by flatten(), for
        # which a batched gradient has no rule.
        a = a.reshape(prod(a.shape[:-1]), a.shape[-1])
        grad = grad.reshape(prod(grad.shape[:-1]), grad.shape[-1])
    return reduce_to(_gradient(b, a.mT, grad), b)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = factors(ctx)
    needs_a, needs_b, _ = ctx.needs_input_grad
    if grad.dtype != a.dtype:
        grad = grad.to(a.dtype)
    if a.dim() == b.dim() == 2:
        return (
            _gradient(a, grad, b.mT) if needs_a else None,
            _gradient(b, a.mT, grad) if needs_b else None,
        )
    # See a vector as a matrix of one row (a) or one column (b).
    a_matrix = a.unsqueeze(0) if a.dim() == 1 else a
    b_matrix = b.unsqueeze(1) if b.dim() == 1 else b
    if b.dim() == 1:
        grad = grad.unsqueeze(-1)
    if a.dim() == 1:
        grad = grad.unsqueeze(-2)
    grad_a = grad_b = None
    if needs_a:
        grad_a = _gradient_of_a(grad, a_matrix, b_matrix).reshape(a.shape)
    if needs_b:
        grad_b = _gradient_of_b(grad, a_matrix, b_matrix).reshape(b.shape)
    return grad_a, grad_b


def _vmap(
    info: Any,
    in_dims: Sequence[int | None],
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, int]:
    a_dim, b_dim = in_dims[:2]
    a_rank = a.dim() - (a_dim is not None)
    b_rank = b.dim() - (b_dim is not None)
    # Batch dimension first, then as many batch dimensions as the other has, then
    # the matrix; a vector becomes a matrix of one row or one column.
    lead = max(a_rank, b_rank, 2) - 2

    def laid_out(tensor: Tensor, dim: int | None, rank: int, vector_dim: int) -> Tensor:
        tensor = tensor.movedim(dim, 0) if dim is not None else tensor.unsqueeze(0)
        if rank == 1:
            tensor = tensor.unsqueeze(vector_dim)
        missing = lead + 3 - tensor.dim()
        return tensor.reshape(tensor.shape[:1] + (1,) * missing + tensor.shape[1:])

    product = matmul(
        laid_out(a, a_dim, a_rank, -2), laid_out(b, b_dim, b_rank, -1), out_dtype=out_dtype
    )
    if b_rank == 1:
        product = product.squeeze(-1)
    if a_rank == 1:
        product = product.squeeze(-1 if b_rank == 1 else -2)
    return product, 0


def _sharding(a: Description, b: Description, out_dtype: torch.dtype | None) -> str:
    rows, columns = len(a.shape) > 1, len(b.shape) > 1
    return (
        f"a {'... m k' if rows else 'k'}, b {'... k n' if columns else 'k'} -> "
        f"...{' m' if rows else ''}{' n' if columns else ''}"
    )


register_gradients("matmul", _backward, is_product=True, tangent=linear_in("matmul", (0,), (1,)))
torch.library.register_vmap("pkg::matmul", _vmap)
register_lower_precision_autocast("matmul")
register_sharding("matmul", _sharding)
