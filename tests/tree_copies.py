"""Copies of the checkout in which an operator is added: what the tests of the guides share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.utils import cpp_extension

from pkg import _build_flags

ROOT = Path(__file__).resolve().parent.parent
# Of the checkout, beside the files.
PARTS = (
    *("csrc", "pkg", "tests", "benchmarks", "examples", "docs", "tools", "build_backend"),
    *(".ci", ".github"),
)
# What mypy found out about PyTorch for the checkout (`make lint`), by the contents of the files: to
# read them once more for a copy takes 20 s.
TYPES = ".mypy_cache"


def shell(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a reader would, with the interpreter of this test as ``python``."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ours = ("PKG_CPU_CAPABILITY", "PKG_JIT", "MAKEFLAGS", "MAKELEVEL")
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    environment = {**inherited, "PATH": path, **variables}
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def must_succeed(command: str, folder: Path, **variables: str) -> None:
    """The same for a command that must not fail, else with what it printed."""
    done = shell(command, folder, **variables)
    assert done.returncode == 0, done.stdout + done.stderr


def copy_checkout(folder: Path) -> None:
    """Copy the sources into a folder, without what was built or run in them."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "output")
    for entry in ROOT.iterdir():
        if entry.is_file():
            shutil.copy(entry, folder)
        elif entry.name in (*PARTS, TYPES):
            shutil.copytree(entry, folder / entry.name, ignore=ignored)


def texts_of(folder: Path) -> dict[str, str]:
    """The texts of a tree, by their paths in it, without what was built or run in it."""
    return {
        path.relative_to(folder).as_posix(): path.read_text("utf-8")
        for part in PARTS
        for path in (folder / part).rglob("*")
        if path.suffix in {".py", ".pyi", ".cpp", ".h", ".cu", ".cuh", ".md"}
    }


def keep_kernels(tree: Path, stems: Collection[str]) -> None:
    """Delete the kernels' sources but these: all of them would take minutes to compile."""
    for source in (tree / "csrc").glob("c*/**/*.c*"):
        if source.suffix in {".cpp", ".cu"} and source.stem not in stems:
            source.unlink()


def variables_of(tree: Path) -> dict[str, str]:
    """The environment in which ``PKG_JIT=1`` compiles a copy.

    With a build folder of its own: it is compiled from other sources than the user's. A compiler's
    cache, where there is one, has all but the new operator of an earlier run.
    """
    folders = ["/usr/lib/ccache", str(Path(sys.executable).parent), os.environ["PATH"]]
    return {
        "TORCH_EXTENSIONS_DIR": str(tree / "build"),
        "CCACHE_BASEDIR": str(tree),
        # CUDA where it can be run; that a CUDA source compiles, cuda_compilation() is to show.
        "PKG_BUILD_CUDA": str(int(torch.cuda.is_available())),
        "PATH": os.pathsep.join(folders),
    }


def cuda_compilation(source: str) -> str:
    """The command that compiles a CUDA source, for one architecture."""
    includes = [f"-isystem {path}" for path in cpp_extension.include_paths()]
    flags = [*_build_flags.nvcc_flags(threads=1), "-arch=sm_80", "-Icsrc", *includes]
    return f"nvcc {' '.join(flags)} -c {source} -o object.o"


def formatter() -> str | None:
    """The clang-format beside this interpreter or on the path, where what it needs is there too."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    has_tools = shutil.which("make") and find_spec("ruff") and find_spec("mypy")
    return shutil.which("clang-format", path=path) if has_tools else None


def lint_of(paths: Collection[str]) -> list[str]:
    """The commands of ``make lint`` for some files alone."""
    python = " ".join(sorted(path for path in paths if path.endswith(".py")))
    package = " ".join(sorted(path for path in paths if path.startswith("pkg/")))
    kernels = " ".join(sorted(path for path in paths if path.startswith("csrc/")))
    return [
        f"python -m ruff check --no-cache {python}",
        f"python -m ruff format --no-cache --check {python}",
        f"python -m mypy {package}",
        f"{formatter()} --dry-run -Werror {kernels}",
    ]
