"""``Int4Linear``: a linear layer whose weight has values of four bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..ops._arguments import check_instance
from ..ops._autocast import dtype_under_autocast
from ..ops._tensor_core_tiled_layout import GROUP_SIZES, INNER_K_TILES
from ..ops.int4_linear import int4_linear
from ..ops.pack_tensor_core_tiled_layout import pack_tensor_core_tiled_layout
from ._parameters import refuse_lazy
from ._tracing import node_or_refusal
from .linear import refuse_activation

if TYPE_CHECKING:
    from typing_extensions import Self

_ROW_TILE = 8


class Int4Linear(torch.nn.Module):
    """A linear layer with a weight of 4-bit values, for inference: :func:`pkg.ops.int4_linear`.

    The weight is ``(q - 8) * scale + zero``, with a scale and a zero for each group of input
    features of each output feature. It lies in the tensor-core tiled layout, which both the CPU's
    and the GPU's kernels read in order and at full speed; so a module is moved between devices as
    any other, and what one device saves, another loads. It takes half a byte for each value and
    four bytes for each group: 0.53 bytes a value for groups of 128.

    ``state_dict`` holds ``packed_weight`` (int32), ``scales_and_zeros`` (bfloat16) and ``bias``;
    they are buffers, and the bias a parameter if it was one. :meth:`to` with a dtype changes the
    bias alone: the input's dtype is that of the computation, and the bias is converted to it.
    Under autocast the input is converted first, as :class:`torch.nn.Linear` does.
    Gradients flow to the input and to the bias.

    :attr:`weight` is for code that asks a linear layer for the device and the dtype of its weight.

    Args:
        in_features: Elements in a row of the input; a multiple of ``group_size``.
        out_features: Elements in a row of the output; a multiple of 8.
        bias: Whether there is one.
        group_size: 32, 64, 128 or 256.
        device: Of the buffers.
        dtype: Of the bias; floating.

    Raises:
        ValueError: ``group_size`` is another number, or a size is not such a multiple.

    Example:
        >>> layer = Int4Linear.from_linear(torch.nn.Linear(256, 64), group_size=128)
        >>> layer(torch.ones(5, 256)).shape
        torch.Size([5, 64])
        >>> layer.packed_weight.nbytes
        8192
    """

    in_features: int
    out_features: int
    group_size: int
    inner_k_tiles: int
    packed_weight: Tensor
    scales_and_zeros: Tensor
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group_size: int = 128,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        problem = why_not_int4(in_features, out_features, group_size)
        if problem is not None:
            raise ValueError(problem)
        self.in_features = in_features
        self.out_features = out_features
        self.group_size = group_size
        self.inner_k_tiles = _inner_k_tiles(in_features)
        tiles = (out_features // _ROW_TILE, in_features // (16 * self.inner_k_tiles))
        words = torch.zeros(*tiles, 32, self.inner_k_tiles // 2, dtype=torch.int32, device=device)
        pairs = torch.zeros(
            in_features // group_size, out_features, 2, dtype=torch.bfloat16, device=device
        )
        self.register_buffer("packed_weight", words)
        self.register_buffer("scales_and_zeros", pairs)
        if bias:
            values = torch.zeros(out_features, dtype=dtype, device=device)
            self.bias = torch.nn.Parameter(values)
        else:
            self.register_parameter("bias", None)

    @classmethod
    def from_linear(cls, module: torch.nn.Module, group_size: int = 128) -> Self:
        """Quantises the weight of a linear layer, rounding to nearest.

        Each group of a row gets the scale with which its smallest to its largest value span the
        sixteen values that there are, as torchao's does for this layout; the bias is shared.

        Args:
            module: A :class:`torch.nn.Linear`, or another module with a floating ``weight``
                (out_features, in_features) and, if any, a ``bias``. It is not changed. Of one on
                the meta device comes one on the meta device, to be filled by
                ``load_state_dict(..., assign=True)``.
            group_size: 32, 64, 128 or 256.

        Raises:
            TypeError: ``module`` is no module.
            ValueError: The weight's sizes do not divide, it is not floating or has values that are
                not finite, or ``module`` is a :class:`pkg.nn.Linear` with an activation, or lazy
                and was not called yet.

        Example:
            >>> linear = torch.nn.Linear(32, 8, bias=False)
            >>> _ = torch.nn.init.constant_(linear.weight, 0.5)
            >>> Int4Linear.from_linear(linear, 32)(torch.ones(1, 32))[0, 0].item()
            16.0
        """
        check_instance(
            "Int4Linear.from_linear", "module", module, torch.nn.Module, "a torch.nn.Module"
        )
        refuse_lazy("Int4Linear.from_linear", module)
        weight = getattr(module, "weight", None)
        bias = getattr(module, "bias", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            raise ValueError("the module's weight is not a matrix (out_features, in_features)")
        if not weight.is_floating_point():
            raise ValueError(f"the module's weight is {weight.dtype}; it must be floating")
        refuse_activation("Int4Linear.from_linear", module)
        out_features, in_features = weight.shape
        # Checks the sizes; no memory for buffers that are replaced at once.
        new = cls(in_features, out_features, False, group_size, device="meta")
        values, new.scales_and_zeros = quantize(weight.detach(), group_size)
        new.packed_weight = pack_tensor_core_tiled_layout(values, new.inner_k_tiles)
        if bias is not None:
            new.bias = bias if isinstance(bias, torch.nn.Parameter) else torch.nn.Parameter(bias)
        return new.train(module.training)

    @property
    def weight(self) -> Tensor:
        """The bytes of the packed weight: int8, shape (out_features, in_features / 2); a view.

        That a weight is of integers tells other code that it is quantised, and that inputs keep
        their dtype: transformers' T5 asks for it. Where code converts inputs to this dtype
        without a look at it, as Mamba2 does before its head, the layer has to stay floating. The
        bytes lie in the tensor-core tiled layout, not row by row, and are nothing to compute with:
        for the values see :func:`pkg.ops.dequantize_tensor_core_tiled_layout`. It cannot be
        assigned. PyTorch's fused encoders multiply by it in inference: where such a layer is put
        into one by other means than :func:`pkg.quantize_`, end them by
        ``torch.backends.mha.set_fastpath_enabled(False)``.
        """
        shape = (self.out_features, self.in_features // 2)
        return self.packed_weight.view(torch.int8).reshape(shape)

    def forward(self, input: Tensor) -> Tensor:
        """Computes ``input @ weight.T + bias``; see :func:`pkg.ops.int4_linear`."""
        if not isinstance(input, Tensor):
            return node_or_refusal(self, "Int4Linear", "input", "a floating tensor", (input,))
        input = input.to(dtype_under_autocast(input))
        bias = self.bias
        if bias is not None and bias.dtype != input.dtype:
            bias = bias.to(input.dtype)  # type: ignore[assignment]
        return int4_linear(
            input,
            self.packed_weight,
            self.scales_and_zeros,
            self.group_size,
            self.inner_k_tiles,
            bias,
        )

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, group_size={self.group_size}"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        pairs = self.scales_and_zeros
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # half() and the like convert floating buffers; the scales stay as they were.
        if self.scales_and_zeros.dtype != pairs.dtype:
            self.scales_and_zeros = pairs.to(self.scales_and_zeros.device)
        return self


def _inner_k_tiles(in_features: int) -> int:
    """The most that divide the weight: the kernels read the longest runs then."""
    return max(tiles for tiles in INNER_K_TILES if in_features % (16 * tiles) == 0)


def why_not_int4(in_features: int, out_features: int, group_size: int) -> str | None:
    """What keeps a weight of this shape from being quantised, in words."""
    if group_size not in GROUP_SIZES:
        return f"group_size is {group_size}; it must be 32, 64, 128 or 256"
    if in_features % group_size:
        return f"in_features is {in_features}, not a multiple of group_size {group_size}"
    if out_features % _ROW_TILE:
        return f"out_features is {out_features}, not a multiple of {_ROW_TILE}"
    return None


MOST_MAGNITUDE = 2.0**126
"""Of a value of a weight: two of these are not so far apart that float32 has not the distance."""


def can_be_scaled(weight: Tensor) -> bool:
    """Whether no value is NaN, infinite or above ``MOST_MAGNITUDE``; of none, none is."""
    if weight.is_meta or isinstance(weight, FakeTensor) or weight.numel() == 0:
        return True
    least, most = weight.aminmax()  # NaN where there is one
    return bool((least >= -MOST_MAGNITUDE) & (most <= MOST_MAGNITUDE))


def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Values of four bits for a weight, rounded to nearest, with scales and zeros.

    Args:
        weight: Floating, shape (out_features, in_features).
        group_size: Input features that share a scale and a zero.

    Returns:
        int32 values of the weight's shape, and bfloat16 scales and zeros of shape
        (in_features / group_size, out_features, 2).

    Raises:
        ValueError: A value is infinite or NaN, or above 2**126 in magnitude.
    """
    if not can_be_scaled(weight):
        raise ValueError("the weight has values that are infinite or NaN, or above 2**126")
    groups = weight.float().unflatten(-1, (weight.shape[-1] // group_size, group_size))
    least, most = groups.amin(-1), groups.amax(-1)
    # What is rounded to the values has to be what they are multiplied with: bfloat16.
    scales = ((most - least) / 15).clamp(min=1e-9).bfloat16()
    zeros = (least + scales.float() * 8).bfloat16()
    # Where they are rounded by several steps, of values far from zero, sixteen of these have to
    # reach further, with half a step to spare at either end.
    reach = torch.maximum((most - zeros.float()) / 7.5, (zeros.float() - least) / 8.5)
    scales = torch.where(reach > scales.float(), (reach * (1 + 2**-8)).bfloat16(), scales)
    steps = (groups - zeros.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)
    values = steps.round() + 8
    values = values.clamp(0, 15).int().flatten(-2)
    return values, torch.stack([scales, zeros], -1).transpose(0, 1).contiguous()
