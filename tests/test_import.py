"""Importing the package, and every way in which that can fail.

Each case runs in a process of its own, with a copy of the installed package that
the test damages, so that nothing of the installed one is touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from built_libraries import BUILT, USABLE

import pkg

INSTALLED = Path(pkg.__file__).parent
SUFFIX = Path(pkg._C.__file__).name.removeprefix("_C")

pytestmark = pytest.mark.skipif(
    not pkg._loader.library_file("_C"), reason="pkg was compiled on import (PKG_JIT)"
)


def run_python(code: str, path: Path | None = None, **environment: str):
    """Runs code with the package of `path` (or the installed one) importable."""
    env = {k: v for k, v in os.environ.items() if k != "PKG_CPU_CAPABILITY"}
    env |= {"PYTHONPATH": str(path or INSTALLED.parent)} | environment
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )


def import_error(path: Path | None = None, before: str = "", **environment: str) -> str:
    """The message of the ImportError that `import pkg` raises, after a check of what it leaves."""
    code = f"""
import sys
{textwrap.dedent(before)}
try:
    import pkg
except ImportError as error:
    left = [m for m in sys.modules if m == "pkg" or m.startswith("pkg.")]
    assert not left, left
    print(error)
else:
    sys.exit("imported")
"""
    result = run_python(code, path, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def damaged_copy(tmp_path: Path) -> Path:
    """A copy of the installed package, for a test to damage."""
    shutil.copytree(INSTALLED, tmp_path / "pkg", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.fixture
def damaged_checkout(damaged_copy: Path) -> Path:
    """The same in a folder that has the sources."""
    (damaged_copy / "csrc").mkdir()
    (damaged_copy / "setup.py").touch()
    return damaged_copy


def test_what_tests_operators_is_imported_where_it_is_used() -> None:
    done = run_python("""
        import sys
        import pkg

        assert "pkg.testing" not in sys.modules
        assert pkg.testing.check_op is sys.modules["pkg.testing"].check_op
        pkg.absent
    """)
    assert done.stderr.endswith("AttributeError: module 'pkg' has no attribute 'absent'\n")


def test_every_library_of_the_build_is_there() -> None:
    present = {file.name for file in INSTALLED.glob(f"_cpu_*{SUFFIX}")}
    assert present == {f"_cpu_{level}{SUFFIX}" for level in BUILT}


def test_import_loads_the_best_library() -> None:
    result = run_python("import pkg; print(pkg._C.cpu_capability())")
    assert result.stdout.split() == [USABLE[-1]]


def test_import_brings_nothing_but_the_package() -> None:
    # torch._dynamo alone would take a second.
    code = """
        import sys, torch
        before = set(sys.modules)
        import pkg
        print(*(name for name in set(sys.modules) - before if name.split(".")[0] != "pkg"))
    """
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    brought = {name.split(".")[0] for name in result.stdout.split()}
    # Which the list leaves out.
    assert brought <= {*sys.stdlib_module_names, "_xxsubinterpreters", "_interpreters"}


@pytest.mark.long
def test_import_is_quick_beside_that_of_torch(tmp_path: Path) -> None:
    # A twenty-fifth of it, once Python has compiled its files. Processor time: other processes do
    # not count in it.
    code = """
        import time
        start = time.process_time()
        import torch
        between = time.process_time()
        import pkg
        print((time.process_time() - between) / (between - start))
    """
    keeping = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    _, *later = (float(run_python(code, **keeping).stdout) for _ in range(4))
    assert min(later) < 0.08


@pytest.mark.parametrize("capability", USABLE)
def test_capability_can_be_chosen(capability: str) -> None:
    code = """
        import pkg, torch
        libraries = [l for l in open('/proc/self/maps') if '/_cpu_' in l] \\
            if __import__('os').path.exists('/proc/self/maps') else [pkg._C.cpu_capability()]
        print(pkg._C.cpu_capability(), pkg.ops.mul(torch.ones(3), torch.ones(3)).tolist())
        print({l.split('/_cpu_')[-1].split('.')[0].strip() for l in libraries})
    """
    result = run_python(code, PKG_CPU_CAPABILITY=capability.upper())
    assert result.stdout.splitlines() == [
        f"{capability} [1.0, 1.0, 1.0]",
        str({capability}),
    ], result.stderr


def test_unknown_capability_is_named() -> None:
    message = import_error(PKG_CPU_CAPABILITY="sse9")
    assert "PKG_CPU_CAPABILITY is 'sse9'" in message
    assert "baseline, avx2, avx2_vnni, avx512, avx512_vnni, avx512_bf16, amx" in message


@pytest.mark.parametrize("is_checkout", [False, True])
def test_a_capability_to_compile_for(
    damaged_copy: Path, is_checkout: bool, request: pytest.FixtureRequest
) -> None:
    """``PKG_JIT=1`` refuses what an import without it does, before anything is compiled."""
    if is_checkout:
        request.getfixturevalue("damaged_checkout")
    message = import_error(damaged_copy, PKG_CPU_CAPABILITY="sse9", PKG_JIT="1")
    assert "PKG_CPU_CAPABILITY is 'sse9'; it must be one of baseline, " in message
    jit = damaged_copy / "pkg" / "jit.py"
    jit.write_text(
        jit.read_text().replace("cpu_levels(), _capabilities()", "cpu_levels(), ['baseline']")
    )
    level = pkg._loader.CPU_CAPABILITIES[1]
    message = import_error(damaged_copy, PKG_CPU_CAPABILITY=level, PKG_JIT="1")
    assert f"PKG_CPU_CAPABILITY is '{level}'" in message
    assert "runs only baseline" in message


def test_capability_beyond_the_processor(damaged_copy: Path) -> None:
    # Every level runs on some machines that test this: pretend that few do.
    loader = damaged_copy / "pkg" / "_loader.py"
    text = loader.read_text().replace("module.cpu_capabilities()", "['baseline']")
    loader.write_text(text)
    message = import_error(damaged_copy, PKG_CPU_CAPABILITY="avx512")
    assert "PKG_CPU_CAPABILITY is 'avx512'" in message
    assert "runs only baseline" in message


def test_processor_below_the_baseline(damaged_copy: Path) -> None:
    loader = damaged_copy / "pkg" / "_loader.py"
    loader.write_text(loader.read_text().replace("module.cpu_capabilities()", "[]"))
    assert "SSE4.2" in import_error(damaged_copy)


def test_the_best_of_those_that_were_built(damaged_copy: Path) -> None:
    loader = damaged_copy / "pkg" / "_loader.py"
    text = loader.read_text()
    built = 'module.build_info()["cpu_levels"]'
    # A build of one library may have another than the baseline: any of them stands for it.
    best = damaged_copy / "pkg" / f"_cpu_{USABLE[-1]}{SUFFIX}"
    shutil.copy(best, best.with_name(f"_cpu_baseline{SUFFIX}"))
    loader.write_text(text.replace(built, "['baseline']"))
    result = run_python("import pkg; print(pkg._C.cpu_capability())", damaged_copy)
    assert result.stdout.strip() == "baseline", result.stderr
    loader.write_text(text.replace(built, "['avx1024']"))
    assert "has the CPU libraries avx1024" in import_error(damaged_copy)


def without_baseline(copy: Path) -> list[str]:
    """Takes the library from a copy; the others that it has."""
    (copy / "pkg" / f"_cpu_baseline{SUFFIX}").unlink(missing_ok=True)
    # A build of the baseline alone has no other: its library under another name stands for it.
    if USABLE == ["baseline"]:
        shutil.copy(pkg._loader.library_file("_cpu_baseline"), copy / "pkg" / f"_cpu_avx2{SUFFIX}")
    files = (copy / "pkg").glob(f"_cpu_*{SUFFIX}")
    present = {file.name.removeprefix("_cpu_").removesuffix(SUFFIX) for file in files}
    return [c for c in pkg._loader.CPU_CAPABILITIES if c in present]


def test_capability_that_this_build_lacks(damaged_copy: Path) -> None:
    others = without_baseline(damaged_copy)
    message = import_error(damaged_copy, PKG_CPU_CAPABILITY="baseline")
    assert f"_cpu_baseline{SUFFIX} is missing" in message
    assert f"this build has {', '.join(others)}. Set PKG_CPU_CAPABILITY to one of these" in message
    # Nothing is damaged where the library was never asked for.
    assert ("--force-reinstall" in message) == ("baseline" in BUILT)
    asked = f'PKG_CPU_LEVELS="baseline {" ".join(others)}"'
    assert (asked in message) == ("baseline" not in BUILT)


def test_capability_that_this_checkout_lacks(damaged_checkout: Path) -> None:
    others = without_baseline(damaged_checkout)
    message = import_error(damaged_checkout, PKG_CPU_CAPABILITY="baseline")
    assert f"_cpu_baseline{SUFFIX} is missing" in message
    assert f"Set PKG_CPU_CAPABILITY to one of these, or build it, in {damaged_checkout}" in message
    asked = f'PKG_CPU_LEVELS="baseline {" ".join(others)}" pip install --no-build-isolation -e .'
    assert asked in message
    assert "reinstall" not in message.lower()


def test_torch_absent() -> None:
    hide = """
        class Hide:
            def find_spec(self, name, path=None, target=None):
                if name == "torch":
                    raise ModuleNotFoundError("No module named 'torch'", name="torch")
        sys.meta_path.insert(0, Hide())
    """
    message = import_error(before=hide)
    assert "needs PyTorch 2.10 or newer" in message
    assert "pip install 'torch>=2.10'" in message


@pytest.mark.parametrize("version", ["1.13.1", "2.9.1+cu128"])
def test_torch_too_old(tmp_path: Path, version: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"__version__ = '{version}'")
    before = f"sys.path.insert(0, {str(tmp_path)!r})"
    message = import_error(before=before)
    assert f"this is {version}" in message
    assert "pip install -U" in message


def test_binding_missing(damaged_copy: Path) -> None:
    (damaged_copy / "pkg" / f"_C{SUFFIX}").unlink()
    message = import_error(damaged_copy)
    assert f"_C{SUFFIX} is missing" in message
    assert "pip install --force-reinstall pkg-kernels" in message


def test_a_checkout_that_was_not_built(damaged_checkout: Path) -> None:
    (damaged_checkout / "pkg" / f"_C{SUFFIX}").unlink()
    message = import_error(damaged_checkout)
    assert f"_C{SUFFIX} is missing" in message
    assert f"In {damaged_checkout}: pip install -e ." in message
    assert "reinstall" not in message.lower()


def test_a_checkout_that_hides_an_install(damaged_checkout: Path) -> None:
    (damaged_checkout / "pkg" / f"_C{SUFFIX}").unlink()
    before = f"sys.path.append({str(INSTALLED.parent)!r})"
    message = import_error(damaged_checkout, before)
    assert f"Or leave that folder: it hides the pkg installed in {INSTALLED}" in message


@pytest.mark.parametrize("other", ["_C.cpython-27-x86_64-linux-gnu.so", "_C.cp399-win_amd64.pyd"])
def test_built_for_another_python(damaged_copy: Path, other: str) -> None:
    folder = damaged_copy / "pkg"
    (folder / f"_C{SUFFIX}").rename(folder / other)
    message = import_error(damaged_copy)
    assert "built for another system" in message
    assert other in message
    assert SUFFIX in message


@pytest.mark.parametrize("library", ["_C", f"_cpu_{pkg._C.cpu_capability()}"])
def test_damaged_library(damaged_copy: Path, library: str) -> None:
    path = damaged_copy / "pkg" / f"{library}{SUFFIX}"
    path.write_bytes(path.read_bytes()[:3000])
    message = import_error(damaged_copy)
    assert str(path) in message
    assert "does not load" in message
    assert "--force-reinstall" in message


def test_damaged_library_of_a_checkout(damaged_checkout: Path) -> None:
    path = damaged_checkout / "pkg" / f"_C{SUFFIX}"
    path.write_bytes(path.read_bytes()[:3000])
    message = import_error(damaged_checkout)
    assert f"{path} does not load" in message
    # What is newer than its sources is not built again while it is there.
    assert f"Delete the file and build it again, in {damaged_checkout}: pip install" in message
    assert "--force-reinstall" not in message


def test_import_succeeds_after_the_cause_is_mended(damaged_copy: Path) -> None:
    code = """
        import os
        os.environ["PKG_CPU_CAPABILITY"] = "nonsense"
        try:
            import pkg
        except ImportError:
            del os.environ["PKG_CPU_CAPABILITY"]
        import pkg, torch
        print(pkg.ops.mul(torch.ones(2), torch.ones(2)).tolist())
    """
    result = run_python(code)
    assert result.stdout == "[1.0, 1.0]\n", result.stderr


HELPERS = """
import gc, sys, warnings

