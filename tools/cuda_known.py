"""What tools/cuda_report.py cannot read from machine code: faults that are known, and sizes.

Kernels are named by regular expressions of the whole name that the report gives them.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Exemption:
    """Kernels that have a fault today, and why: the line goes when the fault does.

    ``fault`` is a word of ``faults`` in tools/cuda_report.py. The check fails where an exemption
    is not needed any more.
    """

    kernel: str
    fault: str
    reason: str
    architecture: str = ".*"


@dataclasses.dataclass(frozen=True)
class Expected:
    """The least that a main loop has of some instructions: fewer, and it is another loop.

    ``on_the_way`` are those that the shortest way round has: what the compiler has put behind
    branches, one after the other, is not on it.
    """

    kernel: str
    counts: dict[str, int]
    on_the_way: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Copied:
    """What the copy engine brings to shared memory for a pass of the main loop.

    A kernel's copies are asked for by other warps than multiply: ``warps`` of a block make a pass
    of the main loop for each time that ``boxes`` of ``box_bytes`` are copied.
    """

    boxes: int
    box_bytes: int
    warps: int

    @property
    def bytes_of_warp(self) -> float:
        """Bytes for each pass of a warp."""
        return self.boxes * self.box_bytes / self.warps


EXEMPTIONS: tuple[Exemption, ...] = ()

EXPECTED = (
    # 8 x 8 products of a thread, and its 16 numbers, for each of two steps unrolled.
    Expected(
        r"matmul_kernel<float, float, KeepSums, BlockProduct<.*>", {"FFMA": 128, "LDS.128": 8}
    ),
    Expected(r"matmul_kernel<double, double, KeepSums, BlockProduct<.*>", {"LDS.64": 12}),
    # 16 x 8 products of a thread, and its 24 numbers, for each of four steps; 16 x 8 x 4 products
    # of 64 x 32 sums of a warp, or as many of 8 x 8 x 4, and their 12 numbers, four times. The same
    # of 4 x 4 products, and of 16 x 16 sums.
    Expected(r"matmul_kernel<float, .*LargeProduct<float>>", {"FFMA": 512, "LDS.128": 24}),
    Expected(r"matmul_kernel<double, .*LargeProduct<double>>", {"LDS.64": 48}),
    Expected(r"matmul_kernel<float, .*SmallProduct<float>>", {"FFMA": 64, "LDS.128": 8}),
    Expected(r"matmul_kernel<double, .*SmallProduct<double>>", {"LDS.64": 16}),
    # 64 x 64 sums of a warp, over 64 steps of halves: 128 products by 32 loads of four matrices.
    Expected(
        r"matmul_kernel<(bfloat16|float16), .*>",
        {"HMMA.16816": 128, "LDSM.x4": 32, "LDGSTS.128": 16},
    ),
    # The same over 32 steps of float32, in TF32; for each operand loads of both kinds, of lines
    # that are rows or columns and of lines that are steps.
    Expected(
        r"matmul_kernel<Tf32, .*>",
        {"HMMA.1688": 128, "LDSM.x4": 32, "LDS.32": 128, "LDGSTS.128": 32},
    ),
    # A stage of 128 bytes of the summed dimension: four products, a wait and a release.
    Expected(
        r"matmul_warpgroup_kernel<(bfloat16|float16), \w+, 256, .*>",
        {"HGMMA.64x256x16": 4, "SYNCS": 2},
    ),
    Expected(
        r"matmul_warpgroup_kernel<(bfloat16|float16), \w+, 128, .*>",
        {"HGMMA.64x128x16": 4, "SYNCS": 2},
    ),
    # Three stages, the parts of 64 steps: six products of such, waits for them, and releases.
    Expected(r"matmul_six_products_kernel<.*>", {"HGMMA.64x128x16": 24, "SYNCS": 6}),
    Expected(r"matmul_warpgroup_kernel<Tf32, float, 256, .*>", {"HGMMA.64x256x8": 4, "SYNCS": 2}),
    Expected(r"matmul_warpgroup_kernel<Tf32, float, 128, .*>", {"HGMMA.64x128x8": 4, "SYNCS": 2}),
    Expected(r"matmul_warpgroup_kernel<int8, int, 256, .*>", {"IGMMA.64x256x32": 4, "SYNCS": 2}),
    Expected(r"matmul_warpgroup_kernel<int8, int, 128, .*>", {"IGMMA.64x128x32": 4, "SYNCS": 2}),
    Expected(r"matmul_kernel<int8, .*>", {"IMMA.16832": 128, "LDSM.x4": 32, "LDGSTS.128": 16}),
    # Few rows: four vectors of a weight to a stage and from another; of eight rows, or as many as
    # have 32 registers of sums, a vector each, or of a weight along columns four numbers.
    Expected(
        r"matmul_few_rows_kernel<(bfloat16|float16), .*AlongDepth, .*>",
        {"FFMA": 256, "LDGSTS.128": 4, "LDS.128": 4, "LDG.128": 8},
    ),
    Expected(
        r"matmul_few_rows_kernel<(bfloat16|float16), .*AlongColumns, .*>",
        {"FFMA": 128, "LDGSTS.128": 4, "LDS.128": 4, "LDG.16": 16},
    ),
    Expected(
        r"matmul_few_rows_kernel<float, .*AlongDepth, .*>",
        {"FFMA": 128, "LDGSTS.128": 4, "LDS.128": 4, "LDG.128": 8},
    ),
    Expected(
        r"matmul_few_rows_kernel<float, .*AlongColumns, .*>",
        {"FFMA": 128, "LDGSTS.128": 4, "LDS.128": 4, "LDG.32": 32},
    ),
    Expected(
        r"matmul_few_rows_kernel<double, .*AlongDepth, .*>",
        {"DFMA": 32, "LDGSTS.128": 4, "LDS.128": 4, "LDG.128": 4},
    ),
    Expected(
        r"matmul_few_rows_kernel<double, .*AlongColumns, .*>",
        {"DFMA": 64, "LDGSTS.128": 4, "LDS.128": 4, "LDG.64": 32},
    ),
    # A thread's 8 x 12 sums, and its 20 numbers, for each of two steps unrolled.
    Expected(r"lltm_step_kernel<float>", {"FFMA": 192, "LDS.128": 10}),
    Expected(r"lltm_step_kernel<double>", {"LDS.64": 14}),
    # 64 rows x 16 units of a warp, over 64 steps of halves: 96 products by 28 loads.
    Expected(
        r"lltm_step_kernel<(bfloat16|float16)>",
        {"HMMA.16816": 96, "LDSM.x4": 28, "LDGSTS.128": 16},
    ),
    # 32 x 64 scores of a warp over the head, and their product with the values: both alike, but
    # that the first loads two operands.
    Expected(
        r"attention_forward_mma_kernel<.*, 64, true, 128>",
        {"HMMA.16816": 128, "LDSM.x4": 40},
        {"MUFU": 64},  # an exponential of each score
    ),
    Expected(
        r"attention_forward_mma_kernel<.*, 128, true, 128>",
        {"HMMA.16816": 256, "LDSM.x4": 80},
        {"MUFU": 64},
    ),
    # 16 x 64 scores of a warp, for 64 columns of the head.
    Expected(
        r"attention_forward_mma_kernel<.*, (256, true|\d+, false), \d+>",
        {"HMMA.16816": 32, "LDSM.x4": 20},
    ),
    # 64 x 128 scores of a warpgroup, or 64 x 64, over the head, and their product with the values.
    Expected(
        r"attention_forward_warpgroups_kernel<.*, 64, true>",
        {"HGMMA.64x128x16": 4, "HGMMA.64x64x16": 8},
        {"MUFU": 64},  # an exponential of each score, as below
    ),
    Expected(r"attention_forward_warpgroups_kernel<.*, 64, false>", {"HGMMA.64x64x16": 8}),
    Expected(
        r"attention_forward_warpgroups_kernel<.*, 128, true>",
        {"HGMMA.64x128x16": 16},
        {"MUFU": 64},
    ),
    Expected(
        r"attention_forward_warpgroups_kernel<.*, 128, false>",
        {"HGMMA.64x64x16": 8, "HGMMA.64x128x16": 4},
    ),
    Expected(
        r"attention_forward_warpgroups_kernel<.*, 256, true>",
        {"HGMMA.64x64x16": 16, "HGMMA.64x256x16": 4},
        {"MUFU": 32},
    ),
    # Scores and their gradients, over the heads, and the products of them that are summed.
    Expected(
        r"attention_grad_query_warpgroups_kernel<.*, 64, true>",
        {"HGMMA.64x128x16": 8, "HGMMA.64x64x16": 8},
        {"MUFU": 64},
    ),
    Expected(r"attention_grad_query_warpgroups_kernel<.*, 64, false>", {"HGMMA.64x64x16": 12}),
    Expected(
        r"attention_grad_query_warpgroups_kernel<.*, 128, true>",
        {"HGMMA.64x128x16": 24},
        {"MUFU": 64},
    ),
    Expected(
        r"attention_grad_query_warpgroups_kernel<.*, 128, false>",
        {"HGMMA.64x64x16": 16, "HGMMA.64x128x16": 4},
    ),
    Expected(
        r"attention_grad_query_warpgroups_kernel<.*, 256, true>",
        {"HGMMA.64x64x16": 32, "HGMMA.64x256x16": 4},
        {"MUFU": 32},
    ),
    Expected(
        r"attention_grad_key_value_warpgroups_kernel<.*, 256, true>",
        {"HGMMA.64x64x16": 32, "HGMMA.64x128x16": 8},
        {"MUFU": 32},
    ),
    Expected(
        r"attention_grad_key_value_warpgroups_kernel<.*, 64, true>",
        {"HGMMA.64x64x16": 16},
        {"MUFU": 32},
    ),
    Expected(r"attention_grad_key_value_warpgroups_kernel<.*, 64, false>", {"HGMMA.64x64x16": 16}),
    Expected(
        r"attention_grad_key_value_warpgroups_kernel<.*, 128, true>",
        {"HGMMA.64x64x16": 16, "HGMMA.64x128x16": 8},
        {"MUFU": 32},
    ),
    Expected(r"attention_grad_key_value_warpgroups_kernel<.*, 128, false>", {"HGMMA.64x64x16": 24}),
    # The same, and gradients of scores times keys, half of the columns by either warpgroup.
    Expected(
        r"attention_joint_gradients_warpgroups_kernel<.*, 64>",
        {"HGMMA.64x64x16": 16, "HGMMA.64x32x16": 8},
        {"MUFU": 32},
    ),
    Expected(
        r"attention_joint_gradients_warpgroups_kernel<.*, 128>",
        {"HGMMA.64x64x16": 24, "HGMMA.64x128x16": 8},
        {"MUFU": 32},
    ),
    Expected(r"attention_grad_query_mma_kernel<.*, 128>", {"HMMA.16816": 32, "LDSM.x4": 20}),
    # 16 x 32 scores of a warp, where blocks are of 64 queries.
    Expected(r"attention_grad_query_mma_kernel<.*, 64>", {"HMMA.16816": 16, "LDSM.x4": 12}),
    Expected(
        r"attention_(grad_key_value|joint_gradients)_mma_kernel<.*>",
        {"HMMA.16816": 16, "LDSM.x4": 12},
    ),
    # Of panels, two steps of a thread's 8 x 8 sums.
    Expected(
        r"attention_(\w+_panels|grad_mask)_kernel<float, .*>",
        {"FFMA": 128, "LDS.128": 8},
    ),
    # The same for each of four steps, of copied panels.
    Expected(
        r"attention_(forward|joint_gradients)_copied_kernel<.*>", {"FFMA": 256, "LDS.128": 16}
    ),
    # Scores of 16 x 16 for heads of up to 256, and as many outputs as the tile is wide.
    Expected(
        r"decode_attention_mma_kernel<.*, 64>", {"HMMA.16816": 40, "LDSM.x4": 36, "LDGSTS.128": 20}
    ),
    Expected(
        r"decode_attention_mma_kernel<.*, 128>", {"HMMA.16816": 48, "LDSM.x4": 40, "LDGSTS.128": 24}
    ),
    Expected(
        r"decode_attention_mma_kernel<.*, 256>", {"HMMA.16816": 64, "LDSM.x4": 48, "LDGSTS.128": 32}
    ),
    # 8 elements of 2 keys by those of 8 rows, 16 bytes of each at a time.
    Expected(
        r"decode_attention_panels_kernel<float, 8, .*>",
        {"FFMA": 128, "LDG.128": 4, "LDS.128": 16},
    ),
    # 64 x 64 sums of a warp, over 128 values, and what it needs of both operands.
    Expected(
        r"rowwise_scaled_linear_kernel<false>",
        {"IMMA.16832": 128, "LDS.64": 32, "LDSM.x4": 8, "LDGSTS.128": 12},
    ),
    Expected(
        r"rowwise_scaled_linear_kernel<true>",
        {"IMMA.16832": 128, "LDSM.x4": 16, "LDGSTS.128": 8},
    ),
    # Two turns of 32 columns by 16 rows, over 128 values each.
    Expected(r"rowwise_few_rows_kernel<false>", {"IMMA.16832": 32, "LDG.128": 16}),
    Expected(r"rowwise_few_rows_kernel<true>", {"IMMA.16832": 32, "LDG.128": 12}),
    # 64 columns by 128 or 256 rows of a warpgroup, over 128 values: a lane's bytes of two columns,
    # and the words that lanes exchange.
    Expected(
        r"rowwise_warpgroups_kernel<128>",
        {"IGMMA.64x128x32": 4, "LDG.128": 2, "SHFL": 8, "SYNCS": 2},
    ),
    Expected(
        r"rowwise_warpgroups_kernel<256>",
        {"IGMMA.64x256x32": 4, "LDG.128": 2, "SHFL": 8, "SYNCS": 2},
    ),
    Expected(r"rowwise_widen_kernel<.*>", {"LDG.64": 1, "STG.128": 1}),
    # 16, 32 or 64 rows by 32 columns of a warp, over 128 steps, and the sums of the rows: a word
    # makes two operands.
    Expected(
        r"int4_linear_half_kernel<.*Int4TurnedProduct<\w+, 1>, \d+>.*",
        {"HMMA.16816": 24, "LDSM.x4": 4, "LDGSTS.128": 7},
    ),
    Expected(
        r"int4_linear_half_kernel<.*Int4TurnedProduct<\w+, 2>, \d+>.*",
        {"HMMA.16816": 48, "LDSM.x4": 8, "LDGSTS.128": 7},
    ),
    Expected(
        r"int4_linear_half_kernel<.*Int4Product<\w+, 2>, \d+>.*",
        {"HMMA.16816": 80, "LDSM.x4": 16, "LDGSTS.128": 9},
    ),
    Expected(
        r"int4_linear_half_kernel<.*Int4Product<\w+, 4>, \d+>.*",
        {"HMMA.16816": 160, "LDSM.x4": 32, "LDGSTS.128": 13},
    ),
    # 64 columns by 128 rows of a warpgroup, over 128 steps: a lane's words of two tiles of eight
    # columns, and a multiply-add of each sum of a group.
    Expected(
        r"int4_linear_warpgroups_kernel<.*, 128>",
        {"HGMMA.64x128x16": 8, "FFMA": 64, "LDG.128": 2, "SYNCS": 3},
        {"HGMMA.64x128x16": 8, "FFMA": 64},
    ),
    Expected(
        r"int4_linear_warpgroups_kernel<.*, 64>",
        {"HGMMA.64x128x16": 8, "FFMA": 128, "LDG.128": 2},
    ),
    Expected(
        r"int4_linear_warpgroups_kernel<.*, 32>",
        {"HGMMA.64x128x16": 8, "FFMA": 256, "LDG.128": 2},
    ),
    Expected(r"int4_row_sums_kernel<.*>", {"LDG.128": 1, "SHFL": 5}),
    # Two rows of 4 positions at 9 shifts for each of two channels, and their 20 pixels.
    Expected(r"spatial_correlation_kernel<float>", {"FFMA": 144, "LDS.128": 10}),
    Expected(r"spatial_correlation_kernel<double>", {"DFMA": 72, "LDS.128": 14}),
    # 2 x 3 pairs of rows: 16 positions by 24 pixels of each, over 32 channels.
    Expected(r"spatial_correlation_mma_kernel<.*>", {"HMMA.16816": 36, "LDSM.x4": 16}),
    # Two rows of 4 pixels of 8 channels at 9 shifts.
    Expected(
        r"spatial_correlation_gradient_kernel<(bfloat16|float16|float)>",
        {"FFMA": 576, "LDS.128": 42},
    ),
)

# Bytes that a launch adds to the shared memory of a block: the largest that csrc/cuda asks for.
# The check names a kernel that needs a line here.
DYNAMIC_SHARED: dict[str, int] = {
    r"matmul_kernel<.*WideProduct<.*>": 147456,
    r"matmul_kernel<(bfloat16|float16|int8|Tf32), .*>": 65536,
    r"matmul_kernel<float, .*LargeProduct<float>>": 75264,
    r"matmul_kernel<double, .*LargeProduct<double>>": 101376,
    r"matmul_kernel<float, .*SmallProduct<float>>": 26624,
    r"matmul_kernel<double, .*SmallProduct<double>>": 36864,
    r"matmul_few_rows_kernel<.*>": 65536,
    r"lltm_product_kernel<(bfloat16|float16), .*>": 65536,
    r"lltm_step_kernel<(bfloat16|float16)>": 65536,
    # Four stages of 48 KiB, or six of 32.
    r"matmul_warpgroup_kernel<.*>": 196608,
    r"matmul_six_products_kernel<.*>": 196608,
    # Stages of both operands; less than 4 KiB more are declared.
    r"rowwise_scaled_linear_kernel<false>": 73728,
    r"rowwise_scaled_linear_kernel<true>": 65536,
    # Eight stages of 16 KiB, or six of 32.
    r"rowwise_warpgroups_kernel<128>": 131072,
    r"rowwise_warpgroups_kernel<256>": 196608,
    r"int4_linear_half_kernel<.*Int4TurnedProduct<\w+, [12]>, 32>.*": 86016,
    r"int4_linear_half_kernel<.*Int4TurnedProduct<\w+, [12]>, 64>.*": 79872,
    r"int4_linear_half_kernel<.*Int4TurnedProduct<\w+, [12]>, 128>.*": 76800,
    r"int4_linear_half_kernel<.*Int4Product<\w+, 2>, 32>.*": 55296,
    r"int4_linear_half_kernel<.*Int4Product<\w+, 2>, 64>.*": 52224,
    r"int4_linear_half_kernel<.*Int4Product<\w+, 2>, 128>.*": 50688,
    r"int4_linear_half_kernel<.*Int4Product<\w+, 4>, 32>.*": 79872,
    r"int4_linear_half_kernel<.*Int4Product<\w+, 4>, 64>.*": 76800,
    r"int4_linear_half_kernel<.*Int4Product<\w+, 4>, 128>.*": 75264,
    # Eight stages of 16 KiB.
    r"int4_linear_warpgroups_kernel<.*>": 131072,
    # Of heads as wide as the tile of the output; up to 99 KiB for wider ones.
    r"attention_forward_mma_kernel<.*, 64, (true|false), 128>": 40960,
    r"attention_forward_mma_kernel<.*, 128, (true|false), 128>": 81920,
    r"attention_forward_mma_kernel<.*, 128, false, 64>": 81920,
    r"attention_forward_mma_kernel<.*, 256, true, 128>": 163840,
    r"attention_forward_mma_kernel<.*, 256, true, 64>": 98304,
    r"attention_forward_copied_kernel<.*, 64>": 67584,
    r"attention_forward_copied_kernel<.*, 128>": 134144,
    r"attention_joint_gradients_copied_kernel<.*, 64>": 102400,
    r"attention_joint_gradients_copied_kernel<.*, 128>": 186368,
    r"attention_forward_warpgroups_kernel<.*, 64, true>": 147456,
    r"attention_forward_warpgroups_kernel<.*, 64, false>": 81920,
    r"attention_forward_warpgroups_kernel<.*, 128, true>": 163840,
    r"attention_forward_warpgroups_kernel<.*, 128, false>": 98304,
    r"attention_forward_warpgroups_kernel<.*, 256, true>": 196608,
    r"attention_grad_query_warpgroups_kernel<.*, 64, true>": 163840,
    r"attention_grad_query_warpgroups_kernel<.*, 64, false>": 98304,
    r"attention_grad_query_warpgroups_kernel<.*, 128, true>": 196608,
    r"attention_grad_query_warpgroups_kernel<.*, 128, false>": 196608,
    r"attention_grad_query_warpgroups_kernel<.*, 256, true>": 196608,
    r"attention_grad_key_value_warpgroups_kernel<.*, 64, .*>": 100352,
    r"attention_grad_key_value_warpgroups_kernel<.*, 128, .*>": 198656,
    r"attention_grad_key_value_warpgroups_kernel<.*, 256, true>": 197632,
    r"attention_joint_gradients_warpgroups_kernel<.*, 64>": 165888,
    r"attention_joint_gradients_warpgroups_kernel<.*, 128>": 230400,
    r"attention_(grad_key_value|joint_gradients)_panels_kernel<\w*float\w*, 64>": 69632,
    r"attention_(grad_key_value|joint_gradients)_panels_kernel<.*, 128>": 86016,
    r"attention_grad_key_value_panels_kernel<double, 64>": 87040,
    r"decode_attention_mma_kernel<.*, 64>": 34816,
    r"decode_attention_mma_kernel<.*, 128>": 69632,
    r"decode_attention_mma_kernel<.*, 256>": 139264,
    # Of such heads too, with two places for what is loaded in turns.
    r"attention_grad_query_mma_kernel<.*, 64, 128>": 57344,
    r"attention_grad_query_mma_kernel<.*, 128, 128>": 114688,
    r"attention_grad_query_mma_kernel<.*, 128, 64>": 98304,
    r"attention_grad_key_value_mma_kernel<.*, 64, 128>": 49152,
    r"attention_grad_key_value_mma_kernel<.*, 128, (128|64)>": 98304,
    r"attention_joint_gradients_mma_kernel<.*, 64, .*>": 65536,
    r"attention_joint_gradients_mma_kernel<.*, 128, .*>": 114688,
    # Of a window of one place, up to 64 channels, a tile of one class; totals of 36 KiB for more.
    r"spatial_correlation_kernel<float>": 20992,
    r"spatial_correlation_kernel<double>": 11776,
    r"spatial_correlation_mma_kernel<.*>": 50560,
    r"spatial_correlation_gradient_kernel<(bfloat16|float16|float)>": 29184,
    r"spatial_correlation_gradient_kernel<double>": 45568,
}

# Kernels whose operands come by the copy engine. The check names a kernel that needs a line here.
COPIED: dict[str, Copied] = {
    r"matmul_warpgroup_kernel<\w+, \w+, 256, .*>": Copied(boxes=6, box_bytes=8192, warps=8),
    r"matmul_warpgroup_kernel<\w+, \w+, 128, .*>": Copied(boxes=4, box_bytes=8192, warps=8),
    r"matmul_six_products_kernel<.*>": Copied(boxes=12, box_bytes=8192, warps=8),
    # Of the activations of 128 rows a stage of 64 steps, for half a pass of eight warps.
    r"int4_linear_warpgroups_kernel<.*>": Copied(boxes=2, box_bytes=8192, warps=4),
    # Of the rows a stage of 128 values.
    r"rowwise_warpgroups_kernel<128>": Copied(boxes=2, box_bytes=8192, warps=8),
    r"rowwise_warpgroups_kernel<256>": Copied(boxes=4, box_bytes=8192, warps=8),
    # Of keys and of values, 64 or 128 of them.
    r"attention_forward_warpgroups_kernel<.*, 64, true>": Copied(boxes=4, box_bytes=8192, warps=8),
    r"attention_forward_warpgroups_kernel<.*, 64, false>": Copied(boxes=2, box_bytes=8192, warps=8),
    r"attention_forward_warpgroups_kernel<.*, 128, true>": Copied(boxes=8, box_bytes=8192, warps=8),
    r"attention_forward_warpgroups_kernel<.*, 128, false>": Copied(
        boxes=4, box_bytes=8192, warps=8
    ),
    r"attention_forward_warpgroups_kernel<.*, 256, true>": Copied(boxes=8, box_bytes=8192, warps=8),
    # The same of the gradient of the query; of the others queries, and the gradient of the output.
    r"attention_grad_query_warpgroups_kernel<.*, 64, true>": Copied(
        boxes=4, box_bytes=8192, warps=8
    ),
    r"attention_grad_query_warpgroups_kernel<.*, 64, false>": Copied(
        boxes=2, box_bytes=8192, warps=8
    ),
    r"attention_grad_query_warpgroups_kernel<.*, 128, true>": Copied(
        boxes=8, box_bytes=8192, warps=8
    ),
    r"attention_grad_query_warpgroups_kernel<.*, 128, false>": Copied(
        boxes=4, box_bytes=8192, warps=8
    ),
    r"attention_grad_query_warpgroups_kernel<.*, 256, true>": Copied(
        boxes=8, box_bytes=8192, warps=8
    ),
    r"attention_grad_key_value_warpgroups_kernel<.*, 64, .*>": Copied(
        boxes=4, box_bytes=4096, warps=8
    ),
    r"attention_grad_key_value_warpgroups_kernel<.*, 128, .*>": Copied(
        boxes=8, box_bytes=4096, warps=8
    ),
    r"attention_joint_gradients_warpgroups_kernel<.*, 64>": Copied(
        boxes=4, box_bytes=4096, warps=8
    ),
    r"attention_joint_gradients_warpgroups_kernel<.*, 128>": Copied(
        boxes=8, box_bytes=4096, warps=8
    ),
    # Two warps have 8 boxes of 4096 bytes copied each, by the same instructions.
    r"attention_grad_key_value_warpgroups_kernel<.*, 256, true>": Copied(
        boxes=8, box_bytes=8192, warps=8
    ),
}

# Kernels that multiply integers without tensor cores: in others IMAD makes addresses.
INTEGERS = r"matmul_kernel<int8, .*"
