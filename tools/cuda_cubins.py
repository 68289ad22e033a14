"""Machine code of the CUDA kernels as nvcc made it, and NVIDIA's programs that take it apart.

``compiled`` makes a cubin of each ``csrc/cuda/*.cu`` and architecture with the flags of a release
build; one that is there stays while its source, its headers, the flags and nvcc are the same.
``extracted`` takes the cubins out of a library or a wheel instead.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "cuda_report"
ARCHITECTURES = ("sm_80", "sm_90a")
# The oldest on the package index that read what nvcc 13.0 writes; newer ones do too.
PACKAGES = "nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"


@dataclasses.dataclass(frozen=True)
class Cubin:
    """The kernels of a source for one architecture."""

    source: str
    file: Path


class MissingProgramError(Exception):
    """A program that is needed is not there; the text says what to install."""


def program(name: str) -> Path:
    """Where cuobjdump or nvdisasm is: of the package index, of a CUDA toolkit, or on PATH.

    Raises:
        MissingProgramError: it is nowhere.
    """
    places = {Path(sysconfig.get_path(key)) for key in ("purelib", "platlib")}
    places |= {Path(entry) for entry in sys.path if entry.endswith("-packages")}
    found = [file for place in sorted(places) for file in place.glob(f"nvidia/cu*/bin/{name}")]
    found += [Path(home, "bin", name) for home in (os.environ.get("CUDA_HOME"),) if home]
    found += [Path(path) for path in (shutil.which(name), f"/usr/local/cuda/bin/{name}") if path]
    for file in found:
        if file.exists():
            if not os.access(file, os.X_OK):  # pip unpacks them so
                file.chmod(file.stat().st_mode | 0o111)
            return file
    raise MissingProgramError(f"{name} is not there: pip install {PACKAGES}")


def nvcc() -> Path:
    """CUDA's compiler: of CUDA_HOME, or on PATH.

    Raises:
        MissingProgramError: it is nowhere.
    """
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=str(Path(home, "bin"))) if home else shutil.which("nvcc")
    if found is None:
        raise MissingProgramError(
            "nvcc is not there: python tools/install_cuda_toolkit.py FOLDER, then set CUDA_HOME to "
            "the folder; or name a built library or a wheel"
        )
    return Path(found)


@functools.cache
def nvcc_release() -> str:
    """What nvcc says of itself: ``13.0, V13.0.88``."""
    return output([nvcc(), "--version"]).split("release ")[1].splitlines()[0]


def flags() -> list[str]:
    """Flags for nvcc of a release build, without those of the architecture."""
    from torch.utils import cpp_extension

    ours: list[str] = runpy.run_path(str(ROOT / "pkg" / "_build_flags.py"))["nvcc_flags"](1)
    includes = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    return [*ours, *cpp_extension.COMMON_NVCC_FLAGS, *includes, f"-I{ROOT / 'csrc'}"]


@functools.cache
def digest(file: Path) -> str:
    """What tells this file's content from any other."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else "none"


def dependencies(file: Path) -> list[Path]:
    """The files that a make rule of the compiler names."""
    words = file.read_text("utf-8").split(" : ", 1)[1].replace("\\\n", " ").split()
    return [Path(word) for word in words]


def is_fresh(cubin: Path, command: list[str]) -> bool:
    """Whether the cubin is what this command would make of what its files say now."""
    stamp = cubin.with_suffix(".json")
    if not (cubin.exists() and stamp.exists()):
        return False
    made = json.loads(stamp.read_text("utf-8"))
    return made["command"] == command and all(
        digest(Path(name)) == content for name, content in made["files"].items()
    )


def compile_one(source: Path, architecture: str, common: list[str]) -> Cubin:
    """The cubin of a source, compiled where what is there is not of this content."""
    cubin = FOLDER / f"{source.stem}.{architecture}.cubin"
    rule = cubin.with_suffix(".d")
    command = [str(nvcc()), *common, "-cubin", f"-arch={architecture}", str(source)]
    record = [nvcc_release(), *command]
    if not is_fresh(cubin, record):
        print(f"nvcc: {source.name} for {architecture}", file=sys.stderr, flush=True)
        cubin.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [*command, "-MMD", "-MF", str(rule), "-o", str(cubin)], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise SystemExit(f"nvcc could not compile {source} for {architecture}:\n{done.stderr}")
        files = {str(path): digest(path) for path in dependencies(rule)}
        text = json.dumps({"command": record, "files": files})
        cubin.with_suffix(".json").write_text(text, "utf-8")
    return Cubin(source.stem, cubin)


def compiled(sources: Sequence[Path], architectures: Sequence[str], jobs: int) -> list[Cubin]:
    """Cubins of the sources, ``jobs`` compiled at a time."""
    common = flags()
    with ThreadPoolExecutor(jobs) as pool:
        tasks = [
            pool.submit(compile_one, source.resolve(), architecture, common)
            for source in sources
            for architecture in architectures
        ]
        return [task.result() for task in tasks]


def extracted(file: Path, folder: Path) -> list[Cubin]:
    """The cubins in a library, or in the CUDA library of a wheel, as files of ``folder``.

    Raises:
        SystemExit: there are none.
    """
    if file.suffix == ".cubin":
        return [Cubin(file.stem, file)]
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            names = [name for name in wheel.namelist() if name.startswith("pkg/_cuda.")]
            if len(names) != 1:
                raise SystemExit(f"{file} has no CUDA library: it was built without nvcc")
            file = Path(wheel.extract(names[0], folder))
    command = [str(program("cuobjdump")), "-xelf", "all", str(file.resolve())]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    found = sorted(folder.glob("*.cubin"))
    if not found:
        raise SystemExit(f"{file} holds no machine code of a GPU")
    return [Cubin(cubin.name.split(".")[0], cubin) for cubin in found]


def output(command: Sequence[str | Path], text: str | None = None) -> str:
    """What a command prints; ``text`` is what it reads."""
    done = subprocess.run(
        [str(word) for word in command], input=text, capture_output=True, text=True, check=True
    )
    return done.stdout


def disassembly(cubin: Path) -> str:
    """All sections as nvdisasm prints them."""
    return output([program("nvdisasm"), cubin])


def resource_usage(cubin: Path) -> str:
    """Registers, stack and shared memory of each kernel, as cuobjdump prints them."""
    return output([program("cuobjdump"), "--dump-resource-usage", cubin])


def demangled(names: Sequence[str]) -> list[str]:
    """C++ names as they are written, by the host compiler's c++filt.

    Raises:
        MissingProgramError: there is none.
    """
    if shutil.which("c++filt") is None:
        raise MissingProgramError("c++filt is not there: it comes with binutils, as g++ does")
    return output(["c++filt"], "\n".join(names)).splitlines()
