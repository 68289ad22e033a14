"""Each element of an output is stored once in a launch, whoever stores it.

Two blocks that change the same byte are found in every emulated test. Here the stores themselves
are seen: also the second one of the same block, and one that writes what is there already.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import test_emulated_lltm as lltm
import torch
from emulator import EmulationError, Emulator
from quantised_samples import scales_and_zeros, words
from rowwise_scaled_samples import call
from test_emulated_attention import check as check_attention
from test_emulated_attention import emulated_backward, emulated_forward
from test_emulated_attention import make as make_attention
from test_emulated_attention_backward_warpgroups import check as check_gradients_by_warpgroups
from test_emulated_attention_joint_gradients import check as check_joint_gradients
from test_emulated_attention_joint_warpgroups import check as check_joint_gradients_by_warpgroups
from test_emulated_attention_varlen_warpgroups import check_apart, check_counts
from test_emulated_attention_varlen_warpgroups import make as make_packed
from test_emulated_attention_warpgroups import check as check_attention_warpgroups
from test_emulated_decode_attention import check as check_decoding
from test_emulated_decode_attention import emulated as emulated_decoding
from test_emulated_decode_attention import make as make_decoding
from test_emulated_few_rows import LAYOUTS, few_rows, turn_of, weight_of
from test_emulated_int4_linear import emulated as emulated_int4_linear
from test_emulated_linear import ACTIVATIONS, emulated_linear
from test_emulated_lltm import arguments as lltm_arguments
from test_emulated_lltm import emulated_step
from test_emulated_matmul import emulated_matmul
from test_emulated_pointwise import emulated_dense, emulated_strided
from test_emulated_rotary_embedding import emulated as emulated_rotary
from test_emulated_rotary_embedding import heads_inside, tables
from test_emulated_rowwise_scaled_linear import emulated as emulated_rowwise
from test_emulated_rowwise_scaled_linear import emulated_quantized
from test_emulated_spatial_correlation_sample import emulated as emulated_correlation
from test_emulated_spatial_correlation_sample import emulated_gradient, integers
from test_emulated_warpgroups import bulk
from test_emulated_warpgroups import check as check_warpgroups
from test_emulator import plant

from pkg.testing import Sample

BFLOAT16 = "cuda::bfloat16"


@pytest.fixture(scope="session")
def announcing_emulator(counting_emulator: Emulator) -> Emulator:
    """Hears of each store, and counts nothing."""
    return Emulator(counting_emulator.program)


def run_matmul(emulator: Emulator) -> None:
    """Whole and divided, by panels and by tensor cores, with and without vectors."""
    for rows, columns in ((130, 136), (70, 131)):
        a, b = torch.randn(rows, 100), torch.randn(100, columns)
        emulated_matmul(emulator, a, b)
        emulated_matmul(emulator, a.bfloat16(), b.bfloat16())
        emulated_matmul(emulator, a.bfloat16(), b.bfloat16(), torch.float32)


def run_strided_matmul(emulator: Emulator) -> None:
    """Of operands by columns, in steps and in batches that broadcast, whole and divided."""
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(3, 1, 200, 70).to(dtype).mT, torch.randn(2, 262, 200).to(dtype).mT
        emulated_matmul(emulator, a, b[..., ::2])
        emulated_matmul(emulator, a[..., ::2, :], b, split_depth=64)


def run_linear(emulator: Emulator) -> None:
    """The output, and beside it the activation's argument, by warps and by warpgroups."""
    for dtype in (torch.float32, torch.bfloat16):
        for columns in (136, 131):
            input, weight = torch.randn(2, 70, 40).to(dtype), torch.randn(columns, 40).to(dtype)
            for activation in ACTIVATIONS if dtype == torch.float32 else ["gelu"]:
                options = (torch.randn(columns).to(dtype), activation, True)
                emulated_linear(emulator, input, weight, *options)
    input, weight = bulk(130, 72), bulk(136, 72)
    emulated_linear(emulator, input, weight, None, "gelu", True, tile_columns=128)


