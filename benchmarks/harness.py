"""Verify, then time: every benchmark of this folder is a list of cases for this module.

A module's ``cases(device)`` yields the :class:`Case` objects of an ordinary run, and its
``full_cases(device)``, where it has that, what ``--full`` adds to them. They are generators: the
tensors of a case live only while it is measured. A module with many cases of large tensors has
``recipes(full)`` instead, things with a ``name`` and a method ``case(device)``, of which only those
that are wanted are made.

All peers of a case alternate in rounds, so that what disturbs the machine disturbs them alike; the
figure is the median of the rounds. A case whose result is wrong is not timed. The timing itself is
``torch.utils.benchmark``'s, which warms up and waits for the device.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import math
import os
import pkgutil
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import pkg
from pkg import environment

from ._case import OURS, Case, ForeignCall, Result, copies_beyond_caches, each_in_turn, in_turn
from ._limits import Limits
from ._peers import Zentorch, compiled, numpy_function, zentorch_here
from ._report import document, picture, summary, table
from ._threads import blas_libraries, pinned, place
from ._timing import LEAST_ROUNDS, first_call, measure, verify

__all__ = [
    "LEAST_ROUNDS",
    "OURS",
    "Case",
    "ForeignCall",
    "Limits",
    "Options",
    "Result",
    "Session",
    "Zentorch",
    "cases",
    "compiled",
    "copies_beyond_caches",
    "document",
    "each_in_turn",
    "in_turn",
    "machine",
    "measure",
    "numpy_function",
    "operators",
    "picture",
    "pinned",
    "run",
    "summary",
    "table",
    "verify",
    "zentorch_here",
]

# A peer whose one call takes longer than a case's time, and as many times longer than ours, is
# left out. At least so long, or a first call would be taken for a slow peer.
SLOW_SECONDS, SLOW_TIMES = 0.5, 10
MEMORY = "memory"


@dataclass(frozen=True)
class Options:
    """What a run does.

    Attributes:
        device: where the tensors are.
        seconds: to spend on timing a case.
        threads: one run with each number; none: one with PyTorch's present number.
        full: the whole grid of cases.
        words: only cases whose names contain all of them.
        compiled: ``torch.compile`` of the peer PyTorch is a peer too.
        zentorch: the interpreter that has zentorch, or None.
        json: where to write results, limits, machine and versions.
        picture: where to draw the results.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seconds: float = 0.3
    threads: Sequence[int] = ()
    full: bool = False
    words: Sequence[str] = ()
    compiled: bool = False
    zentorch: str | None = None
    json: Path | None = None
    picture: Path | None = None


class NoCasesError(Exception):
    """No case is named as asked for."""


@dataclass
class Session:
    """What is known while cases are run with one number of threads."""

    options: Options
    limits: Limits | None
    processors: list[int]
    zentorch: Zentorch | None = None
    # The least work with which a peer was too slow: it is not tried with as much or more.
    too_much: dict[tuple[tuple[str | None, ...], str], float] = field(default_factory=dict)

    def result(self, operator: str, case: Case) -> Result:
        """Verify a case, and time it beside all peers that are fast enough.

        Raises:
            ArithmeticError: our result is wrong.
        """
        key = (operator, case.limit, case.unit, case.kind)

        def is_slow(peer: str) -> bool:
            return case.work >= self.too_much.get((key, peer), math.inf)

        seconds = verify(case, is_slow)
        ours = next(iter(seconds.values()))
        skipped = []
        for name, function in list(case.peers.items())[1:]:
            if name not in seconds and not is_slow(name):
                seconds[name] = first_call(function)[1]
            if name not in seconds:
                skipped.append(name)
            elif seconds[name] > max(self.options.seconds, SLOW_SECONDS, SLOW_TIMES * ours):
                skipped.append(name)
                self.too_much[key, name] = case.work
        if self.options.compiled and "PyTorch" in case.peers and "PyTorch" not in skipped:
            peer = compiled(case.peers["PyTorch"])
            if peer is not None:
                case = dataclasses.replace(case, peers={**case.peers, "torch.compile": peer})
        elsewhere = self._elsewhere(case)
        if self.processors:
            place(os.getpid(), self.processors)
        result = measure(operator, case, self.options.seconds, skipped, elsewhere, seconds)
        return dataclasses.replace(result, attainable=self._attainable(result))

    def _attainable(self, result: Result) -> float | None:
        """What the limit of a case allows: memory's as it was in the rounds of the case."""
        if self.limits is None or result.limit is None:
            return None
        seconds = result.seconds.pop(MEMORY, None)
        result.spread.pop(MEMORY, None)
        return 1 / seconds if seconds else self.limits.rates[result.limit]

    def _elsewhere(self, case: Case) -> dict[str, Callable[[int], float]]:
        """What takes turns with the peers of a case without being one of them."""
        clocks: dict[str, Callable[[int], float]] = {}
        if self.limits is not None and case.limit == MEMORY:
            limits = self.limits
            clocks[MEMORY] = lambda number: limits.reading_seconds(1)
        if self.zentorch is not None and case.zentorch is not None:
            # RuntimeError: it does not have this dtype, or not this shape.
            with suppress(RuntimeError):
                self.zentorch.prepare(case.zentorch, torch.get_num_threads(), self.processors)
                clocks["zentorch"] = self.zentorch.seconds
        return clocks


