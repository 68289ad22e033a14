"""Calls made again with their tensors elsewhere in memory, for ``gpu_check.py sample``."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from gpu_calls import Call, calls
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from pkg.testing import same_bits

Tensors = list[Tensor]
Move = Callable[[Sequence[Tensor]], tuple[Tensors, Tensors]]
FIRST_BEYOND = 2**31
# Elements: distances that are multiples of it leave all that kernels ask of alignment as it was.
ALIGNMENT = 64
MOST_DIMENSIONS = 5
# MAP_NORESERVE of Linux, which not every Python names: more than the machine has may be mapped.
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


class Elsewhere(TorchDispatchMode):
    """Makes each call of an operator of this package again, and compares.

    Args:
        moves: by what they are, in words, each takes tensors and gives the same values in two other
            places, between which results must not differ in a bit.
        operator: what is called in place of one of this package.

    Attributes:
        faults: in words.
        compared: the names of the operators that were called again.
    """

    def __init__(
        self, moves: dict[str, Move], operator: Callable[[Any], Any] = lambda each: each
    ) -> None:
        super().__init__()
        self.moves = moves
        self.operator = operator
        self.faults: list[str] = []
        self.compared: set[str] = set()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if not name.startswith("pkg::"):
            return func(*args, **(kwargs or {}))
        flat, structure = tree_flatten((args, kwargs or {}))
        where = [index for index, each in enumerate(flat) if isinstance(each, Tensor)]

        def called(tensors: Sequence[Tensor]) -> Any:
            given = list(flat)
            for index, tensor in zip(where, tensors, strict=True):
                given[index] = tensor
            positional, named = tree_unflatten(given, structure)
            return self.operator(func)(*positional, **named)

        tensors = [flat[index] for index in where]
        if self.is_new(name, flat):
            for words, move in self.moves.items():
                if not self.compare(name, words, move, called, tensors, range(len(tensors))):
                    # Some argument may lie in one way alone: then the others.
                    for index in range(len(tensors)):
                        self.compare(name, words, move, called, tensors, [index])
        return called(tensors)

    def compare(
        self,
        name: str,
        words: str,
        move: Move,
        called: Callable[[Tensors], Any],
        tensors: Tensors,
        moved: Sequence[int],
    ) -> bool:
        """Whether the call may be made so; notes where results differ."""
        first, second = list(tensors), list(tensors)
        for index, near, far in zip(moved, *move([tensors[each] for each in moved]), strict=True):
            first[index], second[index] = near, far
        try:
            expected = [*tree_flatten(called(first))[0], *first]
        except RuntimeError:
            return False
        # Arguments too, since an operator may write them.
        results = [*tree_flatten(called(second))[0], *second]
        if any(each is not tensor for each, tensor in zip(second, tensors, strict=True)):
            self.compared.add(name)
        for index, pair in enumerate(zip(results, expected, strict=True)):
            if isinstance(pair[0], Tensor) and not same_bits(*pair):
                self.faults.append(f"{name}: result {index} differs with {words}")
        return True

    def is_new(self, name: str, flat: Sequence[Any]) -> bool:
        """Whether no call was like this one but for values."""
        like = [
            (each.shape, each.stride(), each.dtype) if isinstance(each, Tensor) else each
            for each in flat
        ]
        key = f"{name} {like}"
        is_new = key not in self.seen
        self.seen.add(key)
        return is_new


def elements(count: int, like: Tensor) -> Tensor:
    """So many, of which on the CPU only those take memory that are touched."""
    if like.device.type != "cpu":
        return torch.empty(count, dtype=like.dtype, device=like.device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, count * like.element_size(), flags=flags)
    return torch.frombuffer(memory, dtype=like.dtype)


def spread(tensor: Tensor, dim: int, beyond: int) -> tuple[int, list[int]]:
    """How many elements, and which strides, a tensor has whose last place along ``dim`` is so far.

    All else lies together, in the order in which it did.
    """
    strides = [0] * tensor.dim()
    inner = 1
    for each in sorted(range(tensor.dim()), key=lambda each: (tensor.stride(each), -each)):
        if each != dim and tensor.size(each) > 1 and tensor.stride(each) > 0:
            strides[each] = inner
            inner *= tensor.size(each)
    steps = tensor.size(dim) - 1
    distance = max(inner, -(-beyond // steps))
    strides[dim] = (distance // ALIGNMENT + 1) * ALIGNMENT
    return strides[dim] * steps + inner, strides


def placed(tensor: Tensor, dim: int, beyond: int) -> Tensor:
    """A copy of the tensor, spread so."""
    count, strides = spread(tensor, dim, beyond)
    result = elements(count, tensor).as_strided(tensor.shape, strides)
    # Of what is one element for all of a dimension, that one.
    first = [slice(0, 1) if stride == 0 else slice(None) for stride in strides]
    result[tuple(first)].copy_(tensor[tuple(first)])
    return result


def far_apart(from_last: int, tensors: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
    """Tensors spread along a dimension, counted from the last, as far as the device has memory.

    Beside them such of as many different strides, whose elements lie near each other.
    """
    near, far = list(tensors), list(tensors)
    if any(tensor.device.type == "cuda" for tensor in tensors):
        torch.cuda.empty_cache()  # of the call before, which is no free memory to fits()
    for index, tensor in enumerate(tensors):
        dim = tensor.dim() - from_last
        if dim >= 0 and tensor.size(dim) > 1 and fits(tensor, dim):
            near[index] = placed(tensor, dim, 0)
            far[index] = placed(tensor, dim, FIRST_BEYOND)
    return near, far


def fits(tensor: Tensor, dim: int) -> bool:
    """Whether the device has the memory for it, and as much again."""
    if tensor.device.type == "cpu":
        return True
    count, _ = spread(tensor, dim, FIRST_BEYOND)
    return bool(torch.cuda.mem_get_info(tensor.device)[0] > 2 * count * tensor.element_size())


def small_calls(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[Call]:
    """Calls of every operator that take little memory, but for what is spread."""
    return list(calls(device, [dtype], [3]))


def spread_beyond_31_bits(
    made: Iterable[Call], operator: Callable[[Any], Any] = lambda each: each
) -> tuple[list[str], set[str]]:
    """What differs where elements of arguments are more than 2^31 apart; what was compared."""
    moves: dict[str, Move] = {
        f"arguments apart along dimension {-from_last}": partial(far_apart, from_last)
        for from_last in range(1, MOST_DIMENSIONS + 1)
    }
    with Elsewhere(moves, operator) as elsewhere:
        for call in made:
            call.run()
    return elsewhere.faults, elsewhere.compared
