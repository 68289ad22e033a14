"""The arguments that an operator is checked with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Sample:
    """The arguments of one call that must succeed.

    A float64 tensor stands for "a tensor of the dtype under test": :func:`pkg.testing.check_op`
    converts it to each of its ``dtypes`` in turn. Tensors of any other dtype (masks, indices, the
    operands of a mixed-dtype call) stay as they are. A sample without a float64 tensor is checked
    once, as it is.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        name: what a failure calls this sample, put before the shapes of its tensors.
        family: samples of one family differ in sizes alone; they pass through one compiled and one
            exported program, which must serve them all. The family decides what is constant:
            number of dimensions, dtypes, which dimensions broadcast, every argument that is not a
            tensor. PyTorch compiles sizes of 0 and 1 apart, and takes sizes that are equal in the
            first sample to be equal always.
        values_only: check values, gradients, layouts and determinism but nothing that traces or
            compiles: for the long list of sizes around a tile boundary.
        differentiable: whether the gradients of this sample are compared with the reference's.
        gradcheck: whether finite differences are meaningful here; not at a kink or for a NaN.
        random: the call draws random numbers, so its values are compared only between calls made
            with the same seed.
        dtypes: replaces ``dtypes`` of ``check_op`` for this sample; ``()`` leaves float64 alone.

    Example:
        >>> sample = Sample((torch.ones(2, 3), 2.0), name="scaled")
        >>> str(sample)
        'scaled (float32[2, 3], 2.0)'
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    family: str | None = None
    values_only: bool = False
    differentiable: bool = True
    gradcheck: bool = True
    random: bool = False
    dtypes: tuple[torch.dtype, ...] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments, in order."""
        return [leaf for leaf in self._leaves() if isinstance(leaf, Tensor)]

    def with_tensors(self, tensors: Iterable[Tensor]) -> Sample:
        """The same call with other tensors, given in the order of :attr:`tensors`."""
        remaining = iter(tensors)
        return self.map(lambda leaf: next(remaining) if isinstance(leaf, Tensor) else leaf)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Sample:
        """The same call with ``function`` applied to every tensor."""
        return self.map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)

    def map(self, function: Callable[[Any], Any]) -> Sample:
        """The same call with ``function`` applied to every argument, inside lists too."""
        args = _mapped(function, self.args)
        kwargs = {name: _mapped(function, argument) for name, argument in self.kwargs.items()}
        return dataclasses.replace(self, args=args, kwargs=kwargs)

    def converted(self, dtype: torch.dtype | None) -> Sample:
        """This sample with its float64 tensors in ``dtype``; unchanged for ``None``."""
        if dtype is None:
            return self
        return self.map_tensors(lambda tensor: tensor.to(dtype) if is_template(tensor) else tensor)

    def copy(self) -> Sample:
        """The same call on copies of the tensors that keep strides, offset and padding."""
        return self.map_tensors(copy_of)

    def _leaves(self) -> list[Any]:
        leaves: list[Any] = []
        _mapped(leaves.append, (*self.args, *self.kwargs.values()))
        return leaves

    def __str__(self) -> str:
        parts = [_describe(argument) for argument in self.args]
        parts += [f"{name}={_describe(argument)}" for name, argument in self.kwargs.items()]
        return f"{self.name} ({', '.join(parts)})".strip()


@dataclass(frozen=True)
class ErrorSample:
    """The arguments of one call that must be refused in words.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        error: the exception type expected.
        match: regular expression that the message must contain.
        name: what a failure calls this sample.
        move: whether the tensors are moved to the device under test; not where the error is that
            they are on several devices.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    error: type[Exception] = RuntimeError
    match: str = ""
    name: str = ""
    move: bool = True

    def to(self, device: torch.device) -> ErrorSample:
        """The same call on ``device``, where it may be moved.

        What is wrong may be how tensors lie: they keep strides and offsets, and the memory that
        they share.
        """
        if not self.move:
            return self
        moved = Sample(self.args, self.kwargs).map_tensors(_Mover(device))
        return dataclasses.replace(self, args=moved.args, kwargs=moved.kwargs)

    def __str__(self) -> str:
        return f"expected to fail: {Sample(self.args, self.kwargs, self.name)}"


class _Mover:
    """Moves tensors to a device as they lie in memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor there, in the memory of those before it where it was in theirs."""
        has_memory = type(tensor) is Tensor and tensor.layout is torch.strided
        if tensor.device == self._device or not has_memory or tensor.is_conj() or tensor.is_neg():
            return tensor.to(self._device)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._storages[key] = whole.to(self._device).untyped_storage()
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        there = torch.empty(0, dtype=tensor.dtype, device=self._device)
        there.set_(self._storages[key], *place)
        return there.requires_grad_(tensor.requires_grad)


# What most arguments are: PyTorch's own way, which knows every container, takes ten times as long.
_LEAVES = (Tensor, int, float, str, type(None))


def _mapped(function: Callable[[Any], Any], argument: Any) -> Any:
    """The argument with ``function`` applied to each leaf."""
    if isinstance(argument, _LEAVES):
        return function(argument)
    kind = type(argument)
    if kind is tuple or kind is list:
        return kind([_mapped(function, each) for each in argument])
    return pytree.tree_map(function, argument)


def is_template(tensor: Tensor) -> bool:
    """Whether ``tensor`` stands for the dtype under test."""
    return tensor.dtype == torch.float64


def copy_of(tensor: Tensor) -> Tensor:
    """A copy that keeps size, strides and offset, and what lies between the elements.

    Memory that an expanded dimension shares is shared in the copy too.
    """
    storage = tensor.untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    return copy.requires_grad_(tensor.requires_grad)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same bits, NaN and -0.0 included."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if actual.numel() == 0:
        return True
    return torch.equal(_bytes_of(actual), _bytes_of(expected))


def _bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor that is not empty, in one dimension."""
    flat = tensor.detach().contiguous().reshape(-1)
    # A single element keeps its stride, which a view in bytes does not take.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _describe(argument: Any) -> str:
    if isinstance(argument, Tensor):
        text = f"{str(argument.dtype).removeprefix('torch.')}{list(argument.shape)}"
        if not argument.is_contiguous():
            text += f" strides {list(argument.stride())}"
        return text
    if isinstance(argument, list | tuple):
        return f"[{', '.join(_describe(item) for item in argument)}]"
    return repr(argument)
