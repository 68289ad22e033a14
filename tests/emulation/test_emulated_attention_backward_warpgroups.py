"""Attention backward by products of warpgroups, run on the CPU by the emulator."""

from __future__ import annotations

import pytest
import torch
from emulator import Emulator
from test_emulated_attention import (
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
    OTHER_WAYS,
    heads_inside,
    of_head,
    with_feature,
    with_operands,
)
from torch import Tensor


def gradients_of(
    emulator: Emulator,
    call: Call,
    blocks: int = 3,
    *,
    warpgroups: bool = True,
    joint: bool = False,
) -> list[Tensor]:
    """The gradients, from the outputs of the kernels without warpgroups."""
    outputs = emulated_forward(emulator, call, blocks)
    return emulated_backward(emulator, call, outputs, blocks, warpgroups=warpgroups, joint=joint)


def check(emulator: Emulator, call: Call, blocks: int = 3, *, joint: bool = False) -> list[Tensor]:
    """Compare them where kernels of warpgroups make all of them."""
    gradients = gradients_of(emulator, call, blocks, joint=joint)
    if call.mask is None or not call.mask.is_floating_point():  # whose gradient's kernel is last
        assert emulator.counters.group_products > 0
        assert emulator.counters.products == 0
    compare_gradients(call, gradients)
    return gradients


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (64, 128), (65, 129), (129, 64), (200, 270), (97, 130)]
)
def test_lengths_around_every_tile_boundary(
    cuda_emulator: Emulator, rows: int, columns: int
) -> None:
    check(cuda_emulator, of_head(rows=rows, columns=columns))


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize(
    ("head", "value_head"), [(8, 64), (72, 128), (128, 24), (256, 256), (136, 24)]
)
def test_head_sizes_around_every_width(
    cuda_emulator: Emulator, dtype: torch.dtype, head: int, value_head: int
) -> None:
    check(cuda_emulator, of_head(head, dtype, value_head=value_head, rows=70, columns=140))


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("head", [64, 192])
def test_causal_and_windows(cuda_emulator: Emulator, head: int, limits: dict[str, object]) -> None:
    check(cuda_emulator, of_head(head, rows=200, columns=270, **limits))


@pytest.mark.parametrize("head", [40, 104])
@pytest.mark.parametrize("feature", FEATURES)
def test_what_may_become_of_a_score(cuda_emulator: Emulator, head: int, feature: str) -> None:
    check(cuda_emulator, with_feature(feature, head, rows=100, hidden_below=0.7))


@pytest.mark.parametrize("inside", [False, True])
def test_grouped_queries(cuda_emulator: Emulator, inside: bool) -> None:
    """A key head sums over the queries of all heads that share it."""
    options = {"rows": 9, "columns": 70, "head": 64, "dtype": HALVES[0], "enable_gqa": True}
    call = make(2, 6, key_lead=(2, 3), **options)
    check(cuda_emulator, with_operands(call, heads_inside) if inside else call)


@pytest.mark.parametrize(
    ("query", "key"), [((2, 3), (3,)), ((1, 3), (2, 1)), ((3,), (2, 3)), ((), ())]
)
def test_leading_dimensions_broadcast(
    cuda_emulator: Emulator, query: tuple[int, ...], key: tuple[int, ...]
) -> None:
    call = make(*query, rows=70, columns=9, head=16, dtype=torch.float16, key_lead=key)
    check(cuda_emulator, call)


def products_of(emulator: Emulator, call: Call) -> dict[str, int]:
    """How many products of warpgroups each of the kernels needs that make gradients."""
    counted = {}
    run = emulator.run

    def counting(kernel: str, *args: object, **arguments: object) -> None:
        run(kernel, *args, **arguments)  # type: ignore[arg-type]
        counted[kernel] = emulator.counters.group_products

    emulator.run = counting  # type: ignore[method-assign]
    try:
        gradients_of(emulator, call)
    finally:
        emulator.run = run  # type: ignore[method-assign]
    return counted


