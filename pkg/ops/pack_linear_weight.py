"""``pack_linear_weight``: a weight in the order in which the product reads it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._call import operator
from ._inference import register_inference_only
from ._registration import register_fake
from ._vmap import each_slice

# csrc/packed_linear.h says why.
_PACKED_ROWS = 64
_PACKED_COLUMNS = 4


TABLE = (
    "the weight in the order in which the product reads it, for this process",
    "floating",
    "no",
)
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def pack_linear_weight(weight: Tensor) -> Tensor:
    """Packs the weight of :func:`pkg.ops.packed_linear`, for many calls with the same weight.

    The result belongs to the processor and the library that made it: another level of
    ``PKG_CPU_CAPABILITY``, another version or another device orders it in another way. So it
    is never saved, and packed again from ``weight`` where that is moved or changed.
    :meth:`pkg.nn.Linear.pack_weight` holds it beside the weight and gives it up in time.

    On Linux, where the system lets a program ask for them, it lies in pages of 2 MiB, of which a
    core reads more in the same time.

    Args:
        weight: Shape (out_features, in_features); float16, bfloat16, float32 or float64, any
            strides.

    Returns:
        Shape (out_features + 64, in_features + 4), of the dtype and on the device of
        ``weight``. What lies where in it is not said.

    Raises:
        RuntimeError: ``weight`` is not a floating matrix, or requires grad while gradients
            are recorded.

    Example:
        >>> packed = pack_linear_weight(torch.eye(3))
        >>> torch.ops.pkg.packed_linear(torch.arange(3.0), packed, 3)
        tensor([0., 1., 2.])
    """
    return torch.ops.pkg.pack_linear_weight.default(weight)


def packed_shape(out_features: Any, in_features: Any) -> tuple[Any, Any]:
    """The shape of a packed weight."""
    return out_features + _PACKED_ROWS, in_features + _PACKED_COLUMNS


@register_fake("pack_linear_weight")
def _fake(weight: Tensor) -> Tensor:
    torch._check(weight.dim() == 2, lambda: "pack_linear_weight: weight is not a matrix")
    return weight.new_empty(packed_shape(*weight.shape))


register_inference_only("pack_linear_weight", "pack weight.detach()")
torch.library.register_vmap(
    "pkg::pack_linear_weight", partial(each_slice, torch.ops.pkg.pack_linear_weight.default)
)
