"""One case: check its result, then time its peers in alternating rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer

from ._case import OURS, Case, Result, Returned

ROUNDS = 9
LEAST_ROUNDS = 3  # fewer have no median worth the name
# A call that takes so long has few disturbances that a warm-up or a median would keep out, and a
# round that takes so long comes twice.
LONG_SECONDS, LONG_ROUND_SECONDS = 0.5, 5.0
# For so long the threads of a pool go on spinning, on the cores of the next peer's: OpenBLAS's for
# 2^28 cycles of the clock, OpenMP's for a few milliseconds.
SPINNING_SECONDS = {"NumPy": 0.15, "zentorch": 0.01, "PyTorch": 0.01}


def verify(case: Case, is_slow: Callable[[str], bool] = lambda peer: False) -> dict[str, float]:
    """Check our result: at most twice the error of the second peer, or of the case's plain result.

    The least tolerance is half a unit in the last place, the error of rounding the exact result.
    In float64 the reference rounds too, once a term, and so does ours, in every dtype, where there
    is nothing to be compared with: such errors grow as the root of their number.

    Args:
        case: to check.
        is_slow: whether not to call the second peer, of its name.

    Returns:
        The seconds of each call that was made, by peer: first calls, so rough figures.

    Raises:
        ArithmeticError: when ours is worse.
    """
    exact = [tensor.double() for tensor in _tensors(case.exact())]
    results: list[list[Tensor]] = []
    seconds: dict[str, float] = {}
    plain = None if case.plain is None else _tensors(case.plain())
    for name, function in list(case.peers.items())[:2]:
        if results and (plain is not None or is_slow(name)):
            break
        result, seconds[name] = first_call(function)
        results.append([case.part(each) if case.part else each for each in _tensors(result)])
    references = [plain] if plain is not None else results[1:]
    for index, (ours, expected) in enumerate(zip(results[0], exact, strict=True)):
        errors = [_relative_error(each[index], expected) for each in references]
        tolerance = _tolerance(ours.dtype, errors, case.terms)
        error = _relative_error(ours, expected)
        if not error <= tolerance:
            which = f" in result {index + 1}" if len(exact) > 1 else ""
            raise ArithmeticError(
                f"{case.name}: the relative error of {OURS}{which} is {error:.2e}, "
                f"more than {tolerance:.2e}"
            )
    return seconds


def _tensors(result: Returned) -> Sequence[Tensor]:
    return [result] if isinstance(result, Tensor) else result


def _relative_error(result: Tensor, exact: Tensor) -> float:
    scale = exact.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return ((result.double() - exact).norm() / scale).item()


def _tolerance(dtype: torch.dtype, errors: Sequence[float], terms: int) -> float:
    """What is allowed beside references of these errors."""
    if not dtype.is_floating_point:
        return 0.0
    roundings = terms if not errors or dtype == torch.float64 else 1
    return max(2 * max(errors, default=0.0), roundings**0.5 * torch.finfo(dtype).eps / 2)


def first_call(function: Callable[[], Returned]) -> tuple[Returned, float]:
    """What a peer returns, and roughly how many seconds it takes."""
    begin = timer()
    result = function()
    return result, timer() - begin


def measure(
    operator: str,
    case: Case,
    seconds: float,
    skipped: Collection[str] = (),
    elsewhere: Mapping[str, Callable[[int], float]] | None = None,
    first: Mapping[str, float] | None = None,
) -> Result:
    """Time a verified case in about so many seconds.

    Args:
        operator: its name.
        case: to time.
        seconds: to spend.
        skipped: peers of the case to leave out.
        elsewhere: what else takes turns with them: functions that make so many calls, be it in
            another process, and return the seconds of one.
        first: the seconds of first calls, by peer. One of a second needs no warm-up, and no more
            than a call in each round.
    """
    threads = torch.get_num_threads()
    long = {name: each for name, each in (first or {}).items() if each >= LONG_SECONDS}

    def clock(name: str, function: Callable[[], Returned]) -> Callable[[int], float]:
        if name in long:
            return lambda number: first_call(function)[1]
        repeated = Timer("function()", globals={"function": function}, num_threads=threads)
        return lambda number: float(repeated.timeit(number).median)

    here = {name: function for name, function in case.peers.items() if name not in skipped}
    clocks = {name: clock(name, function) for name, function in here.items()}
    clocks |= elsewhere or {}
    # NumPy at the end, where it has two turns running: its threads have to come to rest less often.
    order = sorted(clocks, key=lambda name: name == "NumPy")
    before = order[-1]

    def take_turn(name: str, number: int) -> float:
        nonlocal before
        if threads > 1 and _pool(name) != _pool(before):
            time.sleep(SPINNING_SECONDS[_pool(before)])
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
        limit=case.limit,
        threads=threads,
        skipped=tuple(skipped),
        beside=case.beside,
    )


def _pool(peer: str) -> str:
    """Whose threads a peer runs on."""
    return peer if peer in SPINNING_SECONDS else "PyTorch"
