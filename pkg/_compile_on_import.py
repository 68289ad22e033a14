"""``PKG_JIT=1`` in a checkout: what has changed is compiled on import, where an install has it.

That is setup.py's own ``build_ext --inplace``, for this processor alone, so that an editable
install and an import share their objects and their libraries.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from . import _build_flags, jit

ROOT = Path(__file__).resolve().parent.parent
# What the libraries are made of, beside csrc.
_BUILT_BY = ("setup.py", "pyproject.toml", "pkg/version.py", "pkg/_build_flags.py")


def compile_changes(level: str) -> None:
    """Compiles what has changed since it was last compiled.

    One process of several does it, and the others wait for it.

    Args:
        level: The instruction set to compile for.

    Raises:
        ImportError: A tool that the build needs is not installed, or it failed.
    """
    for tool in ("setuptools", "filelock"):
        if importlib.util.find_spec(tool) is None:
            raise ImportError(f"PKG_JIT=1 compiles the sources and needs {tool}: install it")
    import filelock

    cuda = jit.can_build_cuda()
    libraries = ["_C", f"_cpu_{level}", *(["_cuda"] if cuda else [])]
    folder = ROOT / "build"
    try:
        folder.mkdir(exist_ok=True)
        # Held by the system for a process, so that one that was killed leaves no lock behind.
        with filelock.FileLock(folder / "compiling.lock"):
            stamp = folder / "compiled_on_import.txt"
            if not stamp.exists() or stamp.read_text("utf-8") != _state(libraries):
                _compile(level, cuda)
                stamp.write_text(_state(libraries), "utf-8")
    except OSError as error:
        raise ImportError(
            f"PKG_JIT=1 compiles into {ROOT}, which failed: {error}. Make the folder writable, or "
            "unset PKG_JIT to load what was built before"
        ) from error


def _state(libraries: list[str]) -> str:
    """The sources, and the libraries that were made of them, in a text that changes with both."""
    digest = hashlib.sha256()
    for name in _BUILT_BY:
        digest.update((ROOT / name).read_bytes())
    digest.update(jit.fingerprint(ROOT / "csrc", [_flags_of_the_caller()]).encode())
    lines = [digest.hexdigest()]
    for name in libraries:
        path = Path(__file__).with_name(name + importlib.machinery.EXTENSION_SUFFIXES[0])
        content = path.read_bytes() if path.exists() else b""
        lines.append(f"{name} {hashlib.sha256(content).hexdigest()}")
    return "\n".join(lines)


def _flags_of_the_caller() -> str:
    names = ["CXX", "CUDA_HOME", "PKG_EXTRA_CFLAGS", "PKG_EXTRA_NVCC_FLAGS", "PKG_CUTLASS_INCLUDE"]
    names += [f"PKG_EXTRA_CFLAGS_{level.upper()}" for level in _build_flags.cpu_levels()]
    values = [os.environ.get(name, "") for name in names]
    return "\0".join([*values, _build_flags.asked_cuda_architectures()])


def _compile(level: str, cuda: bool) -> None:
    objects = ROOT / "build"
    files = [*(ROOT / "csrc").glob("*.cpp"), *(ROOT / "csrc" / "python").glob("*.cpp")]
    files += (ROOT / "csrc" / "cpu").rglob("*.cpp")
    files += (ROOT / "csrc" / "cuda").glob("*.cu") if cuda else []
    environment = {**os.environ, "PKG_CPU_LEVELS": level, "PKG_BUILD_CUDA": str(int(cuda))}
    # Of the build itself, if that imports the package.
    environment.pop("PKG_JIT", None)
    with jit.progress(objects, len(files), level):
        done = subprocess.run(
            [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    if done.returncode != 0:
        raise ImportError(
            f"PKG_JIT=1: the sources in {ROOT / 'csrc'} do not compile:\n{done.stdout[-20000:]}"
        )
