"""What a build shows of itself: a line for each file, and everything where it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout

TOOL = Path(__file__).resolve().parents[1] / "tools" / "show_build.py"
BUILD = """
import sys
print("Installing build dependencies")
print("  indented: what pip was told by the build")
objects = "/x/build/objects-linux-x86_64/pkg._cpu_avx2"
print(f"  [1/2] c++ -O3 -c /x/csrc/cpu/mul.cpp -o {objects}/csrc/cpu/mul.o")
print("  /x/csrc/cpu/mul.cpp:3:1: warning: unused variable", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


def show(status: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, TOOL, sys.executable, "-u", "-c", BUILD, str(status)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_shows_files_and_warnings() -> None:
    done = show(0)
    assert done.returncode == 0
    lines = [line.split(" s  ", 1)[1].strip() for line in done.stdout.splitlines()]
    assert lines == [
        "Installing build dependencies",
        "pkg._cpu_avx2 1/2: csrc/cpu/mul",
        "/x/csrc/cpu/mul.cpp:3:1: warning: unused variable",
    ]


def test_shows_all_of_a_build_that_fails() -> None:
    done = show(3)
    assert done.returncode == 3
    assert "  indented: what pip was told by the build" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("ended with 3")


def test_shows_that_it_goes_on() -> None:
    # The build ends when it has been seen to go on, whatever the clock says.
    program = f"""
import subprocess, sys
sys.path.insert(0, {str(TOOL.parent)!r})
import show_build
show_build.SILENCE = 0.01
sys.exit(show_build.run([sys.executable, "-c", "input()"]))
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as tool:
        assert tool.stdin is not None
        assert tool.stdout is not None
        assert "…" in tool.stdout.readline()
        tool.stdin.write("\n")
        tool.stdin.close()
        assert tool.wait() == 0
