#!/usr/bin/env python3
"""What a call costs more that ``pkg.accelerate()`` leaves alone, of every operator it knows.

Each operator is called at a size where nothing but the way to it counts, in inference mode, by a
process that never accelerated and by one that did, with a table that takes nothing: with the switch
on, and with it off. The three alternate in short rounds on one core. The figures of a pair of
processes are the medians of PyTorch's time and of what each round took more, and those of several
pairs the medians of theirs: where the code and data of a process lie can alone make a difference of
a tenth of a microsecond.

    python tools/left_alone.py            # every operator
    python tools/left_alone.py mm bmm     # those whose name begins so
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

if __name__ == "__main__":  # the checkout's, which need not be installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PLAIN, ON, OFF = "PyTorch", "left alone", "switched off"
SECONDS = 0.002  # that a round measures of each

Call = Callable[[], object]


class Figures(NamedTuple):
    """Of one operator, in microseconds: PyTorch's time, and what the other two take more."""

    plain: float
    on: float
    off: float


def calls() -> dict[str, Call]:
    """By name a call of each operator that is registered, as small as it can be."""
    aten = torch.ops.aten
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    batch = torch.randn(2, 8, 8)
    out, batch_out = torch.empty(8, 8), torch.empty(2, 8, 8)
    small, long = (torch.randint(-9, 9, shape, dtype=torch.int8) for shape in ((8, 8), (24, 8)))
    sums = torch.empty(24, 8, dtype=torch.int32)
    sides = [torch.randn(1, 2, 8, 16) for _ in range(3)]
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    forward = flash(*sides, 0.0, False)
    flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    image, weight = torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3)
    half_image, half_weight = image.half(), weight.half()
    gradient = torch.randn(1, 2, 3, 3)
    convolution_backward = aten.convolution_backward.default
    places = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    tokens = torch.randn(1, 8, 64)
    parameters = [torch.randn(shape) for shape in ((192, 64), (192,), (64, 64), (64,))]
    several = torch._native_multi_head_attention
    return {
        "mm": lambda: torch.mm(a, b),
        "mm.out": lambda: torch.mm(a, b, out=out),
        "bmm": lambda: torch.bmm(batch, batch),
        "bmm.out": lambda: torch.bmm(batch, batch, out=batch_out),
        "addmm": lambda: torch.addmm(a, a, b),
        "addmm.out": lambda: torch.addmm(a, a, b, out=out),
        "baddbmm": lambda: torch.baddbmm(batch, batch, batch),
        "_addmm_activation": lambda: torch._addmm_activation(a, a, b),
        "_addmm_activation.out": lambda: torch._addmm_activation(a, a, b, out=out),
        "_int_mm": lambda: torch._int_mm(long, small),
        "_int_mm.out": lambda: torch._int_mm(long, small, out=sums),
        "attention": lambda: flash(*sides, 0.0, False),
        "attention_backward": lambda: flash_backward(sides[0], *sides, *forward, 0.0, False),
        "convolution": lambda: torch.conv2d(image, weight),
        "convolution, float16": lambda: torch.conv2d(half_image, half_weight),
        "convolution_backward": lambda: convolution_backward(
            gradient, image, weight, [2], *places, [True, True, False]
        ),
        "_native_multi_head_attention": lambda: several(
            *(tokens, tokens, tokens, 64, 4, *parameters, None, False, True, None)
        ),
        "gelu": lambda: aten.gelu(a),
        "gelu.out": lambda: aten.gelu.out(a, out=out),
        "gelu_backward": lambda: aten.gelu_backward(a, b),
        "silu": lambda: aten.silu(a),
        "silu_backward": lambda: aten.silu_backward(a, b),
        "bernoulli_": lambda: out.bernoulli_(0.5),
        "dropout": lambda: torch.nn.functional.dropout(a),
    }


def serve(names: Sequence[str], accelerates: bool) -> None:
    """Times what each line of JSON asks for: an operator, on or off, and how many calls."""
    import pkg
    from pkg import _accelerate_routes, _accelerate_table

    torch.set_num_threads(1)
    gc.disable()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if accelerates:
        # Activations are only registered where a table takes one, here of bfloat16.
        nothing = [0.0] * (len(_accelerate_routes.table()) - 1)
        _accelerate_table.put({"ratios": [*nothing, 2.0]})
    with torch.inference_mode():
        known = {name: calls()[name] for name in names}
        for line in sys.stdin:
            name, is_on, count = json.loads(line)
            if accelerates:
                pkg.accelerate(is_on)
            print(_nanoseconds(known[name], count), flush=True)


def _nanoseconds(call: Call, count: int) -> float:
    for _ in range(count // 10 + 1):
        call()
    begin = time.perf_counter_ns()
    for _ in range(count):
        call()
    return (time.perf_counter_ns() - begin) / count


class Process:
    """One that times calls when it is asked to."""

    def __init__(self, names: Sequence[str], accelerates: bool) -> None:
        """Starts it."""
        arguments = ["--serve", str(int(accelerates)), *names]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def time(self, name: str, is_on: bool, count: int) -> float:
        """Nanoseconds of a call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([name, is_on, count]), file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def end(self) -> None:
        """Waits for its end."""
        self._process.communicate()


def measure(names: Sequence[str], pairs: int, rounds: int) -> dict[str, Figures]:
    """By operator, of so many pairs of processes."""
    found: dict[str, list[Figures]] = {name: [] for name in names}
    for _ in range(pairs):
        plain, accelerated = Process(names, False), Process(names, True)
        for name in names:
            count = int(SECONDS * 1e9 / plain.time(name, True, 1000)) + 1
            ways = ((plain, True), (accelerated, True), (accelerated, False))
            times = [
                [process.time(name, is_on, count) for process, is_on in ways] for _ in range(rounds)
            ]
            differences = [(plain, on - plain, off - plain) for plain, on, off in times]
            found[name].append(medians(differences, 1e-3))
        plain.end()
        accelerated.end()
    return {name: medians(figures, 1.0) for name, figures in found.items()}


def medians(rows: Sequence[Sequence[float]], unit: float) -> Figures:
    """Of each column, times a unit."""
    return Figures(*(unit * statistics.median(column) for column in zip(*rows, strict=True)))


def table(figures: dict[str, Figures]) -> list[str]:
    """Lines of Markdown."""
    lines = [f"| operator | {PLAIN}, us | {ON} | {OFF} |", "| --- | ---: | ---: | ---: |"]
    lines += [
        f"| `{name}` | {each.plain:.2f} | {each.on:+.2f} | {each.off:+.2f} |"
        for name, each in figures.items()
    ]
    return lines


def main() -> None:
    """Measures, or serves one that does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of operators' names; all without")
    parser.add_argument("--pairs", type=int, default=3, help="of processes (3)")
    parser.add_argument("--rounds", type=int, default=100, help="of each pair (100)")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.names, bool(arguments.serve))
        return
    wanted = tuple(arguments.names)
    names = [name for name in calls() if not wanted or name.startswith(wanted)]
    print("\n".join(table(measure(names, arguments.pairs, arguments.rounds))))


if __name__ == "__main__":
    main()
