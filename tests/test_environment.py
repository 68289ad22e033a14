"""``python -m pkg env`` and ``make debug``: they speak where everything else is broken."""

from __future__ import annotations

import os
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
    assert "table of pkg.accelerate(): " in report


def test_capabilities_are_a_line_each_the_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--capabilities"]) == 0
    usable = capsys.readouterr().out.split()
    assert usable
    assert set(usable) <= set(pkg._C.cpu_capabilities())
    assert usable == sorted(usable, key=pkg._C.cpu_capabilities().index, reverse=True)


def test_the_script_describes_a_package_that_cannot_be_imported(tmp_path: Path) -> None:
    script = without_libraries(tmp_path) / "pkg" / "environment.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "_C: not built" in done.stdout
    assert "failure: ImportError: pkg's library _C" in done.stdout


def run_env(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python -m pkg env`` of the copy in a folder."""
    return subprocess.run(
        [sys.executable, *(options or ("-m", "pkg", "env"))],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k not in {"PKG_JIT", "PYTHONSAFEPATH"}}
        | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def without_libraries(folder: Path) -> Path:
    shutil.copytree(environment.PACKAGE, folder / "pkg", ignore=shutil.ignore_patterns("*.so"))
    return folder


@pytest.mark.parametrize("options", [("-m", "pkg", "env"), ("-Bmpkg", "env")])
def test_the_command_describes_a_package_that_cannot_be_imported(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = run_env(without_libraries(tmp_path), *options)
    assert done.returncode == 1
    assert "_C: not built" in done.stdout
    assert "failure: ImportError: pkg's library _C" in done.stdout
    assert done.stderr.startswith("python -m pkg env: import pkg fails: ImportError: pkg's library")
    assert "Traceback" not in done.stderr


def test_the_command_describes_a_variable_that_is_wrong() -> None:
    done = run_env(environment.PACKAGE.parent, PKG_CPU_CAPABILITY="sse9")
    assert done.returncode == 1
    assert f"version: {pkg.__version__}" not in done.stdout
    assert "failure: ImportError: PKG_CPU_CAPABILITY is 'sse9'" in done.stdout
    assert "import pkg fails: ImportError: PKG_CPU_CAPABILITY is 'sse9'" in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("-m", "pkg", "env", "--capabilities"),
        ("-m", "pkg", "bench", "mul"),
        ("-c", "import pkg", "env"),
        ("-m", "another", "env"),
    ],
)
def test_no_other_command_gives_the_report_for_its_result(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    folder = without_libraries(tmp_path)
    (folder / "another").mkdir()
    (folder / "another" / "__init__.py").write_text("import pkg")
    done = run_env(folder, *options)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "ImportError: pkg's library _C" in done.stderr


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
