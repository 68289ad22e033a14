"""``Linear``: PyTorch's module with an activation, and a packed weight where it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops._arguments import check_instance, is_kept_otherwise
from ..ops._forward_mode import may_be_forward_mode
from ..ops._registration import records_gradients
from ..ops.linear import ACTIVATIONS, activated, linear
from ..ops.pack_linear_weight import pack_linear_weight
from ..ops.packed_linear import packed_linear
from ._parameters import refuse_computed, refuse_lazy
from ._tracing import node_or_refusal

if TYPE_CHECKING:
    from typing_extensions import Self

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class _Packed:
    """A packed weight, and what can be told of whether its parameter is still the same."""

    tensor: Tensor
    parameter: Tensor
    # Keeps the memory alive: its address would else come back with another weight in it.
    source: Tensor
    # None for a parameter that was made in inference mode.
    version: int | None

    @classmethod
    def of(cls, parameter: Tensor) -> _Packed:
        # The version before the values: a write meanwhile is then seen.
        source, version = parameter.detach(), _version(parameter)
        return cls(pack_linear_weight(source), parameter, source, version)

    def check(self) -> None:
        """Raises if the parameter's values have changed, as far as that can be seen."""
        parameter, source = self.parameter, self.source
        if not (
            _version(parameter) == self.version
            and parameter.data_ptr() == source.data_ptr()
            and parameter.dtype == source.dtype
            and parameter.device == source.device
            and parameter.shape == source.shape
            and parameter.stride() == source.stride()
        ):
            raise RuntimeError(
                "Linear: weight has been written or replaced since pack_weight(), which forbids "
                "that; call pack_weight() again, or unpack_weight() before the next write"
            )


class Linear(torch.nn.Linear):
    """:class:`torch.nn.Linear` and an activation, in one operator: :func:`pkg.ops.linear`.

    Parameters and state are those of :class:`torch.nn.Linear`, so each loads what the other
    saved. Every call multiplies by the weight as it is then, whoever wrote it and how. For
    inference on weights that are frozen, :meth:`pack_weight` is the faster way; it says what it
    forbids. :func:`pkg.pack_weights_` takes it for a whole model. Several threads may call one
    module.

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
        >>> layer = Linear(3, 2, activation="relu")
        >>> layer(torch.ones(5, 3)).shape
        torch.Size([5, 2])
    """

    # The class's own, so that a module without one in its state (a copy) has none.
    _packed: _Packed | None = None

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

    @classmethod
    def from_linear(cls, module: torch.nn.Linear, activation: str | None = None) -> Self:
        """A module that shares the parameters of a :class:`torch.nn.Linear`.

        Args:
            module: Is not changed.
            activation: As for the constructor; by default that of ``module`` if it is a
                :class:`pkg.nn.Linear`.

        Raises:
            TypeError: ``module`` is no :class:`torch.nn.Linear`.
            ValueError: There is no such activation, ``module`` has another one, it is lazy and was
                not called yet, or a parametrization or a hook computes a parameter of it.

        Example:
            >>> layer = Linear.from_linear(torch.nn.Linear(3, 2), "gelu")
            >>> layer.out_features
            2
        """
        check_instance("Linear.from_linear", "module", module, torch.nn.Linear, "a torch.nn.Linear")
        refuse_lazy("Linear.from_linear", module)
        refuse_computed("Linear.from_linear", module, ("weight", "bias"))
        own = activation_of(module)
        if own is not None and activation not in (None, own):
            raise ValueError(
                f"Linear.from_linear: activation is {activation!r}, and module applies {own!r} "
                "already; leave activation out"
            )
        activation = activation or own
        # No memory for parameters that are replaced at once.
        new = cls(module.in_features, module.out_features, False, activation, device="meta")
        new.weight, new.bias = module.weight, module.bias
        return new.train(module.training)

    def forward(self, input: Tensor) -> Tensor:
        """Computes the activation of ``input @ weight.T + bias``; see :func:`pkg.ops.linear`.

        Raises:
            RuntimeError: What that function's does; or the weight has been written since
                :meth:`pack_weight`, where that is seen.
            TypeError: ``input`` is no tensor.
        """
        if not isinstance(input, Tensor):
            return node_or_refusal(
                self, "Linear", "input", "a tensor of shape (..., in_features)", (input,)
            )
        weight, bias = self.weight, self.bias
        if type(weight) is not torch.nn.Parameter and is_kept_otherwise(weight):
            # Quantised by torchao, say, which has products of its own.
            return activated(torch.nn.functional.linear(input, weight, bias), self.activation)
        packed = None if torch.compiler.is_compiling() else self._packed
        if (
            packed is None
            # Another parameter was assigned, or torch.func.functional_call gives one.
            or weight is not packed.parameter
            or not _is_plain_inference(input, weight, bias)
        ):
            return linear(input, weight, bias, self.activation)
        packed.check()
        return packed_linear(input, packed.tensor, self.out_features, bias, self.activation)

    def pack_weight(self) -> Self:
        """Packs the weight for inference: calls multiply by the copy that is made here and now.

        The copy lies in the order in which the product reads it, and takes as much memory again as
        the weight. It is used where no gradient is recorded; ``torch.compile``, ``torch.export``,
        autocast, ``torch.func``, tensor subclasses and a weight that is assigned anew get the
        weight itself. The bias is not copied: it may change.

        **Until the module is unpacked, the weight must not be modified**: by no optimiser, no
        collective operation, no other process that shares its memory, no view, NumPy array or
        ``weight.data``. The calls after such a write would multiply by the old weight. A write that
        PyTorch's version counter or the address of the weight shows makes the next call raise;
        those of fused optimisers and of the others of this list do not show. After a write, pack
        again.

        :meth:`unpack_weight` ends it, and so do :meth:`train`, ``load_state_dict``, and every move
        (``to``, ``half``, ``cuda``, ``to_empty``, ``share_memory``, also where nothing moves). The
        copy is never saved, pickled or copied with the module.

        Returns:
            The module.

        Raises:
            RuntimeError: The module is in training mode, or its weight is no plain
                :class:`torch.nn.Parameter` (a parametrization computes it, or it is of a
                subclass), of no supported dtype, or neither on the CPU nor on a CUDA device.

        Example:
            >>> layer = Linear(3, 2, activation="relu").eval().pack_weight()
            >>> with torch.inference_mode():
            ...     output = layer(torch.ones(5, 3))
            >>> layer.is_packed, layer.train().is_packed
            (True, False)
        """
        problem = why_not_packed(self)
        if problem is not None:
            raise RuntimeError(f"Linear.pack_weight: {problem}")
        self._packed = _Packed.of(self.weight)
        return self

    def unpack_weight(self) -> Self:
        """Gives the packed weight up, if there is one: calls multiply by the weight itself.

        Returns:
            The module.
        """
        self._packed = None
        return self

    @property
    def is_packed(self) -> bool:
        """Whether :meth:`pack_weight` was called, and nothing has ended it since."""
        return self._packed is not None

    def train(self, mode: bool = True) -> Self:
        """Sets the mode; training mode gives the packed weight up."""
        if mode:
            self.unpack_weight()
        return super().train(mode)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        text = super().extra_repr()
        return text if self.activation is None else f"{text}, activation={self.activation!r}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.unpack_weight()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.unpack_weight()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_packed", None)
        return state


