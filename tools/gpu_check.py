"""The Python half of ``tools/gpu_check.sh``: what is missing, a sample of calls, and the figures.

``requirements`` says in words what this machine lacks. ``sample`` calls every operator over sizes
around its tiles (``gpu_calls.py``), again, on another stream, while another device is the current
one, in a CUDA graph and where waiting for the device is an error (``gpu_ways.py``), and with
elements more than 2^31 apart (``gpu_places.py``), or with ``--plain`` once, for compute-sanitizer
to watch.
``time`` verifies and times the benchmarks of every operator beside PyTorch's and writes a JSON
file.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

ROUNDS = 9
WARM_UP_SECONDS = 0.02
SAMPLE_SECONDS = 0.01  # of one reading of the clock: a thousand times its resolution
# A call that takes less may be one of the host's time: it is timed in a CUDA graph too.
MOST_SECONDS_IN_A_GRAPH = 100e-6
CALLS_IN_A_GRAPH = 20
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
    """Call every operator, over sizes around its tiles and in every way that the device has."""
    import gpu_attention
    import gpu_calls
    import gpu_places
    import gpu_ways
    import torch

    device = torch.device(options.device)
    torch.manual_seed(0)
    sizes = options.sizes or gpu_calls.SIZES
    calls = list(gpu_calls.calls(device, gpu_calls.DTYPES, sizes))
    ways = () if options.plain else gpu_ways.ways_on(device)
    wrong = list(gpu_ways.faults(calls, ways))
    few = gpu_calls.calls(device, gpu_calls.DTYPES[1:2], sizes[-1:])
    wrong += [
        f"{name}: no call reaches it, see tools/gpu_calls.py"
        for name in gpu_ways.never_called(few, device)
    ]
    if device.type == "cuda" and not options.plain:
        if torch.cuda.device_count() == 1:
            print(
                "SKIPPED: there is one device, so none but that of the tensors is the current one"
            )
        wrong += gpu_attention.ways_that_attend(device)
        wrong += gpu_ways.beyond_31_bits(device)
        faults, apart = gpu_places.spread_beyond_31_bits(gpu_places.small_calls(device))
        print(f"{len(apart)} operators with elements more than 2^31 apart, as far as memory allows")
        wrong += faults
        wrong += gpu_ways.ways_that_multiply(device)
        wrong += gpu_ways.ways_that_multiply_float32(device)
        wrong += gpu_ways.ways_that_multiply_rows(device)
    print(f"{len(calls)} calls in {1 + len(ways)} ways, {len(wrong)} faults")
    for fault in wrong:
        print(f"WRONG {fault}", file=sys.stderr)
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


def graph_of(function: Callable[[], Any]) -> Callable[[], Any] | None:
    """Replays ``CALLS_IN_A_GRAPH`` calls from a CUDA graph; None where they cannot be captured."""
    import torch

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    try:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            kept = [function() for _ in range(CALLS_IN_A_GRAPH)]
    except RuntimeError:
        torch.cuda.synchronize()
        # One that ends well: of one that did not, the generator of random numbers would take the
        # next call of it for a part (PyTorch 2.11).
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.ones(1, device="cuda")
        return None
    del kept
    return graph.replay


def alternated(peers: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds a call of each, whose rounds alternate."""
    calls = {}
    for name, function in peers.items():
        once = events_of_cuda(function, 1)
        count = max(1, min(1000, int(WARM_UP_SECONDS / max(once, 1e-9))))
        calls[name] = max(1, int(SAMPLE_SECONDS / max(events_of_cuda(function, count), 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in peers}
    order = list(peers)
    for _ in range(ROUNDS):
        for name in order:
            samples[name].append(events_of_cuda(peers[name], calls[name]))
        order.reverse()
    return samples


def measure_on_cuda(harness: ModuleType, operator: str, case: Any) -> Iterator[Any]:
    """Median and spread of each peer; of a call that takes little time in CUDA graphs too."""

    def result(name: str, samples: Mapping[str, list[float]], calls: int) -> Any:
        seconds = {peer: statistics.median(times) / calls for peer, times in samples.items()}
        quartiles = {peer: statistics.quantiles(times, n=4) for peer, times in samples.items()}
        spread = {peer: (high - low) / 2 / calls for peer, (low, _, high) in quartiles.items()}
        return harness.Result(operator, name, case.work, case.unit, seconds, spread)

    skipped = {}
    for name, function in list(case.peers.items())[1:]:
        try:
            function()
        except RuntimeError as error:  # not for this device, or not of this shape
            skipped[name] = f"refused: {str(error).partition(chr(10))[0]}"
    peers = {name: each for name, each in case.peers.items() if name not in skipped}
    plain = dataclasses.replace(result(case.name, alternated(peers), 1), skipped=skipped)
    yield plain
    if plain.seconds[harness.OURS] < MOST_SECONDS_IN_A_GRAPH:
        graphs = {name: graph_of(function) for name, function in peers.items()}
        captured = {name: graph for name, graph in graphs.items() if graph is not None}
        if harness.OURS in captured:
            yield result(f"{case.name}, in a graph", alternated(captured), CALLS_IN_A_GRAPH)


def ceilings(device: Any) -> dict[str, float]:
    """What this device reaches at best here: bytes by a copy, operations by PyTorch's product."""
    import torch

    source = torch.randn(2**28, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    rates = {}
    for name, function, work in (
        ("copy, GB/s read and written", lambda: target.copy_(source), 2 * source.nbytes),
        ("product of bfloat16, GFLOP/s", lambda: a @ b, 2 * 8192**3),
    ):
        events_of_cuda(function, 3)
        rates[name] = work / 1e9 / statistics.median(events_of_cuda(function, 5) for _ in range(5))
    return rates


def time_operators(options: argparse.Namespace) -> int:
    """Verify, time, print tables, write the figures; 1 when a result was wrong."""
    import torch
    from rich.console import Console

    from pkg.__main__ import load_benchmarks

    harness = load_benchmarks()
    torch.set_float32_matmul_precision(options.float32)
    device = torch.device(options.device)
    console = Console(width=160)
    machine = harness.machine(device)
    if device.type == "cuda":
        machine["ceilings"] = ceilings(device)
        console.print(machine["ceilings"])
    results, faults = [], []
    for operator in options.operators or harness.operators():
        of_operator = []
        for case in harness.cases(operator, device):
            try:
                harness.verify(case)
                if device.type == "cuda":
                    of_operator += measure_on_cuda(harness, operator, case)
                else:
                    of_operator.append(harness.measure(operator, case, options.seconds))
            except (ArithmeticError, RuntimeError) as fault:
                faults.append(f"{operator}: {case.name}: {fault}")
        if of_operator:
            console.print(harness.table(operator, of_operator))
        results += of_operator
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
            command.add_argument("--float32", choices=["highest", "high"], default="highest")
            command.add_argument("--seconds", type=float, default=0.2, help="a case, on the CPU")
            command.add_argument("operators", nargs="*", metavar="OPERATOR")
        if function is sample:
            command.add_argument("--plain", action="store_true", help="each call once, in one way")
            command.add_argument("--sizes", type=int, nargs="+", help="in place of those of tiles")
    options = parser.parse_args()
    return int(options.function(options))


if __name__ == "__main__":
    sys.exit(main())
