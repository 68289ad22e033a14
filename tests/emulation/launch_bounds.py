"""Headers in which every kernel tells the emulator what its ``__launch_bounds__`` say.

The macro stands where C++ takes no statement: between a function's type and its name. So the
headers that are compiled are copies, in which the body of each kernel begins with a call that has
the same words as arguments. Their lines are numbered as those of the originals.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

BOUNDS = "__launch_bounds__"
CALL = "::pkg::emulation::check_launch_bounds"


def after_parentheses(text: str, begin: int) -> int:
    """The place behind the parenthesis that closes the one at ``begin``."""
    depth = 0
    for place in range(begin, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    raise ValueError(f"no parenthesis closes the one of {text[begin : begin + 60]!r}")


def stated(text: str) -> str:
    """The text with a call at the beginning of each kernel that has launch bounds."""
    parts = []
    done = 0
    for found in re.finditer(rf"{BOUNDS}\s*(?=\()", text):
        end = after_parentheses(text, found.end())
        name = re.compile(r"\s*\w+\s*(?=\()").match(text, end)
        if name is None:
            raise ValueError(f"no kernel's name follows {text[found.start() : end]!r}")
        body = re.compile(r"\s*([{;])").match(text, after_parentheses(text, name.end()))
        if body is None:
            raise ValueError(f"neither a body nor an end follows kernel {name[0].strip()}")
        if body[1] == "{":
            words = " ".join(text[found.end() : end].split())
            parts += [text[done : body.end()], f" {CALL}{words};"]
            done = body.end()
    return "".join([*parts, text[done:]])


def state_bounds(root: Path, folder: Path) -> Path:
    """Write the copies of a tree's headers to the folder, where these are not there already."""
    wanted = {}
    for file in sorted((root / "csrc").rglob("*.cuh")):
        text = file.read_text()
        if BOUNDS in text:
            wanted[folder / file.relative_to(root / "csrc")] = f'#line 1 "{file}"\n{stated(text)}'
    for copy in set(folder.rglob("*.cuh")) - set(wanted):
        copy.unlink(missing_ok=True)
    for copy, text in wanted.items():
        if not copy.exists() or copy.read_text() != text:
            copy.parent.mkdir(parents=True, exist_ok=True)
            partial = copy.with_name(f"{copy.name}.{os.getpid()}-{threading.get_ident()}")
            partial.write_text(text)
            partial.replace(copy)
    return folder
