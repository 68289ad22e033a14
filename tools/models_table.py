"""Makes README's table of whole models, and its picture, of what the benchmark measured.

    python -m pkg bench models --full --seconds 4 --json models.json
    python tools/models_table.py models.json --picture docs/pictures/models.svg --readme README.md

Several files, of runs with ``--cases`` or with ``--compiled``, are joined: a case of a later one
takes the place of the same case of an earlier one. A run with ``--threads 1,2`` gets a table for
each number of threads; the picture is of the first.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- made by tools/models_table.py -->", "<!-- end of models -->"
WAYS = (
    "training float32",
    "training, autocast to bfloat16",
    "forward float32",
    "forward bfloat16",
    "forward float16",
)
Quartiles = list[float]
Results = dict[str, dict[str, Any]]


def read(files: list[Path]) -> tuple[dict[str, Any], dict[int, Results]]:
    """The machine, and for each number of threads the results of all cases by name.

    Raises:
        SystemExit: a result was wrong, or a file is not of this benchmark.
    """
    machine: dict[str, Any] = {}
    found: dict[int, Results] = {}
    for file in files:
        document = json.loads(file.read_text("utf-8"))
        machine = document["machine"]
        if document["wrong"]:
            raise SystemExit(f"{file}: {'; '.join(document['wrong'])}")
        for each in document["results"]:
            if each["ratios"]:
                found.setdefault(each["threads"], {})[each["case"]] = each
    if not found:
        raise SystemExit("no results of `python -m pkg bench models --json` are in these files")
    return machine, dict(sorted(found.items()))


def ratios(results: Results, peer: str) -> dict[str, dict[str, Quartiles]]:
    """The quartiles of a peer's time divided by ours, by model and by what it does."""
    table: dict[str, dict[str, Quartiles]] = {}
    for name, result in results.items():
        model, way = name.split(", ", 1)
        if peer in result["ratios"]:
            table.setdefault(model, {})[way] = result["ratios"][peer]
    return table


def markdown(table: dict[str, dict[str, Quartiles]]) -> str:
    """Medians, and the quartiles in brackets."""
    ways = [way for way in WAYS if any(way in row for row in table.values())]
    lines = [f"| model | {' | '.join(ways)} |", "| --- |" + " --- |" * len(ways)]
    for model, row in table.items():
        cells = (
            "{1:.2f} ({0:.2f} to {2:.2f})".format(*row[way]) if way in row else "–" for way in ways
        )
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def about(machine: dict[str, Any], threads: int) -> str:
    """What the figures were measured on."""
    return (
        f"{machine['processor']}, CPU library {machine['cpu_capability']}, PyTorch "
        f"{machine['torch']}, {_threads(threads)}, {machine['date'][:10]}"
    )


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count != 1 else ''}"


def draw(table: dict[str, dict[str, Quartiles]], title: str, file: Path) -> None:
    """Bars of the medians with the quartiles as whiskers, a group for each model."""
    from matplotlib.figure import Figure

    ways = [way for way in WAYS if any(way in row for row in table.values())]
    figure = Figure(figsize=(8, 0.6 + 0.16 * len(ways) * len(table)), layout="constrained")
    axes = figure.add_subplot()
    height = 0.8 / len(ways)
    for number, way in enumerate(ways):
        rows = [(place, row[way]) for place, row in enumerate(table.values()) if way in row]
        axes.barh(
            [place + (number - (len(ways) - 1) / 2) * height for place, _ in rows],
            [median for _, (_, median, _) in rows],
            height,
            xerr=[
                [median - low for _, (low, median, _) in rows],
                [high - median for _, (_, median, high) in rows],
            ],
            error_kw={"elinewidth": 0.8},
            label=way,
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(table)), list(table), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("PyTorch's time divided by that with pkg.accelerate()")
    axes.set_title(title, fontsize=7)
    axes.legend(loc="best", fontsize=7)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def section(machine: dict[str, Any], found: dict[int, Results], picture: str) -> str:
    """What stands between the marks of the README."""
    first, *others = found
    parts = [
        BEGIN,
        f"{about(machine, first)}: PyTorch's time divided by that with `pkg.accelerate()`, the "
        "median of rounds that alternate, and their quartiles.",
    ]
    if picture:
        parts.append(f"![PyTorch's time divided by that with pkg.accelerate()]({picture})")
    parts.append(markdown(ratios(found[first], "PyTorch")))
    for count in others:
        parts += [f"With {_threads(count)}:", markdown(ratios(found[count], "PyTorch"))]
    for count, results in found.items():
        if compiled := ratios(results, "torch.compile"):
            what = f"With the time of `torch.compile`, {_threads(count)}:"
            parts += [what, markdown(compiled)]
    return "\n\n".join([*parts, END])


def main() -> None:
    """Read, draw and write, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("json", type=Path, nargs="+", help="what --json of the benchmark wrote")
    parser.add_argument("--picture", type=Path, help="SVG or PNG to draw")
    parser.add_argument("--readme", type=Path, help="file with the marks, whose text is replaced")
    options = parser.parse_args()
    machine, found = read(options.json)
    if options.picture:
        first = next(iter(found))
        draw(ratios(found[first], "PyTorch"), about(machine, first), options.picture)
    text = section(machine, found, options.picture.as_posix() if options.picture else "")
    if not options.readme:
        print(text)
        return
    before = options.readme.read_text("utf-8")
    after, count = re.subn(f"{BEGIN}.*?{END}", lambda _: text, before, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{options.readme} must have the lines {BEGIN} and {END} once")
    options.readme.write_text(after, "utf-8")


if __name__ == "__main__":
    main()
