"""The measured table that decides which of PyTorch's calls :mod:`pkg.accelerate` takes over.

One file for a kind of processor, CPU library and PyTorch: of the user's own measurement, in the
cache directory, or else of the package, in the folder ``accelerate_tables`` beside this file.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import _accelerate_routes, _loader
from .environment import processor_name

SHIPPED = Path(__file__).parent / "accelerate_tables"
FORMAT = 3
_WITHOUT_ACTIVATIONS = 2
"""The format of tables that have products and attention alone: activations stay PyTorch's."""
_WITHOUT_LARGE = 1
"""That of tables that lack the last of each of a product's sizes too, and are good without."""
MOST_NOISE = 1.1
"""A ratio that is no noise, of tables that do not say how far their measurements scatter."""

_in_use: dict[str, Any] | None = None


def name() -> str:
    """The name of this processor's table: its kind, the CPU library, and PyTorch's version."""
    version = ".".join(torch.__version__.split(".")[:2])
    return f"{_processor_kind()}-{_loader.cpu_capability}-torch{version}.json"


def cache_file() -> Path | None:
    """Where the user's own measurement is kept; None where the system knows no home of theirs."""
    try:
        folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(folder, "pkg-kernels", "accelerate", name())


def use() -> None:
    """Gives the CPU library its table, the first time; measures one where there is none.

    A table that was measured with one thread alone (of a worker process, say) serves until PyTorch
    has several, and for calls with one thread from then on too, if the package has one for several.
    """
    wants_several = torch.get_num_threads() > 1
    if _serves(_in_use, wants_several):
        return
    found = _find(wants_several)
    if found:
        put(*found.values())
        return
    from . import tune

    print(
        f"pkg.accelerate: this kind of processor ({processor_name()}) was not measured with "
        f"PyTorch {torch.__version__}{' and several threads' if wants_several else ''} yet; doing "
        "so, once, takes a minute or two",
        file=sys.stderr,
    )
    put(tune.measure())
    save(_in_use)


def _find(wants_several: bool) -> dict[Path, dict[str, Any]]:
    """The file and the table that are to be used, none where none serves.

    Two where the first, the user's own, has one thread and the second serves for several.
    """
    found = {}
    for file in (cache_file(), SHIPPED / name()):
        table = None if file is None else _read(file)
        if file is not None and table is not None:
            found[file] = table
            if _serves(table, wants_several):
                return found
    return {}


def description() -> str:
    """The files of the tables that :func:`use` takes now, when and with how many threads measured.

    It measures nothing, and gives the CPU library nothing.
    """
    found = _find(torch.get_num_threads() > 1)
    if not found:
        return f"none; pkg.accelerate() measures one the first time and keeps it in {cache_file()}"
    return "\n".join(
        f"{file} ({table.get('date', 'no date')}, {_threads(table)})"
        for file, table in found.items()
    )


def _threads(table: dict[str, Any]) -> str:
    """With how many threads a table was measured, in words."""
    counts = list(dict.fromkeys(table.get("threads", [])))
    number = " and ".join(map(str, counts)) or "unknown"
    return f"{number} {'thread' if counts == [1] else 'threads'}"


def _serves(table: dict[str, Any] | None, wants_several: bool) -> bool:
    """Whether there is a table, and it was measured with several threads if these are wanted."""
    return table is not None and not (wants_several and _is_of_one_thread(table))


def _is_of_one_thread(table: dict[str, Any]) -> bool:
    return bool(table.get("threads", [])[-1:] == [1])


def put(table: dict[str, Any], several: dict[str, Any] | None = None) -> None:
    """Gives the CPU library a table.

    Args:
        table: Of one thread and several; where it has none of these, there are no ratios for them.
        several: Another that has them, to be used for several threads in its place.
    """
    global _in_use
    ratios = table["ratios"]
    if several is not None:
        both = zip(ratios, several["ratios"], strict=True)
        ratios = [[one, more] for (one, _), (_, more) in both]
    elif _is_of_one_thread(table):
        ratios = [[one, [0.0] * len(one)] for one, _ in ratios]
    enough = []
    for threads, source in enumerate((table, several or table)):
        ratio = least_ratios(source)[threads]
        # What was measured around a call may be as far below 1, where its scatter is known.
        enough += [ratio, 2 - ratio if "least" in source else ratio]
    _accelerate_routes.put(list(_flatten(ratios)), enough)
    _in_use = several or table


