"""Tables, summaries, JSON and pictures of results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from pkg.testing import RULE

from ._case import OURS, Result
from ._limits import MEMORY, meaning
from ._load import describe

# Of peers that were left out, in the legend of a table.
MOST_REASONS = 4


def _peers(results: Sequence[Result]) -> list[str]:
    """All peers, ours first, in the order in which they come up."""
    names = [name for result in results for name in (*result.seconds, *result.skipped)]
    return list(dict.fromkeys([OURS, *names]))


def _microseconds(result: Result, peer: str) -> str:
    if peer in result.skipped:
        return result.skipped[peer].partition(":")[0]
    if peer == OURS and result.wrong:
        return "WRONG"
    return f"{result.seconds[peer] * 1e6:,.1f}" if peer in result.seconds else "–"


def _ratio(number: float | None, form: str) -> str:
    return "–" if number is None else format(number, form)


def table(operator: str, results: Sequence[Result]) -> Table:
    """The results of one operator, and below them what they mean."""
    threads = {result.threads for result in results} - {None}
    title = ", ".join([operator, *map(_threads, threads), "microseconds a call"])
    rows = Table("case", title=title, title_justify="left", caption_justify="left")
    rows.caption = escape("\n".join(legend(results)))
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
            "–" if result.wrong else f"{result.rate(OURS):,.1f} {result.unit}",
            share,
            _ratio(result.speedup, ".2f"),
            *[_ratio(rate_beside(result, results), ".2f")] * compared,
            style="bold red" if result.wrong else None,
        )
    return rows


def legend(results: Sequence[Result], peers: bool = True) -> list[str]:
    """What the words in a table mean, a line each: limits, what was not timed, other load.

    Args:
        results: of the table.
        peers: with those that were left out, and why.
    """
    lines = []
    rates: dict[str, list[float]] = {}
    for result in results:
        if result.limit and result.attainable:
            rates.setdefault(result.limit, []).append(result.attainable)
    for limit, found in rates.items():
        unit = "GB/s" if limit == MEMORY else "GFLOP/s"
        least, most = f"{min(found):,.0f}", f"{max(found):,.0f}"
        rate = most if least == most else f"{least} to {most}"
        lines.append(f"limit {limit}: {meaning(limit)}, {rate} {unit} measured beside the cases")
    reasons = [result.unheld for result in results if result.unheld]
    lines += [f"share –: {reason}" for reason in dict.fromkeys(reasons)]
    if any((result.share or 0) > 1 for result in results):
        lines.append("share above 100%: the limit was measured too low beside that case")
    if any(result.wrong for result in results):
        lines.append(f"WRONG: not timed, since not right; right is {RULE}")
    skipped: dict[str, list[str]] = {}
    for result in results if peers else ():
        if result.skipped:
            skipped.setdefault(left_out(result), []).append(result.case)
    different = [f"{_cases(names)}: {words}" for words, names in skipped.items()]
    lines += different[:MOST_REASONS]
    if len(different) > MOST_REASONS:
        lines.append(f"and {len(different) - MOST_REASONS} more; --json has all")
    return [*lines, describe([result.others for result in results])]


def _cases(names: Sequence[str]) -> str:
    """The first of some cases, and how many others there are."""
    more = len(names) - 1
    return names[0] + (f" and {more} more case{'s' if more > 1 else ''}" if more else "")


def rate_beside(result: Result, results: Sequence[Result]) -> float | None:
    """Our rate, divided by that of the case that it is to be compared with, if it was run."""
    if result.wrong:
        return None
    for other in results:
        if not other.wrong and (other.operator, other.case, other.threads) == (
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
    wrong = sum(1 for result in results if result.wrong)
    ending = f"; {wrong} of {len(results)} cases WRONG" if wrong else ""
    speedups = [(speedup, result) for result in results if (speedup := result.speedup) is not None]
    if not speedups:
        return f"{operator}: no peer was measured{ending}"
    mean = geometric_mean([speedup for speedup, _ in speedups])
    least, worst = min(speedups, key=lambda pair: pair[0])
    return (
        f"{operator}: {mean:.2f} times as fast as the best peer (geometric mean of "
        f"{len(speedups)} cases); least {least:.2f}, beside {worst.best_peer}: {_label(worst)}"
        f"{ending}"
    )


def _threads(number: int | None) -> str:
    return f"{number} {'thread' if number == 1 else 'threads'}"


def _label(result: Result) -> str:
    return result.case + (f", {_threads(result.threads)}" if result.threads else "")


def document(
    machine: Mapping[str, Any],
    limits: Mapping[int, Mapping[str, float]],
    results: Sequence[Result],
) -> dict[str, Any]:
    """All that was found, for JSON. Limits are by number of threads, in units of 1e9 a second."""
    names = dict.fromkeys(name for rates in limits.values() for name in rates)
    return {
        "machine": dict(machine),
        "rule": RULE,
        "limits": {str(threads): dict(rates) for threads, rates in limits.items()},
        "limits_of": {name: meaning(name) for name in names},
        "load": describe([result.others for result in results]),
        "results": [
            asdict(result)
            | {
                "rate": None if result.wrong else result.rate(OURS),
                "share": result.share,
                "best_peer": result.best_peer,
                "speedup": result.speedup,
                "rate_beside": rate_beside(result, results),
            }
            for result in results
        ],
        "wrong": [f"{result.operator}: {result.wrong}" for result in results if result.wrong],
    }


def why_no_share(result: Result) -> str | None:
    """Why a case has no bar of its share of the limit, in words; None where it has one."""
    if result.wrong:
        return "WRONG: not timed"
    if result.share is None:
        return f"held to no limit: {result.unheld}" if result.unheld else "held to no limit"
    return None


def why_no_speedup(result: Result) -> str | None:
    """Why a case has no bar beside its peers, in words; None where it has one."""
    if result.wrong:
        return "WRONG: not timed"
    if result.speedup is None:
        return left_out(result) or "has no peer"
    return None


def left_out(result: Result) -> str:
    """The peers that were not timed, and why."""
    return "; ".join(f"{peer} {reason}" for peer, reason in result.skipped.items())


def _words(axes: Any, row: int, place: float, words: str) -> None:
    """In a row, right of a place: 0 is the left border of the axes and 1 the right one."""
    axes.annotate(
        words,
        (place, row),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=6,
        color="tab:red" if words.startswith("WRONG") else "dimgray",
    )


def picture(results: Sequence[Result], machine: Mapping[str, Any], file: Path) -> None:
    """Draw the share of the limit and the speed-up of every case.

    Where a bar is missing, words say why; where a peer was left out beside others, they stand at
    the right.

    Args:
        results: to draw, from the top down.
        machine: named in the title.
        file: of any format that matplotlib writes.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(12, 2.2 + 0.22 * len(results)), layout="constrained")
    shares, speedups = figure.subplots(1, 2, sharey=True)
    rows = range(len(results))
    shares.barh(rows, [result.share or 0 for result in results], color="tab:blue")
    shares.axvline(1, color="black", linewidth=1)
    shares.set_xlabel("share of the machine's limit")
    labels = [f"{result.operator}: {_label(result)}" for result in results]
    limits = [f" [{result.limit}]" if result.share is not None else "" for result in results]
    shares.set_yticks(rows, [label + limit for label, limit in zip(labels, limits, strict=True)])
    shares.tick_params(axis="y", labelsize=7)
    shares.set_ylim(len(results) - 0.5, -0.5)
    shares.xaxis.set_major_formatter(lambda number, _: f"{number:.0%}")
    # Bars from 1, where ours is as fast as the best peer.
    logarithms = [math.log2(result.speedup or 1) for result in results]
    colors = ["tab:green" if number >= 0 else "tab:red" for number in logarithms]
    speedups.barh(rows, logarithms, color=colors)
    speedups.axvline(0, color="black", linewidth=1)
    speedups.xaxis.set_major_formatter(lambda number, _: f"{2**number:.2g}")
    speedups.xaxis.set_major_locator(MaxNLocator(integer=True))
    speedups.set_xlabel("times as fast as the best peer")
    for row, result in enumerate(results):
        if share := why_no_share(result):
            _words(shares, row, 0, share)
        if speedup := why_no_speedup(result) or left_out(result):
            _words(speedups, row, 1, speedup)
    figure.suptitle(
        f"{machine['processor']}, {machine['cpu_capability']}, torch {machine['torch']}, "
        f"pkg {machine['pkg']}"
    )
    figure.supxlabel("\n".join(legend(results, peers=False)), fontsize=7, x=0.01, ha="left")
    figure.savefig(file, dpi=150)
