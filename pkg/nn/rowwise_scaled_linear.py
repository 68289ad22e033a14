"""``RowwiseScaledLinear``: int4 weights, and activations that are quantised on the fly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops._arguments import check_instance
from ..ops._autocast import dtype_under_autocast
from ..ops.quantize_rowwise import quantize_rowwise
from ..ops.rowwise_scaled_linear_s4s4 import rowwise_scaled_linear_s4s4
from ..ops.rowwise_scaled_linear_s8s4 import rowwise_scaled_linear_s8s4
from ._parameters import refuse_lazy
from ._tracing import node_or_refusal
from .linear import refuse_activation

if TYPE_CHECKING:
    from typing_extensions import Self


class RowwiseScaledLinear(torch.nn.Module):
    """A linear layer for inference in integers (dynamic quantisation).

    The weight is int4, with one scale for each output feature: an eighth of the memory of float32.
    Each call quantises each row of its input to int8 or int4 (:func:`pkg.ops.quantize_rowwise`),
    multiplies integers (:func:`pkg.ops.rowwise_scaled_linear_s8s4` or its sibling ``_s4s4``), and
    gives the result in the input's dtype, or, under autocast, in autocast's.

    The state, saved and loaded as every module's, is ``weight``: (out_features, in_features / 2),
    int8, packed by :func:`pkg.ops.pack_int4`; ``weight_scale``: (out_features,); and ``bias``:
    (out_features,). They are buffers: there is nothing to train. A move to another dtype converts
    scale and bias alone.

    Args:
        in_features: Elements in a row of the input; even.
        out_features: Elements in a row of the output.
        bias: Whether there is one.
        activation_bits: Of the quantised input: 8 or 4.
        device: Of the buffers.
        dtype: Of the scale and the bias; floating.

    Raises:
        ValueError: ``in_features`` is odd or ``activation_bits`` neither 8 nor 4.

    Example:
        >>> layer = RowwiseScaledLinear.from_linear(torch.nn.Linear(64, 3))
        >>> layer(torch.randn(5, 64)).shape
        torch.Size([5, 3])
        >>> layer.weight.shape
        torch.Size([3, 32])
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation_bits: int = 8,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if in_features % 2:
            raise ValueError(f"in_features is {in_features}; it must be even: a byte holds two")
        if activation_bits not in (4, 8):
            raise ValueError(f"activation_bits is {activation_bits}; it must be 4 or 8")
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.activation_bits = activation_bits
        shape = (out_features, in_features // 2)
        self.register_buffer("weight", torch.zeros(shape, dtype=torch.int8, device=device))
        ones = torch.ones(out_features, device=device, dtype=dtype)
        self.register_buffer("weight_scale", ones)
        self.register_buffer("bias", torch.zeros_like(ones) if bias else None)

    @classmethod
    def from_linear(cls, module: torch.nn.Linear, activation_bits: int = 8) -> Self:
        """Quantises the weight of a linear layer, each row to the nearest of its 16 steps.

        Args:
            module: Is not changed. It has an even number of input features.
            activation_bits: As for the constructor.

        Raises:
            TypeError: ``module`` is no :class:`torch.nn.Linear`.
            ValueError: As the constructor's, or ``module`` is a :class:`pkg.nn.Linear` with an
                activation, or lazy and was not called yet.

        Example:
            >>> linear = torch.nn.Linear(2, 1, bias=False)
            >>> _ = linear.weight.data.copy_(torch.tensor([[7.0, -2.2]]))
            >>> RowwiseScaledLinear.from_linear(linear)(torch.tensor([127.0, 0.0]))
            tensor([889.])
        """
        check_instance(
            "RowwiseScaledLinear.from_linear",
            "module",
            module,
            torch.nn.Linear,
            "a torch.nn.Linear",
        )
        refuse_lazy("RowwiseScaledLinear.from_linear", module)
        refuse_activation("RowwiseScaledLinear.from_linear", module)
        weight, bias = module.weight.detach(), module.bias
        # No memory for buffers that are replaced at once.
        new = cls(
            module.in_features, module.out_features, bias is not None, activation_bits, "meta"
        )
        new.weight, new.weight_scale = quantize_rowwise(weight, 4)
        new.bias = None if bias is None else bias.detach().clone()
        return new.train(module.training)

    def forward(self, input: Tensor) -> Tensor:
        """Computes ``input @ weight.T + bias`` in integers, scaled.

        Args:
            input: Shape (..., in_features), floating.

        Returns:
            Shape (..., out_features).

        Raises:
            RuntimeError: ``input`` is not floating, or its rows have another length.
            TypeError: ``input`` is no tensor.
        """
        if not isinstance(input, Tensor):
            return node_or_refusal(
                self, "RowwiseScaledLinear", "input", "a floating tensor", (input,)
            )
        values, scale = quantize_rowwise(input, self.activation_bits)
        product = (
            rowwise_scaled_linear_s8s4 if self.activation_bits == 8 else rowwise_scaled_linear_s4s4
        )
        dtype = dtype_under_autocast(input)
        return product(values, scale, self.weight, self.weight_scale, self.bias, dtype)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, activation_bits={self.activation_bits}"
        )
