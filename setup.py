"""What is compiled: targets and sources. Flags: pkg/_build_flags.py; metadata: pyproject.toml."""

from __future__ import annotations

import copy
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import SimpleNamespace

from setuptools import Extension, setup

try:
    import torch
    from torch.utils import cpp_extension
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit(
        "pkg needs PyTorch to build and this environment has none: pip install 'torch>=2.10' "
        "first, or build without --no-build-isolation, which finds or brings one"
    )
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
# Not imported: the package itself needs what is built here.
FLAGS = SimpleNamespace(**runpy.run_path(str(ROOT / "pkg" / "_build_flags.py")))
# So few that headers are read seldom, so many that the cores of most machines are kept busy.
MERGED_CUDA_SOURCES = 4
VERSION = runpy.run_path(str(ROOT / "pkg" / "version.py"))["__version__"]


def compiler_command() -> list[str]:
    """The C++ compiler that PyTorch's build takes: CXX, or c++."""
    command = (os.environ.get("CXX") or "c++").split()
    if shutil.which(command[0]) is None:
        sys.exit(
            f"pkg needs a C++ compiler to build and '{command[0]}' is not there. "
            "Debian, Ubuntu: apt-get install g++. Or set CXX to one."
        )
    return command


def cxx_flags() -> list[str]:
    """The package's flags, PyTorch's headers as system headers, and the caller's wishes.

    Paths that the compiler would write into a library are shortened, so that the folders of a
    build leave no trace in it.
    """
    flags = list(FLAGS.cxx_flags())
    if not FLAGS.WINDOWS:
        includes = cpp_extension.include_paths()
        # The last that fits is taken: an environment may lie in this folder.
        flags += [
            f"-ffile-prefix-map={path}={name}"
            for path, name in [(ROOT, "."), *((path, "torch") for path in includes)]
        ]
        flags += [flag for path in includes for flag in ("-isystem", path)]
    return flags + os.environ.get("PKG_EXTRA_CFLAGS", "").split()


def link_flags() -> list[str]:
    """No symbol tables, and no library that is not used."""
    if FLAGS.WINDOWS:
        return []
    return ["-Wl,-dead_strip"] if FLAGS.MACOS else ["-Wl,--as-needed", "-Wl,-s"]


