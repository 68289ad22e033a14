"""float64 evaluation whose matrix products are right to the last place or two.

Elementwise operations and sums of PyTorch lose little in float64. Its matrix products may lose
several bits, more than the operator that is measured against them, since a BLAS sums in an order of
its own. Under :class:`AccurateProducts` they are computed by Ozaki's scheme (Ozaki, Ogita, Oishi,
Rump, https://doi.org/10.1007/s11075-011-9478-1): operands are cut into slices of so few bits that
the product of two slices is exact, in whatever order it is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor, log2
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_BITS = 53
_aten = torch.ops.aten


class AccurateProducts(TorchDispatchMode):
    """Within it, every float64 matrix product is accurate."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace the products; PyTorch makes every other product of these."""
        product = _PRODUCTS.get(func)
        if product is None or kwargs or args[0].dtype != torch.float64:
            return func(*args, **(kwargs or {}))
        return product(func, *args)


def accurate_product(func: Any, a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices, or batches of them, by the product ``func`` of exact slices."""
    plain: Tensor = func(a, b)
    if plain.numel() == 0 or a.shape[-1] == 0:
        return plain
    bits = floor((_BITS - log2(a.shape[-1])) / 2)
    left, right = _slices(a, -1, bits), _slices(b, -2, bits)
    accurate = torch.zeros_like(plain)
    # The smallest products first; those of later slices are below the last place.
    for order in reversed(range(len(left))):
        for first in range(order + 1):
            accurate += func(left[first], right[order - first])
    # Infinite, NaN and nearly overflowing values cannot be cut.
    return torch.where(accurate.isfinite(), accurate, plain)


def power_of_two(exponent: Tensor) -> Tensor:
    """Exactly ``2**exponent`` in float64, as ``torch.exp2`` and ``torch.ldexp`` are not.

    The exponent is clamped to that of a normal number; beyond it the result is infinite.
    """
    biased = exponent.long().clamp(-1022, 1024) + 1023
    return (biased << 52).view(torch.float64)


def _slices(values: Tensor, dim: int, bits: int) -> list[Tensor]:
    """Parts that sum to ``values``, each with ``bits`` bits below the largest along ``dim``."""
    slices = []
    for _ in range(ceil(_BITS / bits) + 1):
        _, exponent = torch.frexp(values.abs().amax(dim, keepdim=True))
        # Adding and subtracting this rounds to a multiple of 2 ** (exponent - bits).
        shift = 0.75 * power_of_two(exponent + (_BITS - bits))
        part = (values + shift) - shift
        slices.append(part)
        values = values - part
    return slices


def _matrix_product(func: Any, a: Tensor, b: Tensor) -> Tensor:
    return accurate_product(func, a, b)


def _sum_and_product(func: Any, c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return c + accurate_product(_aten.mm.default, a, b)


def _matrix_vector(func: Any, a: Tensor, b: Tensor) -> Tensor:
    return accurate_product(_aten.mm.default, a, b.unsqueeze(-1)).squeeze(-1)


def _vector_vector(func: Any, a: Tensor, b: Tensor) -> Tensor:
    product = accurate_product(_aten.mm.default, a.unsqueeze(0), b.unsqueeze(-1))
    return product.reshape(())


_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    _aten.mm.default: _matrix_product,
    _aten.bmm.default: _matrix_product,
    _aten.addmm.default: _sum_and_product,
    _aten.mv.default: _matrix_vector,
    _aten.dot.default: _vector_vector,
}
