"""Loads the compiled libraries, and says in words what is wrong where it cannot.

``pkg._C`` comes first: it defines the operators and knows the processor. Then
exactly one CPU library follows, the best that the processor runs or the one that
``PKG_CPU_CAPABILITY`` names, and on a CUDA build of PyTorch the CUDA library.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import os
import platform
import re
import struct
import sys
from pathlib import Path
from types import ModuleType

from ._build_flags import ARM64
from .version import __version__

OLDEST_TORCH = (2, 10)
X86_CAPABILITIES = (
    *("baseline", "avx2", "avx2_vnni"),
    *("avx512", "avx512_vnni", "avx512_bf16", "amx"),
)
ARM_CAPABILITIES = ("baseline", "neon_dotprod", "neon_bf16")
CPU_CAPABILITIES = ARM_CAPABILITIES if ARM64 else X86_CAPABILITIES
FOLDER = Path(__file__).parent

# Set by load(): the CPU library in use, and that of the CUDA kernels where they are loaded.
cpu_capability: str | None = None
cpu_library: ctypes.CDLL
cuda_library: ctypes.CDLL | None = None
# Keeps what it registered while it lives.
_refusals: object = None


def load() -> ModuleType:
    """Loads every library that belongs to this process.

    Returns:
        The module ``pkg._C``.

    Raises:
        ImportError: torch is absent or older than 2.10, a library is missing
            from the install or was built for another system,
            ``PKG_CPU_CAPABILITY`` names a level that this processor or this
            build lacks, or this is a subinterpreter, which PyTorch cannot be
            imported into.
    """
    global cpu_capability, cpu_library, cuda_library
    _check_interpreter()
    _check_name()
    _check_torch()
    if os.environ.get("PKG_JIT", "0") not in {"", "0"}:
        level = _capability_to_compile()
        if _checkout() is None:
            return _compile_installed_sources(level)
        from . import _compile_on_import

        _compile_on_import.compile_changes(level)
    module = _import_binding()
    cpu_capability = _choose_cpu_capability(module)
    cpu_library = _load_library(f"_cpu_{cpu_capability}")
    module._set_cpu_capability(cpu_capability)
    _use_kernels(module)
    cuda_library = _load_cuda()
    if cuda_library is None:
        _explain_missing_cuda_kernels()
    return module


def _capability_to_compile() -> str:
    """The instruction set that ``PKG_JIT=1`` compiles for."""
    from . import jit

    try:
        return jit.best_capability()
    except (RuntimeError, ValueError) as error:
        raise ImportError(str(error)) from error


def _compile_installed_sources(level: str) -> ModuleType:
    """``PKG_JIT=1`` of an installed package: one library of the sources that it carries."""
    global cpu_capability, cpu_library, cuda_library
    from . import jit

    cpu_capability = level
    with_cuda = jit.can_build_cuda()
    try:
        module = jit.load(namespace="pkg", capability=cpu_capability, with_cuda=with_cuda)
    except (RuntimeError, OSError) as error:
        raise ImportError(f"PKG_JIT=1: {error}") from error
    sys.modules["pkg._C"] = module
    cpu_library = ctypes.CDLL(str(module.__file__))
    cuda_library = cpu_library if with_cuda else None
    module._set_cpu_capability(cpu_capability)
    _use_kernels(module)
    return module


def forget(package: str) -> None:
    """Removes the package and its submodules from ``sys.modules``."""
    for name in [m for m in sys.modules if m == package or m.startswith(package + ".")]:
        del sys.modules[name]


def describes_itself() -> bool:
    """Whether this process runs ``python -m pkg env``, which has more to say of a failed import."""
    # While Python looks for the package, argv[0] is -m; what follows is in orig_argv alone.
    return getattr(sys, "argv", []) == ["-m", "env"] and bool(
        re.fullmatch(r"(-\w*m)?pkg", sys.orig_argv[-2])
    )


def library_file(name: str) -> Path | None:
    """The file of one of the package's libraries for this Python, or None."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = FOLDER / f"{name}{suffix}"
        if path.exists():
            return path
    return None


def _check_interpreter() -> None:
    """Refuses a subinterpreter in words: importing torch into one can end the process."""
    # The module's name until Python 3.12, and since.
    for name in ("_interpreters", "_xxsubinterpreters"):
        try:
            interpreters = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if interpreters.get_current() != interpreters.get_main():
            raise ImportError(
                "pkg cannot be imported into a subinterpreter, since PyTorch cannot: use threads, "
                "or processes (multiprocessing, torch.multiprocessing)"
            )
        return


