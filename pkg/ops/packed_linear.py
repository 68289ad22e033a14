"""``packed_linear``: ``linear`` on a weight that has been packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._call import operator
from ._inference import register_inference_only
from ._registration import check_one_device, register_fake
from ._sharding import register_sharding
from ._vmap import each_slice
from .linear import check_activation, result_shape
from .pack_linear_weight import packed_shape

TABLE = ("`linear` with a packed weight", "floating", "no")
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def packed_linear(
    input: Tensor,
    packed_weight: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Computes :func:`pkg.ops.linear` with a packed weight, for inference.

    Autocast does not change it: the dtype is the one that the weight was packed in.

    Args:
        input: Shape (..., in_features), any strides.
        packed_weight: What :func:`pkg.ops.pack_linear_weight` returned in this process, or a
            clone of it, of the dtype and on the device of ``input``.
        out_features: Of the weight that was packed.
        bias: Shape (out_features,), or None.
        activation: As for :func:`pkg.ops.linear`.

    Returns:
        Shape (..., out_features), contiguous.

    Raises:
        RuntimeError: ``packed_weight`` was not packed for such an ``input``, dtypes or devices
            differ, there is no such activation, or a gradient would have to be recorded.

    Example:
        >>> packed = torch.ops.pkg.pack_linear_weight(torch.tensor([[1.0, 2.0]]))
        >>> packed_linear(torch.tensor([3.0, -4.0]), packed, 1, activation="relu")
        tensor([0.])
    """
    return torch.ops.pkg.packed_linear.default(input, packed_weight, out_features, bias, activation)


@register_fake("packed_linear")
def _fake(
    input: Tensor,
    packed_weight: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    check_one_device("packed_linear", input, packed_weight, *([] if bias is None else [bias]))
    check_activation("packed_linear", activation)
    torch._check(
        packed_weight.dim() == 2, lambda: "packed_linear: packed_weight is not a packed weight"
    )
    shape = result_shape("packed_linear", input, out_features, bias)
    rows, columns = packed_shape(out_features, input.shape[-1])
    torch._check(packed_weight.shape[0] == rows, lambda: "packed_linear: out_features differ")
    torch._check(packed_weight.shape[1] == columns, lambda: "packed_linear: in_features differ")
    return input.new_empty(shape)


def _vmap(
    info: Any,
    in_dims: Sequence[int | None],
    input: Tensor,
    packed_weight: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, int]:
    of_input, of_weight, _, of_bias, *_ = [*in_dims, None, None]
    if of_weight is None and of_bias is None:
        # The batch is one more leading dimension.
        moved = input.movedim(of_input or 0, 0)
        return packed_linear(moved, packed_weight, out_features, bias, activation), 0

    def of_slice(input: Tensor, packed_weight: Tensor, *rest: Any) -> Tensor:
        # The kernels read whole cache lines, and a slice need not begin with one.
        weight = packed_weight if of_weight is None else packed_weight.clone()
        return packed_linear(input, weight, *rest)

    arguments = (input, packed_weight, out_features, bias, activation)
    return each_slice(of_slice, info, in_dims, *arguments)


register_inference_only("packed_linear", "call pkg.ops.linear with the weight itself")
torch.library.register_vmap("pkg::packed_linear", _vmap)
register_sharding("packed_linear", "input ... _ -> ... _")
