"""One case: check its result, then time its peers in alternating rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from ._case import OURS, Case, Result

ROUNDS = 9
LEAST_ROUNDS = 3  # fewer have no median worth the name
# For so long the threads of a pool go on spinning, on the cores of the next peer's: OpenBLAS's for
# 2^28 cycles of the clock, OpenMP's for a few milliseconds.
SPINNING_SECONDS = {"NumPy": 0.15, "zentorch": 0.01, "PyTorch": 0.01}


def verify(case: Case, is_slow: Callable[[str], bool] = lambda peer: False) -> dict[str, float]:
    """Check our result: at most twice the error of the second peer.

    The least tolerance is half a unit in the last place, the error of rounding the exact result.
    In float64 the reference rounds too, once a term, and so does ours, in every dtype, where no
    peer is there to be compared with: such errors grow as the root of their number.

    Args:
        case: to check.
        is_slow: whether not to call the second peer, of its name.

    Returns:
        The seconds of each call that was made, by peer: first calls, so rough figures.

    Raises:
        ArithmeticError: when ours is worse.
    """
    exact = case.exact().double()
    results: dict[str, Tensor] = {}
    seconds: dict[str, float] = {}
    for name, function in list(case.peers.items())[:2]:
        if results and is_slow(name):
            break
        results[name], seconds[name] = first_call(function)
    scale = exact.norm().clamp_min(torch.finfo(torch.float64).tiny)
    errors = [((result.double() - exact).norm() / scale).item() for result in results.values()]
    dtype = next(iter(results.values())).dtype
    alone = len(errors) == 1
    if dtype.is_floating_point:
        roundings = case.terms if alone or dtype == torch.float64 else 1
        tolerance = max(2 * errors[-1] * (not alone), roundings**0.5 * torch.finfo(dtype).eps / 2)
    else:
        tolerance = 0.0
    if not errors[0] <= tolerance:
        raise ArithmeticError(
            f"{case.name}: the relative error of {OURS} is {errors[0]:.2e}, "
            f"more than {tolerance:.2e}"
        )
    return seconds


def first_call(function: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """What a peer returns, and roughly how many seconds it takes."""
    begin = time.perf_counter()
    result = function()
    return result, time.perf_counter() - begin


def measure(
    operator: str,
    case: Case,
    seconds: float,
    skipped: Collection[str] = (),
    elsewhere: Mapping[str, Callable[[int], float]] | None = None,
) -> Result:
    """Time a verified case in about so many seconds.

    Args:
        operator: its name.
        case: to time.
        seconds: to spend.
        skipped: peers of the case to leave out.
        elsewhere: what else takes turns with them: functions that make so many calls, be it in
            another process, and return the seconds of one.
    """

    def clock(name: str, function: Callable[[], Tensor]) -> Callable[[int], float]:
        threads = torch.get_num_threads()
        timer = Timer("function()", globals={"function": function}, num_threads=threads)
        return lambda number: timer.timeit(number).median

    here = {name: function for name, function in case.peers.items() if name not in skipped}
    clocks = {name: clock(name, function) for name, function in here.items()}
    clocks |= elsewhere or {}
    # NumPy at the end, where it has two turns running: its threads have to come to rest less often.
    order = sorted(clocks, key=lambda name: name == "NumPy")
    before = order[-1]

    def take_turn(name: str, number: int) -> float:
        nonlocal before
        if torch.get_num_threads() > 1 and _pool(name) != _pool(before):
            time.sleep(SPINNING_SECONDS[_pool(before)])
        before = name
        return clocks[name](number)

    estimates = {name: take_turn(name, 1) for name in order}
    # A sample of one call has two more, to warm up.
    rounds = int(min(ROUNDS, max(LEAST_ROUNDS, seconds / (3 * sum(estimates.values())))))
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
        threads=torch.get_num_threads(),
        skipped=tuple(skipped),
    )


def _pool(peer: str) -> str:
    """Whose threads a peer runs on."""
    return peer if peer in SPINNING_SECONDS else "PyTorch"
