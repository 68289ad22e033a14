"""No function of the package is longer than a screen, of Python without its docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".h", ".cpp", ".cuh", ".cu"}
LONGEST = 60


def lengths(folder: Path) -> Iterator[tuple[str, int]]:
    """Each function of C++ below a folder, and its lines."""
    lizard = pytest.importorskip("lizard", reason="lizard, of the extra dev, counts lines")
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES:
            # lizard goes by the name, and takes no CUDA sources.
            found = lizard.analyze_file.analyze_source_code(
                path.with_suffix(".cpp").name, path.read_text("utf-8")
            )
            for function in found.function_list:
                where = path.relative_to(folder).as_posix()
                yield f"{where}: {function.name}", function.length


def python_lengths(folder: Path) -> Iterator[tuple[str, int]]:
    """Each function of Python below a folder, and its lines."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = node.body[0] if ast.get_docstring(node) is not None else None
                lines = _lines(node) - (0 if docstring is None else _lines(docstring))
                yield f"{path.relative_to(folder).as_posix()}: {node.name}", lines


def _lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def check(found: list[tuple[str, int]]) -> None:
    too_long = {name: length for name, length in found if length > LONGEST}
    assert not too_long, f"longer than {LONGEST} lines: {too_long}; divide them"


def test_functions_fit_a_screen() -> None:
    found = list(lengths(ROOT / "csrc"))
    assert len(found) > 1000, "lizard does not understand the sources"
    check(found)


def test_functions_of_python_fit_a_screen() -> None:
    check(list(python_lengths(ROOT / "pkg")))


@pytest.mark.parametrize("suffix", sorted(SUFFIXES))
def test_a_long_function_is_found(tmp_path: Path, suffix: str) -> None:
    body = "  f();\n" * (LONGEST - 1)
    text = f"namespace pkg {{\ntemplate <class T>\nvoid fits() {{\n{body[7:]}}}\n"
    text += f"inline auto long_one() -> int {{\n{body}}}\n}}\n"
    (tmp_path / f"some{suffix}").write_text(text, "utf-8")
    assert dict(lengths(tmp_path)) == {
        f"some{suffix}: pkg::fits": LONGEST,
        f"some{suffix}: pkg::long_one": LONGEST + 1,
    }


def test_a_long_function_of_python_is_found(tmp_path: Path) -> None:
    body = "    f()\n" * (LONGEST - 1)
    text = f'def fits():\n    """Says.\n\n    More.\n    """\n{body}class Some:\n'
    text += f"  async def long_one(self):\n{body}    f()\n"
    (tmp_path / "some.py").write_text(text, "utf-8")
    assert dict(python_lengths(tmp_path)) == {
        "some.py: fits": LONGEST,
        "some.py: long_one": LONGEST + 1,
    }
