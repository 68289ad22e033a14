"""Files that pictures are drawn into, looked at before there is anything to draw."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def matplotlib_figure() -> Any:
    """The module ``matplotlib.figure``.

    Raises:
        ImportError: Matplotlib is missing.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise ImportError(
            "the picture needs matplotlib: pip install 'pkg-kernels[bench]'"
        ) from error


def check_ending(file: Path) -> None:
    """Refuses an ending that Matplotlib cannot draw; it gives a file without one its own.

    Where Matplotlib is missing nothing is refused: that is for who draws to say.

    Raises:
        ValueError: Matplotlib does not know the format.
    """
    try:
        figure = matplotlib_figure().Figure()
    except ImportError:
        return
    known = figure.canvas.get_supported_filetypes()
    ending = file.suffix.removeprefix(".").lower()
    if ending and ending not in known:
        raise ValueError(
            f"picture is {file}, and Matplotlib draws no '{ending}'; it must end in one of "
            f"{', '.join(sorted(known))}"
        )
