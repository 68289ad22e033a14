"""Plain loads and stores of the kernels, counted by request of a warp, against what headers say.

What a header says is moved sixteen bytes at a time, in whole sectors, once, or without conflicts
of the shared memory's banks is counted here. A tile of panels is not: its reads are written one by
one, and nvcc makes vectors of them, which the counters do not know.
"""

from __future__ import annotations

import pytest
import torch
from emulator import AccessCount, Emulator
from quantised_samples import scales_and_zeros, words
from rowwise_scaled_samples import call
from test_emulated_attention import emulated_backward, emulated_forward
from test_emulated_attention import make as make_attention
from test_emulated_decode_attention import emulated as emulated_decoding
from test_emulated_decode_attention import make as make_decoding
from test_emulated_few_rows import few_rows, weight_of
from test_emulated_int4_linear import emulated as emulated_int4_linear
from test_emulated_lltm import arguments as lltm_arguments
from test_emulated_lltm import emulated_step
from test_emulated_matmul import emulated_matmul
from test_emulated_pointwise import emulated_dense, emulated_strided
from test_emulated_rowwise_scaled_linear import emulated as emulated_rowwise
from test_emulated_rowwise_scaled_linear import emulated_quantized
from test_emulated_spatial_correlation_sample import (
    emulated as emulated_correlation,
)
from test_emulated_spatial_correlation_sample import emulated_gradient, integers
from torch import Tensor

from pkg.testing import Sample

SECTOR = 32
VECTORS = 512  # bytes of a request of which each lane moves sixteen


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def assert_whole_sectors(count: AccessCount) -> None:
    assert count.bytes > 0
    assert count.transactions * SECTOR == count.bytes


def assert_vectors(count: AccessCount) -> None:
    """Sixteen bytes a lane, in whole sectors."""
    assert_whole_sectors(count)
    assert count.requests * VECTORS == count.bytes


def assert_no_conflicts(count: AccessCount) -> None:
    assert count.requests > 0
    assert count.transactions == count.least


def check_matmul(emulator: Emulator) -> None:
    """cuda/gemm/tile.cuh: a lane writes eight neighbours, four lanes a line of 64 bytes."""
    a, b = torch.randn(256, 64).bfloat16(), torch.randn(64, 256).bfloat16()
    c = emulated_matmul(emulator, a, b)
    stores = emulator.accesses["c"].stores
    assert_vectors(stores)
    assert stores.bytes == size_of(c)


def test_matmul_of_halves(counting_emulator: Emulator) -> None:
    check_matmul(counting_emulator)
    a, b = torch.randn(128, 64).bfloat16(), torch.randn(64, 128).bfloat16()
    c = emulated_matmul(counting_emulator, a, b, torch.float32)
    assert_whole_sectors(counting_emulator.accesses["c"].stores)
    assert counting_emulator.accesses["c"].stores.bytes == size_of(c)


def check_panels(emulator: Emulator) -> None:
    """cuda/gemm/panel.cuh: what is written down a panel's depth is in different banks."""
    a, b = torch.randn(128, 64), torch.randn(128, 64).mT
    emulated_matmul(emulator, a, b)
    assert_no_conflicts(emulator.accesses["shared"].stores)


