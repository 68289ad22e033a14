"""No function of the C++ and CUDA sources is longer than a screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

lizard = pytest.importorskip("lizard", reason="lizard, of the extra dev, counts lines")

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".h", ".cpp", ".cuh", ".cu"}
LONGEST = 60


def lengths(folder: Path) -> Iterator[tuple[str, int]]:
    """Each function below a folder, and its lines."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES:
            # lizard goes by the name, and takes no CUDA sources.
            found = lizard.analyze_file.analyze_source_code(
                path.with_suffix(".cpp").name, path.read_text("utf-8")
            )
            for function in found.function_list:
                where = path.relative_to(folder).as_posix()
                yield f"{where}: {function.name}", function.length


def test_functions_fit_a_screen() -> None:
    found = list(lengths(ROOT / "csrc"))
    assert len(found) > 1000, "lizard does not understand the sources"
    too_long = {name: length for name, length in found if length > LONGEST}
    assert not too_long, f"longer than {LONGEST} lines: {too_long}; divide them"


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
