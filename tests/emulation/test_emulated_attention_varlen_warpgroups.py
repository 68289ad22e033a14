"""Attention over packed sequences by products of warpgroups, run on the CPU by the emulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import test_emulated_attention as attention
import test_emulated_attention_varlen as varlen
import torch
from emulator import Argument, Emulator
from test_emulated_attention import MOST_SHARED_BYTES, RESULTS, assert_near, bounds_of, name_of
from test_emulated_attention_varlen import CALLS, PackedCall, converted, packed_operand
from test_emulated_attention_warpgroups import HALVES
from torch import Tensor

LONG = (130, 0, 3, 257, 64), (200, 5, 65, 129, 0)


def make(*lengths: tuple[int, ...], **options: object) -> PackedCall:
    defaults = {"sizes": (64, 64), "dtype": torch.bfloat16}
    return varlen.make(*lengths, **defaults | options)  # type: ignore[arg-type]


def forward(
    emulator: Emulator, call: PackedCall, blocks: int = 3, warpgroups: bool = True
) -> list[Tensor]:
    """Output and log-sum-exp, of which nothing is written before."""
    output = torch.full(call.grad_output.shape, 77, dtype=call.dtype)
    log_sum_exp = torch.full((call.query.shape[1], len(call.query)), 77.0)
    arguments: dict[str, Argument] = varlen.arguments_of(call) | {"log_sum_exp": log_sum_exp}
    arguments |= packed_operand("output", output, call.group)
    arguments |= packed_operand("output_residual", output.clone(), call.group)
    arguments |= {"most_shared_bytes": MOST_SHARED_BYTES, "warpgroups": warpgroups}
    arguments["copied_panels"] = 0
    emulator.run("attention_forward", ["output", "log_sum_exp"], blocks, **arguments)
    return [output, log_sum_exp]


def of_rows(result: Tensor, rows: slice) -> Tensor:
    """Of an output or a log-sum-exp, as a sequence alone has it."""
    return result[:, rows] if result.dim() == 2 else result[rows].transpose(0, 1)


def check(emulator: Emulator, call: PackedCall, blocks: int = 3) -> list[Tensor]:
    """Compare each sequence with the exact results of it alone; nothing else is written."""
    results = forward(emulator, call, blocks)
    assert emulator.counters.group_products > 0
    assert emulator.counters.products == 0
    covered = torch.zeros(len(call.query), dtype=torch.bool)
    for rows, _, alone in call.sequences():
        covered[rows] = True
        own = [of_rows(each, rows) for each in results]
        if alone.rows == 0 or alone.columns == 0:
            assert (own[0] == 0).all()
            assert (own[1] == -torch.inf).all()
            continue
        exact = attention.exact_results(alone)
        shaped = [each.reshape(value.shape) for each, value in zip(own, exact, strict=False)]
        assert_near(RESULTS[:2], shaped, exact, bounds_of(alone, exact))
    for each in (results[0], results[1].mT):
        assert (each[~covered] == 77).all()
    return results


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("sizes", [(64, 64), (72, 128), (8, 200)], ids=str)
def test_lengths_around_every_tile_boundary(
    cuda_emulator: Emulator, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    check(cuda_emulator, make(*LONG, sizes=sizes, dtype=dtype))


FEATURES = {
    "causal": {"is_causal": True},
    "window": {"window": (40, 2)},
    "window, causal": {"window": (64, -1), "is_causal": True},
    "softcap": {"softcap": 0.8},
    "slopes": {"slopes": torch.linspace(0.25, 1, 4)},
    "slopes of sequences": {"slopes": torch.linspace(0.25, 1, 20).view(5, 4), "is_causal": True},
    "dropout": {"dropout": 0.3},
    "all": {
        "is_causal": True,
        "window": (90, -1),
        "softcap": 2.0,
        "slopes": torch.linspace(0.25, 1, 4),
        "dropout": 0.2,
    },
}


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_what_may_become_of_a_score(
    cuda_emulator: Emulator, name: str, heads: tuple[int, int]
) -> None:
    check(cuda_emulator, make(*LONG, heads=heads, **FEATURES[name]))


# Calls whose offsets, lengths or layouts are out of the ordinary.
OF_THE_OTHERS = [
    "tiles",
    "empty ones",
    "causal, more queries than keys",
    "int64 offsets",
    "long maximum",
    "short maximum",
    "uncovered",
    "heads outside",
]


@pytest.mark.parametrize("name", OF_THE_OTHERS)
def test_calls_of_the_other_kernels(cuda_emulator: Emulator, name: str) -> None:
    """With heads of 8, which the copy engine takes, and NaN wherever no sequence is."""
    call = CALLS[name]()
    tensors = {
        each: torch.randn(*getattr(call, each).shape[:2], 8)
        for each in ("query", "key", "value", "grad_output")
    }
    call = converted(replace(call, **tensors), torch.bfloat16)
    if name == "heads outside":
        call = varlen.heads_outside(call)
    covered = [torch.zeros(len(each), dtype=torch.bool) for each in (call.query, call.key)]
    for rows, columns, _ in call.sequences():
        covered[0][rows] = covered[1][columns] = True
    for tensor, of in zip((call.query, call.key, call.value), (0, 1, 1), strict=True):
        tensor[~covered[of]] = torch.nan
    check(cuda_emulator, call)


def check_apart(emulator: Emulator, call: PackedCall, number: float = torch.nan) -> None:
    """Every second sequence full of a number: the others have the same results to the last bit."""
    before = check(emulator, call)
    sequences = call.sequences()
    for of_queries, of_keys, _ in sequences[1::2]:
        for tensor, tokens in ((call.query, of_queries), (call.key, of_keys)):
            tensor[tokens] = number
        call.value[of_keys] = number
    after = forward(emulator, call)
    for of_queries, _, _ in sequences[::2]:
        for results in zip(before, after, strict=True):
            assert torch.equal(*(of_rows(each, of_queries) for each in results))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout": 0.2}], ids=str)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_sequence(
    cuda_emulator: Emulator, number: float, options: dict[str, object]
) -> None:
    """Wherever in a tile a sequence ends."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        rows, columns = (
            tuple(torch.randint(1, 150, (5,), generator=generator).tolist()) for _ in range(2)
        )
        check_apart(cuda_emulator, make(rows, columns, **options), number)