def activation_of(module: torch.nn.Module) -> str | None:
    """The activation that a linear layer applies: only ours has one."""
    return module.activation if isinstance(module, Linear) else None


def refuse_activation(name: str, module: torch.nn.Module) -> None:
    """Refuses a linear layer with an activation, for a class that has none.

    Args:
        name: The function that was called.
        module: The layer.

    Raises:
        ValueError: It has one.
    """
    activation = activation_of(module)
    if activation is not None:
        raise ValueError(
            f"{name}: module applies {activation!r}, which the new layer would not; set its "
            "activation to None and apply it to the new layer's result"
        )


def why_not_packed(module: Linear) -> str | None:
    """What keeps the weight of a module from being packed, in words."""
    if module.training:
        return "the module is in training mode; call eval() first"
    weight = module.weight
    if type(weight) is not torch.nn.Parameter:
        return (
            f"weight is a {type(weight).__name__}; it must be a plain torch.nn.Parameter, neither "
            "parametrised nor of a subclass"
        )
    if weight.dtype not in FLOATING:
        return f"weight is {weight.dtype}; it must be float16, bfloat16, float32 or float64"
    if weight.device.type not in ("cpu", "cuda"):
        return f"weight is on {weight.device}; it must be on the CPU or on a CUDA device"
    return None


def _version(parameter: Tensor) -> int | None:
    return None if parameter.is_inference() else parameter._version


def _is_plain_inference(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a call is one of plain tensors that nobody traces, transforms or differentiates."""
    if type(input) not in (Tensor, torch.nn.Parameter) or input.device != weight.device:
        return False
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if records_gradients(tensors):
        return False
    return (
        not may_be_forward_mode()
        and not torch._C._are_functorch_transforms_active()
        and not torch.is_autocast_enabled(input.device.type)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
    )