def run_rotary(emulator: Emulator) -> None:
    """By packets, by elements and with indices of 64 bits, whole heads and parts of them."""
    for dtype in (torch.float32, torch.bfloat16):
        packet = 16 // dtype.itemsize
        for way, half, rest in (
            ("packets", 2 * packet, packet),
            ("elements", 3, 1),
            ("wide", 9, 0),
        ):
            input = heads_inside(2, 3, 70, 2 * half + rest).to(dtype)
            for interleaved in (False, True):
                options = {"interleaved": interleaved, "back": interleaved}
                emulated_rotary(emulator, way, input, *tables(70, half, dtype), **options)


def run_few_rows(emulator: Emulator) -> None:
    """Of matmul and linear, whole and divided."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for layout in LAYOUTS:
            depth = 3 * turn_of(dtype, layout)
            b = weight_of(2, depth, 37, dtype=dtype, layout=layout)
            a = torch.randn(2, 3, depth).to(dtype)
            for split_depth in (0, depth // 3):
                few_rows(emulator, a, b, layout, split_depth=split_depth)
            options = {"layout": layout, "share_shift": 3}
            emulated_linear(emulator, a, b[0].mT, None, "gelu", True, **options)


def run_warpgroup_matmul(emulator: Emulator) -> None:
    check_warpgroups(emulator, bulk(130, 133), bulk(133, 72), 128, blocks=1)


def run_pointwise(emulator: Emulator) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(5000, dtype=dtype), torch.randn(5000, dtype=dtype)
        emulated_dense(emulator, "mul", a, b)
    a, b = torch.randn(64, 33), torch.randn(33)
    emulated_strided(emulator, "mul", torch.zeros(64, 33), a, b)


def run_attention(emulator: Emulator) -> None:
    """Outputs and gradients by panels, with a mask's."""
    mask = torch.randn(70)
    check_attention(emulator, make_attention(2, rows=65, columns=70, head=20, mask=mask))


def run_half_attention(emulator: Emulator) -> None:
    for head in (20, 128):
        options = {"dtype": torch.bfloat16, "key_lead": (1,), "enable_gqa": True}
        check_attention(emulator, make_attention(3, rows=70, columns=140, head=head, **options))


def run_joint_gradients(emulator: Emulator) -> None:
    for dtype, head in ((torch.bfloat16, 72), (torch.float32, 40)):
        call = make_attention(2, rows=140, columns=150, head=head, dtype=dtype)
        check_joint_gradients(emulator, call, 3)


def run_attention_by_warpgroups(emulator: Emulator) -> None:
    call = make_attention(2, rows=70, columns=220, head=64, dtype=torch.bfloat16)
    check_attention_warpgroups(emulator, call, 1)


def run_gradients_by_warpgroups(emulator: Emulator) -> None:
    call = make_attention(2, rows=130, columns=140, head=72, dtype=torch.bfloat16)
    check_gradients_by_warpgroups(emulator, call)


def run_joint_gradients_by_warpgroups(emulator: Emulator) -> None:
    for head in (64, 72):
        call = make_attention(1, rows=130, columns=270, head=head, dtype=torch.bfloat16)
        check_joint_gradients_by_warpgroups(emulator, call)


def run_packed_attention(emulator: Emulator) -> None:
    check_apart(emulator, make_packed((130, 40, 70), (70, 100, 30), sizes=(128, 128)))
    check_counts(emulator)


def run_decoding(emulator: Emulator) -> None:
    """Whole and divided among blocks."""
    for dtype in (torch.bfloat16, torch.float32):
        options = {"sizes": (72, 64), "page_size": 16, "dtype": dtype}
        for splits in (1, 3):
            check_decoding(emulator, make_decoding((200, 3), (4, 2), 2, **options), splits)


def run_rowwise(emulator: Emulator) -> None:
    for way in ("tiles", "few_rows"):
        for columns in (140, 135):
            sample = call((9,), 160, columns, False).converted(torch.float32)
            emulated_rowwise(emulator, "s8s4", *sample.args, way=way)
    for out_dtype in (torch.float32, torch.bfloat16):
        sample = call((140,), 160, 136, True, out_dtype=out_dtype).converted(torch.float32)
        for tile_rows in (128, 256):
            emulated_rowwise(emulator, "s4s4", *sample.args, tile_rows=tile_rows)


