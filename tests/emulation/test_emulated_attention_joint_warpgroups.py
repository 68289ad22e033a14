"""All gradients of attention by one kernel of warpgroups, run on the CPU by the emulator."""

from __future__ import annotations

from functools import partial

import pytest
import test_emulated_attention_backward_warpgroups as backward
import torch
from emulator import Emulator
from test_emulated_attention import (
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
    OTHER_WAYS,
    heads_inside,
    of_head,
    with_feature,
    with_operands,
)

gradients_of = partial(backward.gradients_of, joint=True)
check = partial(backward.check, joint=True)


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (64, 128), (65, 129), (129, 127), (200, 270), (97, 400)]
)
def test_lengths_around_every_tile_boundary(
    cuda_emulator: Emulator, rows: int, columns: int, head: int
) -> None:
    check(cuda_emulator, of_head(head, rows=rows, columns=columns))


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize(
    ("head", "value_head"), [(8, 64), (64, 16), (72, 128), (128, 24), (40, 104)]
)
def test_head_sizes_around_every_width(
    cuda_emulator: Emulator, dtype: torch.dtype, head: int, value_head: int
) -> None:
    check(cuda_emulator, of_head(head, dtype, value_head=value_head, rows=70, columns=140))


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(("head", "rows", "columns"), [(64, 200, 400), (128, 400, 200)])
def test_causal_and_windows(
    cuda_emulator: Emulator, head: int, rows: int, columns: int, limits: dict[str, object]
) -> None:
    """Also where no key sees the first queries, or the last ones."""
    check(cuda_emulator, of_head(head, rows=rows, columns=columns, **limits))


@pytest.mark.parametrize("head", [64, 104])
@pytest.mark.parametrize("inside", [False, True])
def test_grouped_queries(cuda_emulator: Emulator, inside: bool, head: int) -> None:
    """A key head sums over the queries of all heads that share it."""
    options = {"rows": 70, "columns": 140, "head": head, "dtype": HALVES[0], "enable_gqa": True}
    call = make(2, 6, key_lead=(2, 3), **options)
    check(cuda_emulator, with_operands(call, heads_inside) if inside else call)


@pytest.mark.parametrize("key", [(3,), (2, 1), ()])
def test_keys_are_broadcast(cuda_emulator: Emulator, key: tuple[int, ...]) -> None:
    options = {"rows": 70, "columns": 140, "head": 16, "dtype": torch.float16}
    check(cuda_emulator, make(2, 3, key_lead=key, **options))


def test_the_layout_changes_no_bit(cuda_emulator: Emulator) -> None:
    call = make(2, 3, rows=70, columns=140, head=24, dtype=torch.bfloat16)
    expected = check(cuda_emulator, call)
    results = check(cuda_emulator, with_operands(call, heads_inside))
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.parametrize("head", [64, 72])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (150, 20)}], ids=str)
def test_the_order_of_sums_is_that_of_the_keys(
    cuda_emulator: Emulator, head: int, options: dict[str, object]
) -> None:
    """Whatever blocks there are, and whenever they run: each call has another order."""
    call = of_head(head, lead=(2,), rows=330, columns=520, **options)
    outputs = emulated_forward(cuda_emulator, call)
    results = [
        emulated_backward(cuda_emulator, call, outputs, blocks, warpgroups=True, joint=True)
        for blocks in (1, 2, 3, 7, 100)
    ]
    compare_gradients(call, results[0])
    for others in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], others, strict=True))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (150, 20)}], ids=str)
def test_the_order_of_sums_of_grouped_queries(
    cuda_emulator: Emulator, options: dict[str, object]
) -> None:
    """Of three key heads, of which one, two or all come by turns."""
    options = {"rows": 270, "columns": 330, "enable_gqa": True, **options}
    call = make(1, 6, key_lead=(1, 3), head=64, dtype=torch.bfloat16, **options)
    outputs = emulated_forward(cuda_emulator, call)
    results = [
        emulated_backward(cuda_emulator, call, outputs, blocks, warpgroups=True, joint=True)
        for blocks in (1, 2, 3, 100)
    ]
    compare_gradients(call, results[0])
    for others in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], others, strict=True))


@pytest.mark.parametrize("head", [64, 104])
def test_keys_and_values_are_those_of_their_own_kernel(cuda_emulator: Emulator, head: int) -> None:
    call = of_head(head, lead=(2,), rows=200, columns=270)
    outputs = emulated_forward(cuda_emulator, call)
    joint = emulated_backward(cuda_emulator, call, outputs, warpgroups=True, joint=True)
    alone = emulated_backward(cuda_emulator, call, outputs, warpgroups=True)
    assert all(torch.equal(*pair) for pair in zip(joint[1:], alone[1:], strict=True))


OTHERS = {
    **{f"features: {name}": lambda name=name: with_feature(name, 64, 70, 0.7) for name in FEATURES},
    **{name: OTHER_WAYS[name] for name in ("step", "misaligned", "three strides")},
    "shared queries": lambda: make(3, key_lead=(2, 3), head=16, dtype=torch.float16),
    "wide heads": lambda: make(2, head=136, dtype=torch.float16),
    "wide values": lambda: make(2, value_head=136, dtype=torch.float16),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_goes_another_way(cuda_emulator: Emulator, name: str) -> None:
    gradients = gradients_of(cuda_emulator, OTHERS[name]())
    assert all((each == 77).all() for each in gradients)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (3, 66)}], ids=str)
@pytest.mark.parametrize("where", ["query", "key", "value", "grad_output"])
def test_what_is_not_finite_reaches_what_it_reaches_by_single_warps(
    cuda_emulator: Emulator, where: str, options: dict[str, object]
) -> None:
    """Gradients of keys and values by their own kernel, whose tiles have 32 queries too."""
    call = of_head(lead=(3,), rows=100, columns=140, **options)
    tensor = getattr(call, where)
    for matrix, row in enumerate((40, tensor.shape[-2] - 1, 0)):
        tensor[matrix, row, 3] = torch.nan if row == 0 else torch.inf
    outputs = emulated_forward(cuda_emulator, call)
    ours = emulated_backward(cuda_emulator, call, outputs, warpgroups=True, joint=True)
    others = emulated_backward(cuda_emulator, call, outputs, joint=True)[:1]
    others += emulated_backward(cuda_emulator, call, outputs)[1:]
    for result, expected in zip(ours, others, strict=True):
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.isinf(), expected.isinf())


@pytest.mark.parametrize("head", [64, 128])
def test_queries_and_keys_that_see_nothing(cuda_emulator: Emulator, head: int) -> None:
    """Their gradients are due all the same."""
    gradients = check(cuda_emulator, of_head(head, rows=300, columns=10, window=(2, 0)))
    assert (gradients[0][:, :290] == 0).all()
    gradients = check(cuda_emulator, of_head(head, rows=10, columns=300, window=(2, 0)))
    assert all((each[:, :288] == 0).all() for each in gradients[1:])


@pytest.mark.parametrize(("head", "products", "scores"), [(64, 48, 8), (128, 64, 16)])
def test_counted_products(cuda_emulator: Emulator, head: int, products: int, scores: int) -> None:
    """As cuda/attention/joint_gradients_warpgroups.cuh says, of 64 queries and 128 keys."""
    call = of_head(head, rows=192, columns=256)
    gradients_of(cuda_emulator, call)
    # After the last queries, scores are multiplied in vain.
    assert cuda_emulator.counters.group_products == 2 * (3 * products + scores)
