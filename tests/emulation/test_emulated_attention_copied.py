"""Attention in float32 by copied panels, run on the CPU by the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from emulator import Argument, EmulationError, Emulator
from test_emulated_attention import (
    RESULTS,
    Call,
    Outputs,
    assert_near,
    bounds_of,
    emulated_forward,
    exact_results,
    make,
)
from test_emulated_attention_warpgroups import FEATURES, LIMITS, heads_inside, with_operands
from torch import Tensor

SHARED_BYTES = 163 * 1024  # of a block of an A100
ROWS = 128  # of a block


def by_copied_panels(
    emulator: Emulator,
    call: Call,
    blocks: int = 3,
    shared_bytes: int = SHARED_BYTES,
    key_parts: int = 1,
) -> Outputs:
    outputs = emulated_forward(
        emulator,
        call,
        blocks,
        copied_panels=True,
        shared_bytes=shared_bytes,
        key_parts=key_parts,
    )
    assert emulator.counters.copies > 0
    return outputs


def check(emulator: Emulator, call: Call, blocks: int = 3, key_parts: int = 1) -> Outputs:
    """Compare the output and the log-sum-exp with the exact ones."""
    outputs = by_copied_panels(emulator, call, blocks, key_parts=key_parts)
    exact = exact_results(call)
    assert_near(RESULTS[:2], outputs, exact, bounds_of(call, exact))
    return outputs


def check_sums(emulator: Emulator, call: Call) -> None:
    """They are those of small tiles, to the last bit."""
    outputs = check(emulator, call)
    small = emulated_forward(emulator, call)
    assert emulator.counters.copies == 0
    assert all(torch.equal(*pair) for pair in zip(outputs, small, strict=True))


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (127, 63), (128, 64), (129, 65), (128, 128), (257, 129)]
)
def test_lengths_around_every_tile_boundary(
    cuda_emulator: Emulator, rows: int, columns: int, head: int
) -> None:
    check_sums(cuda_emulator, make(rows=rows, columns=columns, head=head))


@pytest.mark.parametrize(
    ("head", "value_head"),
    [
        (1, 1),
        (31, 33),
        (32, 64),
        (33, 65),
        (40, 40),
        (80, 80),
        (64, 3),
        (3, 128),
        (200, 64),
        (96, 130),
    ],
)
def test_head_sizes_around_every_panel_and_tile(
    cuda_emulator: Emulator, head: int, value_head: int
) -> None:
    """Values wider than a tile are computed by several blocks, heads by none."""
    check_sums(cuda_emulator, make(2, rows=70, columns=150, head=head, value_head=value_head))


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_causal_and_windows(cuda_emulator: Emulator, limits: dict[str, object]) -> None:
    check_sums(cuda_emulator, make(rows=260, columns=330, head=40, **limits))  # type: ignore[arg-type]
    # Of windows, blocks of other queries begin with other tiles of 128 keys.
    check(cuda_emulator, make(rows=260, columns=330, head=72, **limits))  # type: ignore[arg-type]


@pytest.mark.parametrize("head", [40, 72])
@pytest.mark.parametrize("feature", [*FEATURES[:4], "all"])
def test_what_may_become_of_a_score(cuda_emulator: Emulator, head: int, feature: str) -> None:
    features = {
        "cap": {"softcap": 2.0},
        "slopes": {"slopes": torch.tensor([0.5, 0.25])},
        "booleans": {"mask": torch.linspace(0, 1, 150 * 140).view(150, 140).cos() > 0.7},
        "float32": {"mask": torch.linspace(-3, 3, 2 * 140).view(2, 1, 140)},
    }
    every = features["cap"] | features["slopes"] | features["float32"]
    options = every | {"dropout": 0.3} if feature == "all" else features[feature]
    check_sums(cuda_emulator, make(2, rows=150, columns=140, head=head, **options))


def padded_mask(mask: Tensor, left: int, right: int) -> Tensor:
    """The same in a larger tensor, whose other elements would be seen in a result."""
    fill = mask.new_zeros(()) if mask.dtype == torch.bool else mask.new_full((), torch.nan)
    columns = mask.shape[-1]
    wide = fill.expand(*mask.shape[:-1], left + columns + right).clone()
    wide[..., left : left + columns] = mask
    return wide[..., left : left + columns]


MASK_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda mask: mask,
    "aligned rows": lambda mask: padded_mask(mask, 4, -mask.shape[-1] % 4),
    "rows of other addresses": lambda mask: padded_mask(mask, 1, -(mask.shape[-1] + 1) % 4),
    "odd rows": lambda mask: padded_mask(mask, 0, 1 - mask.shape[-1] % 2),
    "transposed": lambda mask: mask.mT.contiguous().mT,
    "one row": lambda mask: mask[:1],
    "one column": lambda mask: mask[:, :1],
}


@pytest.mark.parametrize("layout", MASK_LAYOUTS)
@pytest.mark.parametrize("columns", [140, 63, 128])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_layouts_of_masks(
    cuda_emulator: Emulator, layout: str, columns: int, dtype: torch.dtype
) -> None:
    """By vectors and by elements, in tiles that the matrix fills and others."""
    mask = torch.randn(135, columns)
    mask = MASK_LAYOUTS[layout](mask > -0.5 if dtype == torch.bool else mask)
    for head in (40, 72):
        check_sums(cuda_emulator, make(2, rows=135, columns=columns, head=head, mask=mask))


@pytest.mark.parametrize("layout", MASK_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32, None], ids=str)
def test_layouts_of_masks_of_other_types(
    cuda_emulator: Emulator, layout: str, dtype: torch.dtype, kind: torch.dtype | None
) -> None:
    """Of bfloat16 with heads that the tensor cores' kernel has no room for."""
    if kind == torch.float32 and dtype == torch.float64:
        return
    mask = torch.randn(70, 68, dtype=torch.float64)
    mask = MASK_LAYOUTS[layout](mask > -0.5 if kind == torch.bool else mask.to(kind or dtype))
    head = 700 if dtype == torch.bfloat16 else 8
    call = make(rows=70, columns=68, head=head, value_head=8, dtype=dtype, mask=mask)
    outputs = emulated_forward(cuda_emulator, call)
    exact = exact_results(call)
    assert_near(RESULTS[:2], outputs, exact, bounds_of(call, exact))


