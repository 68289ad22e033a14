"""Which tensors are batched, or require grad, where a check tries many choices of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TypeVar

Item = TypeVar("Item")

_ALL_OF = 4
"""Of so many items every choice is tried: 15."""


def choices(items: Sequence[Item]) -> Iterator[tuple[Item, ...]]:
    """Choices of one or more of the items; every one where there are few.

    Of more they are those of one, of two and of all: any three items are then met in every
    combination of chosen and not chosen, by n (n + 1) / 2 + 1 choices in place of 2^n - 1, which
    for the nine tensors of a backward operator are 46 and 511.
    """
    count = len(items)
    few = count <= _ALL_OF
    for size in range(1, count + 1):
        if few or size <= 2 or size == count:
            yield from combinations(items, size)
