"""Builds the program that runs the CUDA kernels on the CPU, and calls it.

The kernels of ``csrc/cuda/*.cuh`` are compiled by the host compiler over ``cuda_emulator.h``, under
the address and undefined-behaviour sanitizers. A call is one process: tensors go to it as bytes,
in allocations that end where the tensor ends, and the outputs come back into their tensors.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from launch_bounds import CALL, state_bounds
from torch.utils import cpp_extension

ROOT = Path(__file__).parents[2]
BUILDS = ROOT / "build" / "emulation"
HERE = Path("tests", "emulation")  # in the tree that is built
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-Og", "-g1", "-Wall", "-Wextra", "-Werror"]
LINK_SANITIZERS = ("-fsanitize=address,undefined",)
# A register that is read before it is written holds neither 0 nor a plausible number.
SANITIZE_ADDRESSES = ["-fsanitize=address", "-ftrivial-auto-var-init=pattern"]
SANITIZE_UNDEFINED = ["-fsanitize=undefined", "-fno-sanitize-recover=all"]
SANITIZE = [*SANITIZE_ADDRESSES, *SANITIZE_UNDEFINED]
# An index beyond a span of sizes or strides, an optional that is empty.
ASSERT_RANGES = ["-D_GLIBCXX_ASSERTIONS"]
# The calls that these put before each access and each block of machine code go to the emulator,
# which counts accesses (counters.cpp). -Og leaves packets whole. The types are those of the tests.
COUNT_ACCESSES = ["-fsanitize=thread", "-fsanitize-coverage=trace-pc"]
COUNTED_TYPES = ["-DPKG_EMULATED_TYPES=double,float,pkg::cuda::Tf32,pkg::cuda::bfloat16,int8_t"]
# The checker itself is called for every access to shared memory, and is not what is checked: no
# sanitizers, and optimised.
PLAIN_FLAGS = ["-O2"]
PLAIN = (
    "asynchronous.cpp",
    "clocks.cpp",
    "counters.cpp",
    "cuda_emulator.cpp",
    "device_memory.cpp",
    "emulated_bulk_copy.cpp",
    "emulated_mbarrier.cpp",
    "emulated_turns.cpp",
    "emulated_wgmma.cpp",
    "fiber.cpp",
    "outputs.cpp",
)
NAMESPACE = "pkg_emulated"
KEPT_SECONDS = 3 * 24 * 3600  # since an object was last used
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}

Order = Literal["by_chance", "forwards", "backwards"]
Argument = torch.Tensor | int | float | str | Sequence[int] | None


class EmulationError(Exception):
    """The emulator or a sanitizer stopped the kernel; its report is the message."""


def missing_compiler() -> str | None:
    """Why the program cannot be built here, if so."""
    if sys.platform != "linux":
        return "the emulator runs on Linux"
    if shutil.which(COMPILER.split()[0]) is None:
        return f"the emulator needs a C++ compiler, and there is no {COMPILER}"
    return None


def missing_announcements() -> str | None:
    """Why accesses cannot be counted here, if so."""
    return "the calls by which accesses are counted are GCC's" if is_clang() else None


def is_clang() -> bool:
    command = [*COMPILER.split(), "-dM", "-E", "-x", "c++", "/dev/null"]
    macros = subprocess.run(command, text=True, capture_output=True, check=True).stdout
    return "__clang__" in macros


def missing_preloads() -> str | None:
    """Why no library can be made here for a process that preloads a sanitizer, if so."""
    if is_clang():
        return "the sanitizer's library that a process preloads is GCC's"
    absent = [name for name in preloaded().split() if not Path(name).is_absolute()]
    return f"{COMPILER} has no {' and no '.join(absent)} to preload" if absent else None


def preloaded() -> str:
    """What LD_PRELOAD says to a process that loads a library with the sanitizer of addresses.

    The sanitizer looks for the function that throws before PyTorch brings the library that has it.
    """
    return " ".join(
        subprocess.run(
            [*COMPILER.split(), f"-print-file-name={name}"],
            text=True,
            capture_output=True,
            check=True,
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    )


def digest(root: Path, files: Sequence[Path], flags: Sequence[str]) -> str:
    """Tells an object made of these files from every other."""
    total = hashlib.sha256(" ".join([COMPILER, *flags]).encode())
    for file in files:
        total.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:16]


def included_by(root: Path, file: Path) -> list[Path]:
    """A source and every header of its tree that it includes, directly or not."""
    found = {file}
    pending = [file]
    while pending:
        current = pending.pop()
        for line in current.read_text().splitlines():
            if line.lstrip().startswith('#include "'):
                name = line.split('"')[1]
                for folder in (current.parent, root / HERE, root / "csrc"):
                    header = (folder / name).resolve()
                    if header.exists() and header not in found:
                        found.add(header)
                        pending.append(header)
    return sorted(found)


def compile_object(
    root: Path, source: Path, extra: Sequence[str] = (), sanitize: Sequence[str] = SANITIZE
) -> Path:
    """Compile one file, unless that has been done before."""
    flags = [*FLAGS, *(PLAIN_FLAGS if source.name in PLAIN else sanitize), *extra]
    files = included_by(root, source)
    target = BUILDS / f"{source.stem}-{digest(root, files, [*flags, CALL])}.o"
    if target.exists():
        target.touch()
    else:
        kernels = state_bounds(root, root / BUILDS.relative_to(ROOT) / "kernels")
        folders = (kernels, root / HERE, root / "csrc")
        includes = [option for folder in folders for option in ("-I", folder)]
        command = [*COMPILER.split(), *flags, *includes, "-x", "c++", "-c", source, "-o"]
        run_compiler(command, target)
    return target


def precompiled(flags: Sequence[str]) -> list[str]:
    """Flags by which sources begin with PyTorch's headers, which are half of a small one's time.

    GCC finds the compiled header beside the plain one; another compiler reads the plain one.
    """
    header = ROOT / "csrc" / "cpu" / "runtime" / "precompiled.h"
    plain = BUILDS / f"precompiled-{digest(ROOT, [header], flags)}.h"
    compiled = plain.with_name(f"{plain.name}.gch")
    if plain.exists() and compiled.exists():
        plain.touch()
        compiled.touch()
    else:
        run_compiler([*COMPILER.split(), *flags, "-x", "c++-header", header, "-o"], compiled)
        shutil.copy(header, plain)
    return ["-include", str(plain)]


def run_compiler(command: Sequence[str | Path], target: Path) -> None:
    """Write the target whole or not at all, whatever interrupts."""
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    result = subprocess.run([*command, partial], text=True, capture_output=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{result.stderr}")
    partial.replace(target)


def link(objects: Sequence[Path], flags: Sequence[str] = LINK_SANITIZERS) -> Path:
    """The program or library made of these objects, whose names say what is in them."""
    names = " ".join([*flags, *(each.name for each in objects)])
    target = BUILDS / f"emulation-{hashlib.sha256(names.encode()).hexdigest()[:16]}"
    if target.exists():
        target.touch()
    else:
        run_compiler([*COMPILER.split(), *objects, *flags, "-o"], target)
    return target


@contextmanager
def building() -> Iterator[None]:
    """Let one process build at a time; the next finds what it needs."""
    import fcntl  # not on Windows, where nothing is built

    BUILDS.mkdir(parents=True, exist_ok=True)
    with (BUILDS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for file in BUILDS.glob("*-*"):
            if file.stat().st_mtime < time.time() - KEPT_SECONDS:
                file.unlink()
        yield


@functools.cache
def build_objects(counting: bool = False) -> dict[str, Path]:
    """Compile what has changed of the program since it was built last; its objects by source."""
    names = sorted(file.name for file in (ROOT / HERE).glob("*.cpp"))
    sanitize = [*COUNT_ACCESSES, *COUNTED_TYPES] if counting else SANITIZE
    with building(), ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = pool.map(
            lambda name: compile_object(ROOT, ROOT / HERE / name, sanitize=sanitize), names
        )
        return dict(zip(names, objects, strict=True))


def build(counting: bool = False) -> Path:
    """Build the program; returns its path.

    Args:
        counting: the one that counts plain loads and stores, without the sanitizers' checks.
    """
    objects = list(build_objects(counting).values())
    with building():
        return link(objects, () if counting else LINK_SANITIZERS)


def build_changed(tree: Path, name: str, flags: Sequence[str], counting: bool = False) -> Path:
    """Build the program with one file (``run_matmul.cpp``) compiled from another tree.

    Tests plant faults in the kernels so. Nobody waits for it: each tree is one test's.
    """
    tree = tree.resolve()
    others = [each for source, each in build_objects(counting).items() if source != name]
    own = ["-Og", *COUNT_ACCESSES] if counting else ["-O0"]
    changed = compile_object(tree, tree / HERE / name, [*own, *flags], ())
    # The changed first: of a template that several instantiate the linker keeps the first.
    return link([changed, *others], () if counting else LINK_SANITIZERS)


def contraction() -> list[str]:
    """Flags that make one rounding of a product and a sum, where this processor can."""
    has_fused = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    instructions = ["-mfma"] if has_fused else []  # those of Arm need no flag
    return ["-ffp-contract=fast", *instructions]


def build_operators(
    tree: Path = ROOT, changed: str = "", sanitize: Sequence[str] = SANITIZE_UNDEFINED
) -> Path:
    """Build a library of the CUDA operators for CPU tensors: ``torch.ops.pkg_emulated``.

    Their host code is the same but for the launch, which runs the kernel on the emulator. Products
    and sums are contracted here as nvcc contracts them, and are not in the program.

    Args:
        tree: where the source ``changed`` (``matmul.cu``) is that of, in which a test has planted a
            fault.
        changed: the others are those of this tree.
        sanitize: of a library with the sanitizer of addresses, which Python cannot load late, all
            is in ``preloaded()``.
    """
    flags = ["-fPIC", "-fvisibility=hidden", f"-DPKG_NAMESPACE={NAMESPACE}", "-DTORCH_STABLE_ONLY"]
    flags += ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-Wno-unknown-pragmas"]
    for path in cpp_extension.include_paths():
        flags += ["-isystem", path]
    flags += [*contraction(), *sanitize, *ASSERT_RANGES]
    folder = ROOT / HERE
    sources = [*sorted((ROOT / "csrc" / "cuda").glob("*.cu")), ROOT / "csrc" / "library.cpp"]
    sources += [*sorted((folder / "operators").glob("*.cpp")), *(folder / name for name in PLAIN)]
    flags += [f"-DPKG_BUILT_FOR={torch.__version__}"]  # compile again for another PyTorch
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    with building(), ThreadPoolExecutor(os.cpu_count()) as pool:
        with_headers = [*flags, *precompiled([*FLAGS, *flags])]
        plain = [each for each in flags if each not in sanitize]

        def compile_source(source: Path) -> Path:
            # GCC crashes over headers that were compiled with another -O.
            own = plain if source.name in PLAIN else with_headers
            if source.name == changed:
                return compile_object(tree, tree / source.relative_to(ROOT), own, ())
            return compile_object(ROOT, source, own, ())

        objects = list(pool.map(compile_source, sources))
        return link(objects, ["-shared", *sanitize, *libraries, "-ltorch_cpu"])


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size()


def buffer_line(name: str, tensor: torch.Tensor) -> bytes:
    """The tensor's bytes at an address as well or badly aligned as its own."""
    offset = tensor.data_ptr() % 16
    size = extent(tensor)
    content = bytes(offset) + (ctypes.string_at(tensor.data_ptr(), size) if size else b"")
    return f"buffer {name} {offset} {len(content)}\n".encode() + content + b"\n"


