"""One case: check its result, then time its peers in alternating rounds."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer

from pkg.testing import Expected, exactly, expect, expect_beside, expect_of_terms

from ._apart import Apart
from ._case import OURS, Case, InTurn, Reference, Result, Returned

ROUNDS = 9
LEAST_ROUNDS = 3  # fewer have no median worth the name
# A call that takes so long has few disturbances that a warm-up or a median would keep out, and a
# round that takes so long comes twice.
LONG_SECONDS, LONG_ROUND_SECONDS = 0.5, 5.0
# For so long the threads of a pool go on spinning, on the cores of the next peer's: OpenBLAS's for
# 2^28 cycles of the clock, OpenMP's for a few milliseconds.
SPINNING_SECONDS = {"NumPy": 0.15, "zentorch": 0.01, "PyTorch": 0.01}


def verify(case: Case, is_slow: Callable[[str], bool] = lambda peer: False) -> dict[str, float]:
    """Check our result by the rule that :mod:`pkg.testing.tolerance` derives, as check_op does.

    Args:
        case: to check.
        is_slow: whether the second peer, of its name, takes too long to be called; then plain
            PyTorch's error is not measured, and that of rounding each term stands in its place,
            where the case has terms.

    Returns:
        The seconds of each call that was made, by peer: first calls, so rough figures.

    Raises:
        ArithmeticError: ours is further off; the message says where and by how much.
    """
    seconds: dict[str, float] = {}
    second = next(itertools.islice(case.peers, 1, None), None)
    terms = case.terms or 1
    plain_is_slow = second is not None and case.terms is not None and is_slow(second)
    expected: Sequence[Expected] = ()
    if isinstance(case.exact, Reference) and not plain_is_slow:
        expected = expect(case.exact.evaluate, case.exact.sample)
    else:
        exact = _exactly(case)
    returned, seconds[OURS] = first_call(case.peers[OURS])
    ours = [case.part(each) if case.part else each for each in _tensors(returned)]
    if not expected and second is not None and not plain_is_slow:
        plain, seconds[second] = first_call(case.peers[second])
        pairs = zip(exact, _tensors(plain), strict=True)
        expected = [expect_beside(*pair, terms) for pair in pairs]
    elif not expected:
        pairs = zip(exact, ours, strict=True)
        expected = [expect_of_terms(each, result.dtype, terms) for each, result in pairs]
    for index, (result, wanted) in enumerate(zip(ours, expected, strict=True)):
        which = f"result {index + 1} of {OURS}" if len(ours) > 1 else f"the result of {OURS}"
        try:
            wanted.compare(result, which)
        except AssertionError as error:
            raise ArithmeticError(f"{case.name}: {error}") from None
    return seconds


def _exactly(case: Case) -> Sequence[Tensor]:
    if isinstance(case.exact, Reference):
        return exactly(case.exact.evaluate, case.exact.sample)
    return [tensor.double() for tensor in _tensors(case.exact())]


def _tensors(result: Returned) -> Sequence[Tensor]:
    return [result] if isinstance(result, Tensor) else result


def first_call(function: Callable[[], Returned]) -> tuple[Returned, float]:
    """What a peer returns, and roughly how many seconds it takes."""
    begin = timer()
    result = function()
    return result, timer() - begin


def measure(
    operator: str,
    case: Case,
    seconds: float,
    skipped: Mapping[str, str] | None = None,
    elsewhere: Mapping[str, Callable[[int], float]] | None = None,
    first: Mapping[str, float] | None = None,
) -> Result:
    """Time a verified case in about so many seconds.

    Args:
        operator: its name.
        case: to time.
        seconds: to spend.
        skipped: peers of the case to leave out, and why.
        elsewhere: what else takes turns with them: functions that make so many calls, be it in
            another process, and return the seconds of one.
        first: the seconds of first calls, by peer. One of a second needs no warm-up, and no more
            than a call in each round.
    """
    threads, skipped = torch.get_num_threads(), skipped or {}
    long = {name: each for name, each in (first or {}).items() if each >= LONG_SECONDS}

    def clock(name: str, function: Callable[[], Returned]) -> Callable[[int], float]:
        if name in long:
            return lambda number: first_call(function)[1]
        repeated = Timer("function()", globals={"function": function}, num_threads=threads)
        return lambda number: float(repeated.timeit(number).median)

    here = {name: function for name, function in case.peers.items() if name not in skipped}
    for index, function in enumerate(here.values()):
        if isinstance(function, InTurn):
            # Where each is, none was a moment ago: or a peer that comes after another would read
            # from a cache what the first read from memory.
            function.begin_at(index / len(here))
            function.make_all(seconds)
    clocks = {name: clock(name, function) for name, function in here.items()}
    clocks |= elsewhere or {}
    # NumPy at the end, where it has two turns running: its threads have to come to rest less often.
    order = sorted(clocks, key=lambda name: name == "NumPy")
    before = order[-1]
    pools = {name: _pool(name, here.get(name)) for name in order}

    def take_turn(name: str, number: int) -> float:
        nonlocal before
        if threads > 1 and pools[name] != pools[before]:
            time.sleep(SPINNING_SECONDS.get(pools[before], SPINNING_SECONDS["PyTorch"]))
        before = name
        return clocks[name](number)

    estimates = {name: long.get(name) or take_turn(name, 1) for name in order}
    # A sample of one call has two more, to warm up.
    round_seconds = sum(each if name in long else 3 * each for name, each in estimates.items())
    least = LEAST_ROUNDS if round_seconds < LONG_ROUND_SECONDS else 2
    rounds = int(min(ROUNDS, max(least, seconds / round_seconds)))
    share = seconds / rounds / len(clocks)
    numbers = {name: max(1, int(share / estimate) - 2) for name, estimate in estimates.items()}
    samples: dict[str, list[float]] = {name: [] for name in clocks}
    for _ in range(rounds):
        for name in order:
            samples[name].append(take_turn(name, numbers[name]))
        order.reverse()
    quartiles = {name: statistics.quantiles(times, n=4) for name, times in samples.items()}
    return Result(
        operator,
        case.name,
        case.work,
        case.unit,
        {name: statistics.median(times) for name, times in samples.items()},
        {name: (high - low) / 2 for name, (low, _, high) in quartiles.items()},
        {name: _quartiles(times, samples[OURS]) for name, times in samples.items() if name in here},
        limit=case.limit,
        threads=threads,
        skipped=skipped,
        beside=case.beside,
    )


def _quartiles(times: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    ratios = [time / each for time, each in zip(times, ours, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, median, high


def _pool(peer: str, function: Callable[[], Returned] | None) -> str:
    """Whose threads a peer runs on."""
    has_its_own = isinstance(function, Apart) or peer in SPINNING_SECONDS
    return peer if has_its_own else "PyTorch"