def test_matmul_by_panels(counting_emulator: Emulator) -> None:
    check_panels(counting_emulator)
    a, b = torch.randn(256, 64), torch.randn(64, 128)
    c = emulated_matmul(counting_emulator, a, b)
    counted = counting_emulator.accesses
    for count in (counted["a"].loads, counted["b"].loads, counted["c"].stores):
        assert_vectors(count)
    assert counted["a"].loads.bytes == size_of(a)
    assert counted["b"].loads.bytes == 2 * size_of(b)  # for two tiles of rows
    assert counted["c"].stores.bytes == size_of(c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_matmul_by_large_tiles(
    counting_emulator: Emulator, dtype: torch.dtype, transposed: bool
) -> None:
    """cuda/gemm/copied_panel.cuh and large_product.cuh: rows are copied by elements."""
    a, b = torch.randn(256, 64, dtype=dtype), torch.randn(64, 128, dtype=dtype)
    if transposed:
        a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    c = emulated_matmul(counting_emulator, a, b, tiles="large")
    counted, size = counting_emulator.counters, a.element_size()
    row_tiles = 256 // (256 if dtype == torch.float32 else 128)
    copied = (a.numel(), row_tiles * b.numel())  # b once for each tile of rows
    elements, vectors = reversed(copied) if transposed else copied
    instructions = elements // 32, vectors * size // VECTORS
    assert counted.copies == sum(instructions)
    # No two lanes in one bank: 128 bytes a cycle.
    assert counted.copy_cycles == instructions[0] * size // 4 + instructions[1] * 4
    assert counted.copied_bytes == sum(copied) * size == counted.copied_sectors * SECTOR
    shared = counting_emulator.accesses["shared"].loads
    assert_no_conflicts(shared)
    # Of each step a thread of 16 x 8 sums loads 24 numbers by fours; of eight steps one of 64 sums
    # loads 24 numbers of float64.
    sums, loads = (16 * 8, 6) if dtype == torch.float32 else (64, 3)
    assert shared.requests == c.numel() // sums * 64 * loads // 32
    stores = counting_emulator.accesses["c"].stores
    (assert_vectors if dtype == torch.float32 else assert_whole_sectors)(stores)
    assert stores.bytes == size_of(c)


def check_few_rows_of_products(emulator: Emulator) -> None:
    """cuda/gemm/few_rows.cuh: the weight once; rows as vectors; nothing meets in the banks."""
    for layout, shifts in (("along_depth", (0, 3)), ("along_columns", (3,))):
        for shift in shifts:
            a = torch.randn(4, 1024).bfloat16()
            b = weight_of(1024, 64, dtype=a.dtype, layout=layout, spare=2)
            few_rows(emulator, a, b, layout, shift)
            counted, counters = emulator.accesses, emulator.counters
            assert counters.copied_bytes == size_of(b)
            assert counters.copied_sectors * SECTOR == size_of(b)
            assert counters.copy_cycles == 4 * counters.copies
            assert_no_conflicts(counted["shared"].loads)
            assert_no_conflicts(counted["shared"].stores)
            if layout == "along_depth":
                assert_vectors(counted["a"].loads)
                assert counted["a"].loads.bytes == 64 // 4 * size_of(a)


def test_few_rows_of_products(counting_emulator: Emulator) -> None:
    check_few_rows_of_products(counting_emulator)


@pytest.mark.parametrize(
    ("dtype", "head"), [(torch.bfloat16, 128), (torch.float32, 64), (torch.float32, 128)]
)
def test_attention(counting_emulator: Emulator, dtype: torch.dtype, head: int) -> None:
    """Outputs and gradients are written once, as the results of a product are."""
    call = make_attention(2, rows=128, columns=192, head=head, dtype=dtype)
    stores = {}

    class Recorder(Emulator):
        def run(self, kernel: str, *others: object, **arguments: object) -> None:
            super().run(kernel, *others, **arguments)  # type: ignore[arg-type]
            stores.update({name: each.stores for name, each in self.accesses.items()})

    recorder = Recorder(counting_emulator.program, counting=True)
    outputs = emulated_forward(recorder, call)
    assert_vectors(stores["output"])
    if dtype == torch.bfloat16:
        assert_vectors(stores["output_residual"])
        # By panels a thread's rows lie apart: each is a sector, of an output of sixteen or more.
        assert_whole_sectors(stores["log_sum_exp"])
    assert stores["output"].bytes == size_of(call.query)
    emulated_backward(recorder, call, outputs)
    for name, like in (
        ("grad_query", call.query),
        ("grad_key", call.key),
        ("grad_value", call.value),
    ):
        assert_vectors(stores[name])
        assert stores[name].bytes == size_of(like)


def check_copied_attention(emulator: Emulator) -> None:
    """cuda/attention/forward_copied.cuh: queries once, keys and values for each 128 of them.

    Keys and queries by elements, on the way turned around, values by vectors.
    """
    for head, threads in ((64, 128), (128, 256)):
        call = make_attention(2, rows=256, columns=256, head=head, dtype=torch.float32)
        output, _, _ = emulated_forward(emulator, call, copied_panels=True, shared_bytes=163 * 1024)
        counted, counters = emulator.accesses, emulator.counters
        row_tiles = 256 // 128
        elements = call.query.numel() + row_tiles * call.key.numel()
        vectors = row_tiles * call.value.numel()
        assert counters.copied_bytes == 4 * (elements + vectors)
        assert counters.copied_sectors * SECTOR == counters.copied_bytes
        assert counters.copies == elements // 32 + vectors // 128
        # No two lanes in one bank: 128 bytes a cycle.
        assert counters.copy_cycles == elements // 32 + vectors // 32
        assert_no_conflicts(counted["shared"].loads)
        assert_no_conflicts(counted["shared"].stores)
        # Of each step a thread of 8 x 8 sums loads 16 numbers by fours, and of each tile of keys
        # the maximum and the sum of eight rows, as at the end.
        warps, key_tiles = 2 * row_tiles * threads // 32, 256 // head
        loads = key_tiles * (2 * head * 4 + 16) + 16
        assert counted["shared"].loads.requests == warps * loads
        # Sixteen vectors of weights, and those numbers, as at the beginning.
        assert counted["shared"].stores.requests == warps * (key_tiles * (16 + 16) + 16)
        assert_vectors(counted["output"].stores)
        assert counted["output"].stores.bytes == size_of(output)


def test_attention_by_copied_panels(counting_emulator: Emulator) -> None:
    check_copied_attention(counting_emulator)


@pytest.mark.parametrize("head", [64, 128])
def test_gradients_by_copied_panels(counting_emulator: Emulator, head: int) -> None:
    """cuda/attention/joint_gradients_copied.cuh: what is copied how often; no conflicts."""
    call = make_attention(2, rows=256, columns=256, head=head, dtype=torch.float32)
    outputs = emulated_forward(counting_emulator, call)
    emulated_backward(
        counting_emulator, call, outputs, 3, 227 * 1024, joint=True, copied_panels=True
    )
    counted, counters = counting_emulator.accesses, counting_emulator.counters
    size, tiles = call.query.numel(), 256 // 64
    # Turned around are keys and values once, queries and gradients once for each 64 keys; as they
    # lie the latter too, and keys for each 64 queries.
    elements, vectors = size * (2 + 2 * tiles), size * 3 * tiles
    assert counters.copied_bytes == 4 * (elements + vectors)
    assert counters.copied_sectors * SECTOR == counters.copied_bytes
    assert counters.copies == elements // 32 + vectors // 128
    assert counters.copy_cycles == elements // 32 + vectors // 32
    assert_no_conflicts(counted["shared"].loads)
    assert_no_conflicts(counted["shared"].stores)
    for name in ("grad_query", "grad_key", "grad_value"):
        assert_vectors(counted[name].stores)
        assert counted[name].stores.bytes == 4 * size


def check_decoding(emulator: Emulator) -> None:
    """cuda/attention/decode_mma.cuh: rows of the combined outputs begin in other banks."""
    options = {"sizes": (128, 128), "page_size": 16, "dtype": torch.bfloat16}
    emulated_decoding(emulator, make_decoding((200, 64), (4, 2), 2, **options), 1)
    assert_no_conflicts(emulator.accesses["shared"].loads)
    assert_no_conflicts(emulator.accesses["shared"].stores)
    assert_whole_sectors(emulator.accesses["output"].stores)


def test_decoding(counting_emulator: Emulator) -> None:
    check_decoding(counting_emulator)


def check_decoding_by_panels(emulator: Emulator) -> None:
    """cuda/attention/decode_panels.cuh: 16 bytes a lane, of the keys and values that there are.

    In float32; once for each tile of columns and of rows.
    """
    options = {"sizes": (128, 128), "page_size": 16, "dtype": torch.float32}
    emulated_decoding(emulator, make_decoding((200, 64), (4, 2), 2, **options), 1)
    counted = emulator.accesses
    assert_no_conflicts(counted["shared"].loads)
    assert_no_conflicts(counted["shared"].stores)
    of_a_cache = (200 + 64) * 2 * 128 * 4
    for name in ("key", "value"):
        assert_vectors(counted[name].loads)
        assert counted[name].loads.bytes == of_a_cache
    assert_whole_sectors(counted["output"].stores)


def test_decoding_by_panels(counting_emulator: Emulator) -> None:
    check_decoding_by_panels(counting_emulator)


def check_quantising(emulator: Emulator) -> None:
    """cuda/int4/quantize_rowwise.cuh: reads sixteen bytes at a time, twice, writes as many once."""
    input = torch.randn(6, 512).bfloat16()
    for bits in (8, 4):
        values, _ = emulated_quantized(emulator, input, bits)
        loads, stores = emulator.accesses["input"].loads, emulator.accesses["values"].stores
        assert_vectors(loads)
        assert loads.bytes == 2 * size_of(input)
        assert_whole_sectors(stores)
        assert stores.bytes == size_of(values)
        assert stores.requests == loads.requests // 2  # for each packet read the second time


def test_quantising(counting_emulator: Emulator) -> None:
    check_quantising(counting_emulator)


def check_quantising_held_rows(emulator: Emulator) -> None:
    """cuda/int4/quantize_held_rows.cuh: reads sixteen bytes at a time, and all of it once."""
    for columns in (512, 4096, 14336):
        input = torch.randn(6, columns).bfloat16()
        for bits in (8, 4):
            values, _ = emulated_quantized(emulator, input, bits, held=True)
            loads, stores = emulator.accesses["input"].loads, emulator.accesses["values"].stores
            assert_vectors(loads)
            assert loads.bytes == size_of(input)
            assert_whole_sectors(stores)
            assert stores.bytes == size_of(values)
            assert stores.requests == loads.requests


def test_quantising_held_rows(counting_emulator: Emulator) -> None:
    check_quantising_held_rows(counting_emulator)


def check_few_rows(emulator: Emulator) -> None:
    """cuda/int4/rowwise_few_rows.cuh: the weight once; sums of two rows in different banks."""
    sample = call((16,), 512, 128, False).converted(torch.bfloat16)
    emulated_rowwise(emulator, "s8s4", *sample.args, way="few_rows")
    counted = emulator.accesses
    assert_vectors(counted["weight"].loads)
    assert counted["weight"].loads.bytes == size_of(sample.args[2])
    assert_no_conflicts(counted["shared"].loads)
    assert_no_conflicts(counted["shared"].stores)
    assert_whole_sectors(counted["output"].stores)


def test_few_rows_of_four_bits(counting_emulator: Emulator) -> None:
    check_few_rows(counting_emulator)


def test_tiles_of_four_bits(counting_emulator: Emulator) -> None:
    """cuda/int4/rowwise_slice.cuh: what a warp reads lies in different banks."""
    sample = call((128,), 512, 128, False).converted(torch.bfloat16)
    output = emulated_rowwise(counting_emulator, "s8s4", *sample.args, way="tiles")
    counted = counting_emulator.accesses
    assert_no_conflicts(counted["shared"].loads)
    assert_no_conflicts(counted["shared"].stores)
    assert_vectors(counted["output"].stores)
    assert counted["output"].stores.bytes == size_of(output)


@pytest.mark.parametrize("tile_rows", [128, 256])
@pytest.mark.parametrize("kind", ["s8s4", "s4s4"])
def test_tiles_of_four_bits_by_warpgroups(
    counting_emulator: Emulator, kind: str, tile_rows: int
) -> None:
    """cuda/int4/rowwise_warpgroups.cuh: the weight once for a tile, and whole sectors stored."""
    for out_dtype in (torch.bfloat16, torch.float32):
        sample = call((256,), 512, 128, kind == "s4s4", out_dtype=out_dtype)
        sample = sample.converted(torch.bfloat16)
        output = emulated_rowwise(counting_emulator, kind, *sample.args, tile_rows=tile_rows)
        counted = counting_emulator.accesses
        assert_vectors(counted["weight"].loads)
        assert counted["weight"].loads.bytes == 256 // tile_rows * size_of(sample.args[2])
        assert_whole_sectors(counted["output"].stores)
        assert counted["output"].stores.bytes == size_of(output)
        if out_dtype == torch.bfloat16:
            assert_vectors(counted["output"].stores)


@pytest.mark.parametrize("group_size", [32, 128])
def test_int4_linear_by_warpgroups(counting_emulator: Emulator, group_size: int) -> None:
    """cuda/int4/int4_linear_warpgroups.cuh: the weight once for a tile, as it lies."""
    weight = (words(256, 512, 8), scales_and_zeros(256, 512, group_size), group_size, 8)
    input = torch.randn(256, 512).bfloat16()
    output = emulated_int4_linear(counting_emulator, input, *weight, by_warpgroups=True)
    counted = counting_emulator.accesses
    assert_vectors(counted["words"].loads)
    assert counted["words"].loads.bytes == 2 * size_of(weight[0])
    assert_vectors(counted["output"].stores)
    assert counted["output"].stores.bytes == size_of(output)


def test_int4_linear(counting_emulator: Emulator) -> None:
    """cuda/int4/int4_linear_mma.cuh: teams write and read neighbouring vectors; the weight once.

    Of up to 16 rows eight lanes write neighbours of a row, half of a sector.
    """
    for group_size in (32, 128):
        for rows in (3, 16):
            packed = words(256, 1024, 8)
            weight = (packed, scales_and_zeros(256, 1024, group_size), group_size, 8)
            input = torch.randn(rows, 1024).bfloat16()
            output = emulated_int4_linear(counting_emulator, input, *weight, None, 1)
            counted, counters = counting_emulator.accesses, counting_emulator.counters
            assert_no_conflicts(counted["shared"].loads)
            assert_vectors_of_shared(counted["shared"].stores)
            stores = counted["output"].stores
            assert stores.bytes == size_of(output)
            assert stores.transactions * SECTOR == 2 * stores.bytes
            copied = size_of(packed) + size_of(weight[1]) + 2 * size_of(input)  # two tiles
            assert counters.copied_bytes == copied == counters.copied_sectors * SECTOR


def assert_vectors_of_shared(count: AccessCount) -> None:
    """Sixteen bytes a lane, without conflicts."""
    assert_no_conflicts(count)
    assert count.bytes == VECTORS * count.requests
    assert count.least == 4 * count.requests


def check_correlation(emulator: Emulator) -> None:
    """cuda/correlation/forward.cuh: 5 vectors for 72 products, without conflicts; whole sectors."""
    images = integers(1, 64, 8, 32).float(), integers(1, 64, 8, 32).float()
    output = emulated_correlation(emulator, *images, 1, 9, 1, 0, 1, 1)
    loads, stores = emulator.accesses["shared"].loads, emulator.accesses["output"].stores
    assert_no_conflicts(loads)
    assert loads.least == 4 * loads.requests  # vectors
    # Of 9 rows of shifts and 2 rows of positions 8 warps compute both, and two one of them.
    assert loads.requests == 64 * (8 * 5 + 2 * 4)
    assert_vectors(stores)
    assert stores.bytes == size_of(output)


def test_correlation(counting_emulator: Emulator) -> None:
    check_correlation(counting_emulator)


def test_correlation_by_tensor_cores(counting_emulator: Emulator) -> None:
    """cuda/correlation/forward_mma.cuh: octets, sums and rows of totals lie in different banks."""
    images = integers(1, 64, 8, 32).bfloat16(), integers(1, 64, 8, 32).bfloat16()
    emulated_correlation(counting_emulator, *images, 1, 9, 1, 0, 1, 1)
    assert_no_conflicts(counting_emulator.accesses["shared"].loads)
    assert_no_conflicts(counting_emulator.accesses["shared"].stores)


def check_gradient_of_correlation(emulator: Emulator) -> None:
    """cuda/correlation/gradient.cuh: 42 vectors for 576 products, without conflicts."""
    other = integers(1, 64, 8, 32).float()
    grad = integers(1, 9, 9, 8, 32).float()
    result = emulated_gradient(emulator, grad, other, False, 1, 9, 1, 0, 1, 1)
    counted = emulator.accesses
    assert_no_conflicts(counted["shared"].loads)
    assert_no_conflicts(counted["shared"].stores)
    assert counted["shared"].loads.least == 4 * counted["shared"].loads.requests
    # Of the four pairs of rows, with the rows of the other image at 9 shifts: 24 times both of a
    # pair meet one that exists, 4 times one does; by two warps, of 32 channels each.
    assert counted["shared"].loads.requests == 2 * (24 * 42 + 4 * 33)
    assert_vectors(counted["output"].stores)
    assert counted["output"].stores.bytes == size_of(result)


def test_gradient_of_correlation(counting_emulator: Emulator) -> None:
    check_gradient_of_correlation(counting_emulator)


def check_dense(emulator: Emulator) -> None:
    """cuda/pointwise/pointwise.cuh: a thread moves 16 bytes of each tensor, once."""
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(4096).to(dtype), torch.randn(4096).to(dtype)
        emulated_dense(emulator, "mul", a, b)
        counted = emulator.accesses
        for count in (counted["a"].loads, counted["b"].loads, counted["output"].stores):
            assert_vectors(count)
            assert count.bytes == size_of(a)


def test_pointwise(counting_emulator: Emulator) -> None:
    check_dense(counting_emulator)


def test_pointwise_of_strides(counting_emulator: Emulator) -> None:
    """Neighbouring threads have neighbouring elements of the output, in its order."""
    a, b = torch.randn(64, 128), torch.randn(128)
    emulated_strided(counting_emulator, "mul", torch.zeros(64, 128), a, b)
    counted = counting_emulator.accesses
    for count in (counted["a"].loads, counted["b"].loads, counted["output"].stores):
        assert_whole_sectors(count)
        assert count.bytes == size_of(a)  # of b too, for each row


def test_lltm(counting_emulator: Emulator) -> None:
    """cuda/lltm/step.cuh: B 3H (H + F) (1 / (3 units) + 1 / rows) elements, of 32 rows or more.

    What it stores are sixteen bytes a lane.
    """
    sample = Sample(lltm_arguments((8, 128, 128))).converted(torch.float32)
    emulated_step(counting_emulator, sample, 3, 0)
    counted = counting_emulator.accesses
    weights = sample.args[1]
    assert_whole_sectors(counted["weights"].loads)
    assert counted["weights"].loads.bytes == size_of(weights)
    assert_no_conflicts(counted["shared"].stores)
    for name in ("gates", "new_h", "new_cell"):
        assert_vectors(counted[name].stores)
        assert counted[name].stores.bytes == (3 if name == "gates" else 1) * 8 * 128 * 4


def test_what_is_written_one_by_one_is_seen(counting_emulator: Emulator) -> None:
    """An output of an odd number of columns has rows that no vector begins."""
    c = emulated_matmul(
        counting_emulator, torch.randn(128, 8).bfloat16(), torch.randn(8, 127).bfloat16()
    )
    stores = counting_emulator.accesses["c"].stores
    assert stores.bytes == size_of(c)
    assert stores.transactions * SECTOR > 2 * stores.bytes