def test_keys_and_values_of_other_matrices_go_another_way(cuda_emulator: Emulator) -> None:
    shapes = [(2, 3, 5, 16), (3, 70, 16), (2, 1, 70, 24)]
    query, key, value = (torch.randn(shape).half() for shape in shapes)
    call = Call(query, key, value, grad_output=torch.randn(2, 3, 5, 24).half())
    counted = products_of(cuda_emulator, call)
    assert counted["attention_grad_query"] > 0
    assert counted["attention_grad_key_value"] == 0
    compare_gradients(call, gradients_of(cuda_emulator, call))


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_what_no_warpgroup_takes_goes_another_way(cuda_emulator: Emulator, name: str) -> None:
    call = OTHER_WAYS[name]()
    gradients = gradients_of(cuda_emulator, call)
    assert cuda_emulator.counters.group_products == 0
    others = gradients_of(cuda_emulator, call, warpgroups=False)
    assert all(torch.equal(*pair) for pair in zip(gradients, others, strict=True))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (3, 66)}], ids=str)
@pytest.mark.parametrize("where", ["query", "key", "value", "grad_output"])
def test_what_is_not_finite_reaches_what_it_reaches_without_warpgroups(
    cuda_emulator: Emulator, where: str, options: dict[str, object]
) -> None:
    """Of queries that no key of a block sees, tiles of 64 have more than those of 32."""
    call = of_head(lead=(3,), rows=100, columns=140, **options)
    tensor = getattr(call, where)
    for matrix, row in enumerate((40, tensor.shape[-2] - 1, 0)):
        tensor[matrix, row, 3] = torch.nan if row == 0 else torch.inf
    ours = gradients_of(cuda_emulator, call)
    assert cuda_emulator.counters.group_products > 0
    for result, expected in zip(
        ours, gradients_of(cuda_emulator, call, warpgroups=False), strict=True
    ):
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.isinf(), expected.isinf())


def test_queries_and_keys_that_see_nothing(cuda_emulator: Emulator) -> None:
    mask = torch.rand(100, 140) > 0.3
    mask[[0, 70, 99]] = False
    mask[:, [0, 64, 139]] = False
    gradients = check(cuda_emulator, of_head(rows=100, columns=140, mask=mask))
    assert (gradients[0][:, [0, 70, 99]] == 0).all()
    assert all((each[:, [0, 64, 139]] == 0).all() for each in gradients[1:])
    # Blocks of which no query sees a key, or no key a query: their gradients are due all the same.
    gradients = check(cuda_emulator, of_head(rows=300, columns=10, window=(2, 0)))
    assert (gradients[0][:, :290] == 0).all()
    gradients = check(cuda_emulator, of_head(rows=10, columns=300, window=(2, 0)))
    assert all((each[:, :288] == 0).all() for each in gradients[1:])


def test_results_do_not_depend_on_the_grid(cuda_emulator: Emulator) -> None:
    for options in ({}, {"is_causal": True, "dropout": 0.2}):
        call = of_head(lead=(2,), rows=140, columns=140, **options)
        results = [gradients_of(cuda_emulator, call, blocks) for blocks in (1, 100)]
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("head", [64, 128, 256])
def test_counted_products(cuda_emulator: Emulator, head: int) -> None:
    """As cuda/attention/grad_query_warpgroups.cuh and grad_key_value_warpgroups.cuh say."""
    counted = products_of(cuda_emulator, of_head(head, rows=128, columns=128))
    slices = head // 64
    key_tiles = 1 if head <= 128 else 2  # of the 128 keys
    assert counted["attention_grad_query"] == 2 * (2 * 4 * slices * key_tiles + 8)
    blocks = 1 if head <= 128 else 2  # that have half of the gradients' columns each
    assert counted["attention_grad_key_value"] == 2 * 2 * blocks * (2 * 4 * slices + 2 * 4)
