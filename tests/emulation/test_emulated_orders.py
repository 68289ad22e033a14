"""The same bits in whatever order blocks and the threads of a block run: gradients, divided sums.

A sum that several blocks or threads make is the same each time only if its parts are added in one
order. The emulator chooses who runs when. Here each kernel runs forwards and backwards, with a
block for each piece of its work, and what it writes is compared: of three parts or more, whose sum
is another one from the other end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import test_emulated_attention_varlen as varlen
import test_emulated_lltm as lltm
import torch
from emulator import SANITIZE_ADDRESSES, Argument, Emulator, Order, extent
from quantised_samples import scales_and_zeros, words
from rowwise_scaled_samples import call as rowwise_call
from test_emulated_attention import emulated_backward, emulated_forward, make
from test_emulated_decode_attention import emulated as emulated_decoding
from test_emulated_decode_attention import make as make_decoding
from test_emulated_few_rows import LAYOUTS, few_rows, turn_of, weight_of
from test_emulated_int4_linear import emulated as emulated_int4_linear
from test_emulated_matmul import emulated_matmul
from test_emulated_rotary_embedding import emulated as emulated_rotary
from test_emulated_rotary_embedding import heads_inside, tables
from test_emulated_rowwise_scaled_linear import emulated as emulated_rowwise
from test_emulated_spatial_correlation_sample import emulated as emulated_correlation
from test_emulated_spatial_correlation_sample import emulated_gradient
from test_emulated_warpgroups import bulk
from test_emulator import plant
from torch import Tensor

from pkg.testing import Sample

TYPES = (torch.float32, torch.bfloat16, torch.float64)
A_BLOCK_EACH = 1000  # more than there are pieces of work


def memory(tensor: Tensor) -> Tensor:
    """Its bytes, from the first element to the last."""
    count = extent(tensor) // tensor.element_size()
    return tensor.as_strided((count,), (1,), tensor.storage_offset()).view(torch.uint8)


class InBothOrders(Emulator):
    """Runs each kernel in the two orders, with as many blocks as it has work for."""

    def run(
        self,
        kernel: str,
        outputs: Sequence[str],
        blocks: int = A_BLOCK_EACH,
        order: Order = "by_chance",
        **arguments: Argument,
    ) -> None:
        given = {name: arguments[name] for name in outputs}
        written = {name: memory(each) for name, each in given.items() if isinstance(each, Tensor)}
        before = {name: each.clone() for name, each in written.items()}
        results = []
        orders: tuple[Order, ...] = ("forwards", "backwards")
        for order in orders:
            for name, each in written.items():
                each.copy_(before[name])
            super().run(kernel, outputs, A_BLOCK_EACH, order, **arguments)
            results.append({name: each.clone() for name, each in written.items()})
        for name in written:
            assert torch.equal(*(each[name] for each in results)), f"{name} of {kernel} differs"


def run_matmul(emulator: Emulator) -> None:
    """Of the shape of a weight's gradient, of few tiles and many rows."""
    for dtype, depth in zip(TYPES, (8, 64, 8), strict=True):
        grad, input = torch.randn(6 * depth, 5).to(dtype), torch.randn(6 * depth, 7).to(dtype)
        emulated_matmul(emulator, grad.mT, input, split_depth=depth)
    grad, input = torch.randn(200, 12), torch.randn(200, 8)
    emulated_matmul(emulator, grad.mT, input, split_depth=32, multiplied_as="tf32")


def run_matmul_of_few_rows(emulator: Emulator) -> None:
    """Divided among blocks; the sums of eight warps, and those of lanes."""
    for dtype in TYPES:
        for layout in LAYOUTS:
            part = turn_of(dtype, layout) * 2
            b = weight_of(6 * part, 21, dtype=dtype, layout=layout)
            a = torch.randn(4, 6 * part).to(dtype)
            for split_depth in (0, part):
                few_rows(emulator, a, b, layout, split_depth=split_depth)


def run_matmul_by_warpgroups(emulator: Emulator) -> None:
    emulated_matmul(emulator, bulk(9, 330), bulk(330, 16), tile_columns=128, split_depth=64)


