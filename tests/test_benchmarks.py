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
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import pkg
from pkg.__main__ import load_benchmarks, main

for package in ("rich", "threadpoolctl"):
    pytest.importorskip(package)


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    return load_benchmarks()


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


def test_every_operator_has_a_benchmark(harness: ModuleType) -> None:
    assert harness.operators() == sorted(pkg.ops.__all__)


@pytest.fixture(scope="module")
def limits(harness: ModuleType) -> dict[str, float]:
    return harness.Limits(memory_bytes=1 << 20).rates


@pytest.mark.parametrize("operator", sorted(pkg.ops.__all__))
def test_every_benchmark_has_right_results(harness: ModuleType, operator: str) -> None:
    meta = harness.cases(operator, torch.device("meta"))
    name = min(meta, key=lambda case: case.work).name
    cases = harness.cases(operator, torch.device("cpu"))
    harness.verify(next(case for case in cases if case.name == name))


@pytest.mark.parametrize("operator", sorted(pkg.ops.__all__))
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
    with pytest.raises(ArithmeticError, match="in result 2 is 1"):
        harness.verify(dataclasses.replace(case, peers=wrong, exact=lambda: exact))


def test_a_part_is_verified_beside_a_plain_result(harness: ModuleType) -> None:
    exact = torch.rand(50).double()
    plain = exact.float() * (1 + 1e-5)
    ours = torch.cat([plain, torch.zeros(50)])
    case = harness.Case(
        "part",
        {"pkg": lambda: ours, "PyTorch": lambda: torch.rand(100)},
        lambda: exact,
        1,
        "GFLOP/s",
        plain=lambda: plain,
        part=lambda result: result[:50],
    )
    assert set(harness.verify(case)) == {"pkg"}
    with pytest.raises(ArithmeticError):
        harness.verify(dataclasses.replace(case, plain=lambda: exact.float()))


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
        with pytest.raises(ArithmeticError, match="sum: the relative error of pkg"):
            harness.verify(case_of(harness, lambda result=wrong: result, dtype))


def test_without_a_peer_the_roundings_of_the_terms_are_allowed(harness: ModuleType) -> None:
    unit = torch.finfo(torch.float32).eps
    exact = torch.ones(50).double()
    # The root of the terms, times half a unit.
    for terms, units, right in ((1, 1, False), (16, 2, True), (16, 3, False)):
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
    calls = dict.fromkeys(("pkg", "PyTorch", "other"), 0)

    def case(work: float) -> object:
        def call(name: str) -> Tensor:
            calls[name] += 1
            if name == "PyTorch":
                time.sleep(0.06 * work)
            return torch.ones(3)

        peers = {name: lambda name=name: call(name) for name in calls}
        return harness.Case("ones", peers, lambda: torch.ones(3), work, "GFLOP/s")

    session = harness.Session(harness.Options(seconds=0.01), None, [])
    small = session.result("ones", case(0.5))
    assert small.skipped == ()
    assert set(small.seconds) == set(calls)
    before = calls["PyTorch"]
    for work, tried in ((1.0, 1), (2.0, 1), (0.9, 2)):
        result = session.result("ones", case(work))
        assert result.skipped == ("PyTorch",)
        assert set(result.seconds) == {"pkg", "other"}
        assert calls["PyTorch"] - before == tried


def test_copies_are_used_in_turn(harness: ModuleType) -> None:
    numbers = harness.in_turn(lambda number: number, [(1,), (2,), (3,)])
    assert [numbers() for _ in range(5)] == [1, 2, 3, 1, 2]
    megabyte = torch.empty(1 << 18)
    assert harness.copies_beyond_caches(megabyte) == 256
    assert harness.copies_beyond_caches(megabyte, megabyte) == 128
    assert harness.copies_beyond_caches(megabyte.to("meta")) == 1


def test_limits_are_measured(harness: ModuleType, limits: dict[str, float]) -> None:
    assert set(limits) == {"float64", "float32", "bfloat16", "float16", "int8", "memory"}
    assert all(0.1 < rate < 1e6 for rate in limits.values())
    assert limits["float16"] == limits["float32"]
    library = sys.modules["pkg._benchmarks._limits"]._library()
    assert library.pkg_arithmetic_limit(b"complex64") == 0
    # Too little memory to be divided among the threads.
    assert library.pkg_reading_limit(torch.ones(1).data_ptr(), 4, 1) == 0


