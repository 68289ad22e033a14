"""What ``rowwise_scaled_linear_s8s4`` and ``rowwise_scaled_linear_s4s4`` share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._inference import register_inference_only
from ._registration import check_one_device, register_fake
from ._sharding import Description, register_sharding
from ._vmap import each_slice, vmap_dim_first


def register(name: str, values_of_byte: int) -> None:
    """Registers all that Python knows of one of the operators.

    Args:
        name: The operator, without its namespace.
        values_of_byte: How many values an element of the input holds.
    """

    def fake(
        input: Tensor,
        input_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        tensors = (input, input_scale, weight, weight_scale, bias)
        check_one_device(name, *(tensor for tensor in tensors if tensor is not None))
        torch._check(input.dim() > 0, lambda: f"{name}: input has no dimensions")
        torch._check(weight.dim() == 2, lambda: f"{name}: weight must have two dimensions")
        torch._check(
            input.shape[-1] * values_of_byte == 2 * weight.shape[1],
            lambda: f"{name}: rows of input and weight differ in length",
        )
        return input_scale.new_empty((*input.shape[:-1], weight.shape[0]), dtype=out_dtype)

    register_fake(name)(fake)
    torch.library.register_vmap(f"pkg::{name}", _vmap_of(name))
    register_inference_only(name, "detach what requires it")
    register_sharding(name, _sharding_of(values_of_byte))


def _sharding_of(values_of_byte: int) -> Callable[..., str]:
    """A layout in which ``i`` counts values, of which the weight has two in a byte."""

    def layout(weight_scale: Description, **_: Any) -> str:
        shape = weight_scale.shape
        scale = "o" if len(shape) == 1 else "_ o" if shape[0] == 1 else "o _"
        return (
            f"input ... i/{values_of_byte}, input_scale ..., weight o i/2, weight_scale {scale}, "
            "+ bias o -> ... o"
        )

    return layout


def _vmap_of(name: str) -> Callable[..., tuple[Tensor, int]]:
    operator: Callable[..., Tensor] = getattr(torch.ops.pkg, name).default

    def vmap(
        info: Any,
        in_dims: Sequence[int | None],
        input: Tensor,
        input_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, int]:
        dims = [*in_dims, None][:5]
        if dims[2:] == [None] * 3:
            # The batch is one more leading dimension.
            rows, scales = (
                vmap_dim_first(tensor, dim, info.batch_size)
                for tensor, dim in ((input, dims[0]), (input_scale, dims[1]))
            )
            return operator(rows, scales, weight, weight_scale, bias, out_dtype), 0
        arguments = (input, input_scale, weight, weight_scale, bias, out_dtype)
        return each_slice(operator, info, in_dims, *arguments)

    return vmap