def test_rows_of_no_key(cuda_emulator: Emulator) -> None:
    """Hidden by a mask, beyond the last key that causality shows, and of no keys at all."""
    mask = torch.ones(140, 70, dtype=torch.bool)
    mask[[0, 60, 139]] = False
    for options in ({"mask": mask}, {"window": (3, 0)}):
        check_sums(cuda_emulator, make(rows=140, columns=70, head=16, **options))
    output, log_sum_exp, _ = emulated_forward(
        cuda_emulator, make(2, rows=130, columns=0, head=8), copied_panels=True
    )
    assert (output == 0).all()
    assert (log_sum_exp == -torch.inf).all()


def misaligned(tensor: Tensor) -> Tensor:
    padded = torch.full((tensor.numel() + 1,), torch.nan)
    padded[1:] = tensor.flatten()
    return padded[1:].view(tensor.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads inside": heads_inside,
    "step": lambda tensor: torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2],
    "transposed": lambda tensor: tensor.mT.contiguous().mT,
    "misaligned": misaligned,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head", [64, 30])
def test_layouts(cuda_emulator: Emulator, layout: str, head: int) -> None:
    call = make(2, 3, rows=33, columns=70, head=head)
    check_sums(cuda_emulator, with_operands(call, LAYOUTS[layout]))


@pytest.mark.parametrize("blocks", [1, 2, 100])
def test_grouped_queries_and_broadcast_keys(cuda_emulator: Emulator, blocks: int) -> None:
    options = {"rows": 140, "columns": 70, "head": 24}
    check(cuda_emulator, make(2, 4, key_lead=(2, 2), enable_gqa=True, **options), blocks)
    check(cuda_emulator, make(2, 3, key_lead=(3,), **options), blocks)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_special_values_stay_in_their_row(cuda_emulator: Emulator, value: float) -> None:
    """Of queries; keys that are hidden may hold them too."""
    call = make(rows=130, columns=70, head=64)
    plain = check(cuda_emulator, call)
    query, key = call.query.clone(), call.key.clone()
    query[3, 5] = value
    key[66:] = value
    window = {"mask": torch.arange(70) < 66}
    hidden = by_copied_panels(cuda_emulator, replace(call, key=key, **window))
    shorter = replace(call, key=call.key[:66], value=call.value[:66])
    assert torch.equal(hidden[0], check(cuda_emulator, shorter)[0])
    changed = by_copied_panels(cuda_emulator, replace(call, query=query))
    others = torch.arange(130) != 3
    assert changed[0][3].isnan().all()
    assert torch.equal(changed[0][others], plain[0][others])