def run_quantising(emulator: Emulator) -> None:
    for size in (512, 70):
        for bits in (8, 4):
            emulated_quantized(emulator, torch.randn(6, size).bfloat16(), bits)


def run_int4_linear(emulator: Emulator) -> None:
    weight = (words(136, 1056, 2), scales_and_zeros(136, 1056, 32), 32, 2)
    for rows in (3, 33):
        emulated_int4_linear(emulator, torch.randn(rows, 1056).bfloat16(), *weight, None, 1)
    for split_turns in (0, 3):
        input = torch.randn(130, 1056).bfloat16()
        options = {"split_turns": split_turns, "by_warpgroups": True}
        emulated_int4_linear(emulator, input, *weight, None, 1, **options)


def run_lltm(emulator: Emulator) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        sample = Sample(lltm_arguments((5, 72, 136))).converted(dtype)
        for split_panels in (0, 2):
            emulated_step(emulator, sample, 3, split_panels)


def run_lltm_product(emulator: Emulator) -> None:
    """Of two parts, whole and divided."""
    for dtype in (torch.bfloat16, torch.float32):
        for split_panels in (0, 1):
            lltm.test_a_product_of_two_parts(emulator, dtype, split_panels)


def run_lltm_gradients(emulator: Emulator) -> None:
    lltm.test_gradients_of_a_step(emulator, torch.float32)


def run_correlation(emulator: Emulator) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        images = integers(1, 24, 5, 18).to(dtype), integers(1, 24, 5, 18).to(dtype)
        emulated_correlation(emulator, *images, 1, 3, 1, 0, 1, 1)


def run_gradient_of_correlation(emulator: Emulator) -> None:
    gradient, other = integers(1, 3, 3, 5, 18).float(), integers(1, 24, 5, 18).float()
    for of_input2 in (False, True):
        emulated_gradient(emulator, gradient, other, of_input2, 1, 3, 1, 0, 1, 1)


def run_tf32(emulator: Emulator) -> None:
    """Products and linear layers, with and without vectors, whole and divided."""
    for columns in (136, 131):
        a, b = torch.randn(9, 40), torch.randn(40, columns)
        for split_depth in (0, 32):
            emulated_matmul(emulator, a, b, split_depth=split_depth, multiplied_as="tf32")
        emulated_linear(emulator, a, b.mT, None, "gelu", True, multiplied_as="tf32")


def run_float64_products(emulator: Emulator) -> None:
    """As those in TF32; of int4; and steps, products and gradients of lltm."""
    for columns in (72, 67):
        a, b = torch.randn(9, 40).double(), torch.randn(40, columns).double()
        for split_depth in (0, 16):
            emulated_matmul(emulator, a, b, split_depth=split_depth)
        emulated_linear(emulator, a, b.mT, None, "gelu", True)
    weight = (words(16, 64, 2), scales_and_zeros(16, 64, 32), 32, 2)
    emulated_int4_linear(emulator, torch.randn(3, 64).double(), *weight)
    sample = Sample(lltm_arguments((5, 24, 40))).converted(torch.float64)
    for split_panels in (0, 2):
        emulated_step(emulator, sample, 3, split_panels)
    lltm.test_gradients_of_a_step(emulator, torch.float64)
    lltm.test_a_product_of_two_parts(emulator, torch.float64, 2)


def run_float64_attention(emulator: Emulator) -> None:
    """Outputs, gradients, those of a mask, and decoding, whole and divided."""
    call = make_attention(2, rows=9, columns=70, head=20, dtype=torch.float64)
    emulated_backward(emulator, call, emulated_forward(emulator, call))
    call = make_attention(1, rows=5, columns=70, head=3, dtype=torch.float64, mask=torch.randn(70))
    emulated_backward(emulator, call, emulated_forward(emulator, call))
    for splits in (1, 3):
        emulated_decoding(emulator, make_decoding((70, 3), (4, 2), dtype=torch.float64), splits)