def argument_line(name: str, value: Argument) -> bytes:
    if isinstance(value, torch.Tensor):
        return buffer_line(name, value)
    if isinstance(value, str):
        return f"text {name} {value}\n".encode()
    if isinstance(value, float):
        return f"real {name} {value!r}\n".encode()
    values = [value] if isinstance(value, int) else list(value or ())
    return f"integers {name} {' '.join(map(str, [len(values), *map(int, values)]))}\n".encode()


@dataclass(frozen=True)
class Counters:
    """What instructions of whole warps have cost, as ``cuda_emulator.h`` says."""

    products: int
    matrix_loads: int
    matrix_load_cycles: int
    copies: int
    copy_cycles: int
    copied_bytes: int
    copied_sectors: int
    group_products: int
    boxes: int
    word_loads: int
    word_load_cycles: int


@dataclass(frozen=True)
class AccessCount:
    """Loads or stores of one memory, as ``cuda_emulator.h`` says."""

    requests: int
    bytes: int
    transactions: int
    least: int


@dataclass(frozen=True)
class AccessCounts:
    loads: AccessCount
    stores: AccessCount

    @staticmethod
    def of(numbers: Sequence[int]) -> AccessCounts:
        return AccessCounts(AccessCount(*numbers[:4]), AccessCount(*numbers[4:]))


