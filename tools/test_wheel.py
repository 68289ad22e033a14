"""Runs the tests on an installed wheel, in a fresh environment for each PyTorch.

    python tools/test_wheel.py WHEEL --torch torch==2.10.0 torch [--tests tests/test_import.py …]
    python tools/test_wheel.py WHEEL --python ENVIRONMENT/bin/python

The second way puts the wheel into an environment that is there, with its PyTorch, in the place of
the package that it may have.
Nothing of the checkout but its tests and examples is in reach: they are copied elsewhere. Tests
that are marked as the checkout's own are left out. With --every N the operators' tests follow on
each CPU library that the processor runs but the best, with one of N samples.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What the tests read; the sources are in the wheel.
COPIED = ("tests", "examples", "benchmarks", "tools", "build_backend", "docs", "csrc", "setup.py")
# What depends on the CPU library.
LIBRARY_TESTS = ("tests/ops", "tests/test_c_functions.py")
FILES = ("README.md", "pyproject.toml", "Makefile", "CHANGELOG.md", "LICENSE", "MANIFEST.in")


def new_environment(folder: Path, torch: str) -> Path:
    """The Python of a new environment with this PyTorch."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    subprocess.run([*install_command(python), torch], check=True)
    return python


def install_command(python: Path) -> list[Path | str]:
    """``pip install`` into the environment of a Python."""
    return [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def install(python: Path, wheel: Path) -> None:
    """Puts the wheel, and what its tests need, into the environment of a Python."""
    uninstall = [python, "-m", "pip", "uninstall", "--quiet", "--yes", "pkg-kernels"]
    subprocess.run(uninstall, check=True)
    command = [*install_command(python), f"{wheel.resolve()}[test,bench,examples]"]
    subprocess.run(command, check=True)
    subprocess.run([python, "-m", "pip", "check"], check=True)


def run_tests(python: Path, folder: Path, tests: list[str], arguments: list[str]) -> int:
    """Runs pytest away from the checkout; its exit status."""
    folder.mkdir()
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    clean = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    where = "import pkg; print(pkg.__file__, pkg._C.build_info())"
    subprocess.run([python, "-c", where], cwd=folder, env=clean, check=True)
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not checkout"]
    command += [*arguments, *tests]
    return subprocess.run(command, cwd=folder, env=clean, check=False).returncode


def test_libraries(python: Path, folder: Path, every: int, arguments: list[str]) -> list[str]:
    """Tests the operators on the lesser CPU libraries; names those that fail.

    They are made of the sources that the best one is made of, which passed everything. So a part
    shows that each computes: every operator and dtype, and every check that depends on the
    instruction set, with one sample of so many. Without those that take long: they are of
    indices beyond 32 bits, whose types are the same in every library, and of the binding.
    """
    clean = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    usable = subprocess.run(
        [python, "-m", "pkg", "env", "--capabilities"],
        cwd=folder,
        env=clean,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    ).stdout.split()
    command = [python, "-m", "pytest", "-p", "no:cacheprovider"]
    command += ["-m", "not checkout and not tracing and not long", *arguments, *LIBRARY_TESTS]
    failed = []
    for library in usable[1:]:
        print(f"== CPU library {library}, one of {every} samples", flush=True)
        chosen = {"PKG_CPU_CAPABILITY": library, "PKG_TEST_EVERY": str(every)}
        done = subprocess.run(command, cwd=folder, env=clean | chosen, check=False)
        failed += [library] if done.returncode else []
    return failed


def main() -> None:
    """One environment after another; fails when the tests of any fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    environments = parser.add_mutually_exclusive_group(required=True)
    environments.add_argument("--torch", nargs="+", help="a new environment of each, as pip names")
    environments.add_argument("--python", type=Path, help="that of an environment which is there")
    parser.add_argument("--tests", nargs="+", default=["tests"])
    parser.add_argument("--pytest", default="-q", help="further arguments of pytest, in one word")
    parser.add_argument("--every", type=int, help="test the lesser CPU libraries: one sample of N")
    given = parser.parse_args()
    failed = []
    for torch in given.torch or [f"the PyTorch of {given.python}"]:
        with tempfile.TemporaryDirectory(prefix="pkg-wheel-") as temporary:
            print(f"== {given.wheel.name} with {torch}", flush=True)
            python = (
                given.python.absolute()
                if given.python
                else new_environment(Path(temporary, "venv"), torch)
            )
            install(python, given.wheel)
            rc = run_tests(python, Path(temporary, "tests"), given.tests, given.pytest.split())
            failed += [torch] if rc else []
            if given.every:
                libraries = test_libraries(
                    python, Path(temporary, "tests"), given.every, given.pytest.split()
                )
                failed += [f"{torch} and {library}" for library in libraries]
    if failed:
        sys.exit(f"tests failed with {', '.join(failed)}")


if __name__ == "__main__":
    main()