def test_memory_of_every_device(cuda_emulator: Emulator) -> None:
    """Queries of whole heads are in it: 66 KiB of a head of 64, 132 of one of 128."""
    for head, value_head, kibibytes in ((64, 64, 99), (128, 128, 163), (350, 64, 227)):
        call = make(rows=130, columns=70, head=head, value_head=value_head)
        by_copied_panels(cuda_emulator, call, shared_bytes=kibibytes * 1024)
    for head, kibibytes in ((64, 66), (128, 99)):
        call = make(rows=130, columns=70, head=head)
        with pytest.raises(EmulationError, match="does not take the call"):
            by_copied_panels(cuda_emulator, call, shared_bytes=kibibytes * 1024)


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (15, 64), (17, 129), (128, 320), (129, 640), (5, 0)]
)
def test_divided_keys(
    cuda_emulator: Emulator, rows: int, columns: int, head: int, parts: int
) -> None:
    """Parts of several tiles, of one, and of none."""
    call = make(2, rows=rows, columns=columns, head=head)
    if columns == 0:
        output, log_sum_exp, _ = emulated_forward(
            cuda_emulator, call, copied_panels=True, key_parts=parts, shared_bytes=SHARED_BYTES
        )
        assert (output == 0).all()
        assert (log_sum_exp == -torch.inf).all()
        return
    check(cuda_emulator, call, key_parts=parts)


@pytest.mark.parametrize("value_head", [1, 3, 65, 130])
def test_divided_keys_of_odd_values(cuda_emulator: Emulator, value_head: int) -> None:
    call = make(2, rows=70, columns=200, head=40, value_head=value_head)
    check(cuda_emulator, call, key_parts=2)
    check(cuda_emulator, with_operands(call, misaligned), key_parts=3)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_divided_keys_with_limits(cuda_emulator: Emulator, limits: dict[str, object]) -> None:
    """Some parts are hidden from some queries, or from all of a block."""
    for head in (40, 72):
        call = make(rows=260, columns=330, head=head, **limits)  # type: ignore[arg-type]
        check(cuda_emulator, call, key_parts=3)


def test_divided_keys_with_every_feature(cuda_emulator: Emulator) -> None:
    mask = torch.linspace(0, 1, 150 * 200).view(150, 200).cos() > 0.7
    mask[3] = False  # a row of no key
    mask[4, :64] = False  # of none in the first part
    mask[5, 64:] = False
    options = {"mask": mask, "softcap": 2.0, "slopes": torch.tensor([0.5, 0.25]), "dropout": 0.3}
    call = make(3, 4, key_lead=(3, 2), enable_gqa=True, rows=150, columns=200, head=24, **options)
    call = replace(call, slopes=torch.rand(4))
    outputs = [check(cuda_emulator, call, blocks, key_parts=4) for blocks in (1, 100)]
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))
    assert (outputs[0][0][..., 3, :] == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_special_values_of_divided_keys(cuda_emulator: Emulator, value: float) -> None:
    """Of a query they stay in its row; of a value, in its column."""
    call = make(rows=130, columns=200, head=64)
    plain = check(cuda_emulator, call, key_parts=3)
    query = call.query.clone()
    query[3, 5] = value
    changed = by_copied_panels(cuda_emulator, replace(call, query=query), key_parts=3)
    others = torch.arange(130) != 3
    assert changed[0][3].isnan().all()
    assert torch.equal(changed[0][others], plain[0][others])
    values = call.value.clone()
    values[150, 7] = value
    changed = by_copied_panels(cuda_emulator, replace(call, value=values), key_parts=3)
    others = torch.arange(64) != 7
    assert not changed[0][:, 7].isfinite().any()
    assert torch.equal(changed[0][:, others], plain[0][:, others])


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ((32, 4096, 4096, 64), 1),
        ((32, 4096, 4096, 128), 1),
        ((8, 1024, 1024, 64), 4),  # 256 blocks, where 132 multiprocessors have room for 264
        ((8, 1024, 1024, 128), 2),  # room for 132
        ((1, 4096, 4096, 64), 8),
        ((1, 8448, 8448, 64), 4),
        ((1, 16896, 16896, 64), 2),  # a multiprocessor of each has room for two
        ((1, 128, 64, 64), 1),  # no more parts than tiles of keys
        ((1, 128, 1024, 64), 16),
        ((1000, 64, 64, 64), 0),  # half of each tile's rows
        ((1000, 128, 64, 64), 1),
        ((1000, 129, 64, 64), 0),
        ((0, 128, 64, 64), 0),
    ],
)
def test_into_how_many_parts_keys_are_divided(
    cuda_emulator: Emulator, sizes: tuple[int, int, int, int], parts: int
) -> None:
    """For so many matrices, queries, keys and columns of values, on 132 multiprocessors."""
    result = torch.full((1,), 77)
    arguments: dict[str, Argument] = {"parts": result, "sizes": (*sizes, 132)}
    cuda_emulator.run("copied_forward_parts", ["parts"], **arguments)
    assert int(result) == parts
