"""Measures on this processor which of PyTorch's products run faster in this package.

``python -m pkg tune`` does it, in about a minute, and keeps the table where
:func:`pkg.accelerate` finds it.
"""

from __future__ import annotations

import datetime
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _accelerate_routes, _accelerate_table, _loader
from .environment import processor_name

ROWS = (1, 8, 64, 512)
"""The rows of a product that are measured: ``kRowClasses`` of csrc/cpu/accelerate/routes.h."""
COLUMNS = (16, 64, 256, 1024)
"""Its columns, and the dimension that is summed over: ``kColumnClasses`` there."""
LAYOUTS = ("plain", "right transposed", "left transposed")
FAMILIES = ("product", "batch")
BATCH = 8
"""Products in a batch; its classes of 1024 and 512 have the ratio of a single product."""

_ROUNDS = 7
_SECONDS = 2e-4
_Call = Callable[[], object]


class Case(NamedTuple):
    """One entry of the table."""

    family: str
    dtype: str
    layout: str
    rows: int
    columns: int
    inner: int

    def operands(self) -> tuple[Tensor, Tensor]:
        """Two matrices, or two batches of them, that the operator multiplies."""
        lead = (BATCH,) if self.family == "batch" else ()
        left, right = (*lead, self.rows, self.inner), (*lead, self.inner, self.columns)
        return (
            _operand(left, self.dtype, self.layout == "left transposed"),
            _operand(right, self.dtype, self.layout == "right transposed"),
        )

    def call(self) -> _Call:
        """The operator on operands of its own."""
        a, b = self.operands()
        if self.dtype == "int8":
            return lambda: torch._int_mm(a, b)
        if self.family == "batch":
            return lambda: torch.bmm(a, b)
        return lambda: torch.mm(a, b)


def cases() -> list[Case]:
    """All entries, in the table's order."""
    return list(
        itertools.starmap(
            Case,
            itertools.product(FAMILIES, _accelerate_routes.DTYPES, LAYOUTS, ROWS, COLUMNS, COLUMNS),
        )
    )


def is_measured(case: Case) -> bool:
    """Whether a case is measured itself, and not taken from another."""
    if case.dtype == "int8" and (case.family == "batch" or case.layout == "left transposed"):
        return False
    return case.family == "product" or max(case.rows, case.columns, case.inner) <= 256


def measure(*, quiet: bool = False) -> dict[str, Any]:
    """Measures every entry, with one thread and with as many as PyTorch uses now.

    Args:
        quiet: Show no progress on stderr.

    Returns:
        The table as ``_accelerate_table.put`` takes it: ``ratios`` are the time that
        PyTorch's kernel took divided by ours, 0 where there is nothing to measure.
    """
    threads = torch.get_num_threads()
    _accelerate_routes.register()
    counts = list(dict.fromkeys([1, threads]))
    by_threads = []
    try:
        for index, count in enumerate(counts):
            torch.set_num_threads(count)
            by_threads.append(_measure_all(quiet, index / len(counts), 1 / len(counts)))
    finally:
        torch.set_num_threads(threads)
        _fill(0.0)
        _accelerate_routes.switch(False, False)
        _accelerate_routes.take_counts()
        if not quiet:
            print(file=sys.stderr)
    return {
        "format": _accelerate_table.FORMAT,
        "processor": processor_name(),
        "capability": _loader.cpu_capability,
        "torch": torch.__version__,
        "threads": [counts[0], counts[-1]],
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "ratios": [by_threads[0], by_threads[-1]],
    }


def _measure_all(quiet: bool, done: float, share: float) -> list[float]:
    ratios: dict[Case, float] = {}
    everything = cases()
    for i, case in enumerate(everything):
        if not quiet and sys.stderr.isatty():
            print(f"\r{100 * (done + share * i / len(everything)):3.0f} %", end="", file=sys.stderr)
        ratios[case] = _ratio(case) if is_measured(case) else _taken_from(case, ratios)
    return [round(ratios[case], 2) for case in everything]


def _taken_from(case: Case, ratios: dict[Case, float]) -> float:
    """Of a batch of large products that of one; none of what no operator does."""
    return ratios[case._replace(family="product")] if case.family == "batch" else 0.0


def _ratio(case: Case) -> float:
    """PyTorch's time divided by ours, by turns: the median."""
    call = case.call()
    _fill(float("inf"))
    repeats = max(1, int(_SECONDS / _seconds(call, 1, True)))
    found: list[float] = []
    for _ in range(_ROUNDS):
        ours = _seconds(call, repeats, True)
        found.append(_seconds(call, repeats, False) / ours)
        middle = statistics.median(found)
        # Far from a tie no more rounds are needed, and those of a cliff take long.
        if (len(found) >= 3 and not 0.7 < middle < 1.5) or middle > 5:
            break
    return statistics.median(found)


def _seconds(call: _Call, repeats: int, ours: bool) -> float:
    _accelerate_routes.switch(ours, False)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return max(time.perf_counter() - begin, 1e-9) / repeats


def _operand(shape: tuple[int, ...], dtype: str, is_transposed: bool) -> Tensor:
    if is_transposed:
        return _operand((*shape[:-2], shape[-1], shape[-2]), dtype, False).mT
    if dtype == "int8":
        return torch.randint(-128, 128, shape, dtype=torch.int8)
    return torch.randn(shape).to(getattr(torch, dtype))


def _fill(ratio: float) -> None:
    _accelerate_table.put({"ratios": [ratio] * len(_accelerate_routes.table())})


def summary(table: dict[str, Any]) -> Iterator[str]:
    """A table in words: by dtype, on how many of the sizes ours is faster, and by how much."""
    yield (
        f"{table['processor']}, CPU library {table['capability']}, PyTorch {table['torch']}, "
        f"{table['date']}"
    )
    for threads, ratios in zip(table["threads"], table["ratios"], strict=True):
        yield f"with {threads} thread{'s' if threads > 1 else ''}, PyTorch's time / ours:"
        by_group: dict[tuple[str, str], list[float]] = {}
        for case, ratio in zip(cases(), ratios, strict=True):
            if is_measured(case):
                by_group.setdefault((case.family, case.dtype), []).append(ratio)
        for (family, dtype), values in by_group.items():
            taken = sum(value >= 1.05 for value in values)
            yield (
                f"  {family:7} {dtype:8} ours in {taken:3} of {len(values):3} sizes; ratios "
                f"{min(values):.2f} to {max(values):.2f}, median {statistics.median(values):.2f}"
            )
        if table["threads"][0] == table["threads"][-1]:
            return


def main() -> int:
    """Measures, keeps and shows the table; the exit status."""
    table = measure()
    file = _accelerate_table.save(table)
    _accelerate_table.put(table)
    print(*summary(table), f"kept in {file}", sep="\n")
    return 0
