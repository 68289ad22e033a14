"""Times models in processes of their own: PyTorch's, and with this package, its memory or not.

``python -m pkg bench models`` alternates within one process, where what accelerate() does to the C
library's memory (``keep_memory``) serves PyTorch's own passes too. This runs each model in one
process a way, in turn, and prints the median of a process's steps and the median over processes.

    python tools/models_alone.py [--threads 1] [--seconds 2] [--rounds 3] [part of a name ...]
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pkg
from benchmarks import models

WAYS = ("PyTorch", "keep_memory=False", "accelerate()")
WARM_STEPS, LEAST_STEPS = 3, 5


def steps(name: str, way: str, seconds: float, threads: int) -> None:
    """Prints a step's median time in seconds, and its page faults, of this process."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    recipe = next(each for each in models.recipes(full=False) if each.name == name)
    run = recipe.alone()
    if way == "PyTorch":
        context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    else:
        context = pkg.accelerate(keep_memory=way == "accelerate()")
    times = []
    with context:
        for _ in range(WARM_STEPS):
            run()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times) < LEAST_STEPS:
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    print(statistics.median(times), faults / len(times))


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of models' names; all if there is none")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.way:
        steps(asked.names[0], asked.way, asked.seconds, asked.threads)
        return
    print("| model | PyTorch, ms (page faults) | keep_memory=False | accelerate() |")
    print("| --- | --- | --- | --- |", flush=True)
    options = ["--seconds", str(asked.seconds), "--threads", str(asked.threads)]
    for recipe in models.recipes(full=False):
        if asked.names and not any(part in recipe.name for part in asked.names):
            continue
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(asked.rounds):
            for way in WAYS:
                command = [sys.executable, __file__, recipe.name, "--way", way, *options]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                seconds, faults = map(float, done.stdout.split())
                found[way].append((seconds, faults))
        medians = {way: [*map(statistics.median, zip(*found[way], strict=True))] for way in WAYS}
        plain = medians["PyTorch"][0]
        ratios = " | ".join(
            f"{plain / medians[way][0]:.2f} ({medians[way][1]:.0f})" for way in WAYS[1:]
        )
        print(
            f"| {recipe.name} | {plain * 1e3:.1f} ({medians['PyTorch'][1]:.0f}) | {ratios} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
