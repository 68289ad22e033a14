"""Verify, then time: every benchmark of this folder is a list of cases for this module.

All peers of a case run in one process and alternate in rounds, so that what disturbs the machine
disturbs them alike; the figure is the median of the rounds. A case whose results are wrong is not
timed. The timing itself is ``torch.utils.benchmark``'s, which warms up and waits for the device.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.utils.benchmark import Measurement, Timer

import pkg
from pkg import environment

OURS = "pkg"
ROUNDS = 9
LEAST_ROUNDS = 3  # fewer have no median worth the name


@dataclass(frozen=True)
class Case:
    """One input on which peers are compared.

    Attributes:
        name: dtype and sizes, in words.
        peers: what is called, by name; ``pkg`` first, the one that sets the tolerance second.
        exact: the result in float64.
        work: what one call does, in units of 1e9: operations, or bytes of input and output.
        unit: of the work a second, ``GFLOP/s`` or ``GB/s``.
        terms: that are summed for one element of the result.
    """

    name: str
    peers: Mapping[str, Callable[[], Tensor]]
    exact: Callable[[], Tensor]
    work: float
    unit: str
    terms: int = 1


@dataclass(frozen=True)
class Result:
    """The times of a case: seconds a call by peer, the median and half the middle spread."""

    operator: str
    case: str
    work: float
    unit: str
    seconds: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)

    def rate(self, peer: str) -> float:
        """Units of work a second."""
        return self.work / self.seconds[peer]


def verify(case: Case) -> None:
    """Check our result: at most twice the error of the second peer.

    The least tolerance is half a unit in the last place, the error of rounding the exact result.
    In float64 the reference rounds too, once a term: such errors grow as the root of their number.

    Raises:
        ArithmeticError: when ours is worse.
    """
    exact = case.exact().double()
    ours, theirs = (function() for function in list(case.peers.values())[:2])
    scale = exact.norm().clamp_min(torch.finfo(torch.float64).tiny)
    error, peer_error = (
        ((result.double() - exact).norm() / scale).item() for result in (ours, theirs)
    )
    roundings = case.terms if ours.dtype == torch.float64 else 1
    tolerance = max(2 * peer_error, roundings**0.5 * torch.finfo(ours.dtype).eps / 2)
    if not error <= tolerance:
        raise ArithmeticError(
            f"{case.name}: the relative error of {OURS} is {error:.2e}, more than {tolerance:.2e}"
        )


def measure(operator: str, case: Case, seconds: float) -> Result:
    """Time a verified case in about so many seconds."""
    timers = {
        name: Timer(
            "function()",
            globals={"function": function},
            num_threads=torch.get_num_threads(),
            label=operator,
            sub_label=case.name,
            description=name,
        )
        for name, function in case.peers.items()
    }
    estimates = {name: timer.timeit(1).median for name, timer in timers.items()}
    rounds = int(min(ROUNDS, max(LEAST_ROUNDS, seconds / sum(estimates.values()))))
    share = seconds / rounds / len(timers)
    numbers = {name: max(1, int(share / estimate)) for name, estimate in estimates.items()}
    samples: list[Measurement] = []
    order = list(timers)
    for _ in range(rounds):
        samples.extend(timers[name].timeit(numbers[name]) for name in order)
        order.reverse()
    merged = {each.task_spec.description: each for each in Measurement.merge(samples)}
    return Result(
        operator,
        case.name,
        case.work,
        case.unit,
        {name: merged[name].median for name in timers},
        {name: merged[name].iqr / 2 for name in timers},
    )


def operators() -> list[str]:
    """The names of the benchmarks in this folder."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    names = (module.name for module in modules)
    return sorted(name for name in names if name != "harness" and not name.startswith("_"))


def cases(operator: str, device: torch.device) -> Iterator[Case]:
    """The cases of one operator."""
    module = importlib.import_module(f".{operator}", __package__)
    yield from module.cases(device)


def table(operator: str, results: Sequence[Result]) -> Table:
    """The results of one operator."""
    ours, reference, *others = results[0].seconds
    rows = Table("case", title=operator, title_justify="left")
    for name in (ours, reference, *others):
        rows.add_column(f"{name}, µs", justify="right")
    rows.add_column(ours, justify="right")
    rows.add_column(f"{reference} / {ours}", justify="right")
    for result in results:
        rows.add_row(
            result.case,
            *(f"{seconds * 1e6:,.1f}" for seconds in result.seconds.values()),
            f"{result.rate(ours):,.1f} {result.unit}",
            f"{result.seconds[reference] / result.seconds[ours]:.2f}",
        )
    return rows


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
        "pkg": pkg.__version__,
        "build": pkg._C.build_info(),
    }


def run(names: Sequence[str], device: torch.device, seconds: float, json_path: Path | None) -> bool:
    """Run benchmarks, print their tables; whether every result was right.

    Args:
        names: of the operators.
        device: where the tensors are.
        seconds: to spend on a case.
        json_path: where to write results, machine and versions too.
    """
    console = Console()
    about = machine(device)
    console.print(
        f"{about['processor']}, {about['threads']} threads, {about['cpu_capability']}, "
        f"device {about['device']}, torch {about['torch']}, pkg {about['pkg']}"
    )
    everything: list[Result] = []
    faults: list[str] = []
    for name in names:
        results = []
        for case in track(list(cases(name, device)), name, console=console, transient=True):
            try:
                verify(case)
            except ArithmeticError as fault:
                faults.append(f"{name}: {fault}")
                continue
            results.append(measure(name, case, seconds))
        if results:
            console.print(table(name, results))
        everything += results
    if json_path:
        document = {"machine": about, "results": [asdict(result) for result in everything]}
        json_path.write_text(json.dumps(document, indent=2) + "\n")
    for words in faults:
        console.print(f"[bold red]WRONG[/] {words}")
    return not faults