def test_memory_is_measured_in_turns_with_what_it_bounds(harness: ModuleType) -> None:
    a = torch.ones(8)
    peers = {"pkg": lambda: a + 1, "PyTorch": lambda: a + 1}
    case = harness.Case("ones", peers, lambda: a + 1, 1.0, "GB/s", limit="memory")
    limits = harness.Limits(memory_bytes=1 << 20)
    session = harness.Session(harness.Options(seconds=0.01), limits, [])
    limits.rates["memory"] = 0.0
    result = session.result("ones", case)
    assert set(result.seconds) == set(result.spread) == {"pkg", "PyTorch"}
    assert 0.1 < result.attainable < 1e6
    assert result.share == result.rate("pkg") / result.attainable


def test_limits_are_found_where_binding_and_kernels_are_one_library(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As after PKG_JIT=1.
    file = pkg._loader.library_file(f"_cpu_{pkg._loader.cpu_capability}") or pkg._C.__file__
    monkeypatch.setattr(pkg._C, "__file__", str(file))
    monkeypatch.setattr(pkg._loader, "library_file", lambda name: None)
    assert harness.Limits(memory_bytes=1 << 20).rates["float32"] > 0.1


@pytest.mark.parametrize("capability", pkg._C.cpu_capabilities())
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
        result = session.result("mul", case)
        assert set(result.seconds) == {"pkg", "PyTorch", "zentorch"}
        assert 0 < result.seconds["zentorch"] < 1
        assert result.share == result.rate("pkg") / limits.rates["float32"]
        # Like the real one, this fails when the number of threads changes in its process.
        one, other = [result.seconds["zentorch"] for result in with_threads(session, case, 2, 1)]
        assert 0 < one < 1
        assert 0 < other < 1
        for refused in (
            harness.ForeignCall("zentorch_mm", (a.double(), a.mT.double())),
            harness.ForeignCall("zentorch_bmm", (a, a.mT)),
            harness.ForeignCall("zentorch_abacus", (a,)),
        ):
            other = session.result("mul", dataclasses.replace(case, zentorch=refused))
            assert set(other.seconds) == {"pkg", "PyTorch"}
    finally:
        zentorch.close()
    with pytest.raises((RuntimeError, ValueError)):
        zentorch.seconds(1)


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
            skipped=() if index < 2 else ("PyTorch",),
        )
        for index, times in enumerate(seconds)
    ]


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
    found = harness.document({}, {}, beside, [])["results"]
    assert [each["rate_beside"] for each in found] == [None, pytest.approx(0.5), None]

    found = harness.document({"torch": "2"}, {2: {"memory": 30.0}}, results, ["a fault"])
    assert found["limits"] == {"2": {"memory": 30.0}}
    assert found["wrong"] == ["a fault"]
    assert found["results"][0]["share"] == pytest.approx(0.5)
    assert found["results"][2]["skipped"] == ("PyTorch",)


def test_the_picture_has_every_case(harness: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "results.svg"
    with pytest.MonkeyPatch.context() as patch:
        import matplotlib as mpl

        patch.setitem(mpl.rcParams, "svg.fonttype", "none")
        harness.picture(results_of(harness), harness.machine(torch.device("cpu")), file)
    text = file.read_text()
    assert all(f"case {index}, 2 threads" in text for index in range(3))
    assert "share of the machine" in text


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
    assert "d_sigmoid, 2 threads" in text
    assert "d_sigmoid: " in text.splitlines()[-1] + text.splitlines()[-2]


@pytest.mark.parametrize("threads", ["0", "1,0", "two", ""])
def test_threads_are_positive_numbers(threads: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "mul", "--threads", threads])
    assert "--threads" in capsys.readouterr().err


def test_a_wrong_operator_is_reported_and_not_timed(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cases(operator: str, device: torch.device, *_: object) -> Iterator[object]:
        yield case_of(harness, lambda: torch.zeros(50), torch.float32)

    monkeypatch.setattr(harness, "cases", cases)
    assert main(["bench", "mul"]) == 1
    assert "WRONG mul: sum" in capsys.readouterr().out


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
