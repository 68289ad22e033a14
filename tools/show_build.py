"""Runs a build by pip, and shows a line for each file as it is compiled.

    python tools/show_build.py python -m pip install -v --no-build-isolation -e .

The compiler's commands fill the screen and say little: of each the file and its library are shown,
with the seconds since the start, and of the rest pip's own lines and the compiler's warnings. Where
the build fails, all that it wrote is shown. While nothing ends, the seconds go on.
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
import time

SILENCE = 10.0  # seconds without a line after which one says that the build goes on

# A line of ninja: number of the file, the compiler's command, the object in its library's folder.
COMPILED = re.compile(r"\[(\d+)/(\d+)\] .* -o \S*/objects-[^/]+/(\S+?)/(\S+)\.o\b")
DIAGNOSTIC = re.compile(r":\d+.* (warning|error)( #\S+)?:|fatal error:|Error:")


def shown(line: str) -> str | None:
    """What is shown of a line of the build, or None where that is nothing."""
    if compiled := COMPILED.search(line):
        number, of, library, source = compiled.groups()
        return f"{library} {number}/{of}: {source}"
    if DIAGNOSTIC.search(line):
        return line
    # What pip says itself begins a line; what it was told by the build is indented.
    return line if line[:1].strip() and not line.startswith("[") else None


def run(command: list[str]) -> int:
    """Runs the build and shows it; returns its exit status."""
    started = time.monotonic()
    build = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert build.stdout is not None
        for line in build.stdout:
            lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    written: list[str] = []
    last = started
    while True:
        try:
            line = lines.get(timeout=max(last + SILENCE - time.monotonic(), 0.01))
        except queue.Empty:
            line, words = "", "…"
        else:
            if line is None:
                break
            written.append(line)
            words = shown(line) or ""
        if words:
            last = time.monotonic()
            print(f"{last - started:4.0f} s  {words}", flush=True)
    status = build.wait()
    if status:
        print(*written, f"{' '.join(command)} ended with {status}", sep="\n", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
