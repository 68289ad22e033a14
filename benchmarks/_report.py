"""Tables, summaries, JSON and pictures of results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from ._case import OURS, Result


def _peers(results: Sequence[Result]) -> list[str]:
    """All peers, ours first, in the order in which they come up."""
    names = [name for result in results for name in (*result.seconds, *result.skipped)]
    return list(dict.fromkeys([OURS, *names]))


def _microseconds(result: Result, peer: str) -> str:
    if peer in result.skipped:
        return "skipped"
    return f"{result.seconds[peer] * 1e6:,.1f}" if peer in result.seconds else "–"


def _ratio(number: float | None, form: str) -> str:
    return "–" if number is None else format(number, form)


def table(operator: str, results: Sequence[Result]) -> Table:
    """The results of one operator."""
    threads = {result.threads for result in results} - {None}
    title = ", ".join([operator, *map(_threads, threads), "microseconds a call"])
    rows = Table("case", title=title, title_justify="left")
    peers = _peers(results)
    columns = [*peers, "rate", "share of the limit", f"best peer / {OURS}"]
    compared = any(result.beside for result in results)
    for name in [*columns, *["rate / plain's"] * compared]:
        rows.add_column(name, justify="right")
    for result in results:
        share = "–" if result.share is None else f"{result.share:.0%} of {result.limit}"
        rows.add_row(
            result.case,
            *(_microseconds(result, peer) for peer in peers),
            f"{result.rate(OURS):,.1f} {result.unit}",
            share,
            _ratio(result.speedup, ".2f"),
            *[_ratio(rate_beside(result, results), ".2f")] * compared,
        )
    return rows


def rate_beside(result: Result, results: Sequence[Result]) -> float | None:
    """Our rate, divided by that of the case that it is to be compared with, if it was run."""
    for other in results:
        if (other.operator, other.case, other.threads) == (
            result.operator,
            result.beside,
            result.threads,
        ):
            return result.rate(OURS) / other.rate(OURS)
    return None


def geometric_mean(numbers: Sequence[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(map(math.log, numbers)) / len(numbers))


def summary(operator: str, results: Sequence[Result]) -> str:
    """One line: how an operator stands beside the best peer of each case."""
    speedups = [(speedup, result) for result in results if (speedup := result.speedup) is not None]
    if not speedups:
        return f"{operator}: no peer was measured"
    mean = geometric_mean([speedup for speedup, _ in speedups])
    least, worst = min(speedups, key=lambda pair: pair[0])
    return (
        f"{operator}: {mean:.2f} times as fast as the best peer (geometric mean of "
        f"{len(speedups)} cases); least {least:.2f}, beside {worst.best_peer}: {_label(worst)}"
    )


def _threads(number: int | None) -> str:
    return f"{number} {'thread' if number == 1 else 'threads'}"


def _label(result: Result) -> str:
    return result.case + (f", {_threads(result.threads)}" if result.threads else "")


def document(
    machine: Mapping[str, Any],
    limits: Mapping[int, Mapping[str, float]],
    results: Sequence[Result],
    faults: Sequence[str],
) -> dict[str, Any]:
    """All that was found, for JSON. Limits are by number of threads, in units of 1e9 a second."""
    return {
        "machine": dict(machine),
        "limits": {str(threads): dict(rates) for threads, rates in limits.items()},
        "results": [
            asdict(result)
            | {
                "rate": result.rate(OURS),
                "share": result.share,
                "best_peer": result.best_peer,
                "speedup": result.speedup,
                "rate_beside": rate_beside(result, results),
            }
            for result in results
        ],
        "wrong": list(faults),
    }


def picture(results: Sequence[Result], machine: Mapping[str, Any], file: Path) -> None:
    """Draw the share of the limit and the speed-up of every case.

    Args:
        results: to draw, from the top down.
        machine: named in the title.
        file: of any format that matplotlib writes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.5 + 0.22 * len(results)), layout="constrained")
    shares, speedups = figure.subplots(1, 2, sharey=True)
    rows = range(len(results))
    shares.barh(rows, [result.share or 0 for result in results], color="tab:blue")
    shares.axvline(1, color="black", linewidth=1)
    shares.set_xlabel("share of the machine's limit")
    shares.set_yticks(rows, [f"{result.operator}: {_label(result)}" for result in results])
    shares.tick_params(axis="y", labelsize=7)
    shares.invert_yaxis()
    # Bars from 1, where ours is as fast as the best peer.
    logarithms = [math.log2(result.speedup or 1) for result in results]
    colors = ["tab:green" if number >= 0 else "tab:red" for number in logarithms]
    speedups.barh(rows, logarithms, color=colors)
    speedups.axvline(0, color="black", linewidth=1)
    speedups.xaxis.set_major_formatter(lambda number, _: f"{2**number:.2g}")
    speedups.set_xlabel("times as fast as the best peer")
    figure.suptitle(
        f"{machine['processor']}, {machine['cpu_capability']}, torch {machine['torch']}, "
        f"pkg {machine['pkg']}"
    )
    figure.savefig(file, dpi=150)
