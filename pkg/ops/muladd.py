"""``muladd``: a product and a sum in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._call import operator
from ._factors import factors
from ._forward_mode import linear_in
from ._registration import fake_pointwise, reduce_to, register_fake, register_gradients
from ._sharding import register_sharding
from ._vmap import register_pointwise_vmap
from .mul import mul

TABLE = ("`a * b + c` in one pass, `c` a number", "floating; integers become floating", "yes")
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def muladd(a: Tensor, b: Tensor, c: float) -> Tensor:
    """Computes ``a * b + c`` in one pass over memory.

    Args:
        a: Any shape; bool, an integer dtype, float16, bfloat16, float32 or float64.
        b: A shape that broadcasts with ``a``'s, on the same device.
        c: The number that is added; no gradient flows to it.

    Returns:
        The result, of the broadcast shape and the promoted dtype: that of
        ``a * b`` where it is floating, else PyTorch's default dtype. Rounded
        once where the processor has a fused multiply-add.

    Raises:
        RuntimeError: The shapes do not broadcast, a dtype is not supported, or
            the devices differ.

    Example:
        >>> muladd(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), 0.5)
        tensor([3.5000, 8.5000])
    """
    return torch.ops.pkg.muladd.default(a, b, c)


@register_fake("muladd")
def _fake(a: Tensor, b: Tensor, c: float) -> Tensor:
    dtype = torch.result_type(a, b)
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    return fake_pointwise("muladd", a, b, dtype, then_number=True)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b = factors(ctx)
    return (
        reduce_to(mul(grad, b), a) if ctx.needs_input_grad[0] else None,
        reduce_to(mul(grad, a), b) if ctx.needs_input_grad[1] else None,
        None,
    )


_tangent_of_product = linear_in("mul", (0,), (1,))


def _tangent(values: Any, outputs: Any, tangents: Any) -> Tensor:
    result: Tensor = _tangent_of_product(values[:2], outputs, tangents)
    return result


register_gradients("muladd", _backward, is_product=True, tangent=_tangent)
register_pointwise_vmap("muladd")
register_sharding("muladd", "a ..., b ... -> ...")
