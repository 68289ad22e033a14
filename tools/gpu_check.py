"""The Python half of ``tools/gpu_check.sh``: what is missing, a sample of calls, and the figures.

``requirements`` says in words what this machine lacks. ``sample`` calls every kernel over sizes
around its tiles, for compute-sanitizer to watch. ``time`` verifies and times the benchmarks of
every operator beside PyTorch's and writes a JSON file.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

ROUNDS = 9
WARM_UP_SECONDS = 0.02
SAMPLE_SECONDS = 0.01  # of one reading of the clock: a thousand times its resolution
NEEDED = {
    "build": ("setuptools", "wheel", "ninja"),
    "suite": ("pytest", "numpy", "expecttest"),
    "timing": ("rich",),
}


def missing(device: str) -> Iterator[str]:
    """What keeps the check from running here, in words."""
    for purpose, packages in NEEDED.items():
        absent = [name for name in packages if importlib.util.find_spec(name) is None]
        if absent:
            yield f"the {purpose} needs the Python packages {', '.join(absent)}, not found"
    if importlib.util.find_spec("torch") is None:
        yield f"there is no PyTorch for {sys.executable}: set PYTHON to an interpreter that has it"
        return
    import torch

    if device == "cpu":
        return
    if torch.version.cuda is None:
        yield f"PyTorch {torch.__version__} is a build without CUDA: set PYTHON to one that has it"
    elif not torch.cuda.is_available():
        yield f"PyTorch {torch.__version__} sees no GPU: look at what nvidia-smi says"


def requirements(options: argparse.Namespace) -> int:
    """Print what is missing; else the architecture to build for."""
    problems = list(missing(options.device))
    for problem in problems:
        print(f"gpu_check: {problem}", file=sys.stderr)
    if problems:
        return 1
    if options.device != "cpu":
        import torch

        major, minor = torch.cuda.get_device_capability()
        print(f"{major}.{minor}{'a' if (major, minor) == (9, 0) else ''}")
    return 0


def sample(options: argparse.Namespace) -> int:
    """Call every kernel, over sizes around its tiles, for compute-sanitizer to watch.

    Whether the results are right is the suite's concern; here they only have to be finite.
    """
    import torch

    from pkg import ops

    device = torch.device(options.device)
    torch.manual_seed(0)
    results: list[torch.Tensor] = []
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    for dtype, size in itertools.product(dtypes, (1, 63, 65, 129)):

        def make(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.rand(shape, device=device).to(dtype)

        a, b, out = make(size, 70), make(70, size), make(size, 70)
        ops.add_out(a, a[:1], out=out)
        leaf = a.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(ops.d_sigmoid(leaf).sum(), leaf)
        results += [out, gradient, ops.mul(a, b.mT), ops.muladd(a, a[:1], 0.5), ops.matmul(a, b)]
        for head in (20, 130):
            inputs = [make(2, 3, size, head).requires_grad_() for _ in range(3)]
            mask = make(3, 1, size).requires_grad_()
            capped = {"softcap": 3.0, "window_left": 40, "alibi_slopes": make(3).float()}
            for arguments in ({"attn_mask": mask}, {"is_causal": True}, {"dropout_p": 0.5}, capped):
                output = ops.scaled_dot_product_attention(*inputs, **arguments)
                wanted = [*inputs, *([mask] if "attn_mask" in arguments else [])]
                results += [output, *torch.autograd.grad(output.sum(), wanted)]
            lengths = torch.tensor([size, size // 2], device=device)
            query, key, value = (each.detach() for each in inputs)
            results.append(ops.decode_attention(query[:, :, -4:], key, value, lengths))
            results.append(ops.decode_attention(query[:, :, -4:], key, value, lengths, **capped))
            starts = torch.tensor([0, size, size, size + 40], device=device)
            packed = [make(size + 40, 3, head).requires_grad_() for _ in range(3)]
            longest = max(size, 40)
            output = ops.scaled_dot_product_attention_varlen(
                *packed, starts, starts, longest, longest, 0.5, None, True
            )
            results += [output, *torch.autograd.grad(output.sum(), packed)]
    numbers = torch.randint(-128, 128, (65, 65), dtype=torch.int8, device=device)
    results.append(ops.matmul(numbers, numbers, out_dtype=torch.int32))
    wrong = sum(not bool(result.isfinite().all()) for result in results)
    print(f"{len(results)} results, {wrong} of them not finite")
    return 1 if wrong else 0


def events_of_cuda(function: Callable[[], Any], calls: int) -> float:
    """Seconds a call, by the device's own clock."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def measure_on_cuda(harness: ModuleType, operator: str, case: Any) -> Any:
    """Median and spread of each peer, whose rounds alternate."""
    calls = {}
    for name, function in case.peers.items():
        once = events_of_cuda(function, 1)
        count = max(1, min(1000, int(WARM_UP_SECONDS / max(once, 1e-9))))
        calls[name] = max(1, int(SAMPLE_SECONDS / max(events_of_cuda(function, count), 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in case.peers}
    order = list(case.peers)
    for _ in range(ROUNDS):
        for name in order:
            samples[name].append(events_of_cuda(case.peers[name], calls[name]))
        order.reverse()
    seconds = {name: statistics.median(times) for name, times in samples.items()}
    quartiles = {name: statistics.quantiles(times, n=4) for name, times in samples.items()}
    spread = {name: (high - low) / 2 for name, (low, _, high) in quartiles.items()}
    return harness.Result(operator, case.name, case.work, case.unit, seconds, spread)


def time_operators(options: argparse.Namespace) -> int:
    """Verify, time, print tables, write the figures; 1 when a result was wrong."""
    import torch
    from rich.console import Console

    from pkg.__main__ import load_benchmarks

    harness = load_benchmarks()
    device = torch.device(options.device)
    console = Console()
    results, faults = [], []
    for operator in options.operators or harness.operators():
        of_operator = []
        for case in harness.cases(operator, device):
            try:
                harness.verify(case)
            except ArithmeticError as fault:
                faults.append(f"{operator}: {fault}")
                continue
            if device.type == "cuda":
                of_operator.append(measure_on_cuda(harness, operator, case))
            else:
                of_operator.append(harness.measure(operator, case, options.seconds))
        if of_operator:
            console.print(harness.table(operator, of_operator))
        results += of_operator
    machine = harness.machine(device)
    document = {
        "machine": machine,
        "results": [dataclasses.asdict(result) for result in results],
        "wrong": faults,
    }
    slug = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")
    today = datetime.now(timezone.utc).date().isoformat()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"{slug}-{today}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(f"written: {path}")
    for fault in faults:
        print(f"WRONG {fault}", file=sys.stderr)
    return 1 if faults else 0


def main() -> int:
    """Read the command line and run its command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for name, function in [
        ("requirements", requirements),
        ("sample", sample),
        ("time", time_operators),
    ]:
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        command.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
        if function is time_operators:
            command.add_argument("--folder", type=Path, default=Path("benchmarks", "results"))
            command.add_argument("--seconds", type=float, default=0.2, help="a case, on the CPU")
            command.add_argument("operators", nargs="*", metavar="OPERATOR")
    options = parser.parse_args()
    return int(options.function(options))


if __name__ == "__main__":
    sys.exit(main())
