"""examples/export.py: what holds our operators is saved, and runs in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parent.parent / "examples" / "export.py"


def run(folder: Path, *arguments: str) -> str:
    """What it prints in a folder that has a pkg which was not built, as a checkout has."""
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("raise ImportError('it was not built')")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--output", "output", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.tracing
def test_an_exported_program_runs_elsewhere(tmp_path: Path) -> None:
    agrees, refused = run(tmp_path, "--without-package").splitlines()
    assert agrees.startswith("program.pt2: agrees")
    # These are PyTorch's words; the warnings above them name the operator.
    assert refused.startswith("program.pt2, without import pkg: RuntimeError")


@pytest.mark.long
@pytest.mark.tracing
def test_a_compiled_package_runs_elsewhere(tmp_path: Path) -> None:
    *agree, refused = run(tmp_path).splitlines()
    assert [line.partition(":")[0] for line in agree] == ["program.pt2", "package.pt2"]
    assert refused.startswith("package.pt2, without import pkg: RuntimeError")
    assert "pkg::" in refused
