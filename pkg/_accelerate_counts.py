"""What became of the calls that :func:`pkg.accelerate` knows, for its report."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

_Result = TypeVar("_Result")


class Counts:
    """What became of the calls of one operator with one dtype.

    Attributes:
        operator: One of :data:`~pkg._accelerate_routes.OPERATORS`, or what Python counts:
            ``optim.adam``.
        dtype: One of :data:`~pkg._accelerate_routes.DTYPES`.
        taken: Calls that ran in our kernel, steps that ran fused.
        left: Calls that were left to PyTorch's.
        seconds: Time in ours; 0 where no report was asked for.
        saved: What PyTorch's kernel would have taken more, by the table; None of what has none.
    """

    saved: float | None

    def __init__(self, operator: str, dtype: str, numbers: list[int]) -> None:
        """Of the four numbers that the library counts."""
        self.operator = operator
        self.dtype = dtype
        self.taken, self.left, nanoseconds, saved = numbers
        self.seconds = nanoseconds * 1e-9
        self.saved = saved * 1e-9


class Route:
    """What Python leads elsewhere: whether it does, and what it counts while a report is asked for.

    Attributes:
        is_on: Whether calls may be taken over.
    """

    def __init__(self) -> None:
        """Off, with nothing counted."""
        self.is_on = False
        self.counts_calls = False
        self._counts: dict[tuple[str, str], Counts] = {}

    def switch(self, is_on: bool, takes_time: bool) -> None:
        """Turns it on or off, and the clock of a report."""
        self.is_on = is_on
        self.counts_calls = takes_time

    def run(
        self, operator: str, dtype: torch.dtype, taken: bool, call: Callable[[], _Result]
    ) -> _Result:
        """Makes a call, and counts it: as taken with its time, or as left to PyTorch."""
        if not self.counts_calls:
            return call()
        begin = time.perf_counter()
        result = call()
        key = operator, str(dtype).removeprefix("torch.")
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts.setdefault(key, Counts(*key, [0, 0, 0, 0]))
            counts.saved = None
        counts.taken += taken
        counts.left += not taken
        counts.seconds += time.perf_counter() - begin if taken else 0.0
        return result

    def take(self) -> list[Counts]:
        """What was counted since the last time."""
        found = list(self._counts.values())
        self._counts.clear()
        return found
