"""``pkg.doctor``: what it finds out about PyTorch's kernels, and how it tells it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pkg
from pkg import _accelerate_routes, tune
from pkg.__main__ import main

doctor: Any = sys.modules["pkg.doctor"]


class Limits:
    """Limits that nobody has to measure."""

    def beside(self, limit: str) -> Any:
        class Beside:
            rate = 50.0 if limit == "memory" else 1000.0

            def __call__(self, number: int) -> float:
                return 0.0

        return Beside()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All cases, tiny."""
    for name, size in (("_SIZE", 32), ("_BATCH", 16), ("_LENGTH", 16), ("_WEIGHT", 64)):
        monkeypatch.setattr(doctor, name, size)
    monkeypatch.setattr(doctor, "_load", lambda name: type("module", (), {"Limits": Limits}))


@pytest.mark.usefixtures("small")
def test_a_diagnosis() -> None:
    table = list(_accelerate_routes.table())
    found = pkg.doctor()
    assert [each.dtype for each in found.findings[:5]] == [
        *("float64", "float32", "bfloat16", "float16", "int8")
    ]
    assert len(found.findings) == 21
    for each in found.findings:
        assert each.pytorch > 0
        assert each.pkg > 0
        assert each.kernel
    memory = [each for each in found.findings if each.unit == "GB/s"]
    assert {each.operator for each in memory} == {"linear, 1 row, 64²"}
    text = str(found)
    assert torch.__version__ in text.splitlines()[0]
    assert "attention 8×16×64 backward" in text
    assert list(_accelerate_routes.table()) == table


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_diagnosis_where_gradients_are_off(mode: Any) -> None:
    with mode():
        assert len(pkg.doctor().findings) == 21
        assert not torch.is_grad_enabled()


@pytest.mark.usefixtures("small")
def test_ours_is_measured_with_our_kernels() -> None:
    """Of each case both sides run: the counters see ours once a round and more."""
    with tune.everything_ours():
        for case in doctor._cases():
            _accelerate_routes.take_counts()
            doctor._find(case, Limits())
            taken = sum(counts.taken for counts in _accelerate_routes.take_counts())
            assert taken >= 2, case.operator


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="PyTorch was built without MKL")
def test_kernels_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    a = torch.randn(64, 64)
    case = doctor._Case("mm", "float32", 1.0, "float32", lambda: a @ a)
    assert doctor._kernel(case) == "MKL sgemm"
    quiet = doctor._Case("attention", "float32", 1.0, "float32", lambda: None)
    assert doctor._kernel(quiet) == "flash, its own loop"
    print("seen")
    told = capfd.readouterr().out
    assert "MKL_VERBOSE" not in told
    assert "seen" in told


def finding(**changes: Any) -> Any:
    known = doctor.Finding("mm", "float16", "its own loop", 1.0, 150.0, 170.0, "GFLOP/s")
    return dataclasses.replace(known, **changes)


@pytest.mark.parametrize(
    ("rate", "in_float32", "is_cliff"),
    [(1.0, 100.0, True), (40.0, 100.0, False), (30.0, 40.0, False), (10.0, 15.0, False)],
)
def test_cliffs(rate: float, in_float32: float, is_cliff: bool) -> None:
    """Below a fifth of the peak and half of float32."""
    base = finding(dtype="float32", pytorch=in_float32)
    found = list(doctor._with_cliffs([base, finding(pytorch=rate)]))
    assert [each.is_cliff for each in found] == [False, is_cliff]
    text = str(doctor.Diagnosis("a machine", found))
    assert ("CLIFF" in text) == is_cliff
    assert (f"makes it {150.0 / rate:.1f} times as fast" in text) == is_cliff
    assert ("no cliffs" in text) != is_cliff


def test_a_picture_that_cannot_be_drawn_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(doctor, "_load", lambda name: pytest.fail("it is measured"))
    with pytest.raises(ValueError, match=r"picture is here\.docx, and Matplotlib draws no 'docx'"):
        pkg.doctor("here.docx")


@pytest.mark.usefixtures("small")
def test_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "doctor.png"
    assert main(["doctor", "--picture", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "PyTorch runs" in said
    assert "other processes used" in said.splitlines()[-1]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["doctor", "--picture", str(file)]) == 2
    assert "the picture needs matplotlib" in capsys.readouterr().err
