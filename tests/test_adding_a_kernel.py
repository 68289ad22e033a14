"""The operator of docs/adding_a_kernel.md is made, in a copy of the checkout, and tested there."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from tree_copies import (
    ROOT,
    copy_checkout,
    cuda_compilation,
    formatter,
    keep_kernels,
    lint_of,
    must_succeed,
    texts_of,
    variables_of,
)

GUIDE = ROOT / "docs" / "adding_a_kernel.md"
NAME = "bias_softmax"
SCHEMAS = "csrc/library.cpp"
GENERATED = {"pkg/_C.pyi", "pkg/ops/__init__.py"}  # and README.md
# The second derivative multiplies by mul.
KERNELS = {NAME, "mul", "pointwise"}

pytestmark = [
    pytest.mark.checkout,
    pytest.mark.long,
    pytest.mark.skipif(
        (ROOT / "pkg" / "ops" / f"{NAME}.py").exists(), reason="it is in this checkout"
    ),
]

# Host code and kernels of CUDA, run on the CPU as tests/emulation runs those of the package.
EMULATED = """
import pytest
import torch
from operator_collection import operator_classes

from pkg.testing.layouts import LAYOUTS
from pkg.testing.tolerance import expect


@pytest.mark.parametrize("name", ["NAME", "NAME_backward"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_emulated_NAME(emulated_operators, name, dtype):
    tested = operator_classes()[name]()
    for sample in (each.converted(dtype) for each in tested.samples()):
        (expected,) = expect(lambda each: [tested.reference(*each.args)], sample)
        for layout in LAYOUTS:
            if layout is LAYOUTS[0] or sum(tensor.numel() for tensor in sample.tensors) < 200:
                tensors = [layout.place(tensor).tensor for tensor in sample.tensors]
                result = getattr(emulated_operators, name)(*tensors)
                expected.compare(result, f"{name} of {sample}, {layout.name}")
                assert result.is_contiguous()
    for wrong in tested.errors():
        with pytest.raises(RuntimeError, match=wrong.match):
            getattr(emulated_operators, name)(*wrong.args)
"""


def quoted_files() -> dict[str, str]:
    """What the guide's sections say of the files that they are named for, by path."""
    sections = re.split(r"^## ", GUIDE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    files = {}
    for section in sections:
        named = re.match(r"`([^`]+)`", section)
        blocks = re.findall(r"^```\w+\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
        if named is not None:
            assert len(blocks) == 1, f"{named[1]} has {len(blocks)} blocks"
            files[named[1]] = blocks[0]
    return files


@pytest.fixture(scope="module")
def quoted() -> dict[str, str]:
    return quoted_files()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, quoted: dict[str, str]) -> Path:
    """A copy of the checkout in which the guide was followed."""
    folder = tmp_path_factory.mktemp("kernel")
    copy_checkout(folder)
    for path, text in quoted.items():
        if path != SCHEMAS:
            assert not (folder / path).exists()
            (folder / path).write_text(text, "utf-8")
    list_of_schemas = (folder / SCHEMAS).read_text("utf-8")
    assert list_of_schemas.count("\n};") == 1
    edited = list_of_schemas.replace("\n};", f"\n\n{quoted[SCHEMAS]}}};")
    (folder / SCHEMAS).write_text(edited, "utf-8")
    must_succeed("python tools/generate.py", folder)
    return folder


def test_it_is_six_files_and_an_edit(tree: Path, quoted: dict[str, str]) -> None:
    before, after = texts_of(ROOT), texts_of(tree)
    assert set(after) - set(before) == {
        f"csrc/{NAME}.h",
        f"csrc/cpu/{NAME}.cpp",
        f"csrc/cuda/{NAME}.cuh",
        f"csrc/cuda/{NAME}.cu",
        f"pkg/ops/{NAME}.py",
        f"tests/ops/test_{NAME}.py",
    }
    assert set(after) - set(before) == set(quoted) - {SCHEMAS}
    assert {path for path in before if after[path] != before[path]} == GENERATED | {SCHEMAS}
    assert f"| `{NAME}(x, bias)` |" in (tree / "README.md").read_text("utf-8")


def test_it_passes_its_tests(tree: Path, tmp_path: Path) -> None:
    compiled = tmp_path / "tree"
    shutil.copytree(tree, compiled)
    keep_kernels(compiled, KERNELS)
    tests = [f"tests/ops/test_{NAME}.py", f"pkg/ops/{NAME}.py", "tests/test_every_operator.py"]
    if sys.platform == "linux":  # where the emulator runs
        emulated = f"tests/emulation/test_emulated_{NAME}.py"
        (compiled / emulated).write_text(EMULATED.replace("NAME", NAME), "utf-8")
        tests.append(emulated)
        # What was compiled for the package's own kernels serves here too.
        objects = ROOT / "build" / "emulation"
        objects.mkdir(parents=True, exist_ok=True)
        (compiled / "build").mkdir()
        (compiled / "build" / "emulation").symlink_to(objects)
    command = f"PKG_JIT=1 python -m pytest -q -p no:cacheprovider -k {NAME} {' '.join(tests)}"
    must_succeed(command, compiled, **variables_of(compiled))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_its_cuda_kernels_compile(tree: Path) -> None:
    must_succeed(cuda_compilation(f"csrc/cuda/{NAME}.cu"), tree)


@pytest.mark.skipif(formatter() is None, reason="no make or tools of make lint")
def test_its_files_are_as_the_project_wants_them(tree: Path, quoted: dict[str, str]) -> None:
    for command in lint_of(quoted):
        must_succeed(command, tree)


def test_links_and_files_that_the_guides_name_are_there() -> None:
    for guide in (GUIDE, GUIDE.with_name("adding_an_operator.md")):
        text = re.sub(r"^```.*?^```$", "", guide.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert (guide.parent / target).exists(), target
        for path in re.findall(r"`((?:csrc|pkg|tests|benchmarks)/[^`*]+\.\w+)`", text):
            is_of_an_operator = "X." in path or NAME in path
            assert is_of_an_operator or (ROOT / path).exists(), path
