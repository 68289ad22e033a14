"""Compiles the package's C++ and CUDA sources at run time, to try a kernel.

Edit a file under ``csrc`` and load it, beside an installed :mod:`pkg` and without
installing anything::

    import pkg
    trial = pkg.jit.load()            # compiles what changed
    trial.matmul(a, b)                # the operators as plain functions
    torch.ops.pkg_jit.matmul(a, b)    # and in a namespace of their own

The functions are the compiled kernels alone: gradients, ``vmap`` and the rest,
which :mod:`pkg.ops` registers in Python, belong to the namespace ``pkg``. With
``PKG_JIT=1`` it is ``import pkg`` itself that compiles and uses the sources,
gradients and all: in a checkout where an editable install has its libraries, of
an installed package into a folder of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from . import _build_flags

_OWNER_FILE = "owner"  # beside PyTorch's lock: who holds it
_QUICK_SECONDS = 2.0  # a build that takes less says nothing; another says so often what is done

# Namespaces that load() has registered in this process: what they were built from.
_loaded: dict[str, tuple[str, ModuleType]] = {}
# Of threads one builds at a time: PyTorch keeps in the process what it has built, and nvcc's
# architectures are a variable of the environment.
_one_at_a_time = threading.RLock()


def source_folder() -> Path:
    """The folder of the C++ and CUDA sources: the checkout's, or the wheel's copy.

    Raises:
        FileNotFoundError: Neither is there.
    """
    here = Path(__file__).parent
    for folder in (here.parent / "csrc", here / "_csrc"):
        if (folder / "python" / "pybind.cpp").exists():
            return folder
    raise FileNotFoundError(
        f"pkg.jit: no C++ sources beside {here}; the install is damaged. Reinstall pkg-kernels, "
        "or pass sources= the csrc folder of a checkout"
    )


def best_capability() -> str:
    """The instruction set to compile for: ``PKG_CPU_CAPABILITY``, or the best that runs here.

    Raises:
        RuntimeError: ``PKG_CPU_CAPABILITY`` names one that does not run here.
        ValueError: It names none.
    """
    asked = os.environ.get("PKG_CPU_CAPABILITY", "").strip().lower()
    return _runnable("PKG_CPU_CAPABILITY", asked) if asked else _capabilities()[-1]


def _runnable(argument: str, level: str) -> str:
    """An instruction set that was asked for, where there is such and it runs here."""
    levels, here = _build_flags.cpu_levels(), _capabilities()
    if level not in levels:
        raise ValueError(f"{argument} is '{level}'; it must be one of {', '.join(levels)}")
    if level not in here:
        raise RuntimeError(
            f"{argument} is '{level}' and this processor or its operating system runs only "
            f"{', '.join(here)}. Leave it out for the best of these"
        )
    return level


def _capabilities() -> list[str]:
    """The instruction sets that run here, the best last."""
    binding = sys.modules.get("pkg._C")
    if binding is not None:
        found: list[str] = binding.cpu_capabilities()
        return found
    return _capabilities_by_pytorch()


def _capabilities_by_pytorch() -> list[str]:
    """The same, where nothing is compiled that could ask the processor."""
    levels = list(_build_flags.cpu_levels())
    if _build_flags.ARM64:
        best = _arm_capability() if len(levels) > 1 else "baseline"
        return levels[: levels.index(best) + 1]
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    runs = {"baseline": True}
    runs["avx2"] = capability in {"AVX2", "AVX512"}
    runs["avx2_vnni"] = runs["avx2"] and _has_avx_vnni()
    runs["avx512"] = capability == "AVX512"
    runs["avx512_vnni"] = runs["avx512"] and _has("vnni")
    runs["avx512_bf16"] = runs["avx512_vnni"] and _has("avx512_bf16")
    runs["amx"] = runs["avx512_bf16"] and _can_use_tiles()
    return [level for level in levels if runs[level]]


def _arm_capability() -> str:
    """As csrc/python/cpu_features.cpp asks: PyTorch does not tell of these instructions."""
    libc = ctypes.CDLL(None)
    if sys.platform == "darwin":
        dotprod, bf16 = (_sysctl(libc, f"hw.optional.arm.FEAT_{n}") for n in ("DotProd", "BF16"))
    else:
        libc.getauxval.restype, libc.getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
        at_hwcap, at_hwcap2 = 16, 26
        dotprod = bool(libc.getauxval(at_hwcap) >> 20 & 1)
        bf16 = bool(libc.getauxval(at_hwcap2) >> 14 & 1)
    if not dotprod:
        return "baseline"
    return "neon_bf16" if bf16 else "neon_dotprod"


def _sysctl(libc: ctypes.CDLL, name: str) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = libc.sysctlbyname(
        name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return not failed and bool(value.value)


def _has(instructions: str) -> bool:
    """Whether PyTorch, if it can tell, says that the processor has them."""
    import torch

    return bool(getattr(torch.cpu, f"_is_{instructions}_supported", bool)())


def _has_avx_vnni() -> bool:
    """Whether the system says so: PyTorch asks for the VNNI of AVX-512 alone."""
    flags = Path("/proc/cpuinfo")
    return flags.exists() and bool(re.search(r"^flags\b.*\bavx_vnni\b", flags.read_text(), re.M))


def _can_use_tiles() -> bool:
    """Whether the processor has tile registers and the system gives them to this process."""
    import torch

    return all(getattr(torch.cpu, name, bool)() for name in ("_is_amx_tile_supported", "_init_amx"))


def can_build_cuda() -> bool:
    """Whether PyTorch is a CUDA build and nvcc is there, and ``PKG_BUILD_CUDA`` is not 0."""
    import torch
    from torch.utils import cpp_extension

    return (
        torch.version.cuda is not None
        and cpp_extension.CUDA_HOME is not None
        and _build_flags.builds_cuda()
    )


def load(
    *,
    namespace: str = "pkg_jit",
    sources: str | Path | None = None,
    with_cuda: bool | None = None,
    capability: str | None = None,
    extra_cflags: Sequence[str] = (),
    extra_cuda_cflags: Sequence[str] = (),
    extra_ldflags: Sequence[str] = (),
    build_directory: str | Path | None = None,
    verbose: bool = False,
) -> ModuleType:
    """Compiles the sources with :func:`torch.utils.cpp_extension.load` and imports them.

    Only what changed since the last call is compiled. A second call with nothing
    changed returns the same module.

    Args:
        namespace: Where the operators are registered: ``torch.ops.<namespace>``.
            PyTorch allows one registration of a namespace in a process, so a
            changed kernel needs another one, or a new process.
        sources: A folder laid out like the project's ``csrc``; the package's own
            by default.
        with_cuda: Whether to compile the CUDA kernels too; by default where
            PyTorch is a CUDA build and nvcc is there, unless ``PKG_BUILD_CUDA``
            is 0. They are compiled for ``PKG_CUDA_ARCH_LIST`` or
            ``TORCH_CUDA_ARCH_LIST``; else for the GPUs that are there (an H100
            as 9.0a), and without any for those that a build from source is for.
        capability: The CPU instruction set, ``baseline`` to ``amx``; by
            default the best that runs here.
        extra_cflags: Further flags for the C++ compiler.
        extra_cuda_cflags: Further flags for nvcc.
        extra_ldflags: Further flags for the linker.
        build_directory: Where objects are kept; by default a folder of this
            PyTorch and this namespace under ``TORCH_EXTENSIONS_DIR`` or
            PyTorch's own for extensions.
        verbose: Print the compiler's commands and what it says. Without it a build that
            takes longer tells on standard error how many files it has compiled.

    Returns:
        A module like ``pkg._C``.

    Raises:
        RuntimeError: The namespace is taken, another build holds the lock of the
            build directory or left it behind, CUDA is asked for and cannot be
            built, ``capability`` does not run here, or the compiler refuses a
            source.
        FileNotFoundError: ``sources`` has no ``python/pybind.cpp``.
        ValueError: ``namespace`` is no identifier, or ``capability`` is unknown.
    """
    if not namespace.isidentifier():
        raise ValueError(f"pkg.jit: namespace {namespace!r} is no identifier")
    folder = Path(sources) if sources is not None else source_folder()
    if not (folder / "python" / "pybind.cpp").exists():
        raise FileNotFoundError(f"pkg.jit: {folder} has no python/pybind.cpp; it is no csrc folder")
    level = _runnable("pkg.jit: capability", capability) if capability else best_capability()
    cuda = _checked_cuda(with_cuda)
    cflags = [
        *_build_flags.cxx_flags(),
        *_build_flags.cpu_kernel_flags(level),
        f"-DPKG_NAMESPACE={namespace}",
        *extra_cflags,
    ]
    cuda_cflags = [
        *_build_flags.nvcc_flags(threads=2),
        *_build_flags.cuda_macros(_asked_or_present()),
        f"-DPKG_NAMESPACE={namespace}",
        *extra_cuda_cflags,
    ]
    state = fingerprint(folder, [*cflags, *cuda_cflags, *extra_ldflags, str(cuda)])
    directory = Path(build_directory) if build_directory else _default_folder(namespace)
    files = sorted(
        path for part in ("*", "python/*", "cpu/**/*") for path in folder.glob(f"{part}.cpp")
    )
    files += sorted((folder / "cuda").glob("*.cu")) if cuda else []
    with _one_at_a_time:
        if namespace in _loaded and _loaded[namespace][0] == state:
            return _loaded[namespace][1]
        _refuse_taken_namespace(namespace)
        with _alone_in(directory), _cuda_architectures(), progress(directory, len(files), level):
            module = _build(
                name=f"{namespace}_C",
                sources=[str(path) for path in files],
                extra_cflags=cflags,
                extra_cuda_cflags=cuda_cflags,
                extra_ldflags=list(extra_ldflags),
                extra_include_paths=[str(folder)],
                build_directory=str(directory),
                with_cuda=cuda,
                verbose=verbose,
            )
        _loaded[namespace] = (state, module)
        return module


def _build(*, name: str, **options: Any) -> ModuleType:
    """What PyTorch builds and imports; after a failure the next call builds again."""
    from torch.utils import cpp_extension

    try:
        module: ModuleType = cpp_extension.load(name=name, **options)
    except BaseException:
        # It would take what it has tried for built, and not find the file.
        cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)
        raise
    return module


def _checked_cuda(with_cuda: bool | None) -> bool:
    """Whether to compile the CUDA kernels, which can be done then."""
    import torch
    from torch.utils import cpp_extension

    cuda = can_build_cuda() if with_cuda is None else with_cuda
    if cuda and not can_build_cuda():
        raise RuntimeError(
            "pkg.jit: with_cuda=True needs nvcc (CUDA_HOME) and a CUDA build of PyTorch, and "
            f"PKG_BUILD_CUDA not 0; this is PyTorch {torch.__version__} with "
            f"CUDA_HOME={cpp_extension.CUDA_HOME}, "
            f"PKG_BUILD_CUDA={os.environ.get('PKG_BUILD_CUDA', '')}"
        )
    return cuda


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Waits for another process that builds in a folder, and tells others who does."""
    from torch.utils import cpp_extension

    directory.mkdir(parents=True, exist_ok=True)
    if hasattr(cpp_extension, "FileBaton"):
        _wait_for_lock(directory / "lock")
    owner = directory / _OWNER_FILE
    owner.write_text(f"{os.getpid()} {socket.gethostname()}", encoding="utf-8")
    try:
        yield
    finally:
        owner.unlink(missing_ok=True)


