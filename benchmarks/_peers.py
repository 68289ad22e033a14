"""Peers that need more than a call: NumPy's BLAS, torch.compile, zentorch in another process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._apart import Apart
from ._case import ForeignCall, Returned
from ._threads import place
from ._zentorch_worker import has_half_its_digits

WORKER = Path(__file__).with_name("_zentorch_worker.py")


def numpy_function(name: str, *tensors: Tensor) -> dict[str, Callable[[], Any]]:
    """NumPy's function of that name on the memory of these tensors, as a peer to be merged in.

    Nothing where there is no NumPy, or where it has no BLAS for the dtype: only float32 and float64
    on the CPU.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    if not (on_cpu and dtypes in ({torch.float32}, {torch.float64})):
        return {}
    if importlib.util.find_spec("numpy") is None:
        return {}
    import numpy as np

    function, arrays = getattr(np, name), [tensor.numpy() for tensor in tensors]
    return {"NumPy": lambda: function(*arrays)}


def compiled(function: Callable[[], Returned]) -> Callable[[], Returned] | None:
    """What torch.compile makes of a peer, compiled; None where it cannot."""
    result: Callable[[], Returned]
    if isinstance(function, Apart):
        result = function.compiled()
    else:
        torch._dynamo.reset()  # or a function that was seen with other shapes is not compiled anew
        result = torch.compile(lambda: function())
    try:
        result()
    except Exception:  # of the compiler, in many kinds
        return None
    return result


class WrongResultError(RuntimeError):
    """Of zentorch."""


def by_zentorch(plain: Apart, interpreter: str) -> Apart:
    """A whole model's step, compiled by zentorch, in a process of that Python.

    Raises:
        RuntimeError: it does not run there.
        WrongResultError: less than half of the digits are PyTorch's.
    """
    peer = plain.by_zentorch(interpreter)
    pairs = zip(peer.results(), plain.results(), strict=True)
    if not all(has_half_its_digits(*pair) for pair in pairs):
        raise WrongResultError("zentorch: its result is wrong")
    return peer


class Zentorch:
    """zentorch in a process of its own: it changes PyTorch, and wants a certain version of it.

    A new one where the number of threads changes, and after a wrong result: ``_zentorch_worker.py``
    says why.
    """

    def __init__(self, interpreter: str | Path) -> None:
        """Start it.

        Raises:
            ImportError: that interpreter has no zentorch that works.
        """
        self._interpreter = interpreter
        self._threads: int | None = None
        self._start()

    def _start(self) -> None:
        interpreter = self._interpreter
        try:
            self._process = subprocess.Popen(
                [str(interpreter), "-u", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError as error:
            raise ImportError(f"zentorch: {interpreter} does not run: {error}") from error
        try:
            self.versions = self._answer()
        except RuntimeError as error:
            self.close()
            raise ImportError(f"{interpreter}: {error}") from error

    def _restart(self) -> None:
        self.close()
        self._start()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("zentorch: its process ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            kind = WrongResultError if answer.get("wrong") else RuntimeError
            raise kind(f"zentorch: {answer['error']}")
        return answer

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeError("zentorch: its process ended") from error
        return self._answer()

    def prepare(self, call: ForeignCall, threads: int, on: list[int]) -> None:
        """Make the tensors of a call there, on these logical processors.

        Raises:
            RuntimeError: zentorch refuses the call, or its result is wrong.
        """
        if self._threads not in (None, threads):
            self._restart()
        self._threads = threads
        request = {
            "operator": call.operator,
            "arguments": [_description(argument) for argument in call.arguments],
            "keywords": {name: _description(value) for name, value in call.keywords.items()},
            "copies": call.copies,
        }
        try:
            self._ask({"prepare": request, "threads": threads})
        except WrongResultError:
            self._restart()
            self._ask({"prepare": request, "threads": threads})
        if on:
            place(self._process.pid, on)

    def seconds(self, number: int) -> float:
        """The time of one of so many calls, after warm-up."""
        return float(self._ask({"time": number})["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def _description(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return {
        "shape": list(argument.shape),
        "stride": list(argument.stride()),
        "dtype": str(argument.dtype).removeprefix("torch."),
    }


def zentorch_here() -> str | None:
    """This interpreter, where it has zentorch."""
    return sys.executable if importlib.util.find_spec("zentorch") else None