def least_ratios(table: dict[str, Any]) -> list[float]:
    """The ratios that a call is taken over from, with one thread and with several: no noise."""
    one, several = table.get("least", [MOST_NOISE] * 2)
    return [float(one), float(several)]


def save(table: dict[str, Any] | None) -> Path | None:
    """Keeps a table in the cache directory; None, said on stderr, where that cannot be written."""
    file = cache_file()
    if file is None:
        _say_not_kept("", "you have no home directory")
        return None
    text = json.dumps(table, separators=(",", ":"))
    part = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text + "\n", "utf-8")
        part.replace(file)
    except OSError as error:
        _say_not_kept(f" in {file.parent}", error)
        return None
    return file


def _say_not_kept(where: str, reason: object) -> None:
    print(
        f"pkg.accelerate: the table cannot be kept{where} ({reason}) and will be measured again; "
        "set XDG_CACHE_HOME to a folder that can be written",
        file=sys.stderr,
    )


def _read(file: Path) -> dict[str, Any] | None:
    """A table; None where there is none, or one that cannot be used, which is said on stderr."""
    try:
        table: dict[str, Any] = json.loads(file.read_text("utf-8"))
        if table["format"] == _WITHOUT_LARGE:
            table = _with_places_for_large(table)
        if table["format"] == _WITHOUT_ACTIVATIONS:
            nothing = [0.0] * _accelerate_routes.activation_count()
            table = {**table, "format": FORMAT, "ratios": [*table["ratios"], [nothing, nothing]]}
        count = len(list(_flatten(table["ratios"])))
        whole = table["format"] == FORMAT and count == _accelerate_routes.ratio_count()
        least_ratios(table)
        _is_of_one_thread(table)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        print(
            f"pkg.accelerate: the table {file} cannot be read ({error.strerror}); "
            f"{_instead(file)}. Make it readable, or set XDG_CACHE_HOME to a folder of yours",
            file=sys.stderr,
        )
        return None
    except (ValueError, KeyError, TypeError) as error:
        print(
            f"pkg.accelerate: the table {file} is damaged ({error!r}); {_instead(file)}. "
            "python -m pkg tune makes it anew",
            file=sys.stderr,
        )
        return None
    return table if whole else None


def _instead(file: Path) -> str:
    """What is used in the place of a file that cannot be."""
    shipped = SHIPPED / name()
    if file != shipped and shipped.exists():
        return "the package's own table is used instead"
    return "one is measured instead"


def _with_places_for_large(table: dict[str, Any]) -> dict[str, Any]:
    """A table that lacks the large sizes of products, with places for them; or itself, untouched.

    It has not the ratios of such a table if it is returned as it is.
    """
    from . import tune

    is_large = [bool(case.large()) for case in tune.products()]
    products, attention = table["ratios"]
    if any(len(ratios) != is_large.count(False) for ratios in products):
        return table

    def with_places(ratios: list[float]) -> list[float]:
        known = iter(ratios)
        return [_accelerate_routes.NOT_MEASURED if large else next(known) for large in is_large]

    ratios = [[with_places(each) for each in products], attention]
    return {**table, "format": _WITHOUT_ACTIVATIONS, "ratios": ratios}


def _flatten(values: Any) -> Iterator[float]:
    if isinstance(values, list):
        for value in values:
            yield from _flatten(value)
    else:
        yield float(values)


def _processor_kind() -> str:
    """Vendor, family and model where the system tells them, else the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    wanted = {"vendor_id": "", "cpu family": "", "model": ""}
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in wanted and not wanted[key.strip()]:
            wanted[key.strip()] = value.strip()
    text = "-".join(wanted.values()) if all(wanted.values()) else processor_name()
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")