@contextlib.contextmanager
def progress(directory: Path, files: int, level: str) -> Iterator[None]:
    """Tells on standard error what is compiled and how far that is, unless it is done at once.

    PyTorch's build says nothing until it ends, which for all sources is minutes.

    Args:
        directory: Where the objects are written, in it or below.
        files: How many sources there are.
        level: The instruction set that they are compiled for.
    """
    started = time.time()
    ended = threading.Event()

    def compiled() -> int:
        times = [path.stat().st_mtime for path in directory.rglob("*.o")]
        return sum(each >= started for each in times)

    def tell() -> None:
        first = not any(directory.rglob("*.o"))
        if not first and ended.wait(_QUICK_SECONDS):
            return
        print(f"pkg.jit: compiling for {level} in {directory}", file=sys.stderr, flush=True)
        last = 0
        while not ended.wait(_QUICK_SECONDS):
            if (done := compiled()) > last:
                last = done
                most = "" if first else "at most "
                text = f"pkg.jit: {last} of {most}{files} files compiled"
                print(f"{text}, {time.time() - started:.0f} s", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def fingerprint(folder: Path, flags: Sequence[str]) -> str:
    """A text that changes with the flags and with any file of a folder."""
    digest = hashlib.sha256("\0".join(flags).encode())
    for path in sorted(folder.rglob("*.*")):
        if path.is_file():
            digest.update(str(path.relative_to(folder)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _default_folder(namespace: str) -> Path:
    """Where a namespace is built unless ``build_directory`` says it.

    Of each PyTorch its own: another one's objects do not fit, nor do its locks.
    """
    import torch
    from torch.utils import cpp_extension

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    return Path(root, f"torch-{torch.__version__}", namespace)


def _refuse_taken_namespace(namespace: str) -> None:
    import torch

    if not torch._C._jit_get_schemas_for_operator(f"{namespace}::muladd"):
        return
    if namespace in _loaded:
        why = "by an earlier pkg.jit.load() of sources or flags that have changed since"
    else:
        why = "by the installed pkg or another build of it"
    number = re.search(r"\d+$", namespace)
    stem, last = (namespace[: number.start()], int(number[0])) if number else (namespace, 1)
    raise RuntimeError(
        f"pkg.jit: the operator namespace '{namespace}' is already registered in this process, "
        f"{why}; PyTorch allows one. Pass another, such as namespace='{stem}{last + 1}' (all files "
        "are then compiled once more), or start a new process"
    )


def _asked_or_present() -> str:
    """The architectures for nvcc, as TORCH_CUDA_ARCH_LIST has them; nothing: PyTorch asks the GPUs.

    Where there is none it would fail, with the index of an empty list. Of capability 9.0 it would
    ask for 9.0, which lacks the instructions of warpgroups: they are those of 9.0a.
    """
    import torch

    if asked := _build_flags.asked_cuda_architectures():
        return asked
    if not torch.cuda.is_available():
        return _build_flags.DEFAULT_CUDA_ARCHITECTURES
    present = {
        torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())
    }
    if (9, 0) not in present:
        return ""
    return ";".join(
        f"{major}.{minor}" + "a" * ((major, minor) == (9, 0)) for major, minor in sorted(present)
    )


@contextlib.contextmanager
def _cuda_architectures() -> Iterator[None]:
    """Says what nvcc is to compile for."""
    before = os.environ.get("TORCH_CUDA_ARCH_LIST")
    chosen = _asked_or_present()
    if chosen:
        os.environ["TORCH_CUDA_ARCH_LIST"] = chosen
    try:
        yield
    finally:
        if before is not None:
            os.environ["TORCH_CUDA_ARCH_LIST"] = before
        else:
            os.environ.pop("TORCH_CUDA_ARCH_LIST", None)


def _wait_for_lock(lock: Path, patience: float = 300.0) -> None:
    """Waits while another process builds; explains a lock that nobody holds any more.

    Up to PyTorch 2.13 the lock is a file that must not exist, and PyTorch's own wait for that has
    no end: a build that was killed leaves it behind. Later the file stays, and the system knows
    who has locked it.
    """
    started = time.monotonic()
    while lock.exists():
        try:
            pid_text, host = lock.with_name(_OWNER_FILE).read_text(encoding="utf-8").split()
            pid: int | None = int(pid_text)
        except (OSError, ValueError):
            pid, host = None, ""
        dead = pid is not None and host == socket.gethostname() and not _is_running(pid)
        if dead or time.monotonic() - started > patience:
            holder = (
                f"process {pid}, which no longer runs"
                if dead
                else f"process {pid} on {host}"
                if pid is not None
                else "a process that is not known"
            )
            raise RuntimeError(
                f"pkg.jit: {lock} is held by {holder}. If no build is under way there, one was "
                f"killed and left the lock behind: delete the file and call load() again"
            )
        time.sleep(0.2)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
