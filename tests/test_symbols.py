"""The promise behind one wheel for every PyTorch: no library imports a C++ symbol of PyTorch."""

from __future__ import annotations

import importlib.machinery
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pkg

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")

FOLDER = Path(pkg.__file__).parent
LIBRARIES = sorted(FOLDER.rglob("*.so"))

# In a mangled name a name is its length and itself. What follows is another name, an E, a template.
PYTORCH_NAMESPACE = re.compile(r"(?<!\d)(2at|3c10|5torch|6caffe2)(?=\d|[A-Z])")
# Functions and objects of torch_python outside any namespace.
TORCH_PYTHON = re.compile(r"^(_ZN?\d+)?THP")


def pytorch_symbols(library: Path) -> list[str]:
    from elf import imported_symbols

    return sorted(
        name
        for name in imported_symbols(library)
        if (name.startswith("_Z") and PYTORCH_NAMESPACE.search(name)) or TORCH_PYTHON.match(name)
    )


def test_all_libraries_are_looked_at() -> None:
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    names = {library.name for library in LIBRARIES}
    assert f"_C{suffix}" in names
    assert any(name.startswith("_cpu_") for name in names)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name.split(".")[0])
def test_no_library_imports_a_symbol_of_pytorch(library: Path) -> None:
    assert pytorch_symbols(library) == []


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name.split(".")[0])
def test_no_library_is_bound_to_the_machine_that_built_it(library: Path) -> None:
    from elf import dynamic_entries

    for tag in ("rpath", "runpath"):
        for paths in dynamic_entries(library, tag):
            assert all(path.startswith("$ORIGIN") for path in paths.split(":")), paths


def test_nothing_of_pytorch_is_in_the_package() -> None:
    vendored = re.compile(r"lib(torch|c10|gomp|iomp|omp|cudart)")
    assert [file.name for file in FOLDER.rglob("*") if vendored.match(file.name)] == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles a library")
@pytest.mark.parametrize(
    ("declaration", "use", "found"),
    [
        ("namespace at { void at_function(int); }", "at::at_function(1)", True),
        ("namespace c10 { struct S { void method() const; }; }", "c10::S{}.method()", True),
        ("namespace torch::jit { extern int variable; }", "(void)++torch::jit::variable", True),
        ("namespace at { struct Tensor; } void take(at::Tensor&);", "take(*(at::Tensor*)p)", True),
        ('extern "C" { extern int THPVariableClass; }', "(void)++THPVariableClass", True),
        ("void THPVariable_Wrap(int);", "THPVariable_Wrap(1)", True),
        ('extern "C" int aoti_torch_get_dim(void*);', "aoti_torch_get_dim(p)", False),
        ("namespace chat { void torchlight(int); }", "chat::torchlight(1)", False),
        ("namespace mine { struct at12 {}; void f(at12); }", "mine::f({})", False),
    ],
)
def test_a_planted_symbol_is_found(tmp_path: Path, declaration: str, use: str, found: bool) -> None:
    source, library = tmp_path / "planted.cpp", tmp_path / "planted.so"
    source.write_text(f"{declaration}\nvoid call(void* p) {{ (void)p; {use}; }}\n")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    assert bool(pytorch_symbols(library)) == found
