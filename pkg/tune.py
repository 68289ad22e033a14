"""Measures on this processor which of PyTorch's operators run faster in this package.

``python -m pkg tune`` does it, in a minute or two, and keeps the table in a file that it names,
where :func:`pkg.accelerate` finds it before the package's own; deleting the file undoes that.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _accelerate_activations, _accelerate_routes, _accelerate_table, _loader
from .environment import processor_name

LAYOUTS = ("plain", "right transposed", "left transposed")
FAMILIES = ("product", "batch")
BATCH = 8
"""Products in a batch; its sizes of 512 and more have the ratio of a single product."""
PASSES = ("forward", "backward")
HIDDEN = _accelerate_routes.HIDDEN
CURVES = _accelerate_activations.CURVES
HEADS, HEAD_SIZE = 4, 64

# Of the processors' time, that others may use while a table is measured that is to be kept.
_MOST_OF_OTHERS = 0.2
# Of an activation's tensor: more than a thread's share, and few enough for the caches.
_ELEMENTS = 1 << 17
_ROUNDS = 7
_SECONDS = 2e-4
_MOST_SECONDS = 0.2
_Call = Callable[[], object]
# Of its own: numbers that the user draws are the same, measured or not.
_generator = torch.Generator("cpu")


_SIZES = ("rows", "columns", "inner")
# How large the others are beside the largest, where that is measured.
_MOST_ROWS_BESIDE_LARGE, _BESIDE_LARGE, _WIDE_BESIDE_LARGE = 512, 256, 1024
# The least ratio from which on a call is ever taken over; what is near enough to 1 that it matters
# how exact it is; how many of these are measured again to see.
_LEAST_RATIO, _NEAR, _AGAIN = 1.02, 1.5, 80
# A ratio so far from a tie that it holds for larger sizes: those take PyTorch seconds.
_CLIFF = 4.0


class Product(NamedTuple):
    """A product of two matrices, or a batch of them: an entry of the table."""

    family: str
    dtype: str
    layout: str
    rows: int
    columns: int
    inner: int

    @property
    def group(self) -> str:
        """What a summary counts it to."""
        return f"{self.family} {self.dtype}"

    def operands(self) -> tuple[Tensor, Tensor]:
        """Two matrices, or two batches of them, that the operator multiplies."""
        lead = (BATCH,) if self.family == "batch" else ()
        left, right = (*lead, self.rows, self.inner), (*lead, self.inner, self.columns)
        return (
            operand(left, self.dtype, self.layout == "left transposed"),
            operand(right, self.dtype, self.layout == "right transposed"),
        )

    def call(self) -> _Call:
        """The operator on operands of its own; of large ones into memory that is there.

        Memory that is mapped anew for each result would take as long as the product, and
        :func:`pkg.accelerate` keeps what is freed.
        """
        a, b = self.operands()
        if self.family == "batch":
            return lambda: torch.bmm(a, b)
        function = torch._int_mm if self.dtype == "int8" else torch.mm
        if not self.large():
            return lambda: function(a, b)
        dtype = torch.int32 if self.dtype == "int8" else a.dtype
        out = torch.empty(self.rows, self.columns, dtype=dtype, device="cpu")
        return lambda: function(a, b, out=out)

    def sources(self) -> list[Product]:
        """The entries that are measured for this one, the least of which counts.

        Itself as a rule; none where there is no operator. Of large sizes, one at a time is
        measured, beside one size of the others, which is larger where these are all large enough
        for kernels that only pay there. Where another is smaller than that, the product counts for
        no more than that of the next smaller size, since it may be bound by memory.
        """
        if self.dtype == "int8" and self.layout == "left transposed":
            return []
        if self.family == "batch" and (self.dtype == "int8" or max(self.sizes) > _BESIDE_LARGE):
            return self._replace(family="product").sources()
        large = self.large()
        measured = [self._beside(name) for name in large]
        if measured in ([], [self]):
            return [self]
        is_thin = min(self.columns, self.inner) < _BESIDE_LARGE
        return [*measured, self.smaller()] if is_thin else measured

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, columns and inner dimension."""
        return self.rows, self.columns, self.inner

    def _beside(self, large: str) -> Product:
        """The entry that is measured for one of its large sizes."""
        rows = self.rows if large == "rows" else min(self.rows, _MOST_ROWS_BESIDE_LARGE)
        # Beside the most columns PyTorch's product of float64 would take half a second.
        is_wide = (
            large != "columns"
            and self.rows >= _MOST_ROWS_BESIDE_LARGE
            and min(self.columns, self.inner) >= _WIDE_BESIDE_LARGE
        )
        beside = _WIDE_BESIDE_LARGE if is_wide else _BESIDE_LARGE
        columns = self.columns if large == "columns" else beside
        inner = self.inner if large == "inner" else beside
        return self._replace(rows=rows, columns=columns, inner=inner)

    def large(self) -> list[str]:
        """Which of its sizes are the largest that is measured."""
        measured = _accelerate_routes.measured_sizes()
        named = zip(_SIZES, self.sizes, measured, strict=False)
        return [name for name, size, sizes in named if size == sizes[-1]]

    def smaller(self) -> Product:
        """The entry that has the next smaller size in the place of each that is the largest."""
        measured = _accelerate_routes.measured_sizes()
        rows, columns, inner = (
            sizes[-2] if size == sizes[-1] else size
            for size, sizes in zip(self.sizes, measured, strict=False)
        )
        return self._replace(rows=rows, columns=columns, inner=inner)