def run_lltm(emulator: Emulator) -> None:
    for dtype in TYPES[:2]:
        sample = Sample(lltm.arguments((5, 72, 136))).converted(dtype)
        lltm.emulated_step(emulator, sample, 1, split_panels=1)


def run_lltm_gradients(emulator: Emulator) -> None:
    lltm.test_gradients_of_a_step(emulator, torch.float32)
    lltm.test_a_product_of_two_parts(emulator, torch.float32, 1)


def run_int4_linear(emulator: Emulator) -> None:
    weight = (words(16, 1056, 2), scales_and_zeros(16, 1056, 32), 32, 2)
    for options in ({"split_turns": 1}, {"split_turns": 3, "by_warpgroups": True}):
        emulated_int4_linear(emulator, torch.randn(3, 1056).bfloat16(), *weight, **options)


def run_rowwise(emulator: Emulator) -> None:
    sample = rowwise_call((3,), 5 * 128, 9, False).converted(torch.float32)
    emulated_rowwise(emulator, "s8s4", *sample.args, split_slices=1)
    sample = rowwise_call((3,), 5 * 128, 16, True).converted(torch.float32)
    emulated_rowwise(emulator, "s4s4", *sample.args, split_slices=2, tile_rows=128)


def run_decoding(emulator: Emulator) -> None:
    for dtype in TYPES[:2]:
        emulated_decoding(emulator, make_decoding((300, 3), (4, 2), dtype=dtype), 5)


def run_gradients(emulator: Emulator) -> None:
    """By three kernels and by one, in which three tiles of keys add to one of queries."""
    for dtype, columns in ((torch.float32, 140), (torch.bfloat16, 260)):
        call = make(1, rows=5, columns=columns, head=8, dtype=dtype)
        outputs = emulated_forward(emulator, call)
        for joint in (False, True):
            emulated_backward(emulator, call, outputs, joint=joint)


def run_packed_gradients(emulator: Emulator) -> None:
    call = varlen.make((5, 3), (260, 9), (1, 1), (8, 8), dtype=torch.bfloat16)
    varlen.emulated(emulator, call, joint=True)


def run_gradients_by_warpgroups(emulator: Emulator) -> None:
    call = make(2, rows=5, columns=140, head=64, dtype=torch.bfloat16)
    outputs = emulated_forward(emulator, call, warpgroups=True)
    emulated_backward(emulator, call, outputs, warpgroups=True)


def run_joint_gradients_by_warpgroups(emulator: Emulator) -> None:
    """Three tiles of keys add to each of two of queries, by pieces of both kinds; and heads that
    share keys, of whose first queries fewer see them."""
    shared = {"is_causal": True, "key_lead": (1,), "enable_gqa": True}
    for lead, head, rows, options in ((1, 64, 70, {}), (1, 72, 70, {}), (2, 64, 260, shared)):
        call = make(lead, rows=rows, columns=260, head=head, dtype=torch.bfloat16, **options)
        outputs = emulated_forward(emulator, call, warpgroups=True)
        emulated_backward(emulator, call, outputs, warpgroups=True, joint=True)


def run_mask_gradient(emulator: Emulator) -> None:
    """Of a number for each key, to which all queries add: four parts."""
    call = make(2, rows=70, columns=70, head=8, mask=torch.randn(70))
    emulated_backward(emulator, call, emulated_forward(emulator, call))


def run_correlation(emulator: Emulator) -> None:
    for dtype in TYPES[:2]:
        first, second = torch.randn(2, 1, 24, 5, 18).to(dtype)
        emulated_correlation(emulator, first, second, 1, 3, 1, 0, 1, 1)
        grad = torch.randn(1, 3, 3, 5, 18).to(dtype)
        for of_input2 in (False, True):
            emulated_gradient(emulator, grad, second, of_input2, 1, 3, 1, 0, 1, 1)


def run_rotary_gradient(emulator: Emulator) -> None:
    input = heads_inside(2, 3, 70, 16).float()
    emulated_rotary(emulator, "packets", input, *tables(70, 8, torch.float32), back=True)


