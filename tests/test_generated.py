"""What `make generate` writes is what stands in the tree, and says when it does not."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def generate() -> ModuleType:
    specification = importlib.util.spec_from_file_location("generate", ROOT / "tools/generate.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def copy_of_tree(tmp_path: Path) -> Path:
    for name in ("csrc/library.cpp", "pkg/_C.pyi", "README.md", "tools/generate.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "pkg/ops", tmp_path / "pkg/ops")
    return tmp_path


def test_nothing_is_stale(generate: ModuleType) -> None:
    for path, text in generate.generated():
        assert path.read_text("utf-8") == text, f"{path} is stale: make generate"


def test_a_new_operator_reaches_every_list(copy_of_tree: Path) -> None:
    schemas = copy_of_tree / "csrc/library.cpp"
    line = '    "negated(Tensor a, float? b=None, *, SymInt[2] c=1) -> (Tensor x, Tensor y)",\n'
    head = "kSchemas[] = {\n"
    schemas.write_text(schemas.read_text("utf-8").replace(head, head + line), "utf-8")
    operator = '"""An operator."""\n\nTABLE = ("`-a | b`", "floating", "no")\n\n\n'
    operator += "def negated(a, b=None, *, c=1):\n    return a\n"
    (copy_of_tree / "pkg/ops/negated.py").write_text(operator, "utf-8")
    command = [sys.executable, "tools/generate.py"]
    stale = subprocess.run(
        [*command, "--check"], cwd=copy_of_tree, capture_output=True, text=True, check=False
    )
    assert stale.returncode == 1
    assert "stale: pkg/_C.pyi, pkg/ops/__init__.py, README.md. Run make generate" in stale.stderr
    subprocess.run(command, cwd=copy_of_tree, check=True, capture_output=True)
    subprocess.run([*command, "--check"], cwd=copy_of_tree, check=True, capture_output=True)
    stub = (copy_of_tree / "pkg/_C.pyi").read_text("utf-8")
    assert (
        "def negated(\n    a: Tensor, b: float | None = ..., *, c: int | tuple[int, int] = ...\n"
        in (stub)
    )
    assert ") -> tuple[Tensor, Tensor]: ...\n" in stub
    init = (copy_of_tree / "pkg/ops/__init__.py").read_text("utf-8")
    assert "from .negated import negated\n" in init
    assert '    "negated",\n' in init
    readme = (copy_of_tree / "README.md").read_text("utf-8")
    assert "| `negated(a, b=None, *, c=1)` | `-a \\| b` | floating | no |\n" in readme
