"""What `python -m pkg new` writes and refuses; tests/test_readme.py builds and runs it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("csrc/library.cpp", "pkg/_C.pyi", "README.md", "pyproject.toml", ".clang-format")

SCHEMAS = {
    "scaled": "scaled(Tensor x, float alpha) -> Tensor",
    "square": "square(Tensor x) -> Tensor",
    "product_of": "product_of(Tensor first, Tensor second) -> Tensor",
    "everything": "everything(Tensor a, Tensor b, float c, int n=2, bool is_used=True) -> Tensor",
    # Lines that are too long in each of the files.
    "an_operator_of_a_long_name": "an_operator_of_a_long_name(Tensor the_first_of_the_tensors, "
    "Tensor the_second_of_the_tensors, float the_first_of_the_numbers, int "
    "the_second_of_the_numbers, bool the_only_one_of_the_truths=False) -> Tensor",
    "another_operator_of_a_long_name": "another_operator_of_a_long_name(Tensor the_only_tensor, "
    + ", ".join(f"float number_that_is_the_{i}_of_all" for i in range(5))
    + ") -> Tensor",
}

# A name, a schema and what the refusal says.
REFUSED = {
    "taken": ("mul", "mul(Tensor x) -> Tensor", "has an operator 'mul' already"),
    "taken by a part": ("linear_forward", "linear_forward(Tensor x) -> Tensor", "already"),
    "taken by a file": ("pack_int4", "pack_int4(Tensor x) -> Tensor", "there is pkg/ops/pack_int4"),
    "no identifier": ("my-op", "my-op(Tensor x) -> Tensor", "'my-op'; it must be an identifier"),
    "empty": ("", "(Tensor x) -> Tensor", "it must be an identifier"),
    "a path": ("../my_op", "../my_op(Tensor x) -> Tensor", "it must be an identifier"),
    "not ASCII": ("größe", "größe(Tensor x) -> Tensor", "it must be an identifier"),
    "a capital": ("MyOp", "MyOp(Tensor x) -> Tensor", "it must begin with a small letter"),
    "an underscore": ("_my_op", "_my_op(Tensor x) -> Tensor", "must not begin with an underscore"),
    "a word of Python": ("lambda", "lambda(Tensor x) -> Tensor", "a word of Python or C++"),
    "a word of C++": ("union", "union(Tensor x) -> Tensor", "a word of Python or C++"),
    "other name": (
        "my_op",
        "your_op(Tensor x) -> Tensor",
        "'my_op' but the schema is of 'your_op'",
    ),
    "an overload": ("my_op", "my_op.out(Tensor x) -> Tensor", "the schema is of 'my_op.out'"),
    "no schema": ("my_op", "Tensor x", "'Tensor x' is no schema; it must be like 'my_op("),
    "no result": ("my_op", "my_op(Tensor x)", "is no schema"),
    "two results": ("my_op", "my_op(Tensor x) -> (Tensor, Tensor)", "returns (Tensor, Tensor)"),
    "no parameter": ("my_op", "my_op(Tensor) -> Tensor", "'Tensor' is no parameter"),
    "a parameter too few": ("my_op", "my_op(Tensor x, ) -> Tensor", "'' is no parameter"),
    "a type": ("my_op", "my_op(Tensor x, str mode) -> Tensor", "mode is of type str"),
    "a list": ("my_op", "my_op(Tensor x, int[] sizes) -> Tensor", "correlation_sample.cpp lists"),
    "an optional": ("my_op", "my_op(Tensor x, Tensor? y) -> Tensor", "y is of type Tensor?"),
    "written to": ("my_op", "my_op(Tensor(a!) x) -> Tensor", "x is of type Tensor(a!)"),
    "by keyword": ("my_op", "my_op(Tensor x, *, float c) -> Tensor", "keyword-only"),
    "no tensor": ("my_op", "my_op(float c) -> Tensor", "has 0 tensors; it must have one or two"),
    "nothing": ("my_op", "my_op() -> Tensor", "has 0 tensors"),
    "three": ("my_op", "my_op(Tensor a, Tensor b, Tensor c) -> Tensor", "has 3 tensors"),
    "order": ("my_op", "my_op(float c, Tensor x) -> Tensor", "put the tensors first"),
    "one name twice": ("my_op", "my_op(Tensor x, float x) -> Tensor", "two parameters x"),
    "its own name": ("my_op", "my_op(Tensor my_op) -> Tensor", "a parameter of its own name"),
    "a parameter's word": ("my_op", "my_op(Tensor x, float lambda) -> Tensor", "is 'lambda'"),
    "a parameter's use": ("my_op", "my_op(Tensor x, float grad) -> Tensor", "its files use"),
    "a default": ("my_op", "my_op(Tensor x, int n=0.5) -> Tensor", "has the default '0.5'"),
    "a tensor's default": ("my_op", "my_op(Tensor x=None) -> Tensor", "cannot have a default"),
    "a default before": ("my_op", "my_op(Tensor x, int n=1, int m) -> Tensor", "without a default"),
    "too many": (
        "my_op",
        f"my_op(Tensor x, {', '.join(f'int n{i}' for i in range(16))}) -> Tensor",
        "has 17 parameters; a formula takes 16",
    ),
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in COPIED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("csrc/cpu", "csrc/cuda", "tests/ops"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copytree(ROOT / "pkg/ops", tmp_path / "pkg/ops")
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copytree(ROOT / "pkg/testing", tmp_path / "pkg/testing")  # a module of ours, to ruff
    return tmp_path


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text("utf-8")
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def new(tree: Path, name: str, schema: str) -> subprocess.CompletedProcess[str]:
    """Run where nothing of the package can be imported: it may not be built yet."""
    command = [sys.executable, "-I", "tools/new_operator.py", name, schema]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


def loaded(tree: Path) -> ModuleType:
    path = tree / "tools" / "new_operator.py"
    specification = importlib.util.spec_from_file_location("new_operator", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["new_operator"] = module  # dataclasses look for it there
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SCHEMAS)
def test_four_files_and_one_line(tree: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(tree)
    assert loaded(tree).main([name, SCHEMAS[name]]) == 0
    printed = capsys.readouterr().out
    after = contents(tree)
    written = {
        *(f"csrc/cpu/{name}.cpp", f"csrc/cuda/{name}.cu"),
        *(f"pkg/ops/{name}.py", f"tests/ops/test_{name}.py"),
    }
    assert set(after) - set(before) == written
    changed = {path for path, text in before.items() if after[path] != text}
    generated = {"pkg/_C.pyi", "pkg/ops/__init__.py", "README.md"}
    assert changed == {"csrc/library.cpp", *generated}
    for path in written | changed:
        assert path in printed
    old, text = before["csrc/library.cpp"], after["csrc/library.cpp"]
    start = next(i for i, (a, b) in enumerate(zip(old, text, strict=False)) if a != b)
    added = text[start : start + len(text) - len(old)]
    assert text.replace(added, "") == old
    assert "".join(added.split('"')[1::2]) == SCHEMAS[name]
    assert len(added.splitlines()) == 1 or len(SCHEMAS[name]) > 60
    commands = [line.strip() for line in printed.splitlines() if line.startswith("  ")]
    assert commands == [
        "pip install --no-build-isolation --no-deps -e .",
        f"python -m pytest tests/ops/test_{name}.py",
    ]
    for path, text in loaded(tree).generator().generated(tree):
        assert path.read_text("utf-8") == text


def test_the_files_are_formatted(tree: Path) -> None:
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("no ruff")
    before = contents(tree)
    module = loaded(tree)
    for name, schema in SCHEMAS.items():
        module.write(name, schema)
    written = [*sorted(set(contents(tree)) - set(before)), "csrc/library.cpp"]
    python = [path for path in written if path.endswith(".py")]
    for command in (["format", "--diff"], ["check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", *python]
        done = subprocess.run(ruff, cwd=tree, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    clang_format = shutil.which("clang-format", path=str(Path(sys.executable).parent))
    if clang_format is None:
        pytest.skip("no clang-format")
    cpp = [path for path in written if not path.endswith(".py")]
    done = subprocess.run(
        [clang_format, "--dry-run", "-Werror", *cpp],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(tree: Path, case: str) -> None:
    name, schema, words = REFUSED[case]
    before = contents(tree)
    module = loaded(tree)
    with pytest.raises(module.RefusedError) as refusal:
        module.write(name, schema)
    assert words in str(refusal.value)
    assert contents(tree) == before


@pytest.mark.parametrize(
    "file",
    ["csrc/cpu/my_op.cpp", "csrc/cuda/my_op.cu", "pkg/ops/my_op.py", "tests/ops/test_my_op.py"],
)
def test_a_file_that_is_there_stays(tree: Path, file: str) -> None:
    (tree / file).write_text("mine", "utf-8")
    before = contents(tree)
    done = new(tree, "my_op", "my_op(Tensor x) -> Tensor")
    assert done.returncode == 2
    assert done.stderr == f"pkg new: there is {file} already; take another name\n"
    assert contents(tree) == before


def test_it_needs_no_package_and_no_pytorch(tree: Path) -> None:
    done = new(tree, "my_op", "my_op(Tensor x) -> Tensor")
    assert done.returncode == 0, done.stderr


def test_nothing_is_half_written(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = loaded(tree)
    before = contents(tree)
    written = Path.write_text
    for most in range(8):
        count = 0

        def write_text(path: Path, *arguments: str, most: int = most) -> int:
            nonlocal count
            count += 1
            if count > most:
                raise OSError("the disk is full")
            return written(path, *arguments)

        monkeypatch.setattr(Path, "write_text", write_text)
        with pytest.raises(OSError, match="the disk is full"):
            module.write("my_op", "my_op(Tensor x, float alpha) -> Tensor")
        monkeypatch.undo()
        assert contents(tree) == before


def test_an_operator_that_generate_refuses_is_taken_back(tree: Path) -> None:
    (tree / "README.md").write_text("no table\n", "utf-8")
    before = contents(tree)
    assert new(tree, "my_op", "my_op(Tensor x) -> Tensor").returncode != 0
    assert contents(tree) == before


def test_the_command_of_the_package_calls_it(capsys: pytest.CaptureFixture[str]) -> None:
    from pkg.__main__ import main

    has_sources = (Path(sys.modules["pkg"].__file__ or "").parents[1] / "tools").exists()
    assert main(["new", "mul", "mul(Tensor x) -> Tensor"]) == 2
    words = "has an operator 'mul' already" if has_sources else "run it in a checkout"
    assert words in capsys.readouterr().err


def test_an_install_without_sources_asks_for_a_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pkg import __main__ as command_line

    monkeypatch.setattr(command_line, "__file__", str(tmp_path / "pkg" / "__main__.py"))
    assert command_line.main(["new", "my_op", "my_op(Tensor x) -> Tensor"]) == 2
    assert "is an install without its sources; run it in a checkout" in capsys.readouterr().err
