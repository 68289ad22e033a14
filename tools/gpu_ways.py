"""The ways in which ``gpu_check.py sample`` makes each call, and what each of them must show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from gpu_calls import Call
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pkg import ops
from pkg.testing import same_bits

SEED = 5


class FaultError(Exception):
    """What a call did wrong, in words."""


def seeded(call: Call) -> list[Tensor]:
    """Make the call; dropout draws the same each time."""
    torch.manual_seed(SEED)
    return call.run()


def require_same(results: Sequence[Tensor], expected: Sequence[Tensor], where: str) -> None:
    """Refuse results that are not of the same bits."""
    wrong = [
        str(index)
        for index, pair in enumerate(zip(results, expected, strict=True))
        if not same_bits(*pair)
    ]
    if wrong:
        raise FaultError(f"results {', '.join(wrong)} of {len(results)} differ {where}")


def twice(call: Call, expected: Sequence[Tensor]) -> None:
    """Sums run in one order: a second call gives the same bits."""
    require_same(seeded(call), expected, "from those of the first call")


def on_another_stream(call: Call, expected: Sequence[Tensor]) -> None:
    """Kernels go to PyTorch's current stream, whichever that is."""
    current, other = torch.cuda.current_stream(), torch.cuda.Stream()
    # What is put on the other stream first still runs when the host has made the call, so that a
    # kernel on any other stream would read what the ones before it have not yet written.
    other.wait_stream(current)
    with torch.cuda.stream(other):
        torch.cuda._sleep(1_000_000)
        results = seeded(call)
    current.wait_stream(other)
    require_same(results, expected, "on another stream")
    torch.cuda.synchronize()


def in_a_graph(call: Call, expected: Sequence[Tensor]) -> None:
    """Captured in a CUDA graph, and its results written by the replay."""
    if call.is_random:
        return  # draws otherwise in a graph
    current, other = torch.cuda.current_stream(), torch.cuda.Stream()
    other.wait_stream(current)
    with torch.cuda.stream(other):
        call.run()
    current.wait_stream(other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call.run()
    for result in results:
        result.fill_(77)
    graph.replay()
    require_same(results, expected, "in a CUDA graph")


def without_waiting(call: Call, expected: Sequence[Tensor]) -> None:
    """The host never waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = seeded(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    require_same(results, expected, "where waiting is an error")


Way = Callable[[Call, Sequence[Tensor]], None]
ON_EVERY_DEVICE: tuple[Way, ...] = (twice,)
ON_CUDA: tuple[Way, ...] = (on_another_stream, without_waiting, in_a_graph)


def ways_on(device: torch.device) -> tuple[Way, ...]:
    """All but the plain call."""
    return (*ON_EVERY_DEVICE, *(ON_CUDA if device.type == "cuda" else ()))


def faults(calls: Iterable[Call], ways: Sequence[Way]) -> Iterator[str]:
    """What goes wrong; whether results are right is the suite's concern, here they are finite."""
    for call in calls:
        try:
            expected = [result.clone() for result in seeded(call)]
            if not all(bool(result.isfinite().all()) for result in expected):
                raise FaultError("a result is not finite")
            for way in ways:
                way(call, expected)
        except (FaultError, RuntimeError) as fault:
            yield f"{call.name}: {fault}"


class OperatorsCalled(TorchDispatchMode):
    """Collects the names of this package's operators whose kernels are entered."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("pkg::"):
            self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def kernels(device: torch.device) -> set[str]:
    """The operators that have a kernel for the device."""
    key = "CUDA" if device.type == "cuda" else "CPU"
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name for name in names if name.startswith("pkg::")}


def never_called(calls: Iterable[Call], device: torch.device) -> list[str]:
    """The operators that have a kernel for the device and that no call reaches."""
    with OperatorsCalled() as called:
        for call in calls:
            call.run()
    return sorted(kernels(device) - called.names)


def beyond_31_bits(device: torch.device) -> Iterator[str]:
    """Pointwise operators on more elements than 31 bits count: dense ones, and misaligned ones."""
    count = 2**31 + 70
    needed = 5 * count
    free, _ = torch.cuda.mem_get_info(device)
    if free < needed:
        print(f"SKIPPED: 2^31 elements take {needed >> 30} GiB, of which {free >> 30} are free")
        return
    numbers = torch.randint(0, 15, (count + 1,), dtype=torch.uint8, device=device)
    for name, a in (("dense", numbers[:-1]), ("strided", numbers[1:])):
        result = ops.mul(a, a)
        for part in (slice(1000), slice(2**31 - 1000, None)):
            if not torch.equal(result[part], a[part] * a[part]):
                yield f"mul, {name}, of {count} elements: wrong in {part}"
        del result
