"""``Linear``: PyTorch's module with an activation, and a packed weight for inference."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..ops.linear import ACTIVATIONS, linear
from ..ops.pack_linear_weight import pack_linear_weight
from ..ops.packed_linear import packed_linear

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class _Packed:
    """A packed weight, and how to tell whether it still is that of the parameter."""

    tensor: Tensor
    # Keeps the memory alive: its address would else come back with another weight in it.
    source: Tensor
    version: int

    def is_of(self, weight: Tensor) -> bool:
        return (
            weight._version == self.version
            and weight.data_ptr() == self.source.data_ptr()
            and weight.dtype == self.source.dtype
            and weight.device == self.source.device
            and weight.shape == self.source.shape
            and weight.stride() == self.source.stride()
        )


class Linear(torch.nn.Linear):
    """:class:`torch.nn.Linear` and an activation, in one operator: :func:`pkg.ops.linear`.

    Parameters and state are those of :class:`torch.nn.Linear`, so each loads what the other
    saved. In evaluation mode (after :meth:`eval`), where no gradient is recorded, the module
    multiplies with a packed copy of its weight: as much memory again as the weight takes. The
    copy is made at the first such call, made anew when the weight has changed, and given up by
    :meth:`train`, by a move to another device or dtype, and by :meth:`forget_packed_weight`;
    it is never saved, pickled or copied. Changes are seen by the weight's version counter, which
    PyTorch does not advance for a write through ``weight.data``: call
    :meth:`forget_packed_weight` after one.

    ``torch.compile``, ``torch.export``, autocast, ``torch.func`` and tensor subclasses get the
    operator on the weight itself. Several threads may call one module.

    Args:
        in_features: Elements in a row of the input.
        out_features: Elements in a row of the output.
        bias: Whether there is one.
        activation: None, ``"relu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"silu"``.
        device: Of the parameters.
        dtype: Of the parameters; floating.

    Raises:
        ValueError: There is no such activation.

    Example:
        >>> layer = Linear(3, 2, activation="relu").eval()
        >>> with torch.no_grad():
        ...     output = layer(torch.ones(5, 3))
        >>> output.shape
        torch.Size([5, 2])
    """

    activation: str | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; supported are {ACTIVATIONS}")
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.activation = activation
        self._packed: _Packed | None = None
        self._packing = threading.Lock()

    @classmethod
    def from_linear(cls, module: torch.nn.Linear, activation: str | None = None) -> Self:
        """A module that shares the parameters of a :class:`torch.nn.Linear`.

        Args:
            module: Is not changed.
            activation: As for the constructor.

        Example:
            >>> layer = Linear.from_linear(torch.nn.Linear(3, 2), "gelu")
            >>> layer.out_features
            2
        """
        # No memory for parameters that are replaced at once.
        new = cls(module.in_features, module.out_features, False, activation, device="meta")
        new.weight, new.bias = module.weight, module.bias
        return new.train(module.training)

    def forward(self, input: Tensor) -> Tensor:
        """Computes the activation of ``input @ weight.T + bias``; see :func:`pkg.ops.linear`."""
        weight, bias = self.weight, self.bias
        if (
            self.training
            or torch.compiler.is_compiling()
            or not _is_plain_inference(input, weight, bias)
        ):
            return linear(input, weight, bias, self.activation)
        return packed_linear(
            input, self._packed_weight(weight), self.out_features, bias, self.activation
        )

    def forget_packed_weight(self) -> None:
        """Gives the packed copy of the weight up; the next call that wants one makes it."""
        self._packed = None

    def train(self, mode: bool = True) -> Self:
        """Sets the mode; training mode gives the packed weight up."""
        if mode:
            self.forget_packed_weight()
        return super().train(mode)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        text = super().extra_repr()
        return text if self.activation is None else f"{text}, activation={self.activation!r}"

    def _packed_weight(self, weight: Tensor) -> Tensor:
        packed = self._packed
        if packed is None or not packed.is_of(weight):
            with self._packing:
                packed = self._packed
                if packed is None or not packed.is_of(weight):
                    source, version = weight.detach(), weight._version
                    packed = _Packed(pack_linear_weight(source), source, version)
                    self._packed = packed
        return packed.tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.forget_packed_weight()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_packed"] = None
        del state["_packing"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._packing = threading.Lock()


def _is_plain_inference(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a call is one of plain tensors that nobody traces, transforms or differentiates."""
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    return (
        type(input) in (Tensor, torch.nn.Parameter)
        # A parametrised weight is another tensor at each access, and one that was made in
        # inference mode has no version.
        and type(weight) is torch.nn.Parameter
        and not weight.is_inference()
        and weight.device.type in ("cpu", "cuda")
        and forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
        and not torch.is_autocast_enabled(input.device.type)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
    )
