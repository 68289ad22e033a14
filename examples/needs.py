"""Says in words which package an example needs, where an import of it fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def explain(error: ImportError) -> str:
    """What is missing and how to install it; the error's own words where nothing is."""
    if not isinstance(error, ModuleNotFoundError):
        return str(error)
    package = (error.name or "").partition(".")[0]
    return (
        f"the examples need {package}: pip install 'pkg-kernels[examples]', or in a checkout that "
        "is not installed: pip install '.[examples]'"
    )


@contextmanager
def words_for_missing_packages(program: str) -> Iterator[None]:
    """Ends the program with words, and with status 2, where an import in the block fails."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in {path.stem for path in Path(__file__).parent.iterdir()}:
            raise  # A fault of the example itself, which wants its traceback.
        print(f"{program}: {explain(error)}", file=sys.stderr)
        raise SystemExit(2) from None
