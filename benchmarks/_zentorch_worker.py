"""Times operators of zentorch for another process: run by the interpreter that has zentorch.

It reads requests and answers each, JSON, a line each: ``{"prepare": call, "threads": number}``,
then any number of ``{"time": calls}``, answered by the seconds that a call took. It imports nothing
of pkg, which this interpreter need not have.

zentorch overwrites a second operand with a copy in an order of its own, chosen for the number of
threads at the time, and remembers the address. With another number of threads it then computes
nothing and returns memory as it was; another tensor at that address it takes for the reordered one.
So results are verified, and a process serves one number of threads.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.utils.benchmark import Timer


def _attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    grouped = query.size(1) != key.size(1)  # it does without being told
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, enable_gqa=grouped, **options
    )


# PyTorch's operator of the same meaning.
PLAIN: dict[str, Callable[..., Tensor]] = {
    "zentorch_mm": lambda a, b, **_: a @ b,
    "zentorch_bmm": lambda a, b, **_: a @ b,
    "zentorch_sdpa": _attention,
}
# A call of so many seconds needs no warm-up.
LONG_SECONDS = 0.5


class WrongResultError(RuntimeError):
    """Of zentorch; a new process may give the right one."""


def _argument(description: Any) -> Any:
    if not isinstance(description, dict):
        return description
    dtype = getattr(torch, description["dtype"])
    tensor = torch.empty_strided(description["shape"], description["stride"], dtype=dtype)
    if dtype.is_floating_point:
        return tensor.normal_()
    return tensor.random_(0, 2) if dtype == torch.bool else tensor.random_(-128, 128)


def _keywords(call: dict[str, Any]) -> dict[str, Any]:
    return {name: _argument(value) for name, value in call["keywords"].items()}


class Call:
    """A call of zentorch, made and verified."""

    def __init__(self, call: dict[str, Any], threads: int) -> None:
        """Make the tensors, and the call once, with so many threads.

        Raises:
            RuntimeError: it refuses.
            WrongResultError: it fails.
        """
        torch.set_num_threads(threads)
        name = call["operator"]
        operator = getattr(torch.ops.zentorch, name)
        calls: list[Callable[[], Any]] = []
        for _ in range(call["copies"]):
            arguments = [_argument(each) for each in call["arguments"]]
            keywords = _keywords(call)
            if not calls:  # before zentorch has laid hands on an operand
                expected = PLAIN[name](*arguments, **keywords)
            calls.append(partial(operator, *arguments, **keywords))
        self.long = _verify(calls[0], expected) >= LONG_SECONDS
        if not self.long:  # again, with an operand that it has had
            _verify(calls[0], expected)
        turns = itertools.cycle(calls)
        self.function = calls[0] if len(calls) == 1 else lambda: next(turns)()
        self._timer = Timer("function()", globals={"function": self.function}, num_threads=threads)

    def seconds(self, number: int) -> float:
        """The time of one of so many calls."""
        if self.long:
            begin = time.perf_counter()
            self.function()
            return time.perf_counter() - begin
        return float(self._timer.timeit(number).median)


def _verify(function: Callable[[], Any], expected: Tensor) -> float:
    """Make a call whose result must have half of its digits right; its seconds."""
    begin = time.perf_counter()
    result = function()
    seconds = time.perf_counter() - begin
    result = result[0] if isinstance(result, tuple) else result
    if not has_half_its_digits(result, expected):
        raise WrongResultError("its result is wrong")
    return seconds


def has_half_its_digits(result: Tensor, expected: Tensor) -> bool:
    """Not how exact a result is, but whether it was computed at all."""
    error = (result.double() - expected.double()).norm()
    return bool(error <= torch.finfo(expected.dtype).eps ** 0.5 * expected.double().norm())


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are no more."""
    call: Call | None = None
    for line in requests:
        request = json.loads(line)
        answer: dict[str, Any]
        try:
            if "prepare" in request:
                call = Call(request["prepare"], request["threads"])
                answer = {}
            else:
                assert call is not None
                answer = {"seconds": call.seconds(request["time"])}
        except (RuntimeError, AttributeError, KeyError, TypeError) as error:
            answer = {"error": str(error), "wrong": isinstance(error, WrongResultError)}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Say which versions these are, then serve."""
    # What zentorch prints must not be taken for answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        import zentorch
    except ImportError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return
    versions = {"zentorch": zentorch.__version__, "torch": torch.__version__}
    print(json.dumps(versions), file=answers, flush=True)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
