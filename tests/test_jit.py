"""pkg.jit: compiling the sources at run time, beside the installed package."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension
from tree_copies import ROOT, variables_of

import pkg
from pkg import _build_flags

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's sources with few operators, so that they compile in seconds."""
    folder = tmp_path_factory.mktemp("jit") / "csrc"
    shutil.copytree(pkg.jit.source_folder(), folder, ignore=shutil.ignore_patterns("cuda"))
    for path in (folder / "cpu").rglob("*.cpp"):
        if path.stem not in {"mul", "pointwise"}:
            path.unlink()
    return folder


@pytest.fixture(scope="module")
def build_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jit_build")


# The last such flag counts.
QUICK = ["-O0"]


@pytest.fixture(scope="module")
def module(sources: Path, build_folder: Path):
    return load(sources, build_folder)


def load(sources: Path, build_folder: Path, flags: Sequence[str] = QUICK):
    return pkg.jit.load(
        namespace="pkg_jit_test",
        sources=sources,
        build_directory=build_folder,
        with_cuda=False,
        extra_cflags=flags,
    )


def test_no_two_sources_have_one_name() -> None:
    """PyTorch's loader names an object file after its source, without the folder."""
    for suffix in ("cpp", "cu"):
        names = Counter(path.name for path in pkg.jit.source_folder().rglob(f"*.{suffix}"))
        assert [name for name, count in names.items() if count > 1] == []


def test_loads_beside_the_installed_package(module) -> None:
    a, b = torch.randn(5), torch.randn(5)
    assert torch.equal(module.mul(a, b), pkg.ops.mul(a, b))
    assert torch.equal(torch.ops.pkg_jit_test.mul(a, b), pkg.ops.mul(a, b))
    assert module.build_info()["namespace"] == "pkg_jit_test"


def test_second_load_is_the_same_module(module, sources: Path, build_folder: Path) -> None:
    assert load(sources, build_folder) is module


def test_changed_sources_need_another_namespace(module, sources: Path, build_folder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"already registered.*have changed.*'pkg_jit_test2'"):
        load(sources, build_folder, ["-DPKG_ANOTHER_FLAG"])


def test_namespace_of_the_installed_package_is_refused(sources: Path) -> None:
    with pytest.raises(RuntimeError, match=r"'pkg' is already registered.*the installed pkg"):
        pkg.jit.load(namespace="pkg", sources=sources)


def test_new_process_compiles_nothing(module, sources: Path, build_folder: Path) -> None:
    objects = {path: path.stat().st_mtime_ns for path in build_folder.glob("*.o")}
    assert objects
    code = f"""
        import pkg, torch
        module = pkg.jit.load(namespace="pkg_jit_test", sources={str(sources)!r},
                              build_directory={str(build_folder)!r}, with_cuda=False,
                              extra_cflags={QUICK})
        print(module.mul(torch.ones(2), torch.ones(2)).tolist())
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert result.stdout == "[1.0, 1.0]\n", result.stderr
    assert objects == {path: path.stat().st_mtime_ns for path in build_folder.glob("*.o")}


@pytest.mark.skipif(
    not hasattr(cpp_extension, "FileBaton"), reason="this PyTorch's lock ends with its process"
)
def test_lock_of_a_dead_process_is_explained(sources: Path, tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / "lock").touch()
    (tmp_path / "owner").write_text(f"{dead.pid} {os.uname().nodename}")
    with pytest.raises(RuntimeError, match=r"lock is held by process \d+, which no longer runs"):
        pkg.jit.load(namespace="pkg_jit_locked", sources=sources, build_directory=tmp_path)
    assert (tmp_path / "lock").exists(), "the lock is the user's to delete"


def test_lock_without_an_owner_is_explained(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with pytest.raises(RuntimeError, match=r"a process that is not known.*delete the file"):
        pkg.jit._wait_for_lock(tmp_path / "lock", patience=0.5)


def test_every_call_of_a_failing_build_says_why(tmp_path: Path) -> None:
    """Of two threads at once, and of one after them."""
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "pybind.cpp").write_text("#error of the user's\n")

    def build() -> None:
        pkg.jit.load(
            namespace="pkg_jit_failing",
            sources=tmp_path,
            build_directory=tmp_path / "build",
            with_cuda=False,
        )

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(build) for _ in range(2)]
    for call in (calls[0].result, calls[1].result, build):
        with pytest.raises(RuntimeError, match="#error of the user's"):
            call()


def test_wrong_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no python/pybind\.cpp"):
        pkg.jit.load(namespace="pkg_jit_nothing", sources=tmp_path)


def test_wrong_namespace_and_capability_are_named() -> None:
    with pytest.raises(ValueError, match="'my kernels' is no identifier"):
        pkg.jit.load(namespace="my kernels")
    with pytest.raises(ValueError, match="capability is 'sse9'"):
        pkg.jit.load(namespace="pkg_jit_sse9", capability="sse9")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this is a CUDA build of PyTorch")
def test_cuda_on_a_cpu_build_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"needs nvcc .* and a CUDA build of PyTorch"):
        pkg.jit.load(namespace="pkg_jit_cuda", with_cuda=True)


@pytest.mark.skipif("avx512" not in pkg.jit._build_flags.cpu_levels(), reason="of x86-64")
def test_what_does_not_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose first call would end the process; asked of ``pkg._C``, or of PyTorch where that is."""
    monkeypatch.delenv("PKG_CPU_CAPABILITY", raising=False)
    monkeypatch.setattr(pkg._C, "cpu_capabilities", lambda: ["baseline", "avx2"])
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(pkg.jit, "_has_avx_vnni", lambda: False)
    for _ in range(2):
        assert pkg.jit.best_capability() == "avx2"
        with pytest.raises(RuntimeError, match=r"capability is 'avx512'.*runs only baseline, avx2"):
            pkg.jit.load(namespace="pkg_jit_avx512", capability="avx512")
        with monkeypatch.context() as patch:
            patch.setenv("PKG_CPU_CAPABILITY", "AVX512_BF16")
            with pytest.raises(RuntimeError, match="PKG_CPU_CAPABILITY is 'avx512_bf16'"):
                pkg.jit.load(namespace="pkg_jit_avx512")
        monkeypatch.delitem(sys.modules, "pkg._C", raising=False)


