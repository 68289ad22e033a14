"""How an operator's tensors may be split among processes: what DTensor asks, without its import.

An operator's module states it in a line, as einsum does: every tensor and names for its dimensions.
Where a name stands, the processes may each have a part of that dimension, and compute with that and
the whole of the tensors that lack the name. For a linear layer::

    input ... i, weight o i, + bias o -> ... o

- ``...`` are any leading dimensions, aligned from the right and broadcast, as in PyTorch. ``?h`` is
  broadcast too, where its size is 1. An argument may lack the first of those named after ``...``.
- ``_`` is a dimension that stays whole; ``0`` among the results is one without elements. An
  argument that the line leaves out stays whole.
- A name that a result lacks is summed over: each process has a summand of that result. An argument
  after ``+`` is added to the sum, and so has to come in summands too.
- ``o/8`` is a dimension of which an element stands for eight of ``o``: only whole ones are split.
- ``= query`` among the results is the gradient of that argument: split as it is, and a sum where it
  was broadcast.

Where sizes of one name differ, as the heads of queries and of keys do, all have to divide evenly.
:mod:`pkg.integrations.distributed` makes DTensor's rules of these lines.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

WHOLE = "whole"
SUMMAND = "summand"
Part = int | str
"""What a process has of a tensor: a part of that dimension, ``WHOLE`` or a ``SUMMAND`` of it."""


class Description(NamedTuple):
    """What a layout may ask of a tensor."""

    shape: Sequence[int]
    dtype: torch.dtype


class Split(NamedTuple):
    """A way to split a call: what of each result and of each tensor among the arguments."""

    results: list[Part]
    arguments: dict[str, Part]


Layout = str | Callable[..., str]

_layouts: dict[str, Layout] = {}


def register_sharding(name: str, layout: Layout) -> None:
    """States how an operator's tensors may be split; one that states nothing is never split.

    Args:
        name: The operator's name, without its namespace.
        layout: The line, or a function of the operator's arguments by name that gives it; tensors
            among them come as a :class:`Description`.
    """
    _layouts[name] = layout


def possible_splits(
    name: str, arguments: Mapping[str, Any], results: int, processes: Sequence[int]
) -> list[Split]:
    """All ways to split a call along one dimension of a mesh, that with nothing split first.

    Args:
        name: The operator's name, without its namespace.
        arguments: All of them by name, in order; each tensor a :class:`Description`.
        results: How many the operator has.
        processes: Along each dimension of the mesh.
    """
    tensors = {key: each for key, each in arguments.items() if isinstance(each, Description)}
    whole = Split([WHOLE] * results, dict.fromkeys(tensors, WHOLE))
    layout = _layouts.get(name)
    if layout is None:
        return [whole]
    line = layout if isinstance(layout, str) else layout(**arguments)
    parsed = _parse(line, tensors)
    counts = {
        math.prod(chosen)
        for size in range(1, len(processes) + 1)
        for chosen in itertools.combinations(processes, size)
    }
    names = dict.fromkeys(
        each.name for dims in parsed.arguments.values() for each in dims if each.name != "_"
    )
    splits = [_split(parsed, each) for each in names if _is_possible(parsed, each, counts)]
    return [whole, *splits]


@dataclass(frozen=True)
class _Dimension:
    name: str
    size: int  # of a result's: 0, not known
    stands_for: int
    is_broadcast: bool


@dataclass(frozen=True)
class _Parsed:
    arguments: dict[str, list[_Dimension]]
    added: set[str]
    results: list[list[_Dimension] | str | None]
    """Dimensions, the argument that a gradient is of, or None for one that is empty."""


def _dimensions(words: Sequence[str], leading: int) -> list[_Dimension]:
    """The dimensions of a tensor of which ``...`` are so many."""
    if "..." in words:
        place = words.index("...")
        # From the right, as they are aligned.
        numbered = [f"...{index}" for index in reversed(range(leading))]
        words = [*words[:place], *numbered, *words[place + 1 :]]
    parts = (word.partition("/") for word in words)
    return [
        _Dimension(name.removeprefix("?"), 0, int(number or 1), name.startswith(("...", "?")))
        for name, _, number in parts
    ]


def _parse(line: str, tensors: Mapping[str, Description]) -> _Parsed:
    left, _, right = line.partition("->")
    arguments: dict[str, list[_Dimension]] = {}
    added = set()
    most_leading = 0
    for name, *words in (each.split() for each in left.split(",")):
        if name == "+":
            name, *words = words
            added.add(name)
        if name in tensors:
            sizes = tensors[name].shape
            if "..." in words and len(sizes) < len(words) - 1:
                # A mask of fewer dimensions than are named; they are aligned from the right too.
                words = words[len(words) - len(sizes) :]
            leading = len(sizes) - len(words) + 1 if "..." in words else 0
            dimensions = zip(_dimensions(words, leading), sizes, strict=True)
            arguments[name] = [replace(each, size=size) for each, size in dimensions]
            most_leading = max(most_leading, leading)
    results: list[list[_Dimension] | str | None] = []
    for words in (each.split() for each in right.split(",") if each.strip()):
        if words == ["0"]:
            results.append(None)
        elif words[0] == "=":
            results.append(words[1])
        else:
            results.append(_dimensions(words, most_leading))
    return _Parsed(arguments, added, results)


def _holders(parsed: _Parsed, name: str) -> dict[str, tuple[int, _Dimension]]:
    """The arguments of which a split of this name takes a part, and of which dimension."""
    return {
        argument: (place, each)
        for argument, dimensions in parsed.arguments.items()
        for place, each in enumerate(dimensions)
        if each.name == name and not (each.is_broadcast and each.size == 1)
    }


def _is_possible(parsed: _Parsed, name: str, counts: set[int]) -> bool:
    """Whether all processes can have parts of a dimension that belong to each other.

    DTensor gives the first processes more where a size does not divide, and splits nothing that
    has fewer elements than there are processes.
    """
    sizes = {(each.size, each.stands_for) for _, each in _holders(parsed, name).values()}
    if not sizes or max(size for size, _ in sizes) == 0:
        return False
    stands_for = {
        each.stands_for
        for dimensions in parsed.results
        if isinstance(dimensions, list)
        for each in dimensions
        if each.name == name
    }
    if len(sizes) == 1 and stands_for | {number for _, number in sizes} <= {1}:
        return True
    full = max(size * number for size, number in sizes)
    return all(
        min(size for size, _ in sizes) < count
        or (
            all(size % count == 0 for size, _ in sizes)
            and all(full % (number * count) == 0 for number in stands_for)
        )
        for count in counts
    )


def _split(parsed: _Parsed, name: str) -> Split:
    places = {argument: place for argument, (place, _) in _holders(parsed, name).items()}
    results: list[Part] = []
    for result in parsed.results:
        if result is None:
            results.append(WHOLE)
        elif isinstance(result, str):
            results.append(places.get(result, SUMMAND))
        else:
            names = [each.name for each in result]
            results.append(names.index(name) if name in names else SUMMAND)
    is_sum = SUMMAND in results
    return Split(
        results,
        {
            argument: places.get(
                argument, SUMMAND if is_sum and argument in parsed.added else WHOLE
            )
            for argument in parsed.arguments
        },
    )