def operators() -> list[str]:
    """The names of the benchmarks in this folder."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    names = (module.name for module in modules)
    return sorted(name for name in names if name != "harness" and not name.startswith("_"))


def cases(
    operator: str, device: torch.device, full: bool = False, words: Sequence[str] = ()
) -> Iterator[Case]:
    """The cases of one operator whose names contain all of these words."""
    module = importlib.import_module(f".{operator}", __package__)

    def wanted(named: Any) -> bool:
        return all(word in named.name for word in words)

    if hasattr(module, "recipes"):
        for recipe in filter(wanted, module.recipes(full)):
            yield recipe.case(device)
        return
    yield from filter(wanted, module.cases(device))
    if full and hasattr(module, "full_cases"):
        yield from filter(wanted, module.full_cases(device))


def count_cases(names: Sequence[str], options: Options) -> int | None:
    """How many there are, by tensors without memory; None where that cannot be found out."""
    meta = torch.device("meta")
    try:
        return sum(1 for name in names for _ in cases(name, meta, options.full, options.words))
    except (RuntimeError, TypeError):
        return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": environment.processor_name(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": pkg._loader.cpu_capability,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": _version("numpy"),
        "pkg": pkg.__version__,
        "build": pkg._C.build_info(),
    }


def run(names: Sequence[str], options: Options) -> bool:
    """Run benchmarks, print their tables; whether every result was right.

    Raises:
        ImportError: a package is missing, or zentorch was asked for and cannot be used.
        NoCasesError: there is nothing to run.
    """
    if count_cases(names, options) == 0:
        words = " and ".join(repr(word) for word in options.words)
        hint = "" if options.full else "; --full has more"
        raise NoCasesError(f"{', '.join(names)}: no case is named with {words}{hint}")
    if options.picture:
        importlib.import_module("matplotlib")  # not to find out at the end
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file has no width of its own
    about = machine(options.device) | {"blas": blas_libraries()}
    with ExitStack() as stack:
        zentorch = None
        if options.zentorch:
            zentorch = Zentorch(options.zentorch)
            stack.callback(zentorch.close)
            about["zentorch"] = zentorch.versions
        console.print(
            f"{about['processor']}, {about['cpu_capability']}, device {about['device']}, "
            f"torch {about['torch']}, pkg {about['pkg']}"
        )
        limits: dict[int, Mapping[str, float]] = {}
        results: list[Result] = []
        faults: list[str] = []
        for threads in options.threads or [torch.get_num_threads()]:
            with pinned(threads) as processors:
                measured = Limits() if options.device.type == "cpu" else None
                limits[threads] = measured.rates if measured else {}
                console.print(_limits_line(threads, limits[threads]))
                session = Session(options, measured, processors, zentorch)
                for operator, found in _run_all(names, session, console, faults):
                    if found:
                        console.print(table(operator, found))
                    results += found
    for operator in names:
        if found := [result for result in results if result.operator == operator]:
            console.print(summary(operator, found))
    if options.json:
        text = json.dumps(document(about, limits, results, faults), indent=2)
        options.json.write_text(text + "\n")
    if options.picture:
        picture(results, about, options.picture)
    for words in faults:
        console.print(f"[bold red]WRONG[/] {words}")
    return not faults


def _limits_line(threads: int, limits: Mapping[str, float]) -> str:
    texts = [
        f"{name} {rate:,.0f} {'GB/s' if name == MEMORY else 'GFLOP/s'}"
        for name, rate in limits.items()
        if name != "float16"
    ]
    word = "thread" if threads == 1 else "threads"
    return f"{threads} {word}" + (f", limits: {', '.join(texts)}" if texts else "")


def _run_all(
    names: Sequence[str], session: Session, console: Console, faults: list[str]
) -> Iterator[tuple[str, list[Result]]]:
    """The results of each operator, as soon as it has all."""
    options = session.options
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    # Refreshed by hand: a thread that does it would run beside those that are timed.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=count_cases(names, options))
        for name in names:
            results = []
            torch.manual_seed(0)
            for case in cases(name, options.device, options.full, options.words):
                progress.update(task, description=f"{name}: {case.name}", refresh=True)
                try:
                    results.append(session.result(name, case))
                except ArithmeticError as fault:
                    faults.append(f"{name}: {fault}")
                progress.advance(task)
            yield name, results