def _check_name() -> None:
    """Refuses another name, under which the compiled module would be looked for elsewhere."""
    if __package__ != "pkg":
        raise ImportError(
            f"the package in {FOLDER} is named pkg and was imported as {__package__}: its compiled "
            f"module and its operators have that name. Put {FOLDER.parent} on sys.path and import "
            "pkg; for the operators under another name, pkg.jit.load(namespace=...) builds them"
        )


def _check_torch() -> None:
    needed = ".".join(map(str, OLDEST_TORCH))
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"pkg needs PyTorch {needed} or newer and {sys.executable} has no module named "
            f"torch. Install it into this environment: pip install 'torch>={needed}'"
        ) from error
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if match is None or tuple(map(int, match.groups())) < OLDEST_TORCH:
        raise ImportError(
            f"pkg needs PyTorch {needed} or newer and this is {torch.__version__} "
            f"({Path(torch.__file__).parent}). Upgrade it: pip install -U 'torch>={needed}'"
        )


def _import_binding() -> ModuleType:
    path = library_file("_C")
    if path is None:
        raise ImportError(_why_missing("_C"))
    _check_whole("_C")
    try:
        module = importlib.import_module("pkg._C")
    except ImportError as error:
        if "already registered" in str(error):
            raise
        raise ImportError(_why_unloadable("_C", error)) from error
    # pybind11 hands out the module that it made first under this name.
    first = Path(str(module.__file__))
    if first.resolve() != path.resolve():
        raise ImportError(
            f"the operator namespace 'pkg' is already registered in this process, by the copy of "
            f"pkg in {first.parent}, and this one is in {FOLDER}; PyTorch allows one. Import only "
            "one of them, or build this one under another name: "
            'pkg.jit.load(namespace="another_name")'
        )
    built = module.build_info()["version"]
    if built != __version__:
        raise ImportError(
            f"pkg's library {path} is of version {built} and its Python files are of "
            f"{__version__}: a mixture of two installs. Reinstall: pip install --force-reinstall "
            "pkg-kernels; in a source checkout: pip install -e . again"
        )
    return module


def _choose_cpu_capability(module: ModuleType) -> str:
    runnable: list[str] = module.cpu_capabilities()
    asked = os.environ.get("PKG_CPU_CAPABILITY", "").strip().lower()
    if asked and asked not in CPU_CAPABILITIES:
        raise ImportError(
            f"PKG_CPU_CAPABILITY is '{asked}'; it must be one of "
            f"{', '.join(CPU_CAPABILITIES)}, or unset for the best that the processor runs"
        )
    if not runnable:
        raise ImportError(
            "pkg needs a processor with SSE4.2 and POPCNT (x86-64-v2, since 2008) and this "
            f"one ({platform.processor() or platform.machine()}) lacks them"
        )
    if not asked:
        built: list[str] = module.build_info()["cpu_levels"]
        usable = [level for level in runnable if level in built]
        if not usable:
            raise ImportError(
                f"this build of pkg has the CPU libraries {', '.join(built)} (it was built with "
                f"PKG_CPU_LEVELS) and this processor runs only {', '.join(runnable)}. Install a "
                "wheel, or build from source without PKG_CPU_LEVELS"
            )
        return usable[-1]
    if asked not in runnable:
        raise ImportError(
            f"PKG_CPU_CAPABILITY is '{asked}' and this processor or its operating system runs "
            f"only {', '.join(runnable)}. Choose one of these or unset the variable"
        )
    return asked


def _use_kernels(module: ModuleType) -> None:
    """Tells the functions of ``pkg._C`` where the CPU library has its kernels."""
    module._use_kernels(_address_of("pkg_direct_kernel"))
    # pkg.jit may have compiled a part of the kernels alone.
    if hasattr(cpu_library, "pkg_accelerated_addmm"):
        module._use_accelerated(
            _address_of("pkg_accelerated_addmm"), _address_of("pkg_accelerated_attention")
        )


def _address_of(name: str) -> int | None:
    return ctypes.cast(getattr(cpu_library, name), ctypes.c_void_p).value


def _load_cuda() -> ctypes.CDLL | None:
    import torch

    if torch.version.cuda is None or library_file("_cuda") is None:
        return None
    return _load_library("_cuda")


def _explain_missing_cuda_kernels() -> None:
    """On a CUDA build of PyTorch without our CUDA library, tells CUDA callers what is missing."""
    global _refusals
    import torch

    if torch.version.cuda is None:
        return

    def refuse(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            f"this build of pkg has no CUDA kernels ({FOLDER} holds no _cuda library): no nvcc was "
            "found when it was built. Install a wheel that has them, build from source with nvcc "
            "on PATH, or move the tensors to the CPU"
        )

    _refusals = torch.library.Library("pkg", "IMPL")
    # PyTorch has thousands of operators: ask only about ours.
    ours = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("pkg::")]
    for name in ours:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            _refusals.impl(name.removeprefix("pkg::"), refuse, "CUDA")


