"""What `make test` leaves out: parameters of a kind that another of them stands for, no more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout

TESTS = """
import pytest
import torch

@pytest.mark.parametrize("size", range(8))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sizes(dtype, size):
    pass

@pytest.mark.parametrize("check", ["values", "layouts"])
def test_check(check):
    pass

@pytest.mark.long
def test_that_compiles():
    pass
"""


def collected(
    folder: Path, every: str, *options: str, first: str = "0", long_every: str = "1"
) -> list[str]:
    (folder / "test_of_parameters.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    conftest = Path(__file__).with_name("conftest.py")
    (folder / "conftest.py").write_text(conftest.read_text("utf-8"), "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", *options, folder],
        env={
            **os.environ,
            "PKG_TEST_EVERY": every,
            "PKG_TEST_FIRST": first,
            "PKG_TEST_LONG_EVERY": long_every,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split("::")[1] for line in done.stdout.splitlines() if "::" in line]


def test_all_run_by_default(tmp_path: Path) -> None:
    assert len(collected(tmp_path, "1")) == 2 * 8 + 2 + 1


def test_one_of_four_keeps_each_dtype_and_each_check(tmp_path: Path) -> None:
    assert collected(tmp_path, "4", "-m", "not long") == [
        "test_sizes[dtype0-0]",
        "test_sizes[dtype0-4]",
        "test_sizes[dtype1-0]",
        "test_sizes[dtype1-4]",
        "test_check[values]",
        "test_check[layouts]",
    ]


def test_what_is_left_out_has_its_turn(tmp_path: Path) -> None:
    runs = [collected(tmp_path, "4", first=str(first)) for first in range(4)]
    of_sizes = [[name for name in run if "sizes" in name] for run in runs]
    assert sorted(name for run in of_sizes for name in run) == [
        f"test_sizes[dtype{dtype}-{size}]" for dtype in range(2) for size in range(8)
    ]
    alone = ["test_check[values]", "test_check[layouts]", "test_that_compiles"]
    assert all(run == [*sizes, *alone] for run, sizes in zip(runs, of_sizes, strict=True))


def test_long_files_have_their_turns(tmp_path: Path) -> None:
    for name in "bcd":
        of_file = f"import pytest\n\n@pytest.mark.long\ndef test_{name}():\n    pass\n"
        (tmp_path / f"test_{name}.py").write_text(of_file)
    runs = [collected(tmp_path, "1", first=str(first), long_every="2") for first in range(2)]
    always = {"test_check[values]", "test_check[layouts]"}
    long = [{name for name in run if "[" not in name} for run in runs]
    assert long == [{"test_b", "test_d"}, {"test_c", "test_that_compiles"}]
    assert all(always < set(run) for run in runs)


def test_parameters_of_long_files_have_their_turns(tmp_path: Path) -> None:
    for name in "bc":
        (tmp_path / f"test_{name}.py").write_text(
            "import pytest\n\n"
            "@pytest.mark.long\n"
            f'@pytest.mark.parametrize("size", range(2))\ndef test_{name}(size):\n    pass\n'
        )
    runs = [collected(tmp_path, "2", first=str(first), long_every="2") for first in range(4)]
    long = [name for run in runs for name in run if name.startswith(("test_b[", "test_c["))]
    assert sorted(long) == ["test_b[0]", "test_b[1]", "test_c[0]", "test_c[1]"]
