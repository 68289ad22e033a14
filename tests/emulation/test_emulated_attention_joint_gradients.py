"""All gradients of attention by one kernel, run on the CPU by the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import test_emulated_attention_varlen as varlen
import torch
from emulator import Emulator
from test_emulated_attention import (
    MOST_SHARED_BYTES,
    Call,
    compare_gradients,
    emulated_backward,
    emulated_forward,
    make,
    name_of,
)
from test_emulated_attention_warpgroups import (
    FEATURES,
    HALVES,
    LIMITS,
    heads_inside,
    of_head,
    with_feature,
    with_operands,
)
from torch import Tensor


def gradients_of(
    emulator: Emulator, call: Call, blocks: int = 3, shared_bytes: int = MOST_SHARED_BYTES
) -> list[Tensor]:
    outputs = emulated_forward(emulator, call, blocks)
    return emulated_backward(emulator, call, outputs, blocks, shared_bytes, joint=True)


def in_type(call: Call, dtype: torch.dtype) -> Call:
    names = ("query", "key", "value", "grad_output")
    return replace(call, **{name: getattr(call, name).to(dtype) for name in names})


def check(
    emulator: Emulator, call: Call, blocks: int = 3, shared_bytes: int = MOST_SHARED_BYTES
) -> list[Tensor]:
    gradients = gradients_of(emulator, call, blocks, shared_bytes)
    assert (emulator.counters.products > 0) == (call.query.dtype in HALVES)
    compare_gradients(call, gradients)
    return gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (64, 128), (65, 129), (129, 127), (200, 270), (97, 400)]
)
def test_lengths_around_every_tile_boundary(
    cuda_emulator: Emulator, rows: int, columns: int, dtype: torch.dtype
) -> None:
    check(cuda_emulator, of_head(dtype=dtype, rows=rows, columns=columns))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=name_of)
@pytest.mark.parametrize(
    ("head", "value_head"), [(1, 1), (8, 64), (72, 128), (128, 24), (65, 3), (40, 100)]
)
def test_head_sizes_around_every_width(
    cuda_emulator: Emulator, dtype: torch.dtype, head: int, value_head: int
) -> None:
    check(cuda_emulator, of_head(head, dtype, value_head=value_head, rows=70, columns=140))


@pytest.mark.parametrize("kibibytes", [99, 163])
@pytest.mark.parametrize("head", [64, 128])
def test_memory_of_every_device(cuda_emulator: Emulator, head: int, kibibytes: int) -> None:
    """One place for the queries, or two."""
    call = of_head(head, rows=200, columns=270)
    check(cuda_emulator, call, shared_bytes=kibibytes * 1024)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(200, 400), (400, 200)])
def test_causal_and_windows(
    cuda_emulator: Emulator,
    rows: int,
    columns: int,
    limits: dict[str, object],
    dtype: torch.dtype,
) -> None:
    """Also where no key sees the first queries, or the last ones."""
    check(cuda_emulator, of_head(dtype=dtype, rows=rows, columns=columns, **limits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("head", [40, 104])
@pytest.mark.parametrize("feature", FEATURES)
def test_what_may_become_of_a_score(
    cuda_emulator: Emulator, head: int, feature: str, dtype: torch.dtype
) -> None:
    if feature == "bfloat16" and dtype == torch.float32:
        pytest.skip("a mask of the operands' type is float32 then")
    check(cuda_emulator, in_type(with_feature(feature, head, 100, 0.7), dtype))


def test_a_row_without_keys_passes_no_gradient(cuda_emulator: Emulator) -> None:
    mask = torch.rand(130, 140) > 0.3
    mask[[0, 70, 129]] = False
    mask[:, [5, 139]] = False
    results = check(cuda_emulator, of_head(rows=130, columns=140, mask=mask))
    assert (results[0][:, [0, 70, 129]] == 0).all()
    assert all((each[:, [5, 139]] == 0).all() for each in results[1:])


def test_slopes_and_masks_of_grouped_heads(cuda_emulator: Emulator) -> None:
    """Each matrix of a block has its own slope, mask and words of dropout."""
    options = {"rows": 70, "columns": 140, "head": 24, "dtype": HALVES[0], "enable_gqa": True}
    options |= {"slopes": torch.rand(2, 6), "mask": torch.randn(2, 6, 1, 140), "dropout": 0.3}
    check(cuda_emulator, make(2, 6, key_lead=(2, 3), **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("inside", [False, True])
def test_grouped_queries(cuda_emulator: Emulator, inside: bool, dtype: torch.dtype) -> None:
    options = {"rows": 70, "columns": 140, "head": 64, "dtype": dtype, "enable_gqa": True}
    call = make(2, 6, key_lead=(2, 3), **options)
    check(cuda_emulator, with_operands(call, heads_inside) if inside else call)


@pytest.mark.parametrize("key", [(3,), (2, 1), ()])
def test_keys_are_broadcast(cuda_emulator: Emulator, key: tuple[int, ...]) -> None:
    options = {"rows": 70, "columns": 140, "head": 16, "dtype": torch.float16}
    check(cuda_emulator, make(2, 3, key_lead=key, **options))


@pytest.mark.parametrize("arrange", [lambda each: each.mT.contiguous().mT, heads_inside])
def test_layouts(cuda_emulator: Emulator, arrange: Callable[[Tensor], Tensor]) -> None:
    call = make(2, 3, rows=70, columns=140, head=24, dtype=torch.bfloat16)
    expected = check(cuda_emulator, call)
    results = check(cuda_emulator, with_operands(call, arrange))
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


PACKED = {
    "causal": ((70, 3, 130), (266, 129, 1), {"is_causal": True}),
    "windows": ((200, 0, 70), (140, 300, 0), {"window": (70, 3)}),
    "negative scale": ((64, 65), (300, 7), {"scale": -0.5}),
    "uneven": ((5, 190, 66), (270, 5, 130), {}),
    "all": (
        *((70, 0, 130), (266, 129, 1)),
        {"slopes": torch.rand(3, 4), "softcap": 2.0, "dropout": 0.3, "window": (70, 3)},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=name_of)
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(cuda_emulator: Emulator, name: str, dtype: torch.dtype) -> None:
    """Also of queries that see no key, in a sequence of fewer keys or of none."""
    rows, columns, options = PACKED[name]
    call = varlen.make(rows, columns, (4, 2), (24, 40), dtype, **options)
    results = [varlen.check(cuda_emulator, call, blocks, joint=True) for blocks in (2, 100)]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"window": (150, 20), "dropout": 0.2, "softcap": 3.0}],
    ids=str,
)
def test_the_order_of_sums_is_that_of_the_keys(
    cuda_emulator: Emulator, options: dict[str, object], dtype: torch.dtype
) -> None:
    """Whatever blocks there are, and whenever they run: each call has another order."""
    call = of_head(72, dtype, lead=(2,), rows=330, columns=520, **options)
    outputs = emulated_forward(cuda_emulator, call)
    results = [
        emulated_backward(cuda_emulator, call, outputs, blocks, joint=True)
        for blocks in (1, 2, 3, 7, 100)
    ]
    compare_gradients(call, results[0])
    for others in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], others, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda: of_head(104, lead=(2,), rows=200, columns=270), id="plain"),
        pytest.param(lambda: with_feature("booleans", 40, 100, 0.7), id="all"),
    ],
)
def test_keys_and_values_are_those_of_their_own_kernel(
    cuda_emulator: Emulator, made: Callable[[], Call], dtype: torch.dtype
) -> None:
    call = in_type(made(), dtype)
    outputs = emulated_forward(cuda_emulator, call)
    joint = emulated_backward(cuda_emulator, call, outputs, joint=True)
    alone = emulated_backward(cuda_emulator, call, outputs)
    assert all(torch.equal(*pair) for pair in zip(joint[1:], alone[1:], strict=True))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: make(3, key_lead=(2, 3), dtype=torch.float16), id="shared queries"),
        pytest.param(lambda: make(2, head=136, dtype=torch.float16), id="wide heads"),
        pytest.param(lambda: make(2, value_head=136, dtype=torch.float16), id="wide values"),
    ],
)
def test_what_goes_another_way(cuda_emulator: Emulator, call: Callable[[], Call]) -> None:
    gradients = gradients_of(cuda_emulator, call())
    assert all((each == 77).all() for each in gradients)