def _load_library(name: str) -> ctypes.CDLL:
    import torch

    path = library_file(name)
    if path is None:
        raise ImportError(_why_missing(name))
    _check_whole(name)
    try:
        torch.ops.load_library(str(path))
        return ctypes.CDLL(str(path))
    except OSError as error:
        # PyTorch's own error names only the file; the linker's words are its cause.
        raise ImportError(_why_unloadable(name, error.__cause__ or error)) from error


def _check_whole(name: str) -> None:
    """Refuses a library that was cut short: loading it would end the process."""
    path = library_file(name)
    if path is None or sys.platform != "linux":
        return
    size = path.stat().st_size
    with path.open("rb") as file:
        # ELF64: the program headers say which parts of the file are mapped.
        header = file.read(64)
        whole = len(header) == 64 and header[:5] == b"\x7fELF\x02"
        if whole:
            (table,) = struct.unpack_from("<Q", header, 32)
            entry, count = struct.unpack_from("<HH", header, 54)
            file.seek(table)
            entries = file.read(entry * count)
            whole = len(entries) == entry * count and all(
                sum(struct.unpack_from("<Q", entries, i * entry + at)[0] for at in (8, 32)) <= size
                for i in range(count)
            )
    if not whole:
        raise ImportError(_why_unloadable(name, f"it is {size} bytes long and incomplete"))


def _why_missing(name: str) -> str:
    others = sorted(p.name for p in FOLDER.glob(f"{name}.*") if p.suffix in {".so", ".pyd"})
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    if others:
        return (
            f"pkg was built for another system: {FOLDER} has {', '.join(others)} and this Python "
            f"({sys.executable}, {sys.version.split()[0]} on {platform.machine()}) needs "
            f"{name}{suffix}. Install the wheel for this Python, or build from source"
        )
    missing = f"pkg's library {name}{suffix} is missing from {FOLDER}"
    if name.startswith("_cpu_"):
        return f"{missing}; {_where_to_get_cpu_library(name.removeprefix('_cpu_'))}"
    checkout = _checkout()
    if checkout is None:
        return f"{missing}: the install is damaged: pip install --force-reinstall pkg-kernels"
    shadowed = _installed_elsewhere(name)
    return (
        f"{missing}, in a source checkout that was not built. In {checkout}: pip install -e . "
        "(or PKG_JIT=1 to compile on import)"
        + (f". Or leave that folder: it hides the pkg installed in {shadowed}" if shadowed else "")
    )


def _where_to_get_cpu_library(level: str) -> str:
    """What this build has instead of a CPU library, and how it comes to have that one too."""
    present = [c for c in CPU_CAPABILITIES if library_file(f"_cpu_{c}") is not None]
    wanted = " ".join(c for c in CPU_CAPABILITIES if c in present or c == level)
    built: list[str] = sys.modules["pkg._C"].build_info()["cpu_levels"]
    checkout = _checkout()
    if checkout is not None:
        source = (
            f"build it, in {checkout}: "
            f'PKG_CPU_LEVELS="{wanted}" pip install --no-build-isolation -e .'
        )
    elif level in built:
        source = "reinstall: pip install --force-reinstall pkg-kernels"
    else:
        source = (
            f"install a wheel that has it, or build from source with "
            f'PKG_CPU_LEVELS="{wanted}" or without that variable'
        )
    if not present:
        return f"this build has no CPU library. To get it, {source}"
    return (
        f"this build has {', '.join(present)}. Set PKG_CPU_CAPABILITY to one of these, or {source}"
    )


def _checkout() -> Path | None:
    """The source checkout that the package is in, or None where it was installed as a copy."""
    folder = FOLDER.parent
    is_checkout = (folder / "csrc").is_dir() and (folder / "setup.py").is_file()
    return folder if is_checkout else None


def _installed_elsewhere(name: str) -> Path | None:
    """A copy of the package that has the library and that this one hides, or None."""
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    folders = (Path(entry, "pkg") for entry in sys.path if entry)
    others = (folder for folder in folders if folder.resolve() != FOLDER.resolve())
    has_it = (f for f in others if any((f / f"{name}{suffix}").exists() for suffix in suffixes))
    return next(has_it, None)


def _why_unloadable(name: str, error: object) -> str:
    import torch

    path = library_file(name)
    checkout = _checkout()
    return (
        f"pkg's library {path} does not load: {error}. It was built for another system, or the "
        f"file is damaged; this is {platform.platform()} with PyTorch {torch.__version__}. "
    ) + (
        f"Delete the file and build it again, in {checkout}: pip install -e ."
        if checkout
        else "Reinstall: pip install --force-reinstall --no-cache-dir pkg-kernels, or build from "
        "source"
    )
