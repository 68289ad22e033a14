"""The ways in which ``gpu_check.py sample`` makes each call, and what each of them must show."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from gpu_calls import Call
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pkg
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


def of_another_device(call: Call, expected: Sequence[Tensor]) -> None:
    """Kernels go to the device of the tensors, whichever is the current one."""
    for other in range(torch.cuda.device_count()):
        if other != torch.cuda.current_device():
            with torch.cuda.device(other):
                results = seeded(call)
            require_same(results, expected, f"where device {other} is the current one")
            return


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
ON_CUDA: tuple[Way, ...] = (on_another_stream, of_another_device, without_waiting, in_a_graph)


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


WARPGROUPS = "PKG_CUDA_WARPGROUPS"
# Rows, summed dimension, columns: few tiles and many of both widths, parts of tiles, of panels and
# of groups of tiles; a summed dimension that is divided; more panels than stages.
PRODUCTS = ((128, 64, 256), (200, 72, 136), (72, 4096, 136), (4232, 1032, 4360), (40, 8, 70000))


# The same of weights of four bits, whose summed dimension is of whole groups and their columns of
# eight: of the last of which no tile is whole.
PACKED_PRODUCTS = ((128, 256, 256), (200, 1280, 136), (72, 4096, 136), (4232, 1024, 4360))


@contextmanager
def without_warpgroups() -> Iterator[None]:
    """Products are those of single warps here."""
    before = os.environ.get(WARPGROUPS)
    os.environ[WARPGROUPS] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[WARPGROUPS]
        else:
            os.environ[WARPGROUPS] = before


def products_of_integers(
    dtype: torch.dtype, sizes: Sequence[int], device: torch.device
) -> Iterator[Call]:
    """matmul, and linear where its types allow it, of operands that lie in every way.

    Every sum is an integer below 2^24, so that no order of summation rounds.
    """
    rows, depth, columns = sizes

    def integers(*shape: int, by_columns: bool = False) -> Tensor:
        shape = (*shape[:-2], shape[-1], shape[-2]) if by_columns else shape
        values = torch.randint(-8, 9, shape, device=device).to(dtype)
        return values.mT if by_columns else values

    def multiplied(a: Tensor, b: Tensor, to: torch.dtype | None) -> Callable[[], list[Tensor]]:
        return lambda: [ops.matmul(a, b, out_dtype=to)]

    is_integer = not dtype.is_floating_point
    out_dtype = torch.int32 if is_integer else torch.float32
    for by_columns in ((False, True),) if is_integer else ((a, b) for a in (0, 1) for b in (0, 1)):
        a = integers(rows, depth, by_columns=bool(by_columns[0]))
        b = integers(depth, columns, by_columns=bool(by_columns[1]))
        name = f"{dtype}, {rows} x {depth} x {columns}, by columns {by_columns}"
        yield Call(f"matmul of {name}", multiplied(a, b, out_dtype))
        if not is_integer:
            yield Call(f"matmul of {name}, rounded", multiplied(a, b, None))
            given = (a, b.mT, integers(1, columns)[0], "relu")
            yield Call(f"linear of {name}", lambda given=given: [ops.linear(*given)])
    if rows * columns < 2**20:
        a, b = integers(3, rows, depth), integers(3, depth, columns, by_columns=is_integer)
        yield Call(f"batched matmul of {dtype}, {sizes}", multiplied(a, b, out_dtype))


def products_of_packed_integers(sizes: Sequence[int], device: torch.device) -> Iterator[Call]:
    """int4_linear in every layout, and rows of int8 and int4; likewise no sum rounds."""
    rows, depth, columns = sizes

    def integers(least: int, most: int, *shape: int) -> Tensor:
        return torch.randint(least, most + 1, shape, device=device)

    values = integers(0, 15, columns, depth).int()
    bias = integers(-8, 8, columns)
    for dtype in (torch.bfloat16, torch.float16):
        input = integers(-2, 2, rows, depth).to(dtype)
        for group in (32, 64, 128, 256):
            tiles = 2 if group == 32 else 4 if group == 64 else 8
            pairs = integers(-3, 3, depth // group, columns, 2).bfloat16()
            packed = ops.pack_tensor_core_tiled_layout(values, tiles)
            given = (input, packed, pairs, group, tiles, bias.to(dtype))
            name = f"int4_linear of {dtype}, {rows} x {depth} x {columns} by groups of {group}"
            yield Call(name, lambda given=given: [ops.int4_linear(*given)])
    weight = integers(-128, 127, columns, depth // 2).to(torch.int8)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        scales = [torch.randn(size, device=device).to(dtype) for size in (rows, columns, columns)]
        for operator, width in (
            (ops.rowwise_scaled_linear_s8s4, depth),
            (ops.rowwise_scaled_linear_s4s4, depth // 2),
        ):
            input = integers(-128, 127, rows, width).to(torch.int8)
            given = (input, scales[0], weight, *scales[1:])
            yield Call(
                f"{operator.__name__} of {dtype}, {rows} x {depth} x {columns}",
                lambda operator=operator, given=given: [operator(*given)],
            )


@contextmanager
def float32_made(way: str) -> Iterator[None]:
    """Products of float32 are made in this way here."""
    before = pkg.get_float32_matmul()
    pkg.set_float32_matmul(way)
    try:
        yield
    finally:
        pkg.set_float32_matmul(before)


def ways_that_multiply_float32(
    device: torch.device, products: Sequence[Sequence[int]] = PRODUCTS
) -> Iterator[str]:
    """Where products in TF32, or by six of bfloat16, are not what they are to be.

    Those of integers of few bits do not round at all; random ones are off by some 2^-12 of an
    operand in TF32, and not less, or TF32 did not make them. Six products are about as exact as
    multiply-adds, and the same where an operand has an infinity.
    """
    for sizes in products:
        for call in products_of_integers(torch.float32, sizes, device):
            try:
                with float32_made("fma"):
                    expected = call.run()
                for way, words in (("high", "in TF32"), ("highest", "by six products")):
                    with float32_made(way):
                        require_same(call.run(), expected, words)
            except (FaultError, RuntimeError) as fault:
                yield f"{call.name}: {fault}"
        rows, depth, columns = sizes
        a, b = torch.randn(rows, depth, device=device), torch.randn(depth, columns, device=device)
        yield from _random_products(a, b, str(sizes))
        a[rows // 2, depth // 2] = torch.inf
        with float32_made("fma"):
            expected = ops.matmul(a, b)
        with float32_made("highest"):
            if not torch.allclose(ops.matmul(a, b), expected, rtol=1e-4, atol=1e-2):
                yield f"matmul of torch.float32, {sizes}: by six products inf is another thing"


def _random_products(a: Tensor, b: Tensor, sizes: str) -> Iterator[str]:
    def error_of(way: str) -> float:
        with float32_made(way):
            result = ops.matmul(a, b)
        return float((result - exact).norm() / exact.norm())

    exact = a.double() @ b.double()
    # Rounding both operands makes some 1.2 * 2^-12; on the CPU "high" is more exact.
    least = 2.0**-14 if a.device.type == "cuda" else 0.0
    if not least <= (error := error_of("high")) < 2.0**-11:
        yield f"matmul of torch.float32, {sizes}: in TF32 it is off by {error:.3g}"
    if not (error := error_of("highest")) <= 2 * error_of("fma"):
        yield f"matmul of torch.float32, {sizes}: by six products it is off by {error:.3g}"


def ways_that_multiply(
    device: torch.device,
    products: Sequence[Sequence[int]] = PRODUCTS,
    packed: Sequence[Sequence[int]] = PACKED_PRODUCTS,
) -> Iterator[str]:
    """Where products of warpgroups and those of single warps differ, or a call fails."""
    types = (torch.bfloat16, torch.float16, torch.int8)
    calls = chain(
        *(products_of_integers(dtype, sizes, device) for dtype in types for sizes in products),
        *(products_of_packed_integers(sizes, device) for sizes in packed),
    )
    for call in calls:
        try:
            with without_warpgroups():
                expected = call.run()
            require_same(call.run(), expected, f"where {WARPGROUPS} is not 0")
        except (FaultError, RuntimeError) as fault:
            yield f"{call.name}: {fault}"


# Of how many rows a product is made at a time, to compare it with that of all rows.
ROWS = (1, 7, 128)


def ways_that_multiply_rows(
    device: torch.device, products: Sequence[Sequence[int]] = PRODUCTS
) -> Iterator[str]:
    """Where a product and those of some of its rows differ: by tiles of all sizes, and few rows.

    Of integers, so that no order of summation rounds.
    """
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for rows, depth, columns in products:
            a = torch.randint(-8, 9, (rows, depth), device=device).to(dtype)
            b = torch.randint(-8, 9, (depth, columns), device=device).to(dtype)
            for right in (b, b.mT.contiguous().mT):
                whole = ops.matmul(a, right)
                for count in ROWS:
                    some = a[: 16 * count].split(count)
                    parts = torch.cat([ops.matmul(part, right) for part in some])
                    if not torch.equal(parts, whole[: len(parts)]):
                        what = f"matmul of {dtype}, {rows} x {depth} x {columns}"
                        yield f"{what}, by {count} rows differs from that of all"
