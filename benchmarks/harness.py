"""Verify, then time: every benchmark of this folder is a list of cases for this module.

A module's ``cases(device)`` yields the :class:`Case` objects of an ordinary run, and its
``full_cases(device)``, where it has that, what ``--full`` adds to them; ``gpu_cases(device)`` what
fills a GPU, where the others are done in the time of a launch. They are generators: the tensors of
a case live only while it is measured. A module with many cases of large tensors has
``recipes(full)`` and ``gpu_recipes()`` instead, things with a ``name`` and a method
``case(device)``, of which only those that are wanted are made.

All peers of a case alternate in rounds, so that what disturbs the machine disturbs them alike; the
figure is the median of the rounds. The limit that a case is held to is measured in the same rounds.
A case whose result is wrong, by the rule of ``pkg.testing``, is not timed; its row says so. The
timing itself is ``torch.utils.benchmark``'s, which warms up and waits for the device.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import pkg
from pkg import environment
from pkg.testing import RULE

from ._apart import Apart
from ._case import (
    OURS,
    Case,
    ForeignCall,
    Reference,
    Result,
    copies_beyond_caches,
    each_in_turn,
    in_turn,
)
from ._limits import ARITHMETIC, MEMORY, Beside, Limits
from ._load import Counters
from ._operators import operators
from ._peers import Zentorch, by_zentorch, compiled, numpy_function, zentorch_here
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
    "Reference",
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
# What is measured in the rounds of a case beside its peers.
LIMIT = "limit"


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

        A result that is wrong is not timed: the :class:`Result` has no seconds, and says why.
        """
        before = Counters.now()
        result = self._result(operator, case)
        after = Counters.now()
        others = (after - before).others if before and after else None
        return dataclasses.replace(result, others=others)

    def _result(self, operator: str, case: Case) -> Result:
        key = (operator, case.limit, case.unit, case.kind)

        def is_slow(peer: str) -> bool:
            return case.work >= self.too_much.get((key, peer), math.inf)

        try:
            seconds = verify(case, is_slow)
        except ArithmeticError as fault:
            return Result(
                operator,
                case.name,
                case.work,
                case.unit,
                limit=case.limit,
                threads=torch.get_num_threads(),
                beside=case.beside,
                wrong=str(fault),
            )
        ours = seconds[OURS]
        skipped: dict[str, str] = {}
        for name, function in list(case.peers.items())[1:]:
            if name not in seconds and not is_slow(name):
                seconds[name] = first_call(function)[1]
            if name not in seconds:
                skipped[name] = "skipped: too slow with less work already"
            elif seconds[name] > max(self.options.seconds, SLOW_SECONDS, SLOW_TIMES * ours):
                skipped[name] = f"skipped: {seconds[name]:,.1f} s a call"
                self.too_much[key, name] = case.work
        has_plain = "PyTorch" in case.peers and "PyTorch" not in skipped
        if self.options.compiled and case.compiles and has_plain:
            peer = compiled(case.peers["PyTorch"])
            if peer is None:
                skipped["torch.compile"] = "refused: it does not compile"
            else:
                case = dataclasses.replace(case, peers={**case.peers, "torch.compile": peer})
        case = self._with_zentorch(case, skipped) if has_plain else case
        elsewhere = self._elsewhere(case, skipped)
        if self.processors:
            place(os.getpid(), self.processors)
        result = measure(operator, case, self.options.seconds, skipped, elsewhere, seconds)
        limit = elsewhere.get(LIMIT)
        result.seconds.pop(LIMIT, None)
        result.spread.pop(LIMIT, None)
        if not isinstance(limit, Beside):
            why = "fits in the caches" if self.limits else "limits are measured on the CPU alone"
            return dataclasses.replace(result, limit=None, unheld=why)
        return dataclasses.replace(result, attainable=limit.rate)

    def _with_zentorch(self, case: Case, left_out: dict[str, str]) -> Case:
        """A whole model's case with zentorch as a peer: a process as the others are."""
        plain = case.peers["PyTorch"]
        if not (self.options.zentorch and case.compiles and isinstance(plain, Apart)):
            return case
        try:
            peer = by_zentorch(plain, self.options.zentorch)
        except RuntimeError as error:
            left_out["zentorch"] = f"refused: {str(error).removeprefix('zentorch: ')}"
            return case
        return dataclasses.replace(case, peers={**case.peers, "zentorch": peer})

    def _elsewhere(self, case: Case, left_out: dict[str, str]) -> dict[str, Callable[[int], float]]:
        """What takes turns with the peers of a case without being one of them."""
        clocks: dict[str, Callable[[int], float]] = {}
        # What a cache holds may be read faster than memory: it is held to nothing.
        if self.limits and case.limit and (case.limit != MEMORY or case.from_memory):
            clocks[LIMIT] = self.limits.beside(case.limit)
        if self.zentorch is not None and case.zentorch is not None:
            try:
                self.zentorch.prepare(case.zentorch, torch.get_num_threads(), self.processors)
                clocks["zentorch"] = self.zentorch.seconds
            except RuntimeError as error:  # it does not have this dtype, or not this shape
                reason = str(error).removeprefix("zentorch: ").partition("\n")[0]
                left_out["zentorch"] = f"refused: {reason}"
        return clocks


