"""The benchmarks verify before they time, measure every peer, and report what they ran on."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from built_libraries import USABLE
from torch import Tensor

import pkg
from pkg.__main__ import load_benchmarks, main
from pkg.testing import OperatorCheckError, Sample, check_op
from pkg.testing.tolerance import rounding_of_a_sum

for package in ("rich", "threadpoolctl"):
    pytest.importorskip(package)


BENCHMARKED = load_benchmarks().operators()
WHOLE_MODELS = "models"


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    return load_benchmarks()


@pytest.fixture(autouse=True)
def no_peer_is_slow(harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer's first call may take long on a busy machine; it is not to be left out for that."""
    monkeypatch.setattr(harness, "SLOW_SECONDS", math.inf)


def case_of(harness: ModuleType, ours: Callable[[], Tensor], dtype: torch.dtype) -> object:
    numbers = torch.rand(50).double()
    rounded = numbers.to(dtype)
    return harness.Case(
        "sum",
        {"pkg": ours, "PyTorch": lambda: rounded + 1},
        lambda: rounded.double() + 1,
        1,
        "GB/s",
    )


def limits_module() -> ModuleType:
    return sys.modules["pkg._benchmarks._limits"]


def test_every_benchmark_is_of_an_operator() -> None:
    assert set(BENCHMARKED) <= {*pkg.ops.__all__, WHOLE_MODELS}
    assert {"mul", "muladd"} < set(BENCHMARKED)


@pytest.fixture(scope="module")
def limits(harness: ModuleType) -> dict[str, float]:
    return harness.Limits(memory_bytes=1 << 20).rates


def replace_copies(monkeypatch: pytest.MonkeyPatch, copies: Callable[..., int]) -> None:
    """Say how many copies of its tensors a case of memory has."""
    for module in [each for name, each in sys.modules.items() if "_benchmarks" in name]:
        if hasattr(module, "copies_beyond_caches"):
            monkeypatch.setattr(module, "copies_beyond_caches", copies)