class Attention(NamedTuple):
    """A pass of attention over the heads of one sequence: an entry of the table."""

    which: str
    dtype: str
    hidden: str
    queries: int
    keys: int

    @property
    def group(self) -> str:
        """What a summary counts it to."""
        return f"attention {self.which} {self.dtype}"

    def call(self) -> _Call:
        """The operator on operands of its own, with the heads inside, as models have them."""
        query, key, value, grad = (
            operand((1, length, HEADS, HEAD_SIZE), self.dtype).transpose(1, 2)
            for length in (self.queries, self.keys, self.keys, self.queries)
        )
        mask = None
        if self.hidden == "mask":
            mask = torch.zeros(self.queries, self.keys, dtype=query.dtype, device="cpu")
        causal = self.hidden == "causal"
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        if self.which == "forward":
            return lambda: forward(query, key, value, 0.0, causal, attn_mask=mask)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        out, sums = forward(query, key, value, 0.0, causal, attn_mask=mask)
        return lambda: backward(grad, query, key, value, out, sums, 0.0, causal, attn_mask=mask)

    def sources(self) -> list[Attention]:
        """Itself: every entry is measured."""
        return [self]


class Activation(NamedTuple):
    """An activation of a tensor, or its gradient: an entry of the table."""

    which: str
    dtype: str
    curve: str

    @property
    def group(self) -> str:
        """What a summary counts it to."""
        return f"activation {self.which} {self.dtype}"

    def call(self) -> _Call:
        """The operator on operands of its own, into memory that is there."""
        x, grad, out = (operand((_ELEMENTS,), self.dtype) for _ in range(3))
        aten = torch.ops.aten
        approximate = {"gelu": {"approximate": "none"}, "gelu tanh": {"approximate": "tanh"}}
        words = approximate.get(self.curve, {})
        if self.which == "forward":
            forward = aten.gelu.out if words else aten.silu.out
            return lambda: forward(x, **words, out=out)
        backward = aten.gelu_backward if words else aten.silu_backward
        return lambda: backward.grad_input(grad, x, **words, grad_input=out)

    def sources(self) -> list[Activation]:
        """Itself: every entry is measured."""
        return [self]


Case = Product | Attention | Activation


def products() -> list[Product]:
    """The entries for products, in the table's order."""
    dtypes = _accelerate_routes.DTYPES
    sizes = _accelerate_routes.measured_sizes()[:3]
    parts = itertools.product(FAMILIES, dtypes, LAYOUTS, *sizes)
    return list(itertools.starmap(Product, parts))