def cases(
    operator: str,
    device: torch.device,
    full: bool = False,
    words: Sequence[str] = (),
    for_gpu: bool | None = None,
) -> Iterator[Case]:
    """The cases of one operator whose names contain all of these words.

    Args:
        operator: its name.
        device: of the tensors.
        full: the whole grid.
        words: of which the names have all.
        for_gpu: what fills a GPU too; where the device is one, unless said otherwise.
    """
    module = importlib.import_module(f".{operator}", __package__)
    for_gpu = device.type == "cuda" if for_gpu is None else for_gpu

    def wanted(named: Any) -> bool:
        return all(word in named.name for word in words)

    if hasattr(module, "recipes"):
        recipes = [*module.recipes(full), *(module.gpu_recipes() if for_gpu else ())]
        for recipe in filter(wanted, recipes):
            yield recipe.case(device)
        return
    yield from filter(wanted, module.cases(device))
    if for_gpu and hasattr(module, "gpu_cases"):
        yield from filter(wanted, module.gpu_cases(device))
    if full and hasattr(module, "full_cases"):
        yield from filter(wanted, module.full_cases(device))


def count_cases(names: Sequence[str], options: Options) -> int | None:
    """How many there are, by tensors without memory; None where that cannot be found out."""
    which = (torch.device("meta"), options.full, options.words, options.device.type == "cuda")
    try:
        return sum(1 for name in names for _ in cases(name, *which))
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
        console.print(f"verified: {RULE}", soft_wrap=True)
        limits: dict[int, Mapping[str, float]] = {}
        results: list[Result] = []
        for threads in options.threads or [torch.get_num_threads()]:
            with pinned(threads) as processors:
                measured = Limits() if options.device.type == "cpu" else None
                limits[threads] = measured.rates if measured else {}
                console.print(_limits_line(threads, limits[threads]))
                session = Session(options, measured, processors, zentorch)
                for operator, found in _run_all(names, session, console):
                    if found:
                        console.print(table(operator, found))
                    results += found
    for operator in names:
        if found := [result for result in results if result.operator == operator]:
            console.print(summary(operator, found))
    if options.json:
        text = json.dumps(document(about, limits, results), indent=2)
        options.json.write_text(text + "\n")
    if options.picture:
        picture(results, about, options.picture)
    wrong = [result for result in results if result.wrong]
    for result in wrong:
        console.print(f"[bold red]WRONG[/] {result.operator}: {escape(str(result.wrong))}")
    return not wrong


def _limits_line(threads: int, limits: Mapping[str, float]) -> str:
    texts = [
        f"{name} {rate:,.0f} {'GB/s' if name == MEMORY else 'GFLOP/s'}"
        for name, rate in limits.items()
        if name in (*ARITHMETIC, MEMORY)
    ]
    word = "thread" if threads == 1 else "threads"
    return f"{threads} {word}" + (f", limits: {', '.join(texts)}" if texts else "")


def _run_all(
    names: Sequence[str], session: Session, console: Console
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
                results.append(session.result(name, case))
                progress.advance(task)
            yield name, results
