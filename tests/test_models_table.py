"""tools/models_table.py: README's table of whole models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "models_table.py"
pytestmark = pytest.mark.checkout


def document(ratios: dict[str, list[float]], wrong: list[str]) -> str:
    machine = {"processor": "P", "cpu_capability": "avx2", "torch": "2"}
    result = {"case": "GPT, forward bfloat16", "ratios": {"pkg": [1, 1, 1], **ratios}}
    twice = {name: [2 * each for each in of_peer] for name, of_peer in ratios.items()}
    results = [{**result, "ratios": twice, "threads": 2}, {**result, "threads": 1}]
    machine["date"] = "2026-01-02T03:04"
    return json.dumps({"machine": machine, "results": results, "wrong": wrong})


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_table_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    results, readme, picture = (tmp_path / name for name in ("m.json", "README.md", "m.svg"))
    results.write_text(document({"PyTorch": [1.9, 2.0, 2.1]}, []), "utf-8")
    marks = ("<!-- made by tools/models_table.py -->", "<!-- end of models -->")
    readme.write_text(f"before\n{marks[0]}\nold\n{marks[1]}\nafter\n", "utf-8")
    pytest.importorskip("matplotlib")
    done = run(results, "--readme", readme, "--picture", picture)
    assert done.returncode == 0, done.stderr
    text = readme.read_text("utf-8")
    with_one, with_two = text.split("With 2 threads:")
    assert "avx2, PyTorch 2, 1 thread, 2026-01-02" in with_one
    assert "| GPT | 2.00 (1.90 to 2.10) |" in with_one
    assert "| GPT | 4.00 (3.80 to 4.20) |" in with_two
    assert "old" not in text
    assert text.startswith("before\n<!--")
    assert text.endswith("-->\nafter\n")
    assert picture.read_text("utf-8").startswith("<?xml")


def test_wrong_results_are_refused(tmp_path: Path) -> None:
    results = tmp_path / "m.json"
    results.write_text(document({}, ["models: the result is off"]), "utf-8")
    done = run(results)
    assert done.returncode == 1
    assert "the result is off" in done.stderr