def attentions() -> list[Attention]:
    """The entries for attention, in the table's order."""
    dtypes = _accelerate_routes.DTYPES[:-1]
    *_, queries, keys = _accelerate_routes.measured_sizes()
    parts = itertools.product(PASSES, dtypes, HIDDEN, queries, keys)
    return list(itertools.starmap(Attention, parts))


def activations() -> list[Activation]:
    """The entries for activations, in the table's order."""
    dtypes = _accelerate_routes.DTYPES[:-1]
    return list(itertools.starmap(Activation, itertools.product(PASSES, dtypes, CURVES)))


def kinds() -> list[list[Case]]:
    """The entries of a table, in its order."""
    return [[*products()], [*attentions()], [*activations()]]


def measure(*, quiet: bool = False) -> dict[str, Any]:
    """Measures every entry, with one thread and with as many as PyTorch uses now.

    Where that is one too, the table says nothing of several: its second half is a copy that
    ``_accelerate_table`` does not use.

    Args:
        quiet: Show no progress on stderr.

    Returns:
        The table as ``_accelerate_table.put`` takes it: ``ratios`` are the time that
        PyTorch's kernel took divided by ours, 0 where there is nothing to measure; from ``least``
        on, of each number of threads, a call is to be taken over.
    """
    threads = torch.get_num_threads()
    counts = list(dict.fromkeys([1, threads]))
    total = len(counts) * sum(map(len, kinds()))
    ratios: list[list[list[float]]] = [[] for _ in kinds()]
    least = []
    with everything_ours():
        try:
            for count in counts:
                torch.set_num_threads(count)
                measured: dict[Case, float] = {}
                for kind, cases in enumerate(kinds()):
                    done = sum(len(each) for part in ratios for each in part)
                    ratios[kind].append(_measure_all(cases, None if quiet else (done, total)))
                    measured |= zip(cases, ratios[kind][-1], strict=True)
                noise = 1 + _scatter(measured)
                least.append(min(max(_LEAST_RATIO, noise), _accelerate_table.MOST_NOISE))
        finally:
            torch.set_num_threads(threads)
    if not quiet:
        print(file=sys.stderr)
    return {
        "format": _accelerate_table.FORMAT,
        "processor": processor_name(),
        "capability": _loader.cpu_capability,
        "torch": torch.__version__,
        "threads": [counts[0], counts[-1]],
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "least": [round(least[0], 3), round(least[-1], 3)],
        "ratios": [[each[0], each[-1]] for each in ratios],
    }


@contextlib.contextmanager
def everything_ours() -> Iterator[None]:
    """While it is open our kernels take whatever they can where they are on, table or no table."""
    from .accelerate import collect, settle

    collect()
    _accelerate_routes.register()
    before, enough = _accelerate_routes.table(), _accelerate_routes.enough()
    _accelerate_routes.put([math.inf] * len(before), enough)
    _accelerate_routes.register()  # of activations, which nothing may have taken before
    try:
        yield
    finally:
        _accelerate_routes.put(before, enough)
        _accelerate_routes.take_counts()
        settle()


def _measure_all(cases: Sequence[Case], progress: tuple[int, int] | None) -> list[float]:
    """The ratios of some entries; progress is how many of how many were done before."""
    ratios: dict[Case, float] = {}

    def ratio_of(case: Case) -> float:
        if case not in ratios:
            before = case.smaller() if isinstance(case, Product) and case.large() else None
            ratios[case] = 0.0 if before is None else ratio_of(before)
            if ratios[case] < _CLIFF:
                ratios[case] = _ratio(case)
        return ratios[case]

    found = []
    for i, case in enumerate(cases):
        if progress and sys.stderr.isatty():
            print(f"\r{100 * (progress[0] + i) / progress[1]:3.0f} %", end="", file=sys.stderr)
        found.append(min(map(ratio_of, case.sources()), default=0.0))
    return [round(ratio, 2) for ratio in found]


