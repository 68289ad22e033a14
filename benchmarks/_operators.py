"""Which benchmarks there are: found out without what they need."""

from __future__ import annotations

import pkgutil
from pathlib import Path


def operators() -> list[str]:
    """The names of the benchmarks in this folder."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    names = (module.name for module in modules)
    return sorted(name for name in names if name != "harness" and not name.startswith("_"))
