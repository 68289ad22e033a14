"""The benchmarks verify before they time, measure every peer, and report what they ran on."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import pkg
from pkg.__main__ import load_benchmarks, main

pytest.importorskip("rich")


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


@pytest.mark.parametrize("operator", sorted(pkg.ops.__all__))
def test_every_benchmark_has_right_results(harness: ModuleType, operator: str) -> None:
    cases = list(harness.cases(operator, torch.device("cpu")))
    assert len({case.name for case in cases}) == len(cases)
    small = min(cases, key=lambda case: case.work)
    harness.verify(small)
    assert next(iter(small.peers)) == "pkg"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_wrong_result_is_refused(harness: ModuleType, dtype: torch.dtype) -> None:
    numbers = torch.ones(50, dtype=dtype)
    for wrong in (numbers, numbers * torch.nan, numbers + 1 + 1e-1):
        with pytest.raises(ArithmeticError, match="sum: the relative error of pkg"):
            harness.verify(case_of(harness, lambda result=wrong: result, dtype))


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


def test_results_are_written_with_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    assert main(["bench", "d_sigmoid", "--seconds", "0.01", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert document["machine"]["torch"] == torch.__version__
    assert document["machine"]["cpu_capability"] == pkg._loader.cpu_capability
    assert {result["operator"] for result in document["results"]} == {"d_sigmoid"}
    assert all(set(result["seconds"]) == {"pkg", "PyTorch"} for result in document["results"])
    assert "d_sigmoid" in capsys.readouterr().out


def test_a_wrong_operator_is_reported_and_not_timed(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cases(operator: str, device: torch.device) -> Iterator[object]:
        yield case_of(harness, lambda: torch.zeros(50), torch.float32)

    monkeypatch.setattr(harness, "cases", cases)
    assert main(["bench", "mul"]) == 1
    assert "WRONG mul: sum" in capsys.readouterr().out


def test_an_unknown_operator_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "abacus"]) == 2
    message = capsys.readouterr().err
    assert "no benchmark of abacus" in message
    assert "matmul" in message


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