@pytest.mark.parametrize("operator", BENCHMARKED)
def test_every_benchmark_has_right_results(
    harness: ModuleType, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies enough to go round the caches would be gigabytes for each case on the way."""
    replace_copies(monkeypatch, lambda *tensors, used=None: 2)
    meta = harness.cases(operator, torch.device("meta"))
    name = min(meta, key=lambda case: case.work).name
    cases = harness.cases(operator, torch.device("cpu"))
    harness.verify(next(case for case in cases if case.name == name))


@pytest.mark.parametrize("operator", BENCHMARKED)
def test_every_case_is_named_and_held_to_a_limit(
    harness: ModuleType, limits: dict[str, float], operator: str
) -> None:
    # On the meta device nothing of the large tensors is allocated.
    cases = list(harness.cases(operator, torch.device("meta"), full=True))
    assert len({case.name for case in cases}) == len(cases)
    assert {case.limit for case in cases} <= {None, *limits}
    assert any(case.limit for case in cases)
    for case in cases:
        assert next(iter(case.peers)) == "pkg"
        assert (case.unit == "GB/s") == (case.limit in {None, "memory"}), case.name
        assert case.work > 0


def test_the_grid_of_matmul_is_whole(harness: ModuleType) -> None:
    names = {case.name for case in harness.cases("matmul", torch.device("meta"), full=True)}
    for dtype in ("float32", "float64", "bfloat16", "float16", "int8"):
        for n in (8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096):
            assert f"{dtype}, n = {n}" in names
        for rows in ("1 row", "16 rows", "512 rows"):
            assert f"{dtype}, {rows}, 768 to 3072" in names
            assert f"{dtype}, {rows}, 4096 to 14336" in names


def test_the_grid_of_attention_is_whole(harness: ModuleType) -> None:
    operator, meta = "scaled_dot_product_attention", torch.device("meta")
    cases = {case.name: case for case in harness.cases(operator, meta, full=True)}
    for dtype in ("float32", "bfloat16", "float16"):
        for size in (64, 128):
            for length in (16, 64, 128, 256, 1024, 4096, 16384):
                shape = f"{dtype}, 1x8x{length}x{size}"
                kinds = ["", " causal", " with backward", " causal with backward"]
                assert all(shape + kind in cases for kind in kinds[: 2 if length > 4096 else 4])
            for keys in (128, 1024, 4096, 16384):
                assert cases[f"{dtype}, 1x8x{size}, one query, {keys} keys"].limit == "memory"
        assert f"{dtype}, 1x1x1024x64 with backward" in cases
        plain, trained = (f"{dtype}, 1x8x1024x64{kind}" for kind in ("", " with backward"))
        for case, beside in (
            (f"{plain}, boolean mask", plain),
            (f"{plain}, boolean mask of every head", plain),
            (f"{plain}, ALiBi", plain),
            (f"{trained}, learnable float mask", trained),
            (f"{trained}, dropout", trained),
            (f"{plain}, heads inside", plain),
            (f"{plain}:32", plain),
            (f"{dtype}, 1x8x1024x33", plain),
            (f"{dtype}, 1x8x1024x512", plain),
            (f"{dtype}, 1x8:1x1024x64", plain),
            (f"{dtype}, 1x8x256x64, 2048 keys", plain),
            (f"{dtype}, 1x8x4096x64, window of 128", f"{dtype}, 1x8x4096x64"),
        ):
            assert cases[case].beside == beside
        assert cases[plain].beside is None
    # Of the 16 million scores of 4096 rows, a window of 128 leaves 128 a row, less at the start.
    window = sum(min(row + 1, 128) for row in range(4096)) * 8 * 64 * 4 / 1e9
    assert cases["float32, 1x8x4096x64, window of 128"].work == pytest.approx(window)
    plain = cases["float32, 1x8x1024x64"].work
    assert plain == pytest.approx(4 * 8 * 1024**2 * 64 / 1e9)
    assert cases["float32, 1x8x1024x64 causal with backward"].work == pytest.approx(plain * 3.5 / 2)


@pytest.mark.parametrize(
    "recipe",
    [
        {"mask": "boolean mask", "backward": True},
        {"mask": "learnable float mask", "backward": True},
        {"mask": "ALiBi"},
        {"mask": "window of 128", "causal": False},
        {"key_heads": 1, "backward": True},
        {"dropout": True},
        {"dropout": True, "backward": True},
        {"heads_inside": True, "backward": True},
        {"value_size": 9},
        {"columns": 70},
    ],
    ids=str,
)
def test_every_kind_of_attention_is_verified(
    harness: ModuleType, recipe: dict[str, object]
) -> None:
    attention = importlib.import_module("pkg._benchmarks._attention")
    for dtype in (torch.float32, torch.bfloat16):
        small = attention.Recipe(dtype, **{"rows": 40, "heads": 2, "size": 16, **recipe})
        harness.verify(small.case(torch.device("cpu")))


def test_each_of_several_results_is_verified(harness: ModuleType) -> None:
    one, two = torch.ones(5), torch.full((5,), 1e-3)
    case = case_of(harness, lambda: one, torch.float32)
    peers = {"pkg": lambda: (one, two), "PyTorch": lambda: (one, two)}
    exact = (one.double(), two.double())
    harness.verify(dataclasses.replace(case, peers=peers, exact=lambda: exact))
    # An error that is nothing beside the first result.
    wrong = {**peers, "pkg": lambda: (one, two * (1 + 1e-4))}
    with pytest.raises(ArithmeticError, match="result 2 of pkg must be within"):
        harness.verify(dataclasses.replace(case, peers=wrong, exact=lambda: exact))


def test_a_model_is_held_to_a_slow_peer_too(harness: ModuleType) -> None:
    # Its error is that of many sums, which no number of terms tells.
    exact = torch.linspace(1, 2, 50, dtype=torch.float64)
    peers = {"pkg": lambda: (exact * 1.01).half(), "PyTorch": lambda: (exact * 0.99).half()}
    case = harness.Case("model", peers, lambda: exact, 1, "GFLOP/s", terms=None)
    assert set(harness.verify(case, lambda _: True)) == {"pkg", "PyTorch"}
    with pytest.raises(ArithmeticError, match="the result of pkg"):
        harness.verify(dataclasses.replace(case, terms=1), lambda _: True)


def test_a_part_is_verified(harness: ModuleType) -> None:
    numbers = torch.rand(50)
    reference = harness.Reference(lambda numbers: numbers / 3, numbers)
    ours = torch.cat([numbers / 3, torch.zeros(50)])
    case = harness.Case(
        "part",
        {"pkg": lambda: ours, "PyTorch": lambda: torch.rand(100)},
        reference,
        1,
        "GFLOP/s",
        part=lambda result: result[:50],
    )
    assert set(harness.verify(case)) == {"pkg"}
    with pytest.raises(ArithmeticError):
        harness.verify(dataclasses.replace(case, part=lambda result: result[1:51]))


# PyTorch's softmax, off everywhere by this many of its own largest errors, up and down in turn.
off_by = 0.0


@torch.library.custom_op("benchmarked::softmax", mutates_args=())
def softmax(x: Tensor) -> Tensor:
    exact = x.double().softmax(-1)
    largest = (x.softmax(-1) - exact).abs().max()
    signs = 1 - torch.arange(x.numel()).view_as(x).remainder(2) * 2
    return (exact + off_by * largest * signs).to(x.dtype)


@pytest.mark.parametrize(("factor", "right"), [(1.5, True), (20.0, False)])
def test_the_benchmark_accepts_what_check_op_accepts(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch, factor: float, right: bool
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "off_by", factor)
    rows = torch.randn(20, 40, generator=torch.Generator().manual_seed(3))
    exact, plain = rows.double().softmax(-1), rows.softmax(-1)
    # All elements together are further off than PyTorch's twice, each of them alone is not.
    assert (softmax(rows) - exact).norm() > 2 * (plain - exact).norm()
    case = harness.Case(
        "softmax",
        {"pkg": lambda: softmax(rows), "PyTorch": lambda: rows.softmax(-1)},
        harness.Reference(lambda x: x.softmax(-1), rows),
        1,
        "GB/s",
    )

    def check() -> None:
        check_op(
            torch.ops.benchmarked.softmax,
            [Sample((rows.double(),))],
            reference=lambda x: x.softmax(-1),
            dtypes=[torch.float32],
            checks=["values"],
        )

    if right:
        harness.verify(case)
        check()
        return
    with pytest.raises(ArithmeticError, match="softmax: the result of pkg must be within 2 times"):
        harness.verify(case)
    with pytest.raises(OperatorCheckError, match="output must be within 2 times"):
        check()


def test_neighbouring_inputs_count_before_a_result_fails(harness: ModuleType) -> None:
    one = torch.ones(1)

    def function(x: Tensor) -> Tensor:
        return (3 * x - 3) * 1000  # right at 1 by luck, off by 1000 eps beside it

    def case(exact: object) -> object:
        peers = {"pkg": lambda: function(one) + 1e-4, "PyTorch": lambda: function(one)}
        return harness.Case("amplified", peers, exact, 1, "GB/s")

    harness.verify(case(harness.Reference(function, one)))
    with pytest.raises(ArithmeticError, match="the plain error 0 "):
        harness.verify(case(lambda: function(one.double())))


def test_float64_is_held_to_the_error_of_float32(harness: ModuleType) -> None:
    a, b = torch.randn(30, 60).double(), torch.randn(60, 30).double()
    reference = harness.Reference(torch.matmul, a, b)
    case = harness.Case("product", {"pkg": lambda: a @ b}, reference, 1, "GFLOP/s")
    harness.verify(case)
    wrong = (a @ b) * (1 + 1e-13)
    with pytest.raises(ArithmeticError, match="within 3 times the plain error"):
        harness.verify(dataclasses.replace(case, peers={"pkg": lambda: wrong}))


def test_a_slow_plain_result_is_replaced_by_the_roundings_of_the_terms(harness: ModuleType) -> None:
    a, b = torch.randn(30, 256), torch.randn(256, 30)

    def never(*_: Tensor) -> Tensor:
        raise AssertionError("called")

    def plain(a: Tensor, b: Tensor) -> Tensor:
        assert a.dtype == torch.float64
        return a @ b

    case = harness.Case(
        "product",
        {"pkg": lambda: a @ b, "PyTorch": never},
        harness.Reference(plain, a, b),
        1,
        "GFLOP/s",
        terms=256,
    )
    assert set(harness.verify(case, lambda peer: True)) == {"pkg"}
    wrong = dataclasses.replace(case, peers={"pkg": lambda: (a @ b) * (1 + 1e-4), "PyTorch": never})
    with pytest.raises(ArithmeticError):
        harness.verify(wrong, lambda peer: True)


def test_long_calls_are_made_few_times(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = sys.modules["pkg._benchmarks._timing"]
    monkeypatch.setattr(timing, "LONG_SECONDS", 0.02)
    monkeypatch.setattr(timing, "LONG_ROUND_SECONDS", 0.03)
    calls = []

    def slow() -> Tensor:
        calls.append(time.sleep(0.04))
        return torch.ones(1)

    case = harness.Case("slow", {"pkg": slow}, lambda: torch.ones(1), 1.0, "GFLOP/s")
    first = harness.verify(case)
    result = harness.measure("slow", case, 0.01, first=first)
    assert len(calls) == 3  # the first, and one in each of two rounds
    assert result.seconds["pkg"] >= 0.04


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_wrong_result_is_refused(harness: ModuleType, dtype: torch.dtype) -> None:
    numbers = torch.ones(50, dtype=dtype)
    for wrong in (numbers, numbers * torch.nan, numbers + 1 + 1e-1):
        with pytest.raises(ArithmeticError, match="sum: the result of pkg must be"):
            harness.verify(case_of(harness, lambda result=wrong: result, dtype))


def test_without_a_peer_the_roundings_of_the_terms_are_allowed(harness: ModuleType) -> None:
    unit = torch.finfo(torch.float32).eps
    exact = torch.ones(50).double()
    # Twice half a unit times the root of the terms, and twice the rounding of a sum, 0.3 away.
    floor = rounding_of_a_sum(exact, torch.float32) / unit
    for terms, units, right in (
        (1, floor + 3, False),
        (16, floor + 3, True),
        (16, 8 + floor, False),
    ):
        result = (exact * (1 + units * unit)).float()
        case = harness.Case("sum", {"pkg": lambda r=result: r}, lambda: exact, 1, "", terms)
        if right:
            harness.verify(case)
        else:
            with pytest.raises(ArithmeticError):
                harness.verify(case)


def test_integers_have_to_be_exact(harness: ModuleType) -> None:
    exact = torch.full((50,), 1 << 28)
    peers = {"pkg": lambda: exact.int(), "PyTorch": lambda: exact.int()}
    case = harness.Case("sum", peers, lambda: exact, 1, "GFLOP/s")
    assert set(harness.verify(case)) == {"pkg", "PyTorch"}
    off_by_one = {"pkg": lambda: exact.int() + torch.eye(50).int()[0], "PyTorch": peers["PyTorch"]}
    with pytest.raises(ArithmeticError):
        harness.verify(dataclasses.replace(case, peers=off_by_one))


def test_every_peer_is_measured(harness: ModuleType) -> None:
    calls = dict.fromkeys(("pkg", "PyTorch", "other"), 0)

    def peer(name: str) -> Callable[[], Tensor]:
        def call() -> Tensor:
            calls[name] += 1
            return torch.ones(1)

        return call

    case = harness.Case("ones", {name: peer(name) for name in calls}, lambda: None, 2.0, "GB/s")
    result = harness.measure("ones", case, 0.05)
    assert list(result.seconds) == list(calls) == list(result.spread)
    assert all(seconds > 0 for seconds in result.seconds.values())
    assert all(count >= harness.LEAST_ROUNDS for count in calls.values())
    assert result.rate("other") == 2.0 / result.seconds["other"]


def test_a_far_slower_peer_is_left_out_and_not_tried_with_more(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "SLOW_SECONDS", 0.05)
    now = 0.0  # a clock that only the slow peer moves
    monkeypatch.setattr(sys.modules["pkg._benchmarks._timing"], "timer", lambda: now)
    calls = dict.fromkeys(("pkg", "PyTorch", "other"), 0)

    def case(work: float) -> object:
        def call(name: str) -> Tensor:
            nonlocal now
            calls[name] += 1
            if name == "PyTorch":
                now += 0.06 * work
            return torch.ones(3)

        peers = {name: lambda name=name: call(name) for name in calls}
        return harness.Case("ones", peers, lambda: torch.ones(3), work, "GFLOP/s")

    session = harness.Session(harness.Options(seconds=0.01), None, [])
    small = session.result("ones", case(0.5))
    assert small.skipped == {}
    assert set(small.seconds) == set(calls)
    before = calls["PyTorch"]
    for work, tried in ((1.0, 1), (2.0, 1), (0.9, 2)):
        result = session.result("ones", case(work))
        assert set(result.skipped) == {"PyTorch"}
        assert result.skipped["PyTorch"].startswith("skipped: ")
        assert set(result.seconds) == {"pkg", "other"}
        assert calls["PyTorch"] - before == tried


def test_copies_are_used_in_turn(harness: ModuleType) -> None:
    numbers = harness.in_turn(lambda number: number, [(1,), (2,), (3,)])
    assert [numbers() for _ in range(5)] == [1, 2, 3, 1, 2]
    megabyte = torch.empty(1 << 18)
    megabytes = limits_module().beyond_caches() >> 20
    assert megabytes >= 256
    assert harness.copies_beyond_caches(megabyte) == megabytes
    assert harness.copies_beyond_caches(megabyte, megabyte) == math.ceil(megabytes / 2)
    assert harness.copies_beyond_caches(megabyte, used=4 << 20) == math.ceil(megabytes / 4)
    assert harness.copies_beyond_caches(megabyte.to("meta")) == 1


def test_copies_are_read_twice_before_they_are_timed(harness: ModuleType) -> None:
    used: list[int] = []
    calls = harness.in_turn(used.append, [(1,), (2,), (3,)])
    calls.begin_at(0.5)
    calls.make_all(seconds=1000)
    assert used == [2, 3, 1] * 2
    used.clear()
    calls.make_all(seconds=0)  # what takes too long is made once
    assert used == [2]


def test_peers_do_not_use_a_copy_one_after_the_other(harness: ModuleType) -> None:
    used: dict[str, list[int]] = {name: [] for name in ("pkg", "PyTorch", "NumPy")}

    def use(name: str, copy: int) -> Tensor:
        used[name].append(copy)
        return torch.zeros(1)

    copies = [(copy,) for copy in range(60)]
    peers = {name: harness.in_turn(partial(use, name), copies) for name in used}
    case = harness.Case("copies", peers, lambda: None, 1.0, "GB/s")
    harness.measure("copies", case, seconds=1e-6)
    assert [turns[0] for turns in used.values()] == [0, 20, 40]
    for turns in used.values():
        assert turns == [(turns[0] + i) % 60 for i in range(len(turns))]


def test_limits_are_measured(harness: ModuleType, limits: dict[str, float]) -> None:
    assert set(limits) == set(limits_module().WAYS) | set(limits_module().ARITHMETIC)
    assert all(0.1 < rate < 1e6 for rate in limits.values())
    assert limits["float32"] >= limits["bfloat16"] / 6  # by parts
    assert limits["float16"] == max(limits["float32"], limits["bfloat16"] / 4)
    library = sys.modules["pkg._benchmarks._limits"]._library()
    assert library.pkg_arithmetic_limit(b"complex64", 1) == 0
    # Too little memory to be divided among the threads.
    assert library.pkg_reading_limit(torch.ones(1).data_ptr(), 4, 1) == 0


def test_limits_are_measured_in_turns_with_what_they_bound(harness: ModuleType) -> None:
    a = torch.ones(8)
    peers = {"pkg": lambda: a + 1, "PyTorch": lambda: a + 1}
    from_memory = limits_module().beyond_caches() / 1e9
    case = harness.Case("ones", peers, lambda: a + 1, from_memory, "GB/s", limit="memory")
    limits = harness.Limits(memory_bytes=1 << 20)
    session = harness.Session(harness.Options(seconds=0.01), limits, [])
    # Those of before were measured wrong, and do not count.
    for name in ("memory", "float32"):
        limits.rates[name] = 1e-3
        result = session.result("ones", dataclasses.replace(case, limit=name))
        assert set(result.seconds) == set(result.spread) == {"pkg", "PyTorch"}
        assert 0.1 < result.attainable < 1e6
        assert result.share == result.rate("pkg") / result.attainable
        assert limits.rates[name] >= result.attainable
    # Of memory the best beside the case counts, of arithmetic the best of the run.
    limits.rates["memory"] = limits.rates["float32"] = 1e9
    assert session.result("ones", case).attainable < 1e6
    assert session.result("ones", dataclasses.replace(case, limit="float32")).attainable == 1e9


def test_what_a_cache_holds_is_not_held_to_memory(harness: ModuleType) -> None:
    beyond = limits_module().beyond_caches()
    a = torch.ones(8)

    def case(calls: int, used: float) -> object:
        peers = {"pkg": harness.each_in_turn([lambda: a + 1] * calls)}
        return harness.Case("ones", peers, lambda: a + 1, used / 1e9, "GB/s", limit="memory")

    limits = harness.Limits(memory_bytes=1 << 20)
    session = harness.Session(harness.Options(seconds=0.01), limits, [])
    for calls, used, share in ((1, beyond, True), (1, beyond - 1, False), (2, beyond / 2, True)):
        result = session.result("ones", case(calls, used))
        assert (result.share is not None) == share
        assert result.unheld == (None if share else "fits in the caches")
        assert result.limit == ("memory" if share else None)


@pytest.mark.parametrize("operator", BENCHMARKED)
def test_every_case_of_memory_is_larger_than_the_caches(
    harness: ModuleType, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the number of copies is as on the CPU, where they are made of memory."""
    replace_copies(monkeypatch, copies_of_nothing(harness))
    for case in harness.cases(operator, torch.device("meta"), full=True):
        if case.limit == "memory":
            assert case.from_memory, case.name


def copies_of_nothing(harness: ModuleType) -> Callable[..., int]:
    def copies(*tensors: Tensor, used: int | None = None) -> int:
        size = sum(tensor.nbytes for tensor in tensors)
        return math.ceil(limits_module().beyond_caches() / (size if used is None else used))

    return copies


def test_results_are_kept_as_long_as_the_copies(harness: ModuleType) -> None:
    calls = harness.each_in_turn([lambda: torch.empty(1000) for _ in range(3)])
    addresses = {calls().data_ptr() for _ in range(3)}
    assert len(addresses) == 3


def test_the_caches_are_those_of_the_processors_in_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def level(processor: int, index: int, **facts: str) -> None:
        folder = tmp_path / f"cpu{processor}" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, words in facts.items():
            (folder / name).write_text(f"{words}\n")

    for processor in range(4):
        level(processor, 0, level="1", type="Data", size="32K", shared_cpu_list=f"{processor}")
        pair = processor // 2 * 2
        shared = f"{pair}-{pair + 1}"
        level(processor, 3, level="3", type="Unified", size="8M", shared_cpu_list=shared)
    cache_bytes = limits_module().cache_bytes
    for processors, megabytes in (({0}, 8), ({0, 1}, 8), ({1, 2}, 16), ({9}, 0)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, these=processors: these)
        cache_bytes.cache_clear()
        assert cache_bytes(tmp_path) == megabytes << 20
    cache_bytes.cache_clear()


def test_a_limit_is_that_of_the_fastest_way(limits: dict[str, float]) -> None:
    # A weight of four bits is multiplied by integers where that is faster.
    fastest = max(limits["float32"], limits["int4"] / 3, limits["int8"] / 3)
    assert limits["float32 by int4"] == fastest
    assert limits["int8 by int4"] == max(limits["int8"], limits["int4"])
    meaning = limits_module().meaning
    assert meaning("memory") == "reading memory"
    assert "multiply-add of bfloat16 in 4 products of parts" in meaning("float16")
    assert "multiply-add of int8 in 3 digits" in meaning("float32 by int4")


def test_the_volume_beyond_the_border_is_no_work(harness: ModuleType) -> None:
    (case, *_) = harness.cases("spatial_correlation_sample", torch.device("meta"))
    down = sum(max(0, 48 - abs(shift)) for shift in range(-20, 21, 2))
    right = sum(max(0, 64 - abs(shift)) for shift in range(-20, 21, 2))
    assert case.work == pytest.approx(2 * 256 * down * right / 1e9)


BUSY = "while True: pass"


def test_other_processes_are_counted_and_our_own_are_not(tmp_path: Path) -> None:
    load = sys.modules["pkg._benchmarks._load"]

    def counters(stat: str, own: int) -> object:
        (tmp_path / "stat").write_text(f"{stat}\n")
        folder = tmp_path / str(os.getpid())
        folder.mkdir(exist_ok=True)
        fields = ["S", "1", *["0"] * 9, str(own), "0", "0", "0", *["0"] * 5]
        (folder / "stat").write_text(f"{os.getpid()} (a ) name) {' '.join(fields)}\n")
        child = tmp_path / "7"
        child.mkdir(exist_ok=True)
        fields[1], fields[11] = str(os.getpid()), "5"
        (child / "stat").write_text(f"7 (child) {' '.join(fields)}\n")
        return load.Counters.now(tmp_path)

    before = counters("cpu 100 0 0 100 0 0 0 0 0 0", 40)
    after = counters("cpu 150 10 0 130 0 0 0 10 0 0", 70)
    # 60 busy ticks, 30 of them our own, and 10 stolen, of 100.
    assert (after - before).others == pytest.approx(0.4)
    assert before.own == 45
    assert load.Counters.now(tmp_path / "none") is None
    assert "used 40% of the" in load.describe([0.4])
    assert "ran: figures are disturbed" in load.describe([0.4])
    assert "40% beside one case: figures are disturbed" in load.describe([0.4, 0.0])
    assert "disturbed" not in load.describe([0.01, None])
    assert "not known" in load.describe([None])


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc")
def test_what_this_process_does_is_no_load_of_others() -> None:
    load = sys.modules["pkg._benchmarks._load"]
    before, start = load.Counters.now(), time.process_time()
    # Of a child too.
    child = subprocess.Popen([sys.executable, "-c", BUSY])
    while time.process_time() - start < 0.3:
        pass
    spent = load.Counters.now() - before
    child.kill()
    child.wait()
    ticks = os.sysconf("SC_CLK_TCK")
    assert spent.own >= 0.3 * ticks - 2
    assert spent.busy >= spent.own - 4
    assert 0 <= spent.others <= 1


def test_limits_are_found_where_binding_and_kernels_are_one_library(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As after PKG_JIT=1.
    file = pkg._loader.library_file(f"_cpu_{pkg._loader.cpu_capability}") or pkg._C.__file__
    monkeypatch.setattr(pkg._C, "__file__", str(file))
    monkeypatch.setattr(pkg._loader, "library_file", lambda name: None)
    assert harness.Limits(memory_bytes=1 << 20).rates["float32"] > 0.1


@pytest.mark.parametrize("capability", USABLE or pkg._C.cpu_capabilities())
def test_every_library_measures_its_limits(capability: str) -> None:
    program = """
from pkg.__main__ import load_benchmarks
print(min(load_benchmarks().Limits(memory_bytes=1 << 20).rates.values()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PKG_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0.1


def test_threads_are_placed_on_processors_of_their_own(harness: ModuleType) -> None:
    threads = sys.modules["pkg._benchmarks._threads"]
    before, allowed = torch.get_num_threads(), os.sched_getaffinity(0)
    with harness.pinned(1) as processors:
        assert torch.get_num_threads() == 1
        assert os.sched_getaffinity(0) == set(processors)
        assert len(processors) == 1
    count = len(allowed)
    with harness.pinned(count) as processors:
        torch.ones(1 << 20).sum()
        found = {thread: os.sched_getaffinity(thread) for thread in threads._threads(os.getpid())}
        assert found[os.getpid()] == {processors[0]}
        assert set.union(*found.values()) == allowed
    assert torch.get_num_threads() == before
    assert os.sched_getaffinity(0) == allowed


def test_cores_come_before_their_second_threads(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = sys.modules["pkg._benchmarks._threads"]
    monkeypatch.setattr(threads, "_siblings", lambda processor: str(processor % 4))
    assert threads.processors(4, range(8)) == [0, 1, 2, 3]
    assert threads.processors(6, range(8)) == [0, 1, 2, 3, 4, 5]
    assert threads.processors(3, [1, 2, 5, 6]) == [1, 2, 5]


FAKE_ZENTORCH = """
import torch

print("a word that is no answer")
__version__ = "0.0.fake"
library = torch.library.Library("zentorch", "DEF")
library.define("zentorch_mm(Tensor a, Tensor b, *, str name='') -> Tensor")


threads = []


def multiply(a, b, name=""):
    if a.dtype != torch.float32:
        raise RuntimeError("only float32")
    assert not a.is_contiguous()
    threads.append(torch.get_num_threads())
    return a @ b if threads[-1] == threads[0] else torch.zeros_like(a @ b)


library.impl("zentorch_mm", multiply, "CPU")
library.define("zentorch_bmm(Tensor a, Tensor b) -> Tensor")
library.impl("zentorch_bmm", lambda a, b: b @ a, "CPU")
"""


def with_threads(session: object, case: object, *numbers: int) -> Iterator[object]:
    before = torch.get_num_threads()
    try:
        for number in numbers:
            torch.set_num_threads(number)
            yield session.result("mul", case)
    finally:
        torch.set_num_threads(before)


@pytest.mark.long
def test_zentorch_is_timed_in_a_process_of_its_own(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "zentorch.py").write_text(FAKE_ZENTORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    a = torch.ones(4, 8).mT
    case = harness.Case(
        "ones",
        {"pkg": lambda: a @ a.mT, "PyTorch": lambda: a @ a.mT},
        lambda: a @ a.mT,
        1,
        "GFLOP/s",
        limit="float32",
        zentorch=harness.ForeignCall("zentorch_mm", (a, a.mT), {"name": "words"}, copies=2),
    )
    zentorch = harness.Zentorch(sys.executable)
    try:
        assert zentorch.versions == {"zentorch": "0.0.fake", "torch": torch.__version__}
        limits = harness.Limits(memory_bytes=1 << 20)
        session = harness.Session(harness.Options(seconds=0.01), limits, [], zentorch)
        start = time.perf_counter()
        result = session.result("mul", case)
        assert set(result.seconds) == {"pkg", "PyTorch", "zentorch"}
        assert 0 < result.seconds["zentorch"] < time.perf_counter() - start
        assert result.share == result.rate("pkg") / limits.rates["float32"]
        assert result.skipped == {}
        # Like the real one, this fails when the number of threads changes in its process.
        start = time.perf_counter()
        one, other = [result.seconds["zentorch"] for result in with_threads(session, case, 2, 1)]
        assert 0 < one + other < time.perf_counter() - start
        for refused in (
            harness.ForeignCall("zentorch_mm", (a.double(), a.mT.double())),
            harness.ForeignCall("zentorch_bmm", (a, a.mT)),
            harness.ForeignCall("zentorch_abacus", (a,)),
        ):
            other = session.result("mul", dataclasses.replace(case, zentorch=refused))
            assert set(other.seconds) == {"pkg", "PyTorch"}
            assert other.skipped["zentorch"].startswith("refused: ")
    finally:
        zentorch.close()
    with pytest.raises((RuntimeError, ValueError)):
        zentorch.seconds(1)


FAKE_BACKEND = """
import torch


@torch._dynamo.register_backend(name="zentorch")
def compile(graph, inputs):
    return lambda *arguments: [WORD for each in graph(*arguments)]
"""


@pytest.mark.tracing
@pytest.mark.long
@pytest.mark.parametrize(
    ("word", "refused"),
    [
        ("each", None),
        ("each * 0", "refused: its result is wrong"),
        ("1 / 0", "refused: ViT, forward float32: its process ended"),
    ],
)
def test_zentorch_compiles_whole_models_in_a_process_of_its_own(
    harness: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    word: str,
    refused: str | None,
) -> None:
    (tmp_path / "zentorch.py").write_text(FAKE_BACKEND.replace("WORD", word))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    apart = sys.modules["pkg._benchmarks._apart"].Apart("ViT, forward float32", "PyTorch")
    case = harness.Case("model", {"pkg": apart, "PyTorch": apart}, list, 1, "GFLOP/s")
    session = harness.Session(harness.Options(zentorch=sys.executable), None, [])
    left_out: dict[str, str] = {}
    peers = session._with_zentorch(case, left_out).peers
    assert left_out.get("zentorch") == refused
    assert ("zentorch" in peers) == (refused is None)
    if refused is None:
        (expected,), (result,) = apart.results(), peers["zentorch"].results()
        assert torch.equal(result, expected)


def test_an_interpreter_without_zentorch_is_refused(
    harness: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "mul", "--zentorch", str(tmp_path / "python")]) == 2
    assert "does not run" in capsys.readouterr().err
    if harness.zentorch_here() is None:
        assert main(["bench", "mul", "--zentorch", sys.executable]) == 2
        assert "No module named 'zentorch'" in capsys.readouterr().err


def test_numpy_is_a_peer_where_it_has_a_blas(harness: ModuleType) -> None:
    pytest.importorskip("numpy")
    a = torch.rand(5, 6)
    product = harness.numpy_function("matmul", a, a.mT)["NumPy"]()
    torch.testing.assert_close(torch.from_numpy(product), a @ a.mT)
    assert harness.numpy_function("matmul", a.half(), a.half()) == {}
    assert harness.numpy_function("matmul", a.to("meta"), a) == {}


@pytest.mark.tracing
@pytest.mark.long
def test_a_compiled_peer(harness: ModuleType) -> None:
    a = torch.rand(5)
    function = harness.compiled(lambda: a + 1)
    assert torch.equal(function(), a + 1)

    def failing() -> Tensor:
        raise RuntimeError

    assert harness.compiled(failing) is None


def results_of(harness: ModuleType) -> list[object]:
    seconds = [
        {"pkg": 1e-3, "PyTorch": 4e-3, "NumPy": 2e-3},
        {"pkg": 2e-3, "PyTorch": 1e-3},
        {"pkg": 3e-3},
    ]
    return [
        harness.Result(
            "matmul",
            f"case {index}",
            0.05,
            "GFLOP/s",
            times,
            limit="float32" if index < 2 else None,
            attainable=100.0 if index < 2 else None,
            threads=2,
            others=0.125,
            skipped={} if index < 2 else {"PyTorch": "skipped: 3.0 s a call"},
        )
        for index, times in enumerate(seconds)
    ]


def wrong_result(harness: ModuleType) -> object:
    return harness.Result(
        "matmul", "case 3", 0.05, "GFLOP/s", threads=2, others=0.0, wrong="case 3: too far off"
    )


def test_a_wrong_row_stays_in_the_report(harness: ModuleType) -> None:
    results = [*results_of(harness), wrong_result(harness)]
    console = harness.Console(width=160, file=io.StringIO())
    console.print(harness.table("matmul", results))
    row = next(line for line in console.file.getvalue().splitlines() if "case 3" in line)
    assert "WRONG" in row
    assert "not timed, since not right; right is every element" in console.file.getvalue()
    assert harness.summary("matmul", results).endswith("; 1 of 4 cases WRONG")
    assert harness.summary("matmul", results[3:]).endswith(
        "no peer was measured; 1 of 1 cases WRONG"
    )


def test_the_legend_names_the_limits_and_what_was_left_out(harness: ModuleType) -> None:
    results = results_of(harness)
    console = harness.Console(width=160, file=io.StringIO())
    console.print(harness.table("matmul", results))
    text = console.file.getvalue()
    ways = "the fastest of multiply-add of float32, multiply-add of bfloat16 in 6 products of parts"
    assert f"limit float32: {ways}, 100 GFLOP/s measured beside" in " ".join(text.split())
    assert "case 2: PyTorch skipped: 3.0 s a call" in text
    both = [results[2], dataclasses.replace(results[2], case="case 3")]
    assert (
        "case 2 and 1 more case: PyTorch skipped: 3.0 s a call"
        in harness.table("matmul", both).caption
    )
    assert "other processes used 12%" in text
    assert "share" not in text.partition("limit float32:")[2]
    # More than there is: it is shown as it is, and said what it means.
    results[0] = dataclasses.replace(results[0], attainable=25.0)
    results[2] = dataclasses.replace(results[2], unheld="fits in the caches")
    console.print(harness.table("matmul", results))
    text = console.file.getvalue()
    assert "200% of float32" in text
    assert "25 to 100 GFLOP/s" in text
    assert "share above 100%: the limit was measured too low" in text
    assert "share –: fits in the caches" in text


def test_the_report_says_what_was_reached(harness: ModuleType) -> None:
    results = results_of(harness)
    assert [result.share for result in results] == [pytest.approx(0.5), pytest.approx(0.25), None]
    assert [result.best_peer for result in results] == ["NumPy", "PyTorch", None]
    assert [result.speedup for result in results] == [2.0, 0.5, None]

    console = harness.Console(width=120, file=io.StringIO())
    console.print(harness.table("matmul", results))
    text = console.file.getvalue()
    assert "matmul, 2 threads" in text
    for words in ("50% of float32", "skipped", "2,000.0", "16.7 GFLOP/s"):
        assert words in text

    line = harness.summary("matmul", results)
    assert "1.00 times as fast as the best peer (geometric mean of 2 cases)" in line
    assert "least 0.50, beside PyTorch: case 1, 2 threads" in line
    assert "no peer" in harness.summary("matmul", results[2:])

    assert "plain" not in text
    beside = [results[0], dataclasses.replace(results[1], beside="case 0"), results[2]]
    console.print(harness.table("matmul", beside))
    assert "rate / plain's" in console.file.getvalue()
    found = harness.document({}, {}, beside)["results"]
    assert [each["rate_beside"] for each in found] == [None, pytest.approx(0.5), None]

    found = harness.document(
        {"torch": "2"}, {2: {"memory": 30.0}}, [*results, wrong_result(harness)]
    )
    assert found["limits"] == {"2": {"memory": 30.0}}
    assert found["limits_of"] == {"memory": "reading memory"}
    assert found["wrong"] == ["matmul: case 3: too far off"]
    assert found["results"][3]["rate"] is found["results"][3]["share"] is None
    assert "twice as far" in found["rule"]
    assert "other processes used 9% of the" in found["load"]
    assert ", 12% beside one case" in found["load"]
    assert found["results"][0]["share"] == pytest.approx(0.5)
    assert found["results"][2]["skipped"] == {"PyTorch": "skipped: 3.0 s a call"}


def test_the_picture_has_every_case(harness: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "results.svg"
    results = results_of(harness)
    results[2] = dataclasses.replace(results[2], unheld="fits in the caches")
    alone = dataclasses.replace(results[0], case="case 4", seconds={"pkg": 1e-3})
    with pytest.MonkeyPatch.context() as patch:
        import matplotlib as mpl

        patch.setitem(mpl.rcParams, "svg.fonttype", "none")
        every = [*results, wrong_result(harness), alone]
        harness.picture(every, harness.machine(torch.device("cpu")), file)
    text = file.read_text()
    assert all(f"case {index}, 2 threads" in text for index in range(5))
    assert "share of the machine" in text
    # What has no bar says why.
    assert text.count("held to no limit: fits in the caches") == 1
    assert text.count(">PyTorch skipped: 3.0 s a call<") == 1
    assert text.count(">WRONG: not timed<") == 2
    assert text.count(">has no peer<") == 1
    assert "case 0, 2 threads [float32]" in text
    assert "limit float32: the fastest of multiply-add of float32" in text


def test_results_are_written_with_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    arguments = ["--seconds", "0.01", "--cases", "float32", " 64", "--threads", "1,2"]
    assert main(["bench", "d_sigmoid", *arguments, "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert document["machine"]["torch"] == torch.__version__
    assert document["machine"]["cpu_capability"] == pkg._loader.cpu_capability
    assert "blas" in document["machine"]
    assert set(document["limits"]) == {"1", "2"}
    assert document["limits"]["1"]["memory"] > 0
    results = document["results"]
    assert [(result["case"], result["threads"]) for result in results] == [
        ("float32, 64", 1),
        ("float32, 64", 2),
    ]
    assert all({"pkg", "PyTorch"} <= set(result["seconds"]) for result in results)
    assert all(math.isclose(r["rate"], r["work"] / r["seconds"]["pkg"]) for r in results)
    text = capsys.readouterr().out
    assert "1 thread, limits: float64" in text
    assert "verified: every element at most twice as far from float64 as plain PyTorch" in text
    assert all(result["others"] is None or 0 <= result["others"] <= 1 for result in results)
    assert "d_sigmoid, 2 threads" in text
    assert "d_sigmoid: " in text.splitlines()[-1] + text.splitlines()[-2]


@pytest.mark.parametrize("threads", ["0", "1,0", "two", ""])
def test_threads_are_positive_numbers(threads: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "mul", "--threads", threads])
    assert "--threads" in capsys.readouterr().err


def test_a_wrong_operator_is_reported_and_not_timed(
    harness: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    file = tmp_path / "results.json"

    def cases(operator: str, device: torch.device, *_: object) -> Iterator[object]:
        yield case_of(harness, lambda: torch.zeros(50), torch.float32)

    monkeypatch.setattr(harness, "cases", cases)
    assert main(["bench", "mul", "--json", str(file)]) == 1
    text = capsys.readouterr().out
    assert "WRONG mul: sum" in text
    (row,) = [line for line in text.splitlines() if line.startswith("│ sum")]
    assert "WRONG" in row
    document = json.loads(file.read_text())
    (result,) = document["results"]
    assert result["seconds"] == {}
    assert "must be within" in result["wrong"]
    assert document["wrong"] == [f"mul: {result['wrong']}"]


def test_an_unknown_operator_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "abacus"]) == 2
    message = capsys.readouterr().err
    assert "no benchmark of abacus" in message
    assert "matmul" in message


def test_words_that_name_no_case_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "mul", "matmul", "--cases", "float32", "abacus"]) == 2
    message = capsys.readouterr().err
    assert "mul, matmul: no case is named with 'float32' and 'abacus'; --full has more" in message
    assert main(["bench", "mul", "--full", "--cases", "abacus"]) == 2
    assert "has more" not in capsys.readouterr().err


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "pkg._benchmarks.harness", raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["bench", "mul"]) == 2
    assert "the benchmarks need rich" in capsys.readouterr().err
    assert main(["bench", "abacus"]) == 2
    assert "no benchmark of abacus" in capsys.readouterr().err  # first what is wrong for all


def test_an_install_without_benchmarks_says_where_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("pkg._benchmarks")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("pkg.__main__.__file__", str(tmp_path / "pkg" / "__main__.py"))

    def import_module(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {name!r}", name="pkg._benchmarks")

    monkeypatch.setattr(importlib, "import_module", import_module)
    assert main(["bench", "mul"]) == 2
    assert "the folder benchmarks of the sources" in capsys.readouterr().err
