"""What a setter of how matrices are multiplied can be told."""

from __future__ import annotations

from collections.abc import Collection

import torch


def check(setter: str, way: str, ways: Collection[str]) -> None:
    """Refuses what a setter cannot be told, and to be called where a graph is recorded.

    Args:
        setter: its name, for the message.
        way: what it was told.
        ways: what it can be told.

    Raises:
        ValueError: ``way`` is none of ``ways``.
        RuntimeError: it is called in a region that ``torch.compile`` compiles.
    """
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            f"{setter} is called in a region that torch.compile compiles; call it outside: "
            "compiled models follow the setting as they run"
        )
    if way not in ways:
        raise ValueError(f"{setter}: way is {way!r}; it must be one of {', '.join(ways)}")