@pytest.mark.skipif("amx" not in pkg.jit._build_flags.cpu_levels(), reason="no such library here")
def test_tile_registers_have_to_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PKG_CPU_CAPABILITY", raising=False)
    monkeypatch.delitem(sys.modules, "pkg._C")
    monkeypatch.setattr(pkg.jit, "_can_use_tiles", lambda: False)
    assert pkg.jit.best_capability() != "amx"
    with pytest.raises(RuntimeError, match="capability is 'amx' and this processor or its"):
        pkg.jit.load(namespace="pkg_jit_amx", capability="amx")


def test_each_pytorch_has_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = pkg.jit._default_folder("pkg_jit")
    assert folder.is_relative_to(tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert pkg.jit._default_folder("pkg_jit") not in {folder, *folder.parents}


def test_architectures_are_known_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("PKG_CUDA_ARCH_LIST", raising=False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    with pkg.jit._cuda_architectures():
        assert cpp_extension._get_cuda_arch_flags()
    assert "TORCH_CUDA_ARCH_LIST" not in os.environ
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")
    monkeypatch.setenv("PKG_CUDA_ARCH_LIST", "8.6")
    with pkg.jit._cuda_architectures():
        flags = cpp_extension._get_cuda_arch_flags()
    assert flags == ["-gencode=arch=compute_86,code=sm_86"]
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "7.5"


@pytest.mark.parametrize(
    ("gpus", "architectures", "has_warpgroups"),
    [
        ([(8, 6)], None, False),  # PyTorch asks the GPU
        ([(9, 0)], "9.0a", True),
        ([(9, 0), (8, 0), (9, 0)], "8.0;9.0a", True),
    ],
)
def test_kernels_are_compiled_for_the_gpus_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    gpus: list[tuple[int, int]],
    architectures: str | None,
    has_warpgroups: bool,
) -> None:
    """Those of warpgroups too, of which the host has to be told by a macro."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpus[index])
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.delenv("PKG_CUDA_ARCH_LIST", raising=False)
    with pkg.jit._cuda_architectures():
        assert os.environ.get("TORCH_CUDA_ARCH_LIST") == architectures
    flags = flags_of_a_build(monkeypatch, tmp_path)
    assert ("-DPKG_CUDA_90A" in flags) == has_warpgroups
    monkeypatch.setenv("PKG_CUDA_ARCH_LIST", "8.0;9.0a")
    assert "-DPKG_CUDA_90A" in flags_of_a_build(monkeypatch, tmp_path)


def flags_of_a_build(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """What nvcc would be given, with a build that ends before it begins."""

    class BuiltError(Exception):
        pass

    def load(*, extra_cuda_cflags: list[str], **others: object) -> None:
        raise BuiltError(extra_cuda_cflags)

    monkeypatch.setattr(cpp_extension, "load", load)
    monkeypatch.setattr(pkg.jit, "can_build_cuda", lambda: True)
    with pytest.raises(BuiltError) as built:
        pkg.jit.load(namespace="pkg_jit_flags", with_cuda=True, build_directory=folder)
    (flags,) = built.value.args
    return flags


@pytest.mark.parametrize(
    ("asked", "old"), [("7.5", "7.5"), ("8.0;7.0+PTX", r"7.0\+PTX"), ("Ampere Turing", "Turing")]
)
def test_kernels_of_pkg_are_not_built_for_what_lacks_their_instructions(
    monkeypatch: pytest.MonkeyPatch, asked: str, old: str
) -> None:
    monkeypatch.setenv("PKG_CUDA_ARCH_LIST", asked)
    with pytest.raises(ValueError, match=f"have {old}, .* from 8.0"):
        _build_flags.package_cuda_architectures()


@pytest.mark.parametrize("asked", ["8.0+PTX;9.0a", "8.6 12.0", "Ampere,Hopper", "10.0a"])
def test_kernels_of_pkg_are_built_for_newer_gpus(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setenv("PKG_CUDA_ARCH_LIST", asked)
    assert _build_flags.package_cuda_architectures() == asked


IMPORT = """
    import pkg, torch
    a = torch.ones(2, requires_grad=True)
    pkg.ops.mul(a, a).sum().backward()
    print(pkg.__file__, a.grad.tolist())
"""


def import_and_compile(tree: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(IMPORT)],
        env=os.environ
        | variables_of(tree)
        | {
            "PYTHONPATH": str(tree),
            "PKG_JIT": "1",
            "PKG_BUILD_CUDA": "0",  # the folder has no CUDA sources
        }
        | variables,
        capture_output=True,
        text=True,
        check=False,
        cwd=tree,
    )


def copy_package(tree: Path, sources: Path) -> None:
    """The Python files, the sources of few operators, and no library."""
    ignored = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
    shutil.copytree(Path(pkg.__file__).parent, tree / "pkg", ignore=ignored)
    shutil.copytree(sources, tree / "csrc")


def test_an_installed_package_compiles_its_sources_on_import(sources: Path, tmp_path: Path) -> None:
    copy_package(tmp_path, sources)
    result = import_and_compile(tmp_path, PKG_EXTRA_CFLAGS=" ".join(QUICK))
    assert result.stdout == f"{tmp_path / 'pkg' / '__init__.py'} [2.0, 2.0]\n", result.stderr
    assert any((tmp_path / "build").rglob("*.o"))
    assert "pkg.jit: compiling for " in result.stderr


def test_sources_of_an_installed_package_that_do_not_compile(sources: Path, tmp_path: Path) -> None:
    copy_package(tmp_path, sources)
    broken = next((tmp_path / "csrc" / "cpu").glob("*.cpp"))
    broken.write_text("#error not today\n")
    result = import_and_compile(tmp_path, PKG_EXTRA_CFLAGS=" ".join(QUICK))
    assert "ImportError: PKG_JIT=1: " in result.stderr, result.stderr
    assert "not today" in result.stderr


@pytest.fixture(scope="module")
def checkout(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout without an install, compiled on import."""
    tree = tmp_path_factory.mktemp("checkout")
    copy_package(tree, sources)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    result = import_and_compile(tree)
    assert result.stdout == f"{tree / 'pkg' / '__init__.py'} [2.0, 2.0]\n", result.stderr
    assert "pkg.jit: compiling for " in result.stderr
    return tree


def objects_of(tree: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (tree / "build").rglob("*.o")}


@pytest.mark.checkout
def test_a_checkout_compiles_what_an_editable_install_does(checkout: Path) -> None:
    before = objects_of(checkout)
    assert before
    # As `pip install -e .` does.
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    level = pkg.jit.best_capability()
    variables = {**variables_of(checkout), "PKG_CPU_LEVELS": level, "PKG_BUILD_CUDA": "0"}
    subprocess.run(command, env=os.environ | variables, cwd=checkout, check=True)
    assert objects_of(checkout) == before


@pytest.mark.checkout
def test_a_checkout_compiles_what_has_changed(checkout: Path) -> None:
    before = objects_of(checkout)
    result = import_and_compile(checkout)
    assert result.returncode == 0, result.stderr
    assert "pkg.jit" not in result.stderr
    assert objects_of(checkout) == before

    changed = checkout / "csrc" / "cpu" / "mul.cpp"
    text = changed.read_text("utf-8")
    try:
        changed.write_text(f"{text}\n#error this is the change\n", "utf-8")
        result = import_and_compile(checkout)
        assert result.returncode != 0
        assert "ImportError: PKG_JIT=1: the sources in" in result.stderr
        assert "this is the change" in result.stderr
    finally:
        changed.write_text(text, "utf-8")
    # Several at once: one compiles.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        results = list(pool.map(import_and_compile, [checkout] * 2))
    for result in results:
        assert result.returncode == 0, result.stderr
    after = objects_of(checkout)
    assert {path.name for path in after if after[path] != before.get(path)} <= {"mul.o"}


@pytest.mark.checkout
def test_a_checkout_that_cannot_be_written_is_named(checkout: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(checkout, tree)
    shutil.rmtree(tree / "build")
    (tree / "build").write_text("a file where the folder should be")
    result = import_and_compile(tree)
    assert f"ImportError: PKG_JIT=1 compiles into {tree}, which failed: " in result.stderr
    assert "Make the folder writable" in result.stderr
