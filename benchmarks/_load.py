"""What else the machine did meanwhile, as Linux counts it: on other systems nothing is known."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
# Above this share of the processors, figures are disturbed by more than they differ otherwise.
DISTURBING = 0.05


@dataclass(frozen=True)
class Counters:
    """Of the time since the start, in ticks of the system's clock, on all processors together.

    Attributes:
        all: that there was, idle too.
        busy: that the programs of this system used, and the system for them.
        stolen: that other systems on the same machine used.
        own: that this process and those that it started used.
    """

    all: int
    busy: int
    stolen: int
    own: int

    @staticmethod
    def now(proc: Path = PROC) -> Counters | None:
        """As they are; None where the system does not count."""
        try:
            fields = (proc / "stat").read_text().split("\n", 1)[0].split()[1:9]
            user, nice, system, idle, waiting, irq, softirq, stolen = map(int, fields)
        except (OSError, ValueError):
            return None
        busy = user + nice + system + irq + softirq
        own = sum(_times_of(proc).values())
        return Counters(busy + idle + waiting + stolen, busy, stolen, own)

    def __sub__(self, before: Counters) -> Counters:
        return Counters(
            self.all - before.all,
            self.busy - before.busy,
            self.stolen - before.stolen,
            self.own - before.own,
        )

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            self.all + other.all,
            self.busy + other.busy,
            self.stolen + other.stolen,
            self.own + other.own,
        )

    @property
    def others(self) -> float | None:
        """The share of all processors that other processes and other systems used."""
        if not self.all:
            return None  # within one tick
        return max(0, self.busy - self.own + self.stolen) / self.all


def _times_of(proc: Path) -> dict[int, int]:
    """The ticks of this process and all below it, with those of children that have ended."""
    parents: dict[int, int] = {}
    times: dict[int, int] = {}
    for file in proc.glob("[0-9]*/stat"):
        try:
            text = file.read_text()
        except OSError:
            continue  # it has ended
        # The name, in parentheses, may have spaces and parentheses within.
        fields = text.rpartition(")")[2].split()
        process = int(file.parent.name)
        parents[process] = int(fields[1])
        times[process] = sum(map(int, fields[11:15]))

    def is_ours(process: int | None) -> bool:
        while process:
            if process == os.getpid():
                return True
            process = parents.get(process)
        return False

    return {process: ticks for process, ticks in times.items() if is_ours(process)}


def describe(others: Sequence[float | None]) -> str:
    """A line to put beside figures, by what others used during each of them."""
    known = [each for each in others if each is not None]
    if not known:
        return "what other processes used meanwhile is not known on this system"
    mean, most = sum(known) / len(known), max(known)
    line = f"other processes used {mean:.0%} of the {os.cpu_count()} processors while this ran"
    if most > DISTURBING:
        if len(known) > 1:
            line += f", {most:.0%} beside one case"
        line += ": figures are disturbed, best run it again when quiet"
    return line