def test_results_do_not_depend_on_the_grid(cuda_emulator: Emulator) -> None:
    call = make(*LONG, heads=(4, 2), is_causal=True, dropout=0.2)
    results = [check(cuda_emulator, call, blocks) for blocks in (1, 2, 100)]
    for others in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], others, strict=True))


@pytest.mark.parametrize("starts", varlen.SENSELESS_OFFSETS)
def test_offsets_that_make_no_sense_touch_nothing_else(
    cuda_emulator: Emulator, starts: list[int]
) -> None:
    """The device reads them when it is too late to refuse: the sanitizer sees every access."""
    call = make((5, 4), (6, 3), is_causal=True)
    wrong = torch.tensor(starts, dtype=torch.int32)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        varlen.emulated(cuda_emulator, replace(call, **{name: wrong}), warpgroups=True)


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"dropout": 0.2, "slopes": torch.linspace(0.5, 1, 2)}], ids=str
)
def test_the_operator_takes_them(
    cuda_emulator: Emulator,
    emulated_operators: varlen.Operators,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, object],
) -> None:
    """To the last bit, where the device has their products, and unless they are turned off."""
    call = make((70, 0, 9), (5, 3, 80), **options)
    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", "90")
    for warpgroups in (True, False):
        actual = varlen.operator_results(emulated_operators, call)
        expected = varlen.emulated(cuda_emulator, call, warpgroups=warpgroups)
        varlen.compare(call, expected)
        assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
        monkeypatch.setenv("PKG_CUDA_WARPGROUPS", "0")


OTHER_WAYS = {
    "rows of 40 bytes": lambda: make((5, 70), (70, 9), sizes=(20, 64)),
    "float32": lambda: make((5, 70), (70, 9), dtype=torch.float32),
    "spread": lambda: varlen.spread(make((5, 70), (70, 9))),
    "wide heads": lambda: make((5, 70), (70, 9), sizes=(64, 264)),
    "a wide head with a cap": lambda: make((5, 70), (70, 9), sizes=(64, 136), softcap=1.0),
    "no maximum": lambda: replace(make((9, 5), (7, 5)), most=(0, 0)),
    "no key": lambda: make((9, 5), (0, 0)),
}


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_what_no_warpgroup_takes_goes_another_way(cuda_emulator: Emulator, name: str) -> None:
    call = OTHER_WAYS[name]()
    results = varlen.emulated(cuda_emulator, call, warpgroups=True)
    others = varlen.emulated(cuda_emulator, call)
    assert all(torch.equal(*pair) for pair in zip(results, others, strict=True))


def check_counts(emulator: Emulator) -> None:
    """Tiles of queries that no sequence has are no work: of four there are three."""
    check(emulator, make((129, 1), (256, 100), heads=(1, 1), sizes=(128, 128)), 1)
    counted = emulator.counters
    query_tiles, key_tiles, slices = 3, 2 + 2 + 1, 2
    assert counted.group_products == key_tiles * 2 * (slices * 4 + 128 // 16)
    # Of tiles of 128 lines, whether a sequence has so many or the copy engine makes zeros.
    assert counted.boxes == 2 * slices * (query_tiles + 2 * key_tiles)


def test_counted_products_and_boxes(cuda_emulator: Emulator) -> None:
    check_counts(cuda_emulator)
