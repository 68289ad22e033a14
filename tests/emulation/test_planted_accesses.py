"""Kernels that compute the same and move more: what their accesses' counts are for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from emulator import Emulator
from test_emulated_accesses import (
    check_copied_attention,
    check_correlation,
    check_decoding,
    check_decoding_by_panels,
    check_dense,
    check_few_rows,
    check_few_rows_of_products,
    check_gradient_of_correlation,
    check_matmul,
    check_panels,
    check_quantising,
    check_quantising_held_rows,
)
from test_emulator import plant

BFLOAT16 = "cuda::bfloat16"
Planted = tuple[str, str, Callable[[Emulator], None], str, str, str]
PLANTED: dict[str, Planted] = {
    "results written by pairs": (
        "run_matmul.cpp",
        BFLOAT16,
        check_matmul,
        "cuda/gemm/tile.cuh",
        "if (row_stride % 8 == 0 && column_count % 8 == 0 && is_aligned(matrix, 8)) {",
        "if (row_stride < 0) {",
    ),
    "lines of a panel without padding": (
        "run_matmul.cpp",
        "float",
        check_panels,
        "cuda/gemm/panel.cuh",
        "kPanelPadding = 4;",
        "kPanelPadding = 0;",
    ),
    "warps' sums of a product of few rows in the same banks": (
        "run_matmul_few_rows.cpp",
        BFLOAT16,
        check_few_rows_of_products,
        "cuda/gemm/few_rows.cuh",
        "kPadding = 4;",
        "kPadding = 0;",
    ),
    "sums of rows in the same banks": (
        "run_rowwise_scaled_linear.cpp",
        BFLOAT16,
        check_few_rows,
        "cuda/int4/rowwise_few_rows.cuh",
        "kFewPitch = kFewColumns + 4;",
        "kFewPitch = kFewColumns;",
    ),
    "rows of outputs in the same banks": (
        "run_decode_attention.cpp",
        BFLOAT16,
        check_decoding,
        "cuda/attention/decode_mma.cuh",
        "kCombinedLine = kWidth + 8;",
        "kCombinedLine = kWidth;",
    ),
    "weights of which lanes write some to the same banks": (
        "run_attention_forward.cpp",
        "float",
        check_copied_attention,
        "cuda/attention/forward_copied.cuh",
        "^ (key / kFragment % 4 * 2);",
        "^ (key / kFragment % 4);",
    ),
    "rows of a cache that are read one by one": (
        "run_decode_attention.cpp",
        "float",
        check_decoding_by_panels,
        "cuda/attention/decode_panels.cuh",
        "if (offset >= 0 && has_vectors && left >= kCount) {",
        "if (offset >= 0 && has_vectors && left < 0) {",
    ),
    "groups that are neighbours of other lanes": (
        "run_spatial_correlation_sample.cpp",
        "float",
        check_correlation,
        "cuda/correlation/correlation.cuh",
        "    group = lane % 8;\n    line = lane / 8;",
        "    group = lane / 4;\n    line = lane % 4;",
    ),
    "correlations that are written one by one": (
        "run_spatial_correlation_sample.cpp",
        "float",
        check_correlation,
        "cuda/correlation/correlation.cuh",
        "if (vectorised) {\n      if (first",
        "if (vectorised && step == 0) {\n      if (first",
    ),
    "pixels that are loaded for every shift": (
        "run_spatial_correlation_sample.cpp",
        "float",
        check_gradient_of_correlation,
        "cuda/correlation/gradient.cuh",
        "if (s % kVector == 1) {",
        "if (s % kVector != 0) {",
    ),
    "packets of eight bytes": (
        "run_pointwise.cpp",
        f"float,{BFLOAT16}",
        check_dense,
        "cuda/pointwise/pointwise.cuh",
        "constexpr int kPacket = 16 / sizeof(Element);\n  const int64_t packed",
        "constexpr int kPacket = 8 / sizeof(Element);\n  const int64_t packed",
    ),
    "packets in an order that spreads them": (
        "run_pointwise.cpp",
        f"float,{BFLOAT16}",
        check_dense,
        "cuda/pointwise/pointwise.cuh",
        "int64_t first = global_thread_index() * kPacket; first < packed;\n       first += step) {",
        "int64_t at = global_thread_index() * kPacket; at < packed; at += step) {\n"
        "    const int64_t first = at / kPacket * 37 % (packed / kPacket) * kPacket;",
    ),
    "rows that are read one by one": (
        "run_rowwise_scaled_linear.cpp",
        BFLOAT16,
        check_quantising,
        "cuda/int4/quantize_rowwise.cuh",
        "packets(stride == 1 && is_aligned(data, kPacket) ? inner / kPacket",
        "packets(stride == 2 ? inner / kPacket",
    ),
    "held rows that are read again": (
        "run_rowwise_scaled_linear.cpp",
        BFLOAT16,
        check_quantising_held_rows,
        "cuda/int4/quantize_held_rows.cuh",
        "quantized_packet<kPerByte>(quantize, packet(i))",
        "quantized_packet<kPerByte>(quantize, (void(i), row.packet(at)))",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_catches_a_kernel_that_moves_more(
    counting_emulator: Emulator, tmp_path: Path, fault: str
) -> None:
    program_file, elements, check, kernel, right, wrong = PLANTED[fault]
    check(counting_emulator)
    flags = [f"-DPKG_EMULATED_TYPES={elements}"]
    planted = plant(tmp_path, kernel, right, wrong, program_file, flags, counting=True)
    with pytest.raises(AssertionError):
        check(planted)