def write(path: Path, text: str) -> Path:
    """Writes a file that a build makes, unless it says that already: then it is no newer."""
    if not path.exists() or path.read_text("utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return path


def relative(paths: list[Path]) -> list[str]:
    """Paths as setuptools wants them, in an order that does not change."""
    return [path.relative_to(ROOT).as_posix() for path in sorted(paths)]


def headers(*folders: Path) -> list[str]:
    """Files whose change means a new build of the sources beside them."""
    return relative([p for each in folders for p in (*each.rglob("*.h"), *each.rglob("*.cuh"))])


def find_cuda_home() -> Path | None:
    """The CUDA toolkit's folder. torch.utils looks for one only in CUDA builds of PyTorch."""
    nvcc = "nvcc.exe" if FLAGS.WINDOWS else "nvcc"
    on_path = shutil.which(nvcc)
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates += [str(Path(on_path).resolve().parents[1])] if on_path else []
    for folder in map(Path, filter(None, [*candidates, "/usr/local/cuda"])):
        if (folder / "bin" / nvcc).exists() and (folder / "include" / "cuda_runtime.h").exists():
            return folder
    return None


def nvcc_version() -> str | None:
    """The release of the CUDA toolkit found, or None without one."""
    if CUDA_HOME is None:
        return None
    command = [CUDA_HOME / "bin" / "nvcc", "--version"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return text.split("release ")[1].split(",")[0]


def cuda_architectures() -> str:
    """Compute capabilities to build for, as TORCH_CUDA_ARCH_LIST writes them."""
    try:
        return FLAGS.package_cuda_architectures()
    except ValueError as error:
        sys.exit(str(error))


def build_facts() -> str:
    """The header that tells csrc/python/pybind.cpp of this build.

    No macros of the command line, by which every source of pkg._C would be compiled again where
    one more CPU library is built.
    """
    facts = {
        "PKG_VERSION": VERSION,
        "PKG_COMPILE_FLAGS": " ".join(FLAGS.cxx_flags()),
        "PKG_CUDA_TOOLKIT": nvcc_version() or "",
        "PKG_BUILT_CPU_LEVELS": " ".join(levels_to_build()),
        "PKG_CUDA_ARCHITECTURES": cuda_architectures() if CUDA_HOME else "",
    }
    return "".join(f'#define {name} "{text}"\n' for name, text in facts.items())


def binding() -> Extension:
    """pkg._C: the pybind11 module and the schemas."""
    return CppExtension(
        "pkg._C",
        relative([*CSRC.glob("*.cpp"), *(CSRC / "python").glob("*.cpp")]),
        depends=[*relative(list(CSRC.glob("*.h"))), *headers(CSRC / "host", CSRC / "python")],
        include_dirs=[str(CSRC)],
        extra_compile_args=[*cxx_flags(), *FLAGS.cpu_levels()["baseline"]],
        extra_link_args=link_flags(),
    )


def cpu_library(level: str) -> Extension:
    """pkg._cpu_<level>: every CPU kernel, compiled whole for one instruction set.

    ``PKG_EXTRA_CFLAGS_AVX512`` and so on are the caller's wishes for one of the libraries.
    """
    wishes = os.environ.get(f"PKG_EXTRA_CFLAGS_{level.upper()}", "").split()
    return CppExtension(
        f"pkg._cpu_{level}",
        relative(list((CSRC / "cpu").rglob("*.cpp"))),
        depends=[*relative(list(CSRC.glob("*.h"))), *headers(CSRC / "host", CSRC / "cpu")],
        include_dirs=[str(CSRC)],
        extra_compile_args=[*cxx_flags(), *FLAGS.cpu_kernel_flags(level), *wishes],
        extra_link_args=link_flags(),
    )


def cutlass_flags() -> list[str]:
    """Flags that build the kernels on CUTLASS, or none where its headers are not found.

    They are looked for in ``PKG_CUTLASS_INCLUDE``, a folder that holds ``cutlass/cutlass.h``, and
    in the package ``nvidia-cutlass`` of this environment; an empty ``PKG_CUTLASS_INCLUDE`` builds
    without them.
    """
    folder = os.environ.get("PKG_CUTLASS_INCLUDE")
    if folder is None:
        package = importlib.util.find_spec("cutlass_library")
        if package is None or package.origin is None:
            return []
        folder = str(Path(package.origin).parent / "source" / "include")
    elif folder and not Path(folder, "cutlass", "cutlass.h").exists():
        sys.exit(f"PKG_CUTLASS_INCLUDE is '{folder}', and there is no cutlass/cutlass.h in it")
    if not Path(folder or ".", "cutlass", "cutlass.h").exists():
        return []
    return ["-DPKG_WITH_CUTLASS", "-isystem", folder]


def cuda_library() -> Extension:
    """pkg._cuda: every CUDA kernel, for all architectures, with the runtime linked in."""
    os.environ["TORCH_CUDA_ARCH_LIST"] = cuda_architectures()
    includes = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    nvcc = FLAGS.package_nvcc_flags(threads=min(os.cpu_count() or 1, 4))
    extension = CUDAExtension(
        "pkg._cuda",
        relative(list((CSRC / "cuda").glob("*.cu"))),
        # Formulas are compiled from the CPU's sources.
        depends=[
            *headers(CSRC),
            *relative(list((CSRC / "cpu").glob("*.cpp"))),
        ],
        include_dirs=[str(CSRC)],
        extra_compile_args={
            "cxx": cxx_flags(),
            "nvcc": [
                *nvcc,
                *includes,
                *cutlass_flags(),
                *os.environ.get("PKG_EXTRA_NVCC_FLAGS", "").split(),
            ],
        },
        extra_link_args=link_flags(),
    )
    # Of PyTorch's libraries only those whose C functions are called; the CUDA runtime is static.
    extension.libraries = ["torch_cpu", "cudart_static"]
    if FLAGS.WINDOWS:
        extension.libraries.append("torch_cuda")
    else:
        extension.libraries += ["dl", "pthread", "rt"]
        # Named in the library even where the one linked against is empty.
        extension.extra_link_args += [
            "-Wl,--push-state,--no-as-needed",
            "-ltorch_cuda",
            "-Wl,--pop-state",
        ]
    return extension


class Build(BuildExtension):
    """BuildExtension with a folder of objects for each target, targets side by side."""

    def run(self) -> None:
        """Notes what ``--inplace`` says, which setuptools takes back while it builds."""
        self.is_of_checkout = bool(self.inplace or self.editable_mode)
        super().run()

    def build_extensions(self) -> None:
        """Checks the compiler, shares the cores out, then builds."""
        if FLAGS.WINDOWS:
            self.use_clang_cl()
        else:
            self.check_compiler()
        # Targets run side by side, each with a ninja of its own: share the cores out, and let the
        # last target have one more than its share, so that none idles at the end.
        cores = os.cpu_count() or 1
        self.parallel = min(len(self.extensions), cores)
        os.environ.setdefault("MAX_JOBS", str(cores // self.parallel + 1))
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        """Builds one target with objects of its own: targets share sources."""
        worker = copy.copy(self)
        # Not setuptools' build_temp, which for an editable install is a new folder each time.
        worker.build_temp = str(ROOT / "build" / f"objects-{sysconfig.get_platform()}" / ext.name)
        if ext.name == "pkg._C":
            header = write(Path(worker.build_temp, "facts", "build_facts.h"), build_facts())
            ext.include_dirs.append(str(header.parent))
            ext.depends.append(str(header))
        elif ext.name == "pkg._cuda":
            ext.library_dirs.append(self.folder_of_torch_cuda(worker.build_temp))
            self.remove_outdated_objects(ext, Path(worker.build_temp))
            if not self.is_of_checkout:
                ext.sources = self.merge_sources(ext, Path(worker.build_temp))
        elif ext.name.startswith("pkg._cpu_"):
            ext.extra_compile_args += self.precompile_headers(ext, Path(worker.build_temp))
        super(Build, worker).build_extension(ext)

    def use_clang_cl(self) -> None:
        """Compiles with clang-cl on Windows, where ninja files of PyTorch's would say cl."""
        clang = shutil.which(os.environ.get("CXX", "clang-cl"))
        if clang is None or "clang" not in Path(clang).name:
            sys.exit(
                "pkg is compiled by clang-cl on Windows: Microsoft's cl has no vector types. Add "
                "'C++ Clang tools for Windows' in the Visual Studio installer, then build from "
                "its developer prompt, or set CXX to clang-cl"
            )
        self.use_ninja = False
        if not getattr(self.compiler, "initialized", True):
            self.compiler.initialize()
        self.compiler.cc = clang

    def check_compiler(self) -> None:
        """Refuses a compiler without C++20 before it fills the screen with errors."""
        command = compiler_command()
        source = "#include <span>\n#include <bit>\nint main() { return std::bit_cast<int>(0U); }"
        result = subprocess.run(
            [*command, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"],
            input=source,
            text=True,
            capture_output=True,
            check=False,
        )
        if result.returncode != 0:
            sys.exit(
                f"pkg needs a C++20 compiler (GCC 11, Clang 14 or newer) and "
                f"'{' '.join(command)}' refused a C++20 program:\n{result.stderr}\n"
                "Set CXX to a newer one."
            )

    def precompile_headers(self, ext: Extension, folder: Path) -> list[str]:
        """Compiles the headers that most CPU sources begin with; returns flags that use them.

        Reading them is half of what a small source takes. For GCC, which passes over a compiled
        header that does not fit the flags, but not over one that is older than its sources.
        """
        compiler = compiler_command()
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
        if FLAGS.WINDOWS or "Free Software Foundation" not in version:
            return []
        header = CSRC / "cpu" / "runtime" / "precompiled.h"
        text = header.read_text("utf-8")
        used = folder / header.name
        compiled = used.with_suffix(".h.gch")
        flags = [*self.compiler.compiler_so[1:], *ext.extra_compile_args]
        command = [*compiler, *flags, "-x", "c++-header", str(used), "-o", str(compiled)]
        made_of = "\n".join([version, torch.__version__, *command, text])
        stamp = folder / "precompiled.txt"
        if not (compiled.exists() and stamp.exists() and stamp.read_text("utf-8") == made_of):
            folder.mkdir(parents=True, exist_ok=True)
            used.write_text(text, "utf-8")
            subprocess.run(command, check=True)
            stamp.write_text(made_of, "utf-8")
        return ["-include", str(used)]

    def remove_outdated_objects(self, ext: Extension, folder: Path) -> None:
        """Has CUDA sources compiled again where a header has changed.

        torch.utils lets nvcc tell ninja of headers in CUDA builds of PyTorch alone.
        """
        if torch.version.cuda is not None:
            return
        newest = max((ROOT / name).stat().st_mtime for name in ext.depends)
        for path in folder.rglob("*.o"):
            if path.stat().st_mtime < newest:
                path.unlink()

    def merge_sources(self, ext: Extension, folder: Path) -> list[str]:
        """Writes a few sources that include those of the CUDA library; returns their paths.

        nvcc reads PyTorch's headers and CUDA's own once for the host and once for each
        architecture: 15 s of processor time before the first line of a kernel. A checkout that is
        worked in compiles each file by itself, since one of them is changed at a time.
        """
        ext.depends = [*ext.depends, *ext.sources]
        # CUTLASS is most of what its kernels compile; they stay by themselves.
        alone = [name for name in ext.sources if "cutlass" in name]
        merged = [name for name in ext.sources if name not in alone]
        folder = folder.relative_to(ROOT) / "merged"
        units = []
        for number in range(MERGED_CUDA_SOURCES):
            includes = [
                Path(name).relative_to("csrc").as_posix()
                for name in merged[number::MERGED_CUDA_SOURCES]
            ]
            text = "".join(f'#include "{name}"\n' for name in includes)
            units.append(write(folder / f"{number}.cu", text).as_posix())
        return [*units, *alone]

    def folder_of_torch_cuda(self, build_folder: str) -> str:
        """A folder with a libtorch_cuda to link against.

        The CUDA library must name libtorch_cuda, where the C functions that it
        calls live. A CPU build of PyTorch has none; there an empty one serves
        for linking, and the real one is found at run time.
        """
        libraries = Path(cpp_extension.library_paths()[0])
        if FLAGS.WINDOWS or (libraries / "libtorch_cuda.so").exists():
            return str(libraries)
        stub = Path(build_folder, "stub", "libtorch_cuda.so")
        stub.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [
                *compiler_command(),
                *("-shared", f"-Wl,-soname,{stub.name}", "-o", str(stub)),
                *("-x", "c", os.devnull),
            ],
            check=True,
        )
        return str(stub.parent)


def native_level() -> str:
    """The CPU library that this processor gets, as csrc/python/cpu_features.cpp has it."""
    if FLAGS.WINDOWS:
        sys.exit("PKG_CPU_LEVELS=native is not known on Windows: name a library, or unset it")
    source = """
        #include <cstdio>
        #include "python/cpu_features.h"
        int main() {
          const auto runnable = pkg::runnable_capabilities();
          if (!runnable.empty()) std::puts(pkg::capability_name(runnable.back()).data());
        }
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "native")
        command = [*compiler_command(), "-std=c++20", f"-I{CSRC}", "-o", str(program)]
        command += [str(CSRC / "python" / "cpu_features.cpp"), "-x", "c++", "-"]
        subprocess.run(command, input=source, text=True, check=True)
        result = subprocess.run([program], capture_output=True, text=True, check=True)
        level = result.stdout.strip()
    if not level:
        sys.exit("PKG_CPU_LEVELS=native: no CPU library runs on this processor. Name some instead")
    return level


def levels_to_build() -> list[str]:
    """The CPU libraries to build: all of this system, or those that PKG_CPU_LEVELS names."""
    levels = list(FLAGS.cpu_levels())
    asked = os.environ.get("PKG_CPU_LEVELS", "").replace(",", " ").split()
    asked = [native_level() if level == "native" else level for level in asked]
    unknown = [level for level in asked if level not in levels]
    if unknown:
        sys.exit(
            f"PKG_CPU_LEVELS names {', '.join(unknown)}; here there are {', '.join(levels)}, and "
            "native for the best that this processor runs. Unset it to build all of them"
        )
    return [level for level in levels if not asked or level in asked]


def targets() -> list[Extension]:
    """Every library of the package that can be built here."""
    extensions = [binding(), *map(cpu_library, levels_to_build())]
    for extension in extensions:
        extension.libraries = ["torch_cpu"]
    if CUDA_HOME is None:
        asked = os.environ.get("PKG_BUILD_CUDA")
        reason = "no CUDA toolkit (CUDA_HOME, nvcc on PATH)"
        if not FLAGS.builds_cuda():
            sees_none = " and PyTorch sees no GPU" if asked == "native" else ""
            reason = f"PKG_BUILD_CUDA={asked}{sees_none}"
        print(f"pkg: {reason}: building without CUDA kernels")
        return extensions
    return [*extensions, cuda_library()]


CUDA_HOME = find_cuda_home() if FLAGS.builds_cuda() else None
cpp_extension.CUDA_HOME = str(CUDA_HOME) if CUDA_HOME else None
setup(ext_modules=targets(), cmdclass={"build_ext": Build})
