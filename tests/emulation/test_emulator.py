"""The emulator accepts what is right and reports each kind of fault, also in the real kernels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import emulator
import pytest
import torch
from emulator import HERE, ROOT, SANITIZE, SANITIZE_ADDRESSES, EmulationError, Emulator
from quantised_samples import scales_and_zeros, words
from rowwise_scaled_samples import call
from test_emulated_attention import check as check_attention
from test_emulated_attention import emulated_backward, emulated_forward
from test_emulated_attention import make as make_attention
from test_emulated_attention_backward_warpgroups import check as check_gradients
from test_emulated_attention_copied import check as check_copied_attention
from test_emulated_attention_copied_gradients import check as check_copied_gradients
from test_emulated_attention_joint_gradients import check as check_joint_gradients
from test_emulated_attention_joint_warpgroups import check as check_joint_warpgroups
from test_emulated_attention_varlen_warpgroups import check_apart, check_counts
from test_emulated_attention_varlen_warpgroups import make as make_packed
from test_emulated_attention_warpgroups import check as check_attention_warpgroups
from test_emulated_counters import check_accesses
from test_emulated_decode_attention import check as check_decoding
from test_emulated_decode_attention import make as make_decoding
from test_emulated_few_rows import few_rows, weight_of
from test_emulated_int4_linear import assert_right as assert_int4_linear
from test_emulated_int4_linear import emulated as emulated_int4_linear
from test_emulated_lltm import arguments as lltm_arguments
from test_emulated_lltm import assert_step, emulated_step
from test_emulated_matmul import assert_product, emulated_matmul
from test_emulated_pointwise import agree, emulated_dense
from test_emulated_rowwise_scaled_linear import assert_right as assert_rowwise
from test_emulated_rowwise_scaled_linear import emulated as emulated_rowwise
from test_emulated_six_products import check as check_six_products
from test_emulated_six_products import six_products
from test_emulated_spatial_correlation_sample import check as check_correlation
from test_emulated_spatial_correlation_sample import integers
from test_emulated_tf32 import assert_product as assert_tf32_product
from test_emulated_tf32 import product as multiply_in_tf32
from test_emulated_warpgroups import bulk
from test_emulated_warpgroups import check as check_warpgroups

from pkg.testing import Sample

RIGHT = [
    "block sum",
    "warp barrier",
    "shuffles",
    "atomics",
    "dynamic shared",
    "several dimensions",
    "launch bounds",
    "static and dynamic shared",
    "static and dynamic shared that the host asked for",
    "all shared memory",
    "global store",
    "asynchronous copy",
    "groups of copies",
    "matrices",
    "transposed matrices",
    "rounding to TF32",
    "blocks side by side",
    "blocks in turn",
    "numbers in turn",
    "pipeline",
    "pipeline of columns",
    "pipeline of rows",
    "pipeline of both",
    "operands of threads",
    "operand in registers",
]
REPORTS = {
    "missing barrier after the store": "race on shared sums|nobody has written",
    "missing barrier in the loop": "race on shared sums",
    "missing warp barrier": "race on shared values|nobody has written",
    "warp barrier across warps": "race on shared values|nobody has written",
    "read of unwritten shared memory": "thread 5 reads shared values, element 5, which nobody",
    "shared index beyond a row": "uses index 8 of shared tile in a dimension of 8",
    "negative shared index": "uses index -1 of shared tile in a dimension of 4",
    "dynamic index beyond the end": "uses index 64 of shared values in a dimension of 64",
    "divergent barrier": "divergent barrier",
    "exit before a barrier": "thread 17 has returned, but thread 0 waits in the barrier",
    "lane missing from a shuffle": "waits for lanes of its warp",
    "lane outside the mask": "shuffles from lane 20, which is not in the mask",
    "global store beyond the end": "heap-buffer-overflow",
    "copy that nobody waits for": "thread 0 returns and has not waited for its asynchronous copies",
    "copy read before the wait": "where an asynchronous copy of thread .* has not arrived",
    "copy of another lane without a barrier": "has not arrived|race on shared memory|nobody has",
    "copy from a misaligned place": "which is not aligned",
    "copy of a later group": "reads shared memory, element 4, where an asynchronous copy",
    "block beyond the launch bounds": "block of 64 threads of a kernel whose launch bounds are 63",
    "static and dynamic shared that nobody asked for": "1024 .* and 49152 .*; 49152 together",
    "static and dynamic shared of no device": "1024 .* and 232448 .*; 232448 together",
    "more shared memory than the device has": "101392 .*; the launch has 101376",
    "block of too many threads": "a block of 2048 threads; from 1 to 1024 are possible",
    "block of no threads": "a block of 0 threads",
    "grid of no blocks": "a grid of 0 x 1 x 1 blocks",
    "grid of too many blocks": "a grid of 2147483648 x 1 x 1 blocks",
    "grid that is too high": "a grid of 1 x 65536 x 1 blocks; from 1 to 2147483647 x 65535 x 65535",
    "output of two blocks": "byte .* of output is written by this block and by block",
    "mbarriers not published": "which was made and not published",
    "no barrier after mbarriers": "without a barrier of the block|which nobody has made",
    "no wait for copies": "a product reads shared memory, .* which nobody|where a copy is on|race",
    "no wait for space": "which a product of warpgroup 0 reads|race on|have arrived|not arrived",
    "stage released early": "a product of warpgroup 0 (reads that nobody has|has read, and does)",
    "stage released by one warp": "does not know of each of its warps that it has waited",
    "arrived too often": "where all 1 of the phase have arrived|deadlock: ",
    "bytes not expected": "which did not expect as many|where a copy is on its way",
    "bytes never copied": r"deadlock: .* mbarrier full\[0\], in which 0 arrivals and 8192 bytes",
    "wrong parity": r"deadlock: .* in which [14] arrivals and 0 bytes are missing",
    "registers not ordered": "adds to registers at .* without having ordered",
    "sums touched early": "has changed sums that products are on their way to",
    "products nobody waits for": "that nobody has waited for|has not waited for its warpgroup's",
    "box nobody waits for": "all threads have returned, and a copy to shared memory is on its way",
    "box misaligned": "copies a box to byte 128, which is not aligned",
    "operand misaligned": "an operand of warpgroup 0 begins at byte 128, which is not aligned",
    "warps disagree": "threads of warpgroup 0 multiply different operands",
    "half a warpgroup": "waits for its warpgroup at|in which .* are missing",
    "operands that are not published": "has written and not published to products",
    "numbers that are not published": "a bulk copy reads .* written and not published to products",
    "numbers overwritten before they are read": "bulk copy of thread 0 reads that nobody has",
    "turn passed on before numbers arrive": "race in global memory: thread 0 writes",
    "numbers not in their turn": "race in global memory|numbers that no block has written",
    "numbers not ordered after the turn": "race in global memory: thread 0 writes",
    "misaligned numbers": "copies 1024 bytes between byte 4 of shared memory and .* not aligned",
    "numbers that are not committed": "bulk copy of thread 0 reads that nobody|race in global",
    "blocks that count without atomics": "wrong result: count of blocks",
    "turn that is not waited for": "race in global memory|numbers that no block has written",
    "no barrier after the wait for a turn": "race in global memory|numbers that no block has",
    "no barrier before a turn is passed on": "race in global memory|numbers that no block has",
    "blocks that wait for later ones": "deadlock: thread 0 waits at .* for turn .*, it is turn 0",
    "misaligned row of a matrix": "accesses 8 neighbours of shared memory from element .* on",
}


@pytest.fixture(scope="module", params=["", "-DPKG_EMULATION_UCONTEXT"], ids=["fast", "portable"])
def faults(request: pytest.FixtureRequest) -> Path:
    """The program of small kernels, over both ways of switching fibers."""
    reason = emulator.missing_compiler()
    if reason is not None:
        pytest.skip(reason)
    extra = request.param.split()
    parts = ("bulk_copies", "faults", "pipelines")
    names = [*emulator.PLAIN, *(f"faults/{part}.cpp" for part in parts)]
    with emulator.building():
        objects = [emulator.compile_object(ROOT, ROOT / HERE / name, extra) for name in names]
        return emulator.link(objects)


def run_case(program: Path, name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, name],
        text=True,
        capture_output=True,
        env=os.environ | emulator.OPTIONS,
        check=False,
    )


@pytest.mark.parametrize("name", RIGHT)
def test_accepts(faults: Path, name: str) -> None:
    result = run_case(faults, f"right: {name}")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", REPORTS)
def test_reports(faults: Path, name: str) -> None:
    result = run_case(faults, name)
    assert result.returncode != 0
    assert re.search(REPORTS[name], result.stderr), result.stderr


def test_matrix_descriptor(faults: Path) -> None:
    """The fields of the "Matrix Descriptor Format" of wgmma, as the PTX ISA manual states them."""
    first, moved = (int(line, 16) for line in run_case(faults, "descriptor").stdout.split())
    for bits, address in ((first, 0x12340), (moved, 0x12340 + 2048)):
        assert bits & 0x3FFF == address >> 4  # bits 13-0: the start address, without 4 bits
        assert bits >> 16 & 0x3FFF == 8192 >> 4  # 29-16: the leading dimension's byte offset
        assert bits >> 32 & 0x3FFF == 1024 >> 4  # 45-32: the stride dimension's byte offset
        assert bits >> 49 & 0x7 == 0  # 51-49: the base offset, of a pattern that is aligned
        assert bits >> 62 == 1  # 63-62: the swizzle of 128 bytes


def manual_places(bits: int) -> dict[tuple[str, int, int], tuple[int, int]]:
    """The fragments of mma.m16n8kK as the PTX ISA manual states them, operand by operand.

    From "Matrix Fragments for mma.m16n8k16 with floating point type" (16 bits), "for
    mma.m16n8k32" (8 bits) and "for mma.m16n8k8", of .tf32 (32 bits): i counts a thread's elements
    of one operand.
    """
    places = {}
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        if bits == 16:
            for i in range(8):
                row = group if i < 2 or 4 <= i < 6 else group + 8
                column = thread * 2 + (i & 1) + (0 if i < 4 else 8)
                places["a", lane, i] = (row, column)
            for i in range(4):
                places["b", lane, i] = (thread * 2 + (i & 1) + (0 if i < 2 else 8), group)
        elif bits == 32:
            for i in range(4):
                row = group if i in (0, 2) else group + 8
                places["a", lane, i] = (row, thread if i in (0, 1) else thread + 4)
            for i in range(2):
                places["b", lane, i] = (thread if i == 0 else thread + 4, group)
        else:
            for i in range(16):
                row = group if i < 4 or 8 <= i < 12 else group + 8
                column = thread * 4 + (i & 3) + (0 if i < 8 else 16)
                places["a", lane, i] = (row, column)
            for i in range(8):
                places["b", lane, i] = (thread * 4 + (i & 3) + (0 if i < 4 else 16), group)
        for i in range(4):
            places["c", lane, i] = (group if i < 2 else group + 8, thread * 2 + (i & 1))
    return places


def manual_places_float64() -> dict[tuple[str, int, int], tuple[int, int]]:
    """From "Matrix Fragments for mma.m8n8k4 with .f64 floating point type"."""
    places = {}
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        places["a", lane, 0] = (group, thread)
        places["b", lane, 0] = (thread, group)
        for i in range(2):
            places["c", lane, i] = (group, thread * 2 + (i & 1))
    return places


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_operands_of_mma_lie_where_the_manual_says(faults: Path, bits: int) -> None:
    result = run_case(faults, f"places of {bits} bits")
    assert result.returncode == 0, result.stderr
    places = {}
    for line in result.stdout.splitlines():
        operand, *numbers = line.split()
        lane, index, row, column = map(int, numbers)
        places[operand, lane, index] = (row, column)
    assert places == (manual_places_float64() if bits == 64 else manual_places(bits))


def copy_with_change(folder: Path, source: str, right: str, wrong: str) -> None:
    """What emulated programs are compiled of, with one change in the text of a source."""
    for part in (HERE, Path("csrc")):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("*.py"))
    file = folder / "csrc" / source
    text = file.read_text()
    assert right in text
    file.write_text(text.replace(right, wrong, 1))


def plant(
    folder: Path,
    kernel: str,
    right: str,
    wrong: str,
    program_file: str,
    flags: Sequence[str],
    counting: bool = False,
) -> Emulator:
    """The program with one change in the text of a kernel's file.

    ``program_file`` runs it: the linker takes what that instantiates, not the same of others.
    """
    copy_with_change(folder, kernel, right, wrong)
    program = emulator.build_changed(folder, program_file, flags, counting)
    return Emulator(program, counting)


def run_matmul(planted: Emulator) -> None:
    a, b = torch.randn(130, 20), torch.randn(20, 131)
    assert_product(emulated_matmul(planted, a, b), a, b)


def run_few_rows(planted: Emulator) -> None:
    """Of weights that end where their memory ends, more turns than stages; several columns each."""
    for layout, shift, depth in (
        ("along_depth", 1, 9 * 128 + 4),
        ("along_columns", 3, 9 * 256 + 1),
    ):
        a = torch.randn(3, depth)
        b = weight_of(depth, 37, dtype=torch.float32, layout=layout)
        assert_product(few_rows(planted, a, b, layout, shift, blocks=1), a, b)


def run_warpgroup_matmul(planted: Emulator) -> None:
    """More panels than stages, by one block that takes two tiles; lines of both kinds."""
    for by_columns in (False, True):
        a, b = bulk(130, 7 * 64 + 5, by_columns=by_columns), bulk(7 * 64 + 5, 72)
        check_warpgroups(planted, a, b, 128, blocks=1)


def run_attention(planted: Emulator) -> None:
    check_attention(planted, make_attention(rows=65, columns=70, head=20))


def run_mask_gradient(planted: Emulator) -> None:
    mask = torch.randn(70)
    check_attention(planted, make_attention(rows=65, columns=70, head=20, mask=mask))


def run_pointwise(planted: Emulator) -> None:
    a, b = torch.randn(1027), torch.randn(1027)
    agree("mul", emulated_dense(planted, "mul", a, b), a, b)


def run_half_matmul(planted: Emulator) -> None:
    """Both ways that operands lie in shared memory, and more steps than stages."""
    a, b = torch.randn(130, 200).bfloat16(), torch.randn(200, 136).bfloat16()
    for first in (a, a.mT.contiguous().mT):
        assert_product(emulated_matmul(planted, first, b), first, b)
    assert_product(emulated_matmul(planted, a[:, :130], b[:130]), a[:, :130], b[:130])


def run_tf32_matmul(planted: Emulator) -> None:
    """Both ways that each operand lies in shared memory, and more slices than stages."""
    a, b = torch.randn(130, 100), torch.randn(100, 136)
    for first, second in ((a, b), (a.mT.contiguous().mT, b.mT.contiguous().mT)):
        assert_tf32_product(multiply_in_tf32(planted, first, second), first, second)


def run_half_gradients(planted: Emulator) -> None:
    """More turns than places; of the second head there is room for one place alone.

    Of the first a block has all tiles of keys, of which no query sees the last.
    """
    for head, blocks in ((20, 1), (128, 3)):
        options = {"rows": 135, "columns": 270, "head": head, "dropout": 0.2}
        options |= {"is_causal": blocks == 1, "key_lead": (1,), "enable_gqa": True}
        check_attention(planted, make_attention(3, dtype=torch.bfloat16, **options), blocks)


def run_gradients_by_warpgroups(planted: Emulator) -> None:
    """More tiles of queries than stages, two parts of each head, two owned tiles a block."""
    check_gradients(planted, make_attention(2, rows=330, columns=70, head=72, dtype=torch.float16))


def run_joint_gradients(planted: Emulator) -> None:
    """Three tiles of keys add to each of several tiles of queries, by one block and by three."""
    for blocks in (1, 3):
        call = make_attention(2, rows=200, columns=300, head=72, dtype=torch.bfloat16)
        check_joint_gradients(planted, call, blocks)


def run_joint_gradients_by_warpgroups(planted: Emulator) -> None:
    """Three tiles of keys add to each of several tiles of queries, pieces of both kinds."""
    for head, blocks in ((72, 3), (64, 1)):
        call = make_attention(1, rows=200, columns=300, head=head, dtype=torch.bfloat16)
        check_joint_warpgroups(planted, call, blocks)


def run_joint_causal_gradients_by_warpgroups(planted: Emulator) -> None:
    """Up to three tiles of keys add to each tile of the queries of two heads that share them."""
    options = {"is_causal": True, "key_lead": (1,), "enable_gqa": True}
    call = make_attention(2, rows=300, columns=300, head=64, dtype=torch.bfloat16, **options)
    check_joint_warpgroups(planted, call, 3)


def run_joint_gradients_by_panels(planted: Emulator) -> None:
    """Five tiles of keys add to each of several tiles of queries, by one block and by three."""
    for blocks in (1, 3):
        check_joint_gradients(planted, make_attention(2, rows=200, columns=300, head=40), blocks)


def run_joint_gradients_with_features(planted: Emulator) -> None:
    """Of three heads that share a key, each of which has its own mask, slope and dropout."""
    options = {"mask": torch.randn(3, 33, 140), "slopes": torch.rand(3), "dropout": 0.2}
    options |= {"rows": 33, "columns": 140, "key_lead": (1,), "enable_gqa": True}
    call = make_attention(3, head=24, dtype=torch.bfloat16, **options)
    check_joint_gradients(planted, call, 1)


def run_gradients_on_a_small_device(planted: Emulator) -> None:
    """Of heads for which other devices have room for two places of queries."""
    call = make_attention(1, rows=5, columns=9, head=128, dtype=torch.bfloat16)
    outputs = emulated_forward(planted, call)
    emulated_backward(planted, call, outputs, shared_bytes=99 * 1024)


def run_without_conflicts(planted: Emulator) -> None:
    emulated_matmul(planted, torch.randn(128, 64).bfloat16(), torch.randn(64, 128).bfloat16())
    check_accesses(planted.counters)


def run_half_decoding(planted: Emulator) -> None:
    """More turns of a warp than it has places."""
    options = {"sizes": (72, 64), "page_size": 16, "dtype": torch.bfloat16}
    check_decoding(planted, make_decoding((200, 3), (4, 2), 2, **options), 1)


def run_rowwise(planted: Emulator) -> None:
    """More slices than stages, and the kernel of few rows."""
    for way in ("tiles", "few_rows"):
        sample = call((9,), 5 * 128 + 32, 140, False).converted(torch.float32)
        assert_rowwise("s8s4", emulated_rowwise(planted, "s8s4", *sample.args, way=way), sample)


def run_int4_linear(planted: Emulator) -> None:
    """More turns than stages, one team and two, groups within a slice, several pieces a block."""
    weight = (words(136, 1056, 2), scales_and_zeros(136, 1056, 32), 32, 2)
    for rows in (3, 17, 33):
        input = torch.randn(rows, 1056).bfloat16()
        assert_int4_linear(emulated_int4_linear(planted, input, *weight, None, 1), input, *weight)


def run_attention_by_warpgroups(planted: Emulator) -> None:
    """More tiles of keys than stages, values of two parts, two tiles of queries a block."""
    call = make_attention(2, rows=70, columns=420, head=128, dtype=torch.bfloat16)
    check_attention_warpgroups(planted, call, 1)


def run_packed_attention_by_warpgroups(planted: Emulator) -> None:
    """Sequences that end within a tile, beside others full of NaN; tiles beyond a sequence."""
    check_apart(planted, make_packed((130, 40, 70), (70, 100, 30), sizes=(128, 128)))
    check_counts(planted)


def run_copied_attention(planted: Emulator) -> None:
    """More panels than stages, of both widths, an odd number too, and several tiles a block."""
    for head in (20, 72):
        check_copied_attention(planted, make_attention(2, rows=130, columns=150, head=head), 1)


def run_copied_gradients(planted: Emulator) -> None:
    """Of both widths, by one block and by three, whose tiles of keys add in turn."""
    for head, blocks in ((20, 1), (72, 3)):
        call = make_attention(2, rows=200, columns=150, head=head)
        check_copied_gradients(planted, call, blocks)


def run_lltm(planted: Emulator) -> None:
    """A step by tensor cores and one by panels, whole and divided, of h and of x."""
    for dtype in (torch.bfloat16, torch.float32):
        sample = Sample(lltm_arguments((5, 72, 136))).converted(dtype)
        for split_panels in (0, 2):
            assert_step(sample, *emulated_step(planted, sample, 3, split_panels))


def run_correlation(planted: Emulator) -> None:
    """Several turns of channels, in float32 and by tensor cores, and both gradients."""
    for dtype in (torch.float32, torch.bfloat16):
        images = integers(1, 70, 5, 18), integers(1, 70, 5, 18)
        check_correlation(planted, *images, 1, 3, 1, 0, 1, 1, dtype=dtype)


def run_int4_by_warpgroups(planted: Emulator) -> None:
    """More panels of activations than stages."""
    arguments = (words(16, 1280, 8), scales_and_zeros(16, 1280, 128), 128, 8)
    input = torch.randn(9, 1280).bfloat16()
    assert_int4_linear(
        emulated_int4_linear(planted, input, *arguments, by_warpgroups=True), input, *arguments
    )


def run_rowwise_by_warpgroups(planted: Emulator) -> None:
    """More slices than stages."""
    sample = call((9,), 1280, 16, False).converted(torch.float32)
    assert_rowwise("s8s4", emulated_rowwise(planted, "s8s4", *sample.args, tile_rows=128), sample)


def run_six_products(planted: Emulator) -> None:
    """Many panels, more tiles than blocks, one step, and a number that parts do not make."""
    check_six_products(planted, torch.randn(130, 1200), torch.randn(1200, 9), blocks=1)
    check_six_products(planted, torch.randn(50, 1), torch.randn(1, 9))
    a = torch.ones(3, 3)
    a[1, 2] = -torch.inf
    assert six_products(planted, a, torch.ones(3, 3))[1]


# What runs a kernel: the file of the program, the types that it is compiled for, and the calls.
# Those types alone: all of them would take three times as long.
HALF, BFLOAT16 = "cuda::float16", "cuda::bfloat16"
ATTENTION_GRADIENT_WARPGROUPS = ("run_attention_backward.cpp", HALF, run_gradients_by_warpgroups)
MATMUL = ("run_matmul.cpp", "float", run_matmul)
HALF_MATMUL = ("run_matmul.cpp", BFLOAT16, run_half_matmul)
TF32_MATMUL = ("run_matmul.cpp", "cuda::Tf32", run_tf32_matmul)
WARPGROUPS = (
    "run_matmul_warpgroups.cpp",
    BFLOAT16,
    run_warpgroup_matmul,
    "cuda/gemm/warpgroup_product.cuh",
)
SIX_PRODUCTS = (
    "run_matmul_warpgroups.cpp",
    BFLOAT16,
    run_six_products,
    "cuda/gemm/six_products.cuh",
)
ATTENTION = ("run_attention_forward.cpp", "float", run_attention)
COPIED_ATTENTION = ("run_attention_forward.cpp", "float", run_copied_attention)
COPIED_GRADIENTS = (
    "run_attention_backward.cpp",
    "float",
    run_copied_gradients,
    "cuda/attention/joint_gradients_copied.cuh",
)
POINTWISE = ("run_pointwise.cpp", "float", run_pointwise)
ATTENTION_WARPGROUPS = (
    "run_attention_forward.cpp",
    BFLOAT16,
    run_attention_by_warpgroups,
    "cuda/attention/forward_warpgroups.cuh",
)
PACKED_ATTENTION_WARPGROUPS = (
    "run_attention_forward.cpp",
    BFLOAT16,
    run_packed_attention_by_warpgroups,
)
MASK_GRADIENT = ("run_attention_backward.cpp", "float", run_mask_gradient)
HALF_GRADIENTS = ("run_attention_backward.cpp", BFLOAT16, run_half_gradients)
JOINT_GRADIENTS = (
    "run_attention_backward.cpp",
    BFLOAT16,
    run_joint_gradients,
    "cuda/attention/joint_gradients_mma.cuh",
)
JOINT_WARPGROUPS = (
    "run_attention_backward.cpp",
    BFLOAT16,
    run_joint_gradients_by_warpgroups,
    "cuda/attention/joint_gradients_warpgroups.cuh",
)
JOINT_CAUSAL_WARPGROUPS = (
    "run_attention_backward.cpp",
    BFLOAT16,
    run_joint_causal_gradients_by_warpgroups,
    "cuda/attention/joint_gradients_warpgroups.cuh",
)
JOINT_GRADIENTS_WITH_FEATURES = (
    "run_attention_backward.cpp",
    BFLOAT16,
    run_joint_gradients_with_features,
)
JOINT_GRADIENTS_BY_PANELS = (
    "run_attention_backward.cpp",
    "float",
    run_joint_gradients_by_panels,
    "cuda/attention/joint_gradients_panels.cuh",
)
HALF_DECODING = ("run_decode_attention.cpp", BFLOAT16, run_half_decoding)
ROWWISE = ("run_rowwise_scaled_linear.cpp", "float", run_rowwise)
FEW_ROWS = ("run_matmul_few_rows.cpp", "float", run_few_rows, "cuda/gemm/few_rows.cuh")
LLTM = ("run_lltm.cpp", f"float,{BFLOAT16}", run_lltm)
CORRELATION = ("run_spatial_correlation_sample.cpp", f"float,{BFLOAT16}", run_correlation)
INT4_LINEAR = ("run_int4_linear.cpp", BFLOAT16, run_int4_linear, "cuda/int4/int4_linear_mma.cuh")
INT4_LINEAR_WARPGROUPS = (
    "run_int4_linear.cpp",
    BFLOAT16,
    run_int4_by_warpgroups,
    "cuda/int4/int4_linear_warpgroups.cuh",
)
ROWWISE_WARPGROUPS = (
    "run_rowwise_scaled_linear.cpp",
    "float",
    run_rowwise_by_warpgroups,
    "cuda/int4/rowwise_warpgroups.cuh",
)
MISALIGNED = "misaligned address"
BARRIER_OF_LOOP = """    __syncthreads();
    current = 1 - current;"""
STAGES = "cuda/gemm/stages.cuh"
BARRIER_OF_STAGES = "      __syncthreads();\n    }"
PLANTED = {
    "missing barrier in the loop over panels": (
        *MATMUL,
        "cuda/gemm/tile_product.cuh",
        BARRIER_OF_LOOP,
        BARRIER_OF_LOOP.split("\n")[1],
        "race on shared|nobody has written",
    ),
    "missing barrier before the first panel": (
        *MATMUL,
        "cuda/gemm/tile_product.cuh",
        "  __syncthreads();\n  int current",
        "  int current",
        "race on shared|nobody has written",
    ),
    "wrong index of a stored column": (
        *MATMUL,
        "cuda/gemm/tile.cuh",
        "column_begin + thread.column(j)",
        "column_begin + thread.column(j ^ 4)",
        "assert",
    ),
    "wrong index in a panel": (
        *MATMUL,
        "cuda/gemm/panel.cuh",
        "panel[depth_index + j][outer_index]",
        "panel[depth_index + j][outer_index + j]",
        "race on shared|nobody has written",
    ),
    "store below the last row": (
        *MATMUL,
        "cuda/gemm/tile.cuh",
        "if (row >= row_count)",
        "if (row > row_count)",
        "heap-buffer-overflow.*WRITE",
    ),
    "load beyond the last step": (
        *MATMUL,
        "cuda/gemm/panel.cuh",
        "j < valid",
        "j <= valid",
        "heap-buffer-overflow.*READ",
    ),
    "missing barrier before warps' sums of few rows are added": (
        *FEW_ROWS,
        "    __syncthreads();\n    const FewRowsThread thread;",
        "    const FewRowsThread thread;",
        "race on shared|nobody has written",
    ),
    "missing barrier before the next sums of few rows": (
        *FEW_ROWS,
        "    __syncthreads();  // all are done with the sums\n",
        "",
        "race on shared|nobody has written",
    ),
    "wait for a turn of few rows too few": (
        *FEW_ROWS,
        "wait_for_copies<kFewRowsStages - 2>()",
        "wait_for_copies<kFewRowsStages - 1>()",
        "has not arrived",
    ),
    "turn of few rows in the stage that comes next": (
        *FEW_ROWS,
        "weight.copy(stage == 0 ? kFewRowsStages - 1 : stage - 1);",
        "weight.copy(stage);",
        "has not arrived|assert",
    ),
    "steps beyond the depth of few rows": (
        *FEW_ROWS,
        "exists ? most : 0",
        "exists || left_ < 1 ? most : 0",
        "heap-buffer-overflow.*READ",
    ),
    "row beyond the last of few rows": (
        *FEW_ROWS,
        "row += r + 1 < rows ? row_stride : 0;",
        "row += row_stride;",
        "heap-buffer-overflow.*READ",
    ),
    "sums of few rows by a lane too many": (
        *FEW_ROWS,
        "(threadIdx.x & kDistance) != 0",
        "(threadIdx.x & kDistance) == 0",
        "assert",
    ),
    "missing barrier between a stage's copies and its products": (
        *HALF_MATMUL,
        STAGES,
        BARRIER_OF_STAGES,
        "    }",
        "has not arrived|race on shared|nobody has written",
    ),
    "wait for a stage too few": (
        *HALF_MATMUL,
        STAGES,
        "wait_for_copies<kStages - 2>()",
        "wait_for_copies<kStages - 1>()",
        "has not arrived",
    ),
    "stage that is still multiplied": (
        *HALF_MATMUL,
        STAGES,
        "load(ahead, stage);",
        "load(ahead, (stage + 1) % kStages);",
        "has not arrived|race on shared|nobody has written",
    ),
    "exchanged words of an operand": (
        *HALF_MATMUL,
        "cuda/gemm/operand_tile.cuh",
        "warp_outer + 8 * (outer_first ? low : high)",
        "warp_outer + 8 * (outer_first ? high : low)",
        "assert",
    ),
    "swizzle of another line": (
        *HALF_MATMUL,
        "cuda/gemm/operand_tile.cuh",
        "(lane_index_ ^ step * kStep)",
        "(lane_index_ + step * kStep)",
        "assert|uses index|nobody has written",
    ),
    "operand that is not rounded to TF32": (
        *TF32_MATMUL,
        "cuda/gemm/mma_product.cuh",
        "    round_operand<Element>(b[part % 2]);\n",
        "",
        "assert",
    ),
    "exchanged words of an operand by steps": (
        *TF32_MATMUL,
        "cuda/gemm/operand_tile.cuh",
        "8 * (outer_first_ ? word % 2 : word / 2)",
        "8 * (outer_first_ ? word / 2 : word % 2)",
        "assert|uses index|nobody has written",
    ),
    "order of lines that their words are not loaded by": (
        *TF32_MATMUL,
        "cuda/device/shared.cuh",
        "line % 4 * 2 + line / 4 % 2",
        "line % 8",
        "assert|uses index|nobody has written",
    ),
    "lines of which each begins in the same banks": (
        "run_matmul.cpp",
        BFLOAT16,
        run_without_conflicts,
        "cuda/device/shared.cuh",
        ": line % 8;",
        ": 0;",
        "assert",
    ),
    "copy beyond the last step": (
        *HALF_MATMUL,
        "cuda/gemm/operand_tile.cuh",
        "const int left = slice.width - place;",
        "const int left = kVector;",
        "heap-buffer-overflow.*READ|assert",
    ),
    "stage released before its products are waited for": (
        *WARPGROUPS,
        "      wait_for_products<1>();\n",
        "",
        "a product of warpgroup . (reads that nobody has|has read, and does)",
    ),
    "products of a stage whose copies nobody waits for": (
        *WARPGROUPS,
        "    full_.wait(stage, turn.parity);\n",
        "",
        "a product reads shared memory, .* which nobody|where a copy is on|race",
    ),
    "panel added up before its products are waited for": (
        *SIX_PRODUCTS,
        "      wait_for_products<0>();\n      release(large);\n",
        "      release(large);\n",
        "a product of warpgroup",
    ),
    "products of a panel added to those before": (
        *SIX_PRODUCTS,
        "      begin(products, large, small, false);",
        "      begin(products, large, small, true);",
        "assert",
    ),
    "one of the six products for another": (
        *SIX_PRODUCTS,
        "      begin(products, middle, middle);",
        "      begin(products, middle, small);",
        "assert",
    ),
    "rest of a number that nobody tells": (
        *SIX_PRODUCTS[:3],
        "cuda/gemm/bfloat16_parts.cuh",
        "    is_inexact |= !(rest[i] == 0.0F);",
        "    is_inexact |= rest[i] > 0.0F;",
        "assert",
    ),
    "step of an operand too short": (
        *WARPGROUPS,
        "? 32 : 16 * 128",
        "? 32 : 8 * 128",
        "assert",
    ),
    "bytes of a box that are not expected": (
        *WARPGROUPS,
        "full_.arrive_and_expect(turn.stage, kStageBytes)",
        "full_.arrive_and_expect(turn.stage, kStageBytes - kBoxBytes)",
        "which did not expect as many|where a copy is on its way",
    ),
    "wait for space of the wrong phase": (
        *WARPGROUPS,
        "empty_.wait(turn.stage, turn.parity ^ 1);",
        "empty_.wait(turn.stage, turn.parity);",
        "deadlock: ",
    ),
    "sums that are used before they are there": (
        *WARPGROUPS,
        "    wait_for_products<0>();\n",
        "",
        "a product of warpgroup . (reads|has read)|that nobody has waited for|has changed sums",
    ),
    "misaligned packet": (
        *POINTWISE,
        "cuda/pointwise/pointwise.cuh",
        "data + first);",
        "data + first + 1);",
        MISALIGNED,
    ),
    "element beyond the end": (
        *POINTWISE,
        "cuda/pointwise/pointwise.cuh",
        "if (index < operands.count)",
        "if (index <= operands.count)",
        "heap-buffer-overflow",
    ),
    "missing barrier before the weights are read": (
        *ATTENTION,
        "cuda/gemm/tile_product.cuh",
        "  __syncthreads();  // also publishes",
        "  // also publishes",
        "race on shared|nobody has written",
    ),
    "wait for a panel of keys or values too few": (
        *COPIED_ATTENTION,
        STAGES,
        "wait_for_copies<kStages - 2>()",
        "wait_for_copies<kStages - 1>()",
        "has not arrived",
    ),
    "missing barrier before a panel of keys or values is overwritten": (
        *COPIED_ATTENTION,
        STAGES,
        BARRIER_OF_STAGES,
        "    }",
        "has not arrived|race on shared|nobody has written",
    ),
    "panel of keys or values in the stage that is multiplied": (
        *COPIED_ATTENTION,
        STAGES,
        "load(ahead, stage);",
        "load(ahead, (stage + 1) % kStages);",
        "has not arrived|race on shared|nobody has written",
    ),
    "next queries while keys and values are multiplied": (
        *COPIED_ATTENTION,
        STAGES,
        "  wait_for_copies<0>();\n  __syncthreads();\n}",
        "  wait_for_copies<0>();\n}",
        "has not arrived|race on shared|nobody has written",
    ),
    "weights that other lanes have not written yet": (
        *COPIED_ATTENTION,
        "cuda/attention/forward_copied.cuh",
        "    __syncwarp();\n  }",
        "  }",
        "race on shared|nobody has written",
    ),
    "weights of the keys before": (
        *COPIED_ATTENTION,
        "cuda/attention/forward_copied.cuh",
        "if (of_part == 0) {",
        "if (panel == 0) {",
        "assert",
    ),
    "maxima of other lanes' rows": (
        *COPIED_ATTENTION,
        "cuda/gemm/tile.cuh",
        "kLaneStride = 2;",
        "kLaneStride = 1;",
        "assert",
    ),
    "wait for a panel of gradients too few": (
        *COPIED_GRADIENTS[:3],
        STAGES,
        "wait_for_copies<kStages - 2>()",
        "wait_for_copies<kStages - 1>()",
        "has not arrived",
    ),
    "missing barrier before a panel of gradients is overwritten": (
        *COPIED_GRADIENTS[:3],
        STAGES,
        BARRIER_OF_STAGES,
        "    }",
        "has not arrived|race on shared|nobody has written",
    ),
    "copied products before the other group has given them": (
        *COPIED_GRADIENTS,
        "    __syncthreads();  // what the other group has given is there\n",
        "",
        "race on shared|nobody has written",
    ),
    "copied weights before both groups have made them": (
        *COPIED_GRADIENTS,
        "    }\n    __syncthreads();  // the weights are there\n",
        "    }\n",
        "race on shared|nobody has written",
    ),
    "halves of copied sums before the other group has given them": (
        *COPIED_GRADIENTS,
        "    __syncthreads();\n    QuerySums sums(0);",
        "    QuerySums sums(0);",
        "race on shared|nobody has written",
    ),
    "sources of a matrix before all have heard of it": (
        *COPIED_GRADIENTS,
        "    __syncthreads();\n    const int64_t seen",
        "    const int64_t seen",
        "race on shared|nobody has written",
    ),
    "scores of the queries before": (
        *COPIED_GRADIENTS,
        "      take_next_part(scores);\n",
        "",
        "assert",
    ),
    "keys of the other group": (
        *COPIED_GRADIENTS,
        "column_of_keys() + group() * kDepth",
        "column_of_keys() + (1 - group()) * kDepth",
        "assert",
    ),
    "missing barrier in a sum over rows": (
        *MASK_GRADIENT,
        "cuda/attention/grad_mask.cuh",
        "  }\n  __syncthreads();",
        "  }",
        "race on shared parked|nobody has written",
    ),
    "sums over rows where others have parked gradients": (
        *MASK_GRADIENT,
        "cuda/attention/grad_mask.cuh",
        "  __syncthreads();\n  const Thread",
        "  const Thread",
        "race on shared parked",
    ),
    "values that are still multiplied": (
        *HALF_GRADIENTS,
        "cuda/attention/grad_query_mma.cuh",
        "        __syncthreads();  // all are done with the values",
        "",
        "has not arrived|race on shared|nobody has written",
    ),
    "keys of one place that are still multiplied": (
        *HALF_GRADIENTS,
        "cuda/attention/grad_query_mma.cuh",
        "        __syncthreads();\n        load_keys",
        "        load_keys",
        "has not arrived|race on shared|nobody has written",
    ),
    "queries copied to the place of those before": (
        *HALF_GRADIENTS,
        "cuda/attention/grad_key_value_mma.cuh",
        "                   place_of(begin + kQueries));",
        "                   place_of(begin));",
        "has not arrived|race on shared|nobody has written",
    ),
    "next keys of a block while those before are stored": (
        *HALF_GRADIENTS,
        "cuda/attention/grad_key_value_mma.cuh",
        "int64_t first_key) {\n    __syncthreads();",
        "int64_t first_key) {",
        "race on shared",
    ),
    "next matrix of queries before all have heard of it": (
        *HALF_GRADIENTS,
        "cuda/attention/grad_key_value_mma.cuh",
        "    __syncthreads();\n    return work()[kShared];",
        "    return work()[kShared];",
        "race on shared",
    ),
    "turn that nobody waits for": (
        *JOINT_GRADIENTS,
        "place()[kHasTurn] == 0",
        "false",
        "race in global memory|numbers that no block has written",
    ),
    "missing barrier after the wait for a turn": (
        *JOINT_GRADIENTS,
        "      __syncthreads();\n      if (place()[kTurn] > 0)",
        "      if (place()[kTurn] > 0)",
        "race |nobody has written|numbers that no block",
    ),
    "turn passed on before its numbers are stored": (
        *JOINT_GRADIENTS,
        "    multiply(sums, keys);\n    if (place()",
        "    multiply(sums, keys);\n    end();\n    if (place()",
        "race in global memory",
    ),
    "turns in the other order": (
        *JOINT_GRADIENTS[:3],
        "cuda/attention/joint_gradients.cuh",
        "return {end - 1 - column_tile,",
        "return {column_tile - first,",
        "deadlock: ",
    ),
    "numbers of a matrix that every thread writes": (
        *JOINT_GRADIENTS_WITH_FEATURES,
        "cuda/attention/scores.cuh",
        "    if (threadIdx.x == 0) {\n      place()[0] =",
        "    {\n      place()[0] =",
        "race on shared",
    ),
    "last turn of a matrix passed on before its numbers are stored": (
        *JOINT_GRADIENTS[:3],
        "cuda/attention/grad_key_value_mma.cuh",
        "    __syncthreads();\n    grad_query.end();",
        "    grad_query.end();",
        "race in global memory",
    ),
    "next matrix that sees no keys either": (
        *HALF_GRADIENTS,
        "cuda/attention/grad_key_value_mma.cuh",
        "      __syncthreads();\n      return;",
        "      return;",
        "race on shared",
    ),
    "panels' turn that nobody waits for": (
        *JOINT_GRADIENTS_BY_PANELS,
        "      counter.wait(turn.index);\n",
        "",
        "race in global memory|numbers that no block has written",
    ),
    "panels' turn passed on before all have added": (
        *JOINT_GRADIENTS_BY_PANELS,
        "  store_sums(sums, memory);\n  __syncthreads();",
        "  store_sums(sums, memory);",
        "race in global memory|numbers that no block has written",
    ),
    "panels' sums that are not the block's before": (
        *JOINT_GRADIENTS_BY_PANELS,
        "    sums.add(before);\n",
        "",
        "assert",
    ),
    "gradients of scores as the key's product has them": (
        *JOINT_GRADIENTS_BY_PANELS,
        "SharedColumns(keys_.grad_scores(), first)",
        "keys_.grad_scores()",
        "assert",
    ),
    "halves of sums before the other group has given them": (
        *JOINT_GRADIENTS_BY_PANELS,
        "    __syncthreads();\n    Sums sums(0);",
        "    Sums sums(0);",
        "race on shared|nobody has written",
    ),
    "products before the other group has given them": (
        *JOINT_GRADIENTS_BY_PANELS[:-1],
        "cuda/attention/grad_key_value_panels.cuh",
        "    __syncthreads();\n    // Not before",
        "    // Not before",
        "race on shared|nobody has written",
    ),
    "weights that the other group adds up": (
        *JOINT_GRADIENTS_BY_PANELS[:-1],
        "cuda/attention/grad_key_value_panels.cuh",
        "        sums, weights(of_group),",
        "        sums, weights(1 - of_group),",
        "assert",
    ),
    "numbers of the first matrix for all": (
        *JOINT_GRADIENTS_WITH_FEATURES,
        "cuda/attention/scores.cuh",
        "    if (threadIdx.x == 0) {\n      place()[0] =",
        "    if (threadIdx.x == 0 && batch == 0) {\n      place()[0] =",
        "assert",
    ),
    "mask of another key": (
        *JOINT_GRADIENTS_WITH_FEATURES,
        "cuda/attention/scores.cuh",
        "        last_column = column;\n",
        "",
        "heap-buffer-overflow|assert",
    ),
    "gradients of scores that are not published": (
        *JOINT_WARPGROUPS,
        "    publish_shared_memory();\n    release(barriers_, grad_scores_full(turn.stage()));",
        "    release(barriers_, grad_scores_full(turn.stage()));",
        "a product reads .* written and not published to products",
    ),
    "gradients of scores of the other warpgroup that may not be there": (
        *JOINT_WARPGROUPS,
        "    barriers_.wait(grad_scores_full(turn.stage()), turn.parity());\n",
        "",
        "race on shared|which nobody has written|not published",
    ),
    "gradients of scores over those that are multiplied": (
        *JOINT_WARPGROUPS,
        "static constexpr int kGradScores = 2;",
        "static constexpr int kGradScores = 1;",
        "a product of warpgroup . (reads that nobody has|has read, and does)",
    ),
    "sums that are not published to bulk copies": (
        *JOINT_WARPGROUPS,
        "    publish_shared_memory();\n    release(barriers_, piece_given(piece));",
        "    release(barriers_, piece_given(piece));",
        "a bulk copy reads .* written and not published to products",
    ),
    "sums over those that have not been read": (
        *JOINT_WARPGROUPS,
        "    barriers_.wait(piece_taken(piece), phases.parity(phase) ^ 1);\n",
        "",
        "a bulk copy of thread 320 (reads that nobody has|has read, and does)",
    ),
    "room for sums before the others have been read": (
        *JOINT_WARPGROUPS,
        "    wait_for_bulk_reads();\n",
        "",
        "a bulk copy of thread 320 (reads that nobody has|has read, and does)",
    ),
    "turn of bulk copies passed on before they arrive": (
        *JOINT_WARPGROUPS,
        "    wait_for_bulk_copies();\n",
        "",
        "race in global memory: thread 320",
    ),
    "turn of bulk copies that nobody waits for": (
        *JOINT_WARPGROUPS,
        "TurnCounter(counter).wait(index);",
        "TurnCounter(counter).is(index);",
        "race in global memory|numbers that no block has written",
    ),
    "bulk copies that are not ordered after their turn": (
        *JOINT_WARPGROUPS,
        "    order_copies_after_turn();\n",
        "",
        "race in global memory: thread 320",
    ),
    "turns of bulk copies in the other order": (
        *JOINT_WARPGROUPS,
        "work.at(kColumnBegin) / kKeys - seen_tiles<kKeys>(extent, row).first",
        "seen_tiles<kKeys>(extent, row).end - 1 - work.at(kColumnBegin) / kKeys",
        "deadlock: |race in global memory|numbers that no block",
    ),
    "tickets from the last keys to the first": (
        *JOINT_WARPGROUPS[:3],
        "cuda/attention/joint_gradients.cuh",
        "ticket % tiles / here}",
        "column_tiles - 1 - ticket % tiles / here}",
        "deadlock: ",
    ),
    "sums of a tile of queries that is not the head's": (
        *JOINT_CAUSAL_WARPGROUPS,
        "add_in_turn(work, row, batch_of(work, shared), phases, count);",
        "add_in_turn(work, row, batch_of(work, 0 * shared), phases, count);",
        "assert|deadlock: |race in global memory|numbers that no block",
    ),
    "sums so far that may not be there": (
        *JOINT_WARPGROUPS,
        "      barriers_.wait(piece_loaded(piece), phases.parity(phase));\n",
        "",
        "race on shared|has not arrived|nobody has written|deadlock",
    ),
    "columns of the other warpgroup": (
        *JOINT_WARPGROUPS,
        "Stages::kKeyIndex, piece_column(computed_here(group)));",
        "Stages::kKeyIndex, 0);",
        "assert",
    ),
    "queries released before they are multiplied": (
        *ATTENTION_GRADIENT_WARPGROUPS,
        "cuda/attention/grad_key_value_warpgroups.cuh",
        "      wait_for_products<0>();\n      hold_sums(value_sums.values);\n"
        "      hold_sums(key_sums.values);\n      release(barriers_, Stages::empty(stage));",
        "      release(barriers_, Stages::empty(stage));\n      wait_for_products<0>();\n"
        "      hold_sums(value_sums.values);\n      hold_sums(key_sums.values);",
        "does not know of each of its warps that it has waited|has read, and does|on its way",
    ),
    "a stage of activations released before it is multiplied": (
        *INT4_LINEAR_WARPGROUPS,
        "      wait_for_products<1>();\n",
        "      wait_for_products<2>();\n",
        "reads that nobody has waited for|has read, and does|does not know of each of its warps",
    ),
    "sums of a group that nobody has waited for": (
        *INT4_LINEAR_WARPGROUPS,
        "    wait_for_products<0>();\n    hold_sums(sums.values);\n    PKG_UNROLL",
        "    wait_for_products<1>();\n    hold_sums(sums.values);\n    PKG_UNROLL",
        "assert|reads that nobody has waited for|does not know of each of its warps",
    ),
    "rows released before they are multiplied": (
        *ROWWISE_WARPGROUPS,
        "      wait_for_products<1>();\n      if (slice > at.begin) {\n"
        "        product_.release(Product::before(turn));",
        "      wait_for_products<2>();\n      if (slice > at.begin) {\n"
        "        product_.release(Product::before(turn));",
        "reads that nobody has waited for|has read, and does|does not know of each of its warps",
    ),
    "bytes of another lane": (
        *ROWWISE_WARPGROUPS,
        "      transpose_quads(words);",
        "      transpose_quads<2>(words);",
        "assert",
    ),
    "sums and words of gradients that are not ordered": (
        *ATTENTION_GRADIENT_WARPGROUPS,
        "cuda/attention/warpgroup_lines.cuh",
        "  hold_words(words);\n  order_registers();",
        "  hold_words(words);",
        "without having ordered",
    ),
    "parts of the queries elsewhere": (
        *ATTENTION_GRADIENT_WARPGROUPS,
        "cuda/attention/warpgroup_lines.cuh",
        "column % kLine, kSliceBytes);",
        "column % kLine, 2 * kSliceBytes);",
        "assert|nobody has written|on its way",
    ),
    "numbers of queries that not all lanes have copied": (
        *ATTENTION_GRADIENT_WARPGROUPS,
        "cuda/attention/gradients_warpgroups.cuh",
        "  __syncwarp();\n  if (threadIdx.x % kWarp == 0) {",
        "  if (threadIdx.x % kWarp == 0) {",
        "race on shared|nobody has written",
    ),
    "exchanged words of an operand by columns": (
        *HALF_GRADIENTS,
        "cuda/gemm/operand_tile.cuh",
        "lane % 16, first_column + lane / 16 * Slice::kVector",
        "lane / 16 * 8 + lane % 8, first_column + lane / 8 % 2 * Slice::kVector",
        "assert",
    ),
    "words of dropout that are not exchanged": (
        *HALF_GRADIENTS,
        "cuda/attention/scores.cuh",
        "transpose_quads<4>(words.words);",
        "",
        "assert",
    ),
    "wait for the keys of a turn too few": (
        *HALF_DECODING,
        "cuda/attention/decode_mma.cuh",
        "wait_for_copies<0>();\n        __syncwarp();",
        "wait_for_copies<1>();\n        __syncwarp();",
        "has not arrived",
    ),
    "missing barrier of the lanes that copied the keys": (
        *HALF_DECODING,
        "cuda/attention/decode_mma.cuh",
        "wait_for_copies<0>();\n        __syncwarp();",
        "wait_for_copies<0>();",
        "has not arrived|race on shared|nobody has written",
    ),
    "values where the keys lie": (
        *HALF_DECODING,
        "cuda/attention/decode_mma.cuh",
        "address_of(kWarp / 2 + line)",
        "address_of(line)",
        "assert",
    ),
    "missing barrier before the outputs of the warps are added": (
        *HALF_DECODING,
        "cuda/attention/decode_mma.cuh",
        "store_combined(output);\n    __syncthreads();",
        "store_combined(output);",
        "race on shared|nobody has written",
    ),
    "stage of packed values that is still multiplied": (
        *ROWWISE,
        STAGES,
        "wait_for_copies<kStages - 2>();",
        "wait_for_copies<kStages - 1>();",
        "has not arrived",
    ),
    "missing barrier before the rows of a tile are read": (
        *ROWWISE,
        "cuda/int4/rowwise.cuh",
        """    __syncthreads();
    typename Product::Sums""",
        "    typename Product::Sums",
        "race on shared|nobody has written",
    ),
    "missing barrier before the sums of warps are added": (
        *ROWWISE,
        "cuda/int4/rowwise_few_rows.cuh",
        "    __syncthreads();\n    const int64_t column",
        "    const int64_t column",
        "race on shared|nobody has written",
    ),
    "values of four bits in another order": (
        *ROWWISE,
        "cuda/int4/rowwise_slice.cuh",
        "b[2 * half] = even_values",
        "b[2 * half] = odd_values",
        "assert",
    ),
    "missing barrier between copies of a weight and their products": (
        *INT4_LINEAR[:-1],
        STAGES,
        BARRIER_OF_STAGES,
        "    }",
        "has not arrived|race on shared|nobody has written",
    ),
    "wait for a stage of a weight too few": (
        *INT4_LINEAR[:-1],
        STAGES,
        "wait_for_copies<kStages - 2>()",
        "wait_for_copies<kStages - 1>()",
        "has not arrived",
    ),
    "missing barrier before the teams' sums are added": (
        *INT4_LINEAR,
        "    __syncthreads();\n    for (int team = 1; team < kTeams && team_ == 0",
        "    for (int team = 1; team < kTeams && team_ == 0",
        "race on shared|nobody has written",
    ),
    "missing barrier after the teams' sums are added": (
        *INT4_LINEAR,
        "    __syncthreads();\n  }\n\n  const Int4LinearProblem",
        "  }\n\n  const Int4LinearProblem",
        "has not arrived|race on shared|nobody has written",
    ),
    "scales of another group": (
        *INT4_LINEAR,
        "done / kGroup - 1);",
        "(kSlice - done) / kGroup);",
        "assert",
    ),
    "keys released before they are multiplied": (
        *ATTENTION_WARPGROUPS,
        "      pass_order();\n      wait_for_products<1>();\n      finish_scores(scores, turn);",
        "      pass_order();\n      finish_scores(scores, turn);\n      wait_for_products<1>();",
        "race on shared|on its way",
    ),
    "output scaled before its product has come": (
        *ATTENTION_WARPGROUPS,
        "      wait_for_products<0>();\n      finish_output(output, before);\n"
        "      rescale(output, corrections);",
        "      rescale(output, corrections);\n      wait_for_products<0>();\n"
        "      finish_output(output, before);",
        "assert|has changed sums",  # poison that is scaled is poison
    ),
    "parts of the values elsewhere": (
        *ATTENTION_WARPGROUPS[:3],
        "cuda/attention/warpgroup_lines.cuh",
        "column % kLine, kSliceBytes);",
        "column % kLine, kBoxLines * 128);",
        "assert",
    ),
    "registers that are not ordered": (
        *ATTENTION_WARPGROUPS[:3],
        "cuda/attention/warpgroup_lines.cuh",
        "  order_registers();",
        "",
        "without having ordered",
    ),
    "keys that nobody has waited for": (
        *ATTENTION_WARPGROUPS,
        "      wait_for(Operand::key, turn.next());\n",
        "      wait_for(Operand::key, turn);\n",
        "has not waited for it|on its way",
    ),
    "values of the sequence behind": (
        *PACKED_ATTENTION_WARPGROUPS,
        "cuda/attention/forward_warpgroups.cuh",
        "problem_.is_packed() && begin + kKeys > last",
        "problem_.is_packed() && begin > last",
        "assert",
    ),
    "zeros before the values have come": (
        *PACKED_ATTENTION_WARPGROUPS,
        "cuda/attention/forward_warpgroups.cuh",
        "    barriers_.wait(kEnded, ended_parity);\n",
        "",
        "on its way|race on shared memory",
    ),
    "zeros that are not published": (
        *PACKED_ATTENTION_WARPGROUPS,
        "cuda/attention/forward_warpgroups.cuh",
        "    publish_shared_memory();\n    __syncwarp();",
        "    __syncwarp();",
        "not published|without having published|fence",
    ),
    "keys of the sequence in front": (
        *PACKED_ATTENTION_WARPGROUPS,
        "cuda/attention/forward_warpgroups.cuh",
        "static_cast<int>(work.extent.first_column);",
        "0;",
        "assert",
    ),
    "queries of the sequence in front": (
        *PACKED_ATTENTION_WARPGROUPS,
        "cuda/attention/forward_warpgroups.cuh",
        "static_cast<int>(work.extent.first_row) + work.row_begin",
        "work.row_begin",
        "assert",
    ),
    "output of the sequence behind": (
        *PACKED_ATTENTION_WARPGROUPS,
        "cuda/attention/forward.cuh",
        "             extent.rows, problem.value_size, call.output.row_stride, row_begin,\n",
        "             problem.rows, problem.value_size, call.output.row_stride, row_begin,\n",
        "of output is written by this block and by block|heap-buffer-overflow",
    ),
    "queries that no sequence has": (
        *PACKED_ATTENTION_WARPGROUPS,
        "cuda/attention/forward_warpgroups.cuh",
        "if (row_begin >= extent.rows) {",
        "if (row_begin >= problem_.rows) {",
        "assert",
    ),
    "stage of gates that is still copied": (
        *LLTM,
        STAGES,
        "wait_for_copies<kStages - 2>()",
        "wait_for_copies<kStages - 1>()",
        "has not arrived",
    ),
    "missing barrier in the loop over panels of gates": (
        *LLTM,
        "cuda/lltm/gate_product.cuh",
        BARRIER_OF_LOOP.replace("    ", "      "),
        "      current = 1 - current;",
        "race on shared|nobody has written",
    ),
    "part of a step that is not added": (
        *LLTM,
        "cuda/lltm/step.cuh",
        "split < step.splits",
        "split + 1 < step.splits",
        "assert",
    ),
    "missing barrier before the pixels of other channels": (
        *CORRELATION,
        "cuda/correlation/forward.cuh",
        "      __syncthreads();\n      load_column<kRows>",
        "      load_column<kRows>",
        "race on shared|nobody has written",
    ),
    "shift beyond the patch": (
        *CORRELATION,
        "cuda/correlation/gradient.cuh",
        "if (s >= kLeast && s >= shifts) {",
        "if (s > shifts) {",
        "nobody has written",
    ),
    "missing barrier of the lanes that added a band": (
        *CORRELATION,
        "cuda/correlation/forward_mma.cuh",
        "    __syncwarp();\n    PKG_UNROLL_BY(1)\n    for (int line",
        "    PKG_UNROLL_BY(1)\n    for (int line",
        "race on shared|nobody has written",
    ),
    "launch bounds of half a block": (
        *MATMUL,
        "cuda/gemm/matmul.cuh",
        "__launch_bounds__(Product::kThreads, Product::kBlocks)",
        "__launch_bounds__(Product::kThreads / 2, Product::kBlocks)",
        "a block of 256 threads of a kernel whose launch bounds are 128",
    ),
    "launch bounds of a block of before": (
        *HALF_DECODING,
        "cuda/attention/decode_mma.cuh",
        "__launch_bounds__(DecodeMma<Element, kWidth>::kThreads,",
        "__launch_bounds__(DecodeMma<Element, kWidth>::kThreads - 32,",
        "threads of a kernel whose launch bounds are",
    ),
    "no launch bounds": (
        *POINTWISE,
        "cuda/pointwise/pointwise.cuh",
        "__launch_bounds__(kPointwiseThreads)",
        "",
        "a kernel without launch bounds",
    ),
    "block of more threads than there can be": (
        *POINTWISE,
        "cuda/pointwise/pointwise.cuh",
        "kPointwiseThreads = 256;",
        "kPointwiseThreads = 2048;",
        "a block of 2048 threads; from 1 to 1024 are possible",
    ),
    "shared memory that nobody has asked for": (
        *HALF_MATMUL,
        "cuda/device/device.cuh",
        "return shared_bytes > 32 * 1024;",
        "return shared_bytes > 320 * 1024;",
        "bytes of dynamic shared memory; the launch has 49152",
    ),
    "shared memory that the device does not have": (
        "run_attention_backward.cpp",
        BFLOAT16,
        run_gradients_on_a_small_device,
        "cuda/attention/gradient_kernels.cuh",
        "if (shape.shared_bytes <= most_shared_bytes) {",
        "if (shape.shared_bytes <= 2 * most_shared_bytes) {",
        "bytes of dynamic shared memory; the launch has 101376",
    ),
    "log-sum-exp of a row too many": (
        *ATTENTION,
        "cuda/attention/forward.cuh",
        "row < extent.rows)",
        "row <= extent.rows)",
        "heap-buffer-overflow.*WRITE",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_catches_a_fault_planted_in_a_kernel(
    cuda_emulator: Emulator, tmp_path: Path, fault: str
) -> None:
    program_file, elements, run, kernel, right, wrong, report = PLANTED[fault]
    run(cuda_emulator)
    # That sanitizer's checks are half of what most of these programs take to compile.
    sanitize = SANITIZE if report == MISALIGNED else SANITIZE_ADDRESSES
    flags = [f"-DPKG_EMULATED_TYPES={elements}", *sanitize]
    planted = plant(tmp_path, kernel, right, wrong, program_file, flags)
    with pytest.raises((AssertionError, EmulationError)) as caught:
        run(planted)
    if isinstance(caught.value, AssertionError):
        assert "assert" in report.split("|")
    else:
        assert re.search(report, str(caught.value), re.DOTALL), caught.value


def test_parameters_that_no_launch_takes_are_not_compiled(tmp_path: Path) -> None:
    """Where a kernel is launched, by the emulator's programs as by CUDA."""
    flags = ["-DPKG_EMULATED_TYPES=float", *SANITIZE_ADDRESSES]
    right = "  int64_t count;\n"
    wrong = f"{right}  char more[32764] = {{}};\n"
    with pytest.raises(RuntimeError, match="fits_parameters") as caught:
        plant(tmp_path, "cuda/pointwise/pointwise.cuh", right, wrong, "run_pointwise.cpp", flags)
    errors = re.findall("error: (.*)", str(caught.value))
    assert errors
    assert all(each.startswith("static assertion failed") for each in errors)
