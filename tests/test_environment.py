"""``python -m pkg env`` and ``make debug``: they speak where everything else is broken."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pkg
from pkg import environment
from pkg.__main__ import main


def test_it_tells_what_a_report_of_a_fault_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    report = capsys.readouterr().out
    for words in (sys.executable, pkg.__version__, "PyTorch", "c++", "nvcc", "_cpu_baseline"):
        assert words in report
    assert f"CPU capability loaded: {pkg._loader.cpu_capability}" in report


def test_capabilities_are_a_line_each_the_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--capabilities"]) == 0
    usable = capsys.readouterr().out.split()
    assert usable
    assert set(usable) <= set(pkg._C.cpu_capabilities())
    assert usable == sorted(usable, key=pkg._C.cpu_capabilities().index, reverse=True)


def test_the_script_describes_a_package_that_cannot_be_imported(tmp_path: Path) -> None:
    # The libraries left out: importing this copy fails.
    shutil.copytree(environment.PACKAGE, tmp_path / "pkg", ignore=shutil.ignore_patterns("*.so"))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "pkg" / "environment.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "_C: not built" in done.stdout
    assert "failure: ImportError: pkg's library _C" in done.stdout


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise ImportError('first line\\nsecond line')", "ImportError: first line\nsecond line"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "ended by SIGILL"),
        ("import time; time.sleep(60)", "no answer in 1 seconds"),
    ],
)
def test_a_failing_probe_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, program: str, words: str
) -> None:
    if "sleep" in program:
        monkeypatch.setattr(environment, "PROBE_SECONDS", 1)
    assert environment.probe(program) == {"failure": words}


def test_a_missing_compiler_is_named_so() -> None:
    assert environment.compiler_version("no-such-compiler") == "not found"
