"""What the tensor cores' kernels ask of the memories, as the emulator counts it.

The headers of the kernels say how many loads of shared memory a product needs; here each is held to
it, and to accesses that nothing delays: no two of a load in the same banks, no byte of global
memory moved that is not used.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from emulator import Counters, Emulator
from test_emulated_attention import (
    Call,
    emulated_backward,
    emulated_forward,
    make,
)
from test_emulated_matmul import emulated_matmul

CYCLES = 4  # of shared memory, for 512 bytes: four matrices, or 16 bytes of each lane
SECTOR = 32


def check_accesses(counted: Counters) -> None:
    assert counted.products > 0
    assert counted.matrix_load_cycles == CYCLES * counted.matrix_loads
    assert counted.copies > 0
    assert counted.copy_cycles == CYCLES * counted.copies
    assert counted.copied_sectors * SECTOR == counted.copied_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_products_of_matrices(
    cuda_emulator: Emulator, dtype: torch.dtype, transposed: tuple[bool, bool]
) -> None:
    if dtype == torch.int8 and transposed != (False, True):
        pytest.skip("int8 is copied where it lies along the summed dimension alone")
    a = torch.randint(-3, 4, (256, 128) if not transposed[0] else (128, 256)).to(dtype)
    b = torch.randint(-3, 4, (128, 256) if not transposed[1] else (256, 128)).to(dtype)
    a, b = a.mT if transposed[0] else a, b.mT if transposed[1] else b
    emulated_matmul(cuda_emulator, a, b, torch.int32 if dtype == torch.int8 else dtype)
    counted = cuda_emulator.counters
    check_accesses(counted)
    # cuda/gemm/block_product.cuh: 32 products for eight loads.
    assert Fraction(counted.products, counted.matrix_loads) == 4
    # Each operand once for each 128 of the other's lines.
    assert counted.copied_bytes == 2 * (a.numel() + b.numel()) * a.element_size()


@pytest.mark.parametrize("is_plain", [True, False])
def test_attention_forward(cuda_emulator: Emulator, is_plain: bool) -> None:
    call = make(
        2, rows=128, columns=192, head=128, dtype=torch.bfloat16, softcap=0.0 if is_plain else 5.0
    )
    emulated_forward(cuda_emulator, call)
    counted = cuda_emulator.counters
    check_accesses(counted)
    # cuda/attention/forward_mma.cuh: for 16 columns of a head and 64 keys five loads for the
    # scores' 8 products, or six for 16; and one for each two of the output's, or four.
    expected = Fraction(6 + 4, 16 + 16) if is_plain else Fraction(5 + 4, 8 + 8)
    assert Fraction(counted.matrix_loads, counted.products) == expected
    inputs = (call.query, call.key, call.value)
    assert counted.copied_bytes == sum(each.numel() for each in inputs) * 2


def backward_counters(emulator: Emulator, call: Call) -> dict[str, Counters]:
    """Of the kernels of the backward pass, by name."""
    counters = {}

    class Recorder(Emulator):
        def run(self, kernel: str, *others: object, **arguments: object) -> None:
            super().run(kernel, *others, **arguments)  # type: ignore[arg-type]
            counters[kernel] = self.counters

    outputs = emulated_forward(emulator, call)
    emulated_backward(Recorder(emulator.program), call, outputs)
    return counters


@pytest.mark.parametrize("head", [64, 128])
def test_attention_backward(cuda_emulator: Emulator, head: int) -> None:
    """As cuda/attention/grad_query_mma.cuh and grad_key_value_mma.cuh say."""
    call = make(2, rows=256, columns=128, head=head, dtype=torch.bfloat16)
    counters = backward_counters(cuda_emulator, call)
    for kernel, loads in [
        ("attention_grad_query", Fraction(14, 24)),
        ("attention_grad_key_value", Fraction(10, 16)),
    ]:
        check_accesses(counters[kernel])
        assert Fraction(counters[kernel].matrix_loads, counters[kernel].products) == loads
    elements = {"query": call.query.numel(), "key": call.key.numel()}
    # Two blocks of queries read all keys and values; one of keys reads queries and gradients once.
    assert counters["attention_grad_query"].copied_bytes == 2 * (
        2 * elements["query"] + 2 * 2 * elements["key"]
    )
    assert counters["attention_grad_key_value"].copied_bytes == 2 * (
        2 * elements["query"] + 2 * elements["key"]
    )


def test_attention_of_wide_heads_where_memory_is_short(cuda_emulator: Emulator) -> None:
    """In 99 KiB blocks own 64 queries, or keys: every kernel multiplies by tensor cores still."""
    call = make(2, rows=128, columns=128, head=256, dtype=torch.bfloat16)
    counters = backward_counters(cuda_emulator, call) | {"forward": cuda_emulator.counters}
    # Of 16 columns of a head. Gradients are of 128 at a time: scores and theirs are made twice.
    loads = {
        "forward": Fraction(5 + 4, 8 + 8),  # 64 keys
        "attention_grad_query": Fraction(2 * (3 + 3) + 2, 2 * (4 + 4) + 4),  # 32 keys
        "attention_grad_key_value": Fraction(2 * (3 + 3) + 4, 2 * (4 + 4) + 8),  # 32 queries
    }
    # By whom queries and gradients of the output are read, and by whom keys and values.
    readers = {
        "forward": (Fraction(1, 2), 2),
        "attention_grad_query": (2, 4),
        "attention_grad_key_value": (4, 2),
    }
    for kernel, expected in loads.items():
        counted = counters[kernel]
        check_accesses(counted)
        assert Fraction(counted.matrix_loads, counted.products) == expected, kernel
        of_queries, of_keys = readers[kernel]
        assert counted.copied_bytes == 2 * (
            of_queries * 2 * call.query.numel() + of_keys * 2 * call.key.numel()
        )


@pytest.mark.parametrize(
    ("head", "loads_of_fifth", "softcap"), [(64, 3, 0.0), (128, 2, 0.0), (64, 3, 2.0)]
)
def test_joint_gradients(
    cuda_emulator: Emulator, head: int, loads_of_fifth: int, softcap: float
) -> None:
    """As cuda/attention/joint_gradients_mma.cuh says: of five products, or six with a cap."""
    call = make(2, rows=256, columns=256, head=head, dtype=torch.bfloat16, softcap=softcap)
    outputs = emulated_forward(cuda_emulator, call)
    emulated_backward(cuda_emulator, call, outputs, joint=True)
    counted = cuda_emulator.counters
    check_accesses(counted)
    # Of 16 columns of a head, 32 queries and 128 keys, by 8 warps.
    parts = 2 * head // 16 * 256 // 32 * 256 // 128
    again = int(softcap > 0)  # the first product
    assert counted.products == parts * 8 * (16 + 4 + 4 * again)
    assert counted.matrix_loads == parts * 8 * (10 + loads_of_fifth + 3 * again)
    # Queries and gradients once for each 128 keys, keys and values once.
    assert counted.copied_bytes == 2 * (2 * 2 * call.query.numel() + 2 * call.key.numel())


def test_sectors_that_are_used_in_part_are_seen(cuda_emulator: Emulator) -> None:
    """Of rows of 144 bytes the first 16."""
    a = torch.randn(128, 72).bfloat16()
    emulated_matmul(cuda_emulator, a[:, :8], torch.randn(8, 128).bfloat16())
    counted = cuda_emulator.counters
    assert counted.copied_sectors * SECTOR == counted.copied_bytes + 128 * 16
