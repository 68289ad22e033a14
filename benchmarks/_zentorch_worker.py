"""Times operators of zentorch for another process: run by the interpreter that has zentorch.

It reads requests and answers each, JSON, a line each: ``{"prepare": call, "threads": number}``,
then any number of ``{"time": calls}``, answered by the seconds that a call took. It imports nothing
of pkg, which this interpreter need not have.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

import torch
from torch.utils.benchmark import Timer


def _argument(description: Any) -> Any:
    if not isinstance(description, dict):
        return description
    dtype = getattr(torch, description["dtype"])
    tensor = torch.empty_strided(description["shape"], description["stride"], dtype=dtype)
    return tensor.normal_() if dtype.is_floating_point else tensor.random_(-128, 128)


def _prepare(call: dict[str, Any], threads: int) -> Timer:
    torch.set_num_threads(threads)
    operator = getattr(torch.ops.zentorch, call["operator"])
    calls: list[Callable[[], Any]] = []
    for _ in range(call["copies"]):
        arguments = [_argument(each) for each in call["arguments"]]
        calls.append(partial(operator, *arguments, **call["keywords"]))
    turns = itertools.cycle(calls)
    function = calls[0] if len(calls) == 1 else lambda: next(turns)()
    function()  # refuses what it cannot do
    return Timer("function()", globals={"function": function}, num_threads=threads)


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are no more."""
    timer: Timer | None = None
    for line in requests:
        request = json.loads(line)
        answer: dict[str, Any]
        try:
            if "prepare" in request:
                timer = _prepare(request["prepare"], request["threads"])
                answer = {}
            else:
                assert timer is not None
                answer = {"seconds": timer.timeit(request["time"]).median}
        except (RuntimeError, AttributeError, TypeError) as error:
            answer = {"error": str(error)}
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