def forget():
    for name in [m for m in sys.modules if m.split(".")[0] == "pkg"]:
        del sys.modules[name]

def works(pkg):
    import torch
    a = torch.full((2, 2), 3.0, requires_grad=True)
    pkg.ops.mul(a, a).sum().backward()
    mapped = torch.func.vmap(pkg.ops.matmul)(a.detach()[None], a.detach()[None])
    meta = torch.empty(2, device="meta")
    assert a.grad.tolist() == [[6.0, 6.0], [6.0, 6.0]], a.grad
    assert mapped.tolist() == [[[18.0, 18.0], [18.0, 18.0]]], mapped
    assert pkg.ops.mul(meta, meta).shape == (2,)
"""


def test_second_copy_is_refused_and_the_first_goes_on(damaged_copy: Path) -> None:
    code = f"""
        import pkg
        first = pkg
        forget()
        sys.path.insert(0, {str(damaged_copy)!r})
        for attempt in range(2):
            try:
                import pkg
            except ImportError as error:
                print(error)
        works(first)
    """
    result = run_python(HELPERS + textwrap.dedent(code))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("namespace 'pkg' is already registered") == 2, result.stderr
    assert f"by the copy of pkg in {INSTALLED}, and this one is in {damaged_copy}" in result.stdout
    assert "pkg.jit.load(namespace=" in result.stdout


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dropped"])
def test_the_same_copy_may_be_imported_again(kept: bool) -> None:
    code = f"""
        # PyTorch says, once, that what was registered before is replaced.
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        import torch, pkg
        first = pkg if {kept} else None
        for again in range(2):
            del pkg
            forget()
            gc.collect()
            import pkg
            gc.collect()
            assert pkg is not first
            works(pkg)
        if first is not None:
            works(first)
    """
    result = run_python(HELPERS + textwrap.dedent(code))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("before", ["", "import pkg"], ids=["alone", "beside pkg"])
def test_another_name_is_refused(before: str) -> None:
    code = f"""
        {before}
        import sys
        from importlib.util import module_from_spec, spec_from_file_location
        specification = spec_from_file_location(
            "vendored", {str(INSTALLED / "__init__.py")!r},
            submodule_search_locations=[{str(INSTALLED)!r}],
        )
        module = sys.modules["vendored"] = module_from_spec(specification)
        try:
            specification.loader.exec_module(module)
        except ImportError as error:
            print(error)
        assert not [name for name in sys.modules if name.startswith("vendored")]
    """
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert f"the package in {INSTALLED} is named pkg and was imported as vendored" in result.stdout


def test_files_of_two_versions_are_refused(damaged_copy: Path) -> None:
    (damaged_copy / "pkg" / "version.py").write_text('__version__ = "99.0"')
    message = import_error(damaged_copy)
    assert f"is of version {pkg.__version__} and its Python files are of 99.0" in message
    assert "--force-reinstall" in message


@pytest.mark.parametrize("kind", ["DEF", "FRAGMENT"])
def test_a_namespace_that_others_took(kind: str) -> None:
    before = f"""
        import torch
        library = torch.library.Library("pkg", {kind!r})
        library.define("mul(Tensor a) -> Tensor")
    """
    assert "already registered" in import_error(before=before)


def test_build_info_tells_what_was_built() -> None:
    info = pkg._C.build_info()
    assert info["version"] == pkg.__version__
    assert info["stable_abi_target"] == "2.10"
    assert "-std=c++20" in info["flags"] or "/std:c++20" in info["flags"]
    assert "_C" in info["libraries"]
    assert f"_cpu_{pkg._loader.cpu_capability}" in info["libraries"]
    assert ("_cuda" in info["libraries"]) == (info["cuda_toolkit"] is not None)