def _scatter(measured: Mapping[Case, float]) -> float:
    """By how much a ratio near 1 differs when it is measured again: nine in ten by less."""
    near = [
        (case, ratio)
        for case, ratio in measured.items()
        if case.sources() == [case] and 1 / _NEAR < ratio < _NEAR
    ]
    again = near[:: len(near) // _AGAIN + 1]
    return _nine_in_ten([abs(_ratio(case) / ratio - 1) for case, ratio in again])


def _nine_in_ten(numbers: Sequence[float]) -> float:
    """What nine in ten of them are not above; 0 of none."""
    return sorted(numbers)[9 * (len(numbers) - 1) // 10] if numbers else 0.0


def _ratio(case: Case) -> float:
    """PyTorch's time divided by ours, by turns: of the best of each, since others only disturb."""
    call = case.call()
    repeats = max(1, int(_SECONDS / seconds_of(call, 1, ours=True)))
    ours = theirs = float("inf")
    begin = time.perf_counter()
    for turn in range(_ROUNDS):
        ours = min(ours, seconds_of(call, repeats, ours=True))
        theirs = min(theirs, seconds_of(call, repeats, ours=False))
        # Far from a tie no more rounds are needed, and long calls vary less.
        is_clear = turn >= 2 and not 0.7 < theirs / ours < 1.5
        if is_clear or time.perf_counter() - begin > _MOST_SECONDS:
            break
    return theirs / ours


def seconds_of(call: _Call, repeats: int, *, ours: bool) -> float:
    """The seconds of a call, by our kernels or by PyTorch's."""
    _accelerate_routes.switch(ours, False)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return max(time.perf_counter() - begin, 1e-9) / repeats


def operand(shape: tuple[int, ...], dtype: str, is_transposed: bool = False) -> Tensor:
    """Random numbers of a shape, on the CPU, whatever the user's device and seed are."""
    if is_transposed:
        return operand((*shape[:-2], shape[-1], shape[-2]), dtype, False).mT
    if dtype == "int8":
        return torch.randint(-128, 128, shape, dtype=torch.int8, device="cpu", generator=_generator)
    values = torch.randn(shape, dtype=torch.float32, device="cpu", generator=_generator)
    return values.to(getattr(torch, dtype))


def summary(table: dict[str, Any]) -> Iterator[str]:
    """A table in words: by dtype, on how many of the sizes ours is faster, and by how much."""
    yield (
        f"{table['processor']}, CPU library {table['capability']}, PyTorch {table['torch']}, "
        f"{table['date']}"
    )
    leasts = _accelerate_table.least_ratios(table)
    for index, threads in enumerate(dict.fromkeys(table["threads"])):
        yield (
            f"with {threads} thread{'s' if threads > 1 else ''}, PyTorch's time / ours, taken over "
            f"from {leasts[index]:.2f} on:"
        )
        by_group: dict[str, list[float]] = {}
        for cases, ratios in zip(kinds(), table["ratios"], strict=True):
            for case, ratio in zip(cases, ratios[index], strict=True):
                if case.sources() == [case]:
                    by_group.setdefault(case.group, []).append(ratio)
        for group, values in by_group.items():
            taken = sum(value >= leasts[index] for value in values)
            yield (
                f"  {group:27} ours in {taken:3} of {len(values):3} sizes; ratios "
                f"{min(values):.2f} to {max(values):.2f}, median {statistics.median(values):.2f}"
            )


def main(*, keeps_disturbed: bool = False) -> int:
    """Measures, keeps and shows the table.

    Args:
        keeps_disturbed: Keep it even if other processes used much of the processors meanwhile.

    Returns:
        The exit status: 1 where it was not kept.
    """
    from .__main__ import load_benchmarks

    load = load_benchmarks("_load")
    before = load.Counters.now()
    table = measure()
    after = load.Counters.now()
    others = (after - before).others if before and after else None
    print(*summary(table), load.describe([others]), sep="\n")
    if others is not None and others > _MOST_OF_OTHERS and not keeps_disturbed:
        print(
            "not kept: it would decide by what other processes did; measure again when they have "
            "ended, or keep it all the same: python -m pkg tune --keep"
        )
        return 1
    file = _accelerate_table.save(table)
    _accelerate_table.put(table)
    if file is None:
        return 1
    print(f"kept in {file}, which pkg.accelerate() uses from now on; delete it to undo that")
    return 0
