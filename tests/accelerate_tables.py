"""Tables that decide for pkg.accelerate(), put in place of the measured one by its tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pkg
from pkg import _accelerate_routes, _accelerate_table


def filled(ratio: float) -> dict[str, Any]:
    """A table that says the same of every product."""
    count = len(_accelerate_routes.table())
    return {"format": _accelerate_table.FORMAT, "ratios": [ratio] * count}


@contextmanager
def in_use(ratio: float) -> Iterator[None]:
    """Such a table, so that none is measured; afterwards nothing is accelerated, as it was."""
    before = _accelerate_table._in_use
    _accelerate_table.put(filled(ratio))
    yield
    pkg.accelerate(False)
    _accelerate_table.put(filled(0.0))
    _accelerate_table._in_use = before