def run_float64_elements(emulator: Emulator) -> None:
    a, b = torch.randn(2, 1030).double()
    emulated_dense(emulator, "mul", a, b)
    emulated_strided(emulator, "mul", torch.zeros(9, 33).double(), a[:297].view(9, 33), b[:33])
    emulated_rotary(emulator, "packets", heads_inside(1, 2, 9, 10), *tables(9, 4, torch.float64))
    for bits in (8, 4):
        emulated_quantized(emulator, torch.randn(3, 70).double(), bits)
    images = torch.randn(2, 1, 9, 5, 18).double()
    emulated_correlation(emulator, *images, 1, 3, 1, 0, 1, 1)
    gradient = torch.randn(1, 3, 3, 5, 18).double()
    emulated_gradient(emulator, gradient, images[0], False, 1, 3, 1, 0, 1, 1)


KERNELS: dict[str, Callable[[Emulator], None]] = {
    name.removeprefix("run_"): function
    for name, function in list(globals().items())
    if name.startswith("run_")
}


@pytest.mark.parametrize("name", KERNELS)
def test_stores_once(announcing_emulator: Emulator, name: str) -> None:
    KERNELS[name](announcing_emulator)


AGAIN = "is stored again, by thread"
PLANTED: dict[str, tuple[str, str, Callable[[Emulator], None], str, str, str]] = {
    "elements of two turns of a grid": (
        "run_pointwise.cpp",
        f"float,{BFLOAT16}",
        run_pointwise,
        "cuda/pointwise/pointwise.cuh",
        "first < packed;\n       first += step) {",
        "first < packed;\n       first += step - kPacket) {",
    ),
    "a tile that is made twice": (
        "run_matmul.cpp",
        f"float,{BFLOAT16}",
        run_matmul,
        "cuda/gemm/matmul.cuh",
        "const auto [batch, tile] = problem.order.place(index);",
        "const auto [batch, tile] = problem.order.place(index / 2);",
    ),
    "a tile of a linear layer that is made twice": (
        "run_linear.cpp",
        f"float,{BFLOAT16}",
        run_linear,
        "cuda/gemm/matmul.cuh",
        "const auto [batch, tile] = problem.order.place(index);",
        "const auto [batch, tile] = problem.order.place(index / 2);",
    ),
    "a tile in TF32 that is made twice": (
        "run_matmul.cpp",
        "cuda::Tf32",
        lambda emulator: emulated_matmul(
            emulator, torch.randn(9, 5), torch.randn(5, 136), multiplied_as="tf32"
        ),
        "cuda/gemm/matmul.cuh",
        "const auto [batch, tile] = problem.order.place(index);",
        "const auto [batch, tile] = problem.order.place(index / 2);",
    ),
    "an element of float64 by its vector and alone": (
        "run_matmul.cpp",
        "double",
        lambda emulator: emulated_matmul(
            emulator, torch.randn(3, 5).double(), torch.randn(5, 4).double()
        ),
        "cuda/gemm/tile.cuh",
        "(matrix + first) = packet;",
        "(matrix + first) = packet;\n        matrix[first / kPacket * kPacket] = packet.values[0];",
    ),
    "columns of few rows that are made twice": (
        "run_matmul_few_rows.cpp",
        f"float,double,{BFLOAT16}",
        run_few_rows,
        "cuda/gemm/few_rows.cuh",
        "problem.batches.divide(index);",
        "problem.batches.divide(index / 2);",
    ),
    "sums of a row by two warps": (
        "run_rowwise_scaled_linear.cpp",
        "float",
        run_rowwise,
        "cuda/int4/rowwise_few_rows.cuh",
        "for (int row = warp; row < problem.rows; row += kFewWarps) {",
        "for (int row = warp / 2; row < problem.rows; row += kFewWarps / 2) {",
    ),
    "states of a row by two threads": (
        "run_lltm.cpp",
        f"float,{BFLOAT16}",
        run_lltm,
        "cuda/lltm/step.cuh",
        "(row + unit) = packet;",
        "(row + unit) = packet;\n      row[unit / 8 * 8] = packet.values[0];",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_catches_what_is_stored_again(
    announcing_emulator: Emulator, tmp_path: Path, fault: str
) -> None:
    program_file, elements, run, kernel, right, wrong = PLANTED[fault]
    flags = [f"-DPKG_EMULATED_TYPES={elements}"]
    planted = plant(tmp_path, kernel, right, wrong, program_file, flags, counting=True)
    with pytest.raises(EmulationError, match=AGAIN):
        run(Emulator(planted.program))