KERNELS: dict[str, Callable[[Emulator], None]] = {
    name.removeprefix("run_"): function
    for name, function in list(globals().items())
    if name.startswith("run_")
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_order_of_blocks_changes_no_bit(cuda_emulator: Emulator, name: str) -> None:
    KERNELS[name](InBothOrders(cuda_emulator.program))


def check_matmul(emulator: Emulator) -> None:
    emulated_matmul(emulator, torch.randn(40, 5).mT, torch.randn(40, 7), split_depth=8)


def check_step(emulator: Emulator) -> None:
    sample = Sample(lltm.arguments((5, 24, 16))).converted(torch.float32)
    lltm.emulated_step(emulator, sample, 1, split_panels=1)


def check_joint_gradients(emulator: Emulator) -> None:
    call = make(1, rows=5, columns=140, head=8)
    outputs = emulated_forward(Emulator(emulator.program), call)
    emulated_backward(emulator, call, outputs, joint=True)


def run_copied_joint_gradients(emulator: Emulator) -> None:
    """Three tiles of keys add to one of queries."""
    call = make(1, rows=5, columns=140, head=8)
    outputs = emulated_forward(Emulator(emulator.program), call)
    options = {"shared_bytes": 227 * 1024, "joint": True, "copied_panels": True}
    emulated_backward(emulator, call, outputs, **options)  # type: ignore[arg-type]


def numbered_as_they_come(name: str) -> str:
    """Code that gives each block the number of those that have come before it."""
    return f"""
  PKG_SHARED(int, arrival, [1]);
  static int arrivals = 0;
  if (threadIdx.x == 0) {{
    arrival[0] = atomicAdd(&arrivals, 1);
  }}
  __syncthreads();
  const int64_t {name} = arrival[0];
"""


# The file of the program, the call, the kernel's file, and a change of its text.
PLANTED: dict[str, tuple[str, Callable[[Emulator], None], str, str, str]] = {
    "parts of a product as they come": (
        "run_matmul.cpp",
        check_matmul,
        "cuda/gemm/matmul.cuh",
        "    store_tile(sums, problem.c + batch *",
        numbered_as_they_come("part") + "    store_tile(sums, problem.c + part *",
    ),
    "parts of a step as they come": (
        "run_lltm.cpp",
        check_step,
        "cuda/lltm/step.cuh",
        "    const int64_t split =\n"
        "        step.tiles.divide(static_cast<uint32_t>(index)).quotient;\n",
        numbered_as_they_come("split"),
    ),
    "turns as blocks come": (
        "run_attention_backward.cpp",
        check_joint_gradients,
        "cuda/attention/joint_gradients_panels.cuh",
        "  const JointTurn turn =\n"
        "      joint_turn<kJointKeys<Element>>(extent, row_begin, column_tile);\n",
        numbered_as_they_come("come")
        + "const JointTurn turn{int(come), come + 1 == call.column_tiles(), column_tile >= 0};",
    ),
    "parts of a mask's gradient by atomic additions": (
        "run_attention_backward.cpp",
        run_mask_gradient,
        "cuda/attention/grad_mask.cuh",
        """    warp_sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && element < elements) {
      for (int other = 1; other < kPartWarps; ++other) {
        sum += warp_sums[other][lane];
      }
""",
        """    if (warp == 0) {
      warp_sums[0][lane] = 0;
    }
    __syncthreads();
    atomicAdd(&warp_sums[0][lane], sum);
    __syncthreads();
    if (warp == 0 && element < elements) {
      sum = warp_sums[0][lane];
""",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_catches_sums_in_the_order_of_blocks(
    cuda_emulator: Emulator, tmp_path: Path, fault: str
) -> None:
    program_file, run, kernel, right, wrong = PLANTED[fault]
    run(InBothOrders(cuda_emulator.program))
    flags = ["-DPKG_EMULATED_TYPES=float", *SANITIZE_ADDRESSES]
    planted = plant(tmp_path, kernel, right, wrong, program_file, flags)
    with pytest.raises(AssertionError, match="differs"):
        run(InBothOrders(planted.program))
