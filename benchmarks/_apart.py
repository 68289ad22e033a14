"""Steps of a whole model in a process of its own, as a user's program runs them.

What :func:`pkg.accelerate` does with memory that is freed holds for a process, so in one process
PyTorch's own steps would gain by it too. Each way of running a model is therefore a process that
waits while another one takes its turn. It is asked by lines of JSON, and answers with one each.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

import pkg

from ._threads import in_use, place

SERVE = "from pkg.__main__ import load_benchmarks; load_benchmarks('_apart').main()"
PYTORCH, ACCELERATED, COMPILED, ZENTORCH = "PyTorch", "pkg", "torch.compile", "zentorch"
BACKENDS = {COMPILED: "inductor", ZENTORCH: "zentorch"}
"""Of ``torch.compile``, for the ways that go by it."""


class Apart:
    """A model's step in a process of its own; called, it makes one and waits for its end.

    The first call returns the results, each later one none: they need not travel while it is timed.
    """

    def __init__(self, recipe: str, way: str, interpreter: str = sys.executable) -> None:
        """Start the process, which goes on making the model.

        Args:
            recipe: the name of a recipe of ``benchmarks/models.py``.
            way: ``PyTorch``, ``pkg``, ``torch.compile`` or ``zentorch``.
            interpreter: the Python that runs it, of this one's version, with a PyTorch of its own.
        """
        self._recipe = recipe
        folder = str(Path(pkg.__file__).resolve().parent.parent)
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [interpreter, "-c", SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        weakref.finalize(self, _end, self._process)
        self._send({"recipe": recipe, "way": way, "processors": in_use()})
        self._is_ready = self._has_results = False

    def __call__(self) -> Sequence[Tensor]:
        """Make a step.

        Raises:
            RuntimeError: the process failed; what it said is on standard error.
        """
        self.wait()
        if self._has_results:
            self._ask({"results": None})
            return []
        self._has_results = True
        return self.results()

    def results(self) -> Sequence[Tensor]:
        """Make a step, whose results travel.

        Raises:
            RuntimeError: the process failed; what it said is on standard error.
        """
        self.wait()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "results.pt"
            self._ask({"results": str(file)})
            found: list[Tensor] = torch.load(file)
        return found

    def wait(self) -> None:
        """Until the model is made."""
        if not self._is_ready:
            self._answer()
            self._is_ready = True

    def compiled(self) -> Apart:
        """The same by ``torch.compile``, in another process."""
        return Apart(self._recipe, COMPILED)

    def by_zentorch(self, interpreter: str) -> Apart:
        """The same by ``torch.compile`` with zentorch, in a process of a Python that has it."""
        return Apart(self._recipe, ZENTORCH, interpreter)

    def _ask(self, request: dict[str, Any]) -> None:
        self._send(request)
        self._answer()

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer that is missing tells
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def _answer(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"{self._recipe}: its process ended")


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    process.wait()


def _step(recipe: Any, way: str) -> Callable[[], list[Tensor]]:
    if way == ACCELERATED:
        pkg.accelerate()
    elif way == ZENTORCH:
        import zentorch  # noqa: F401, registers its backend
    torch.manual_seed(0)
    step: Callable[[], list[Tensor]] = recipe.alone(BACKENDS.get(way))
    return step


def serve(requests: TextIO, answers: TextIO) -> None:
    """Make the model that the first line asks for, then a step for each line."""
    from . import models

    first = json.loads(requests.readline())
    processors = first["processors"]
    if processors:
        torch.set_num_threads(len(processors))
        torch.ones(1 << 20).sum()  # makes PyTorch's threads
        place(os.getpid(), processors)
    recipe = next(each for each in models.recipes(full=True) if each.name == first["recipe"])
    step = _step(recipe, first["way"])
    print("ready", file=answers, flush=True)
    for line in requests:
        results = step()
        if file := json.loads(line)["results"]:
            torch.save(results, file)
        print("done", file=answers, flush=True)


def main() -> None:
    """What another process starts."""
    # What is printed must not be taken for answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, answers)