class Emulator:
    """A built program, and the way to call its kernels.

    Attributes:
        counters: of the kernel that ran last.
        accesses: of that kernel, to each tensor by the name of its argument and to ``"shared"``
            memory; of a program that counts them.
    """

    counters: Counters
    accesses: dict[str, AccessCounts]

    def __init__(self, program: Path, counting: bool = False) -> None:
        self.program = program
        self.counting = counting

    def run(
        self,
        kernel: str,
        outputs: Sequence[str],
        blocks: int = 3,
        order: Order = "by_chance",
        **arguments: Argument,
    ) -> None:
        """Run a kernel; the outputs named are tensors among the arguments, written in place.

        Args:
            kernel: which of the program's kernels.
            outputs: names of the arguments that come back.
            blocks: the most blocks of the grid; fewer than there is work by default.
            order: of blocks and of the threads of a block; by chance it is another one for every
                call, the same each time.
            arguments: what ``run_*.cpp`` asks for, by name; None is passed as nothing.

        Raises:
            EmulationError: with the report of the emulator or a sanitizer.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        numbers = torch.zeros(len(fields(Counters)), dtype=torch.int64)
        given["counters"] = numbers
        outputs = [*outputs, "counters"]
        if self.counting:
            tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
            memories = ["shared", *sorted([*tensors, "accesses"])]
            given["accesses"] = accesses = torch.zeros(len(memories), 8, dtype=torch.int64)
            outputs.append("accesses")
        request = b"".join(argument_line(name, value) for name, value in given.items())
        request += b"".join(f"output {name}\n".encode() for name in outputs)
        seed = zlib.crc32(request)
        request += f"text kernel {kernel}\nintegers blocks 1 {blocks}\n".encode()
        request += f"integers order 1 {seed}\ntext schedule {order}\n".encode()
        result = subprocess.run(
            [self.program],
            input=request,
            capture_output=True,
            env=os.environ | OPTIONS,
            check=False,
        )
        if result.returncode != 0:
            raise EmulationError(result.stderr.decode(errors="replace"))
        received = memoryview(result.stdout)
        for name in outputs:
            tensor = given[name]
            assert isinstance(tensor, torch.Tensor)
            offset, size = tensor.data_ptr() % 16, extent(tensor)
            ctypes.memmove(tensor.data_ptr(), bytes(received[offset : offset + size]), size)
            received = received[offset + size :]
        assert len(received) == 0
        self.counters = Counters(*numbers.tolist())
        if self.counting:
            counts = map(AccessCounts.of, accesses.tolist())
            self.accesses = dict(zip(memories, counts, strict=True))
