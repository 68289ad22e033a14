"""Attention forward by products of warpgroups, run on the CPU by the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from emulator import Emulator
from test_emulated_attention import (
    RESULTS,
    Call,
    Outputs,
    assert_near,
    bounds_of,
    emulated_forward,
    exact_results,
    make,
    name_of,
)
from torch import Tensor

HALVES = [torch.bfloat16, torch.float16]


def by_warpgroups(emulator: Emulator, call: Call, blocks: int = 3) -> Outputs:
    outputs = emulated_forward(emulator, call, blocks, warpgroups=True)
    assert emulator.counters.group_products > 0
    assert emulator.counters.products == 0
    return outputs


def check(emulator: Emulator, call: Call, blocks: int = 3) -> Outputs:
    """Compare the output and the log-sum-exp with the exact ones."""
    outputs = by_warpgroups(emulator, call, blocks)
    exact = exact_results(call)
    assert_near(RESULTS[:2], outputs, exact, bounds_of(call, exact))
    return outputs


def of_head(head: int = 64, dtype: torch.dtype = torch.bfloat16, **options: object) -> Call:
    lead = options.pop("lead", (1,))
    return make(*lead, head=head, dtype=dtype, **options)  # type: ignore[misc, arg-type]


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (64, 64), (63, 129), (128, 65), (129, 300), (200, 128)]
)
def test_lengths_around_every_tile_boundary(
    cuda_emulator: Emulator, rows: int, columns: int
) -> None:
    check(cuda_emulator, of_head(rows=rows, columns=columns))


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize(("head", "value_head"), [(8, 64), (72, 128), (64, 136), (256, 200)])
def test_head_sizes_around_every_width(
    cuda_emulator: Emulator, dtype: torch.dtype, head: int, value_head: int
) -> None:
    check(cuda_emulator, of_head(head, dtype, value_head=value_head, rows=70, columns=200))


LIMITS = [
    {"is_causal": True},
    {"window": (5, 0)},
    {"window": (70, -1)},
    {"window": (3, 66)},
    {"window": (100, 90), "is_causal": True},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_causal_and_windows(cuda_emulator: Emulator, limits: dict[str, object]) -> None:
    check(cuda_emulator, of_head(rows=260, columns=330, **limits))


FEATURES = ["cap", "slopes", "booleans", "float32", "bfloat16", "dropout"]


def with_feature(name: str, head: int, rows: int, hidden_below: float) -> Call:
    """One feature alone, and of heads of 40 all of them at once, for 140 keys.

    ``hidden_below`` is the cosine below which the boolean mask hides a key.
    """
    booleans = torch.linspace(0, 1, rows * 140).view(rows, 140).cos() > hidden_below
    of_rows = torch.linspace(-3, 3, rows).view(rows, 1).bfloat16()
    features = {
        "cap": {"softcap": 2.0},
        "slopes": {"slopes": torch.tensor([0.5, 0.25])},
        "booleans": {"mask": booleans},
        "float32": {"mask": torch.linspace(-3, 3, 2 * 140).view(2, 1, 140)},
        "bfloat16": {"mask": of_rows, "is_causal": True},
        "dropout": {"dropout": 0.3, "window": (80, 3)},
    }
    options = features[name]
    if head == 40:
        options = {"dropout": 0.2} | features["cap"] | features["slopes"] | options
    return of_head(head, lead=(2,), rows=rows, columns=140, **options)


@pytest.mark.parametrize("head", [40, 128])
@pytest.mark.parametrize("feature", FEATURES)
def test_what_may_become_of_a_score(cuda_emulator: Emulator, head: int, feature: str) -> None:
    check(cuda_emulator, with_feature(feature, head, rows=130, hidden_below=0))


def heads_inside(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def with_operands(call: Call, arrange: Callable[[Tensor], Tensor]) -> Call:
    return replace(
        call, query=arrange(call.query), key=arrange(call.key), value=arrange(call.value)
    )


@pytest.mark.parametrize("inside", [False, True])
def test_grouped_queries(cuda_emulator: Emulator, inside: bool) -> None:
    """Heads as a part of the batch, and heads inside, which have a dimension of their own."""
    options = {"rows": 9, "columns": 70, "head": 64, "dtype": HALVES[0], "enable_gqa": True}
    call = make(2, 6, key_lead=(2, 3), **options)
    check(cuda_emulator, with_operands(call, heads_inside) if inside else call)


@pytest.mark.parametrize(
    ("query", "key", "value"), [((2, 3), (3,), (2, 1)), ((1, 3), (2, 1), (3,)), ((), (), ())]
)
def test_leading_dimensions_broadcast(
    cuda_emulator: Emulator, query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]
) -> None:
    shapes = [(*query, 5, 16), (*key, 70, 16), (*value, 70, 24)]
    call = Call(*(torch.randn(shape).half() for shape in shapes))
    grad_output = torch.randn(call.output_shape).half()
    check(cuda_emulator, replace(call, grad_output=grad_output))


def stepped(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]


def misaligned(tensor: Tensor) -> Tensor:
    padded = torch.full((tensor.numel() + 1,), torch.nan, dtype=tensor.dtype)
    padded[1:] = tensor.flatten()
    return padded[1:].view(tensor.shape)


def three_strides(tensor: Tensor) -> Tensor:
    """No two of the dimensions of the batch are as one."""
    return tensor.permute(2, 1, 0, 3, 4).contiguous().permute(2, 1, 0, 3, 4)


OTHER_WAYS = {
    "step": lambda: with_operands(of_head(rows=5), stepped),
    "misaligned": lambda: with_operands(of_head(rows=5), misaligned),
    "rows of 40 bytes": lambda: of_head(20, rows=5),
    "float32": lambda: of_head(64, torch.float32),
    "three strides": lambda: with_operands(make(2, 2, 2, head=8, dtype=HALVES[0]), three_strides),
    "wide heads": lambda: of_head(264),
    "a wide head with a cap": lambda: of_head(136, softcap=1.0),
}


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_what_no_warpgroup_takes_goes_another_way(cuda_emulator: Emulator, name: str) -> None:
    call = OTHER_WAYS[name]()
    outputs = emulated_forward(cuda_emulator, call, warpgroups=True)
    assert cuda_emulator.counters.group_products == 0
    for output, each in zip(outputs, emulated_forward(cuda_emulator, call), strict=True):
        assert torch.equal(output, each)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (3, 66)}], ids=str)
@pytest.mark.parametrize(("where", "number"), [("key", torch.nan), ("value", torch.inf)])
def test_what_is_not_finite_reaches_what_it_reaches_without_warpgroups(
    cuda_emulator: Emulator, number: float, where: str, options: dict[str, object]
) -> None:
    """Of keys that no query of a block sees, tiles of 128 have more than those of 64."""
    call = of_head(lead=(4,), rows=140, columns=270, **options)
    for matrix, column in enumerate((0, 139, 195, 269)):
        getattr(call, where)[matrix, column, 3] = number
    ours = by_warpgroups(cuda_emulator, call)
    for result, expected in zip(ours[:2], emulated_forward(cuda_emulator, call), strict=False):
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.isinf(), expected.isinf())


def test_a_row_without_keys_is_zero(cuda_emulator: Emulator) -> None:
    mask = torch.rand(130, 140) > 0.3
    mask[[0, 70, 129]] = False
    output = check(cuda_emulator, of_head(rows=130, columns=140, mask=mask))[0]
    assert (output[:, [0, 70, 129]] == 0).all()
    # Two blocks of which no query sees a key: their output is due all the same.
    output = check(cuda_emulator, of_head(rows=300, columns=10, window=(2, 0)))[0]
    assert (output[:, :290] == 0).all()


def test_results_do_not_depend_on_the_grid(cuda_emulator: Emulator) -> None:
    for options in ({}, {"is_causal": True, "dropout": 0.2}):
        call = of_head(lead=(3,), rows=140, columns=270, **options)
        results = [by_warpgroups(cuda_emulator, call, blocks) for blocks in (1, 2, 100)]
        for others in results[1:]:
            assert all(torch.equal(*pair) for pair in zip(results[0], others, strict=True))


@pytest.mark.parametrize(("head", "keys"), [(64, 128), (128, 128), (256, 64)])
def test_counted_products_and_boxes(cuda_emulator: Emulator, head: int, keys: int) -> None:
    """As cuda/attention/forward_warpgroups.cuh says."""
    by_warpgroups(cuda_emulator, of_head(head, rows=128, columns=256), 1)
    tiles, slices = 256 // keys, head // 64
    counted = cuda_emulator.counters
    assert counted.group_products == tiles * 2 * (slices * 4 + keys // 16)
    assert counted.boxes == slices * 2 + tiles * 2 * slices * (keys // 64)
