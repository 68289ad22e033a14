"""The examples say what to install where a package that they need is not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
for needed in ("matplotlib", "numpy", "rich", "safetensors"):
    pytest.importorskip(needed)

OPTIONS = {
    "gpt.py": "--steps=0",
    "tensor_parallel_gpt.py": "--steps=0",
    "export.py": "--without-package",
    "optical_flow.py": "--longest=64",
}
HIDE = """
import runpy, sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hide())
sys.argv = [{program!r}, {option!r}]
sys.path.insert(0, {folder!r})
runpy.run_path({program!r}, run_name="__main__")
"""


def run_without(hidden: str, program: str, option: str, folder: Path = EXAMPLES):
    """Runs an example in a process in which a package is not found."""
    code = HIDE.format(
        hidden=hidden, program=str(folder / program), option=option, folder=str(folder)
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/"
    )


@pytest.mark.parametrize(
    ("program", "hidden"),
    [
        ("gpt.py", "matplotlib"),
        ("gpt.py", "numpy"),
        ("gpt.py", "pkg"),
        ("gpt.py", "rich"),
        ("gpt.py", "safetensors"),
        ("gpt.py", "torch"),
        ("tensor_parallel_gpt.py", "numpy"),
        ("tensor_parallel_gpt.py", "pkg"),
        ("tensor_parallel_gpt.py", "torch"),
        ("export.py", "pkg"),
        ("export.py", "torch"),
        ("optical_flow.py", "matplotlib"),
        ("optical_flow.py", "numpy"),
        ("optical_flow.py", "pkg"),
        ("optical_flow.py", "rich"),
        ("optical_flow.py", "torch"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(program: str, hidden: str) -> None:
    done = run_without(hidden, program, OPTIONS[program])
    assert done.returncode == 2, done.stderr
    # PyTorch itself warns where it finds no NumPy.
    words = done.stderr.splitlines()[-1]
    assert words.startswith(f"{program}: the examples need {hidden}: ")
    assert "pip install 'pkg-kernels[examples]'" in words
    assert "pip install '.[examples]'" in words
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("program", "own"), [("gpt.py", "character_gpt"), ("optical_flow.py", "pyramid_flow")]
)
def test_what_the_example_lacks_itself_is_not_called_missing(program: str, own: str) -> None:
    done = run_without(own, program, "--help")
    assert done.returncode == 1
    assert f"ModuleNotFoundError: No module named '{own}" in done.stderr
    assert "pip install" not in done.stderr
