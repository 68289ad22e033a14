"""What is planted in a kernel by one test in several is looked for by this one in every run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import test_emulated_addresses
import test_emulated_orders
import test_emulated_places
import test_emulated_stores
import test_emulator
import test_planted_accesses
from emulator import ROOT

SOURCES = ROOT / "csrc"
MODULES = (
    test_emulated_addresses,
    test_emulated_orders,
    test_emulated_places,
    test_emulated_stores,
    test_emulator,
    test_planted_accesses,
)


def changes(fields: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    """A source below ``csrc`` and the text in it that a fault replaces: one follows the other."""
    texts = ((each, right) for each, right in pairwise(fields) if isinstance(right, str))
    for source, right in texts:
        if isinstance(source, str) and source.startswith("cuda/"):
            yield source, right


# No parameters: a run that takes samples of what has them takes all of this.
def test_the_text_that_a_fault_replaces_stands_in_its_source() -> None:
    for module in MODULES:
        assert module.PLANTED
        for fault, fields in module.PLANTED.items():
            replaced = list(changes(fields))
            assert len(replaced) == 1, fault
            source, right = replaced[0]
            assert right in (SOURCES / source).read_text(), f"{fault}: not in {source}: {right}"
