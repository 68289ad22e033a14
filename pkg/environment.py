"""What is installed here: the text of ``python -m pkg env`` and of ``make debug``.

It is for the moments in which something does not work, so it needs nothing that could be broken:
it runs as a script too (``python pkg/environment.py``), imports the standard library alone, and
asks PyTorch and pkg in processes of their own, where even a crash is only an answer.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
X86_TARGETS = (
    "_cpu_baseline",
    "_cpu_avx2",
    "_cpu_avx2_vnni",
    "_cpu_avx512",
    "_cpu_avx512_vnni",
    "_cpu_avx512_bf16",
    "_cpu_amx",
)
ARM_TARGETS = ("_cpu_baseline", "_cpu_neon_dotprod", "_cpu_neon_bf16")
CPU_TARGETS = ARM_TARGETS if platform.machine().lower() in {"aarch64", "arm64"} else X86_TARGETS
TARGETS = ("_C", *CPU_TARGETS, "_cuda")
COMPILERS = ("c++", "g++", "clang++", "nvcc", "ninja")
# Importing PyTorch from a cold disk takes half a minute.
PROBE_SECONDS = 600  # by then it hangs, however busy the machine is

PROBE_TORCH = """
import json, torch
print(json.dumps({
    "version": torch.__version__,
    "file": torch.__file__,
    "CUDA build": torch.version.cuda or "no",
    "CUDA devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    "threads": torch.get_num_threads(),
}))
"""
PROBE_PKG = """
import json, sys
sys.path.insert(0, sys.argv[1])
import pkg
print(json.dumps({
    "version": pkg.__version__,
    "file": pkg.__file__,
    "CPU capability loaded": pkg._loader.cpu_capability,
    "CPU capabilities of this processor": pkg._C.cpu_capabilities(),
    "float32 products on the CPU": pkg._float32_matmul.description(),
    "float64 products on the CPU": pkg._float64_matmul.description(),
    "float32 products on CUDA": pkg._float32_matmul.description_of_cuda(),
    "table of pkg.accelerate()": pkg._accelerate_table.description(),
    "CUDA kernels loaded": "yes" if pkg._loader.cuda_library else "no",
    "build": pkg._C.build_info(),
}))
"""


def probe(program: str, *arguments: str) -> dict[str, Any]:
    """Run a program in a fresh interpreter.

    Returns:
        What it printed last, which is JSON; or ``{"failure": words}`` when it raised, crashed or
        hung.
    """
    # -P would be right here, but Python 3.10 lacks it: the working directory must not be imported.
    guarded = "import sys; sys.path[:] = [p for p in sys.path if p]\n" + program
    try:
        done = subprocess.run(
            [sys.executable, "-c", guarded, *arguments],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"no answer in {PROBE_SECONDS} seconds"}
    if done.returncode < 0:
        return {"failure": f"ended by {signal.Signals(-done.returncode).name}"}
    if done.returncode:
        return {"failure": _exception(done.stderr)}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _exception(traceback: str) -> str:
    """The exception and its message, the last part of what an interpreter printed."""
    lines = traceback.strip().splitlines()
    for index, line in enumerate(lines):
        if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit)\b", line):
            return "\n".join(lines[index:])
    return "\n".join(lines[-1:]) or "failed without a word"


def target_files() -> dict[str, Path | None]:
    """The libraries of the package, and the file of each in this copy of it, where there is one."""
    suffixes = (sysconfig.get_config_var("EXT_SUFFIX"), ".so", ".pyd")
    files: dict[str, Path | None] = {}
    for target in TARGETS:
        candidates = (PACKAGE / f"{target}{suffix}" for suffix in suffixes)
        files[target] = next((path for path in candidates if path.exists()), None)
    return files


def compiler_version(name: str) -> str:
    """Where a program is and which version it says that it has."""
    path = shutil.which(name)
    if path is None:
        return "not found"
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} (does not run: {error})"
    lines = [line for line in done.stdout.splitlines() if re.search(r"\d\.\d", line)]
    return f"{path} ({lines[-1 if name == 'nvcc' else 0].strip()})" if lines else path


def processor_name() -> str:
    """The processor, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def python_headers() -> str:
    """Where Python.h is."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    return str(header) if header.exists() else f"not found at {header}"


def collect() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Sections of the report: a title, and names with values."""
    yield (
        "Python",
        {
            "version": platform.python_version(),
            "interpreter": sys.executable,
            "extension suffix": sysconfig.get_config_var("EXT_SUFFIX"),
            "headers": python_headers(),
        },
    )
    yield "machine", {"system": platform.platform(), "processor": processor_name()}
    yield "PyTorch", probe(PROBE_TORCH)
    yield "compilers", {name: compiler_version(name) for name in COMPILERS}
    yield "libraries", {name: path or "not built" for name, path in target_files().items()}
    yield "pkg", probe(PROBE_PKG, str(PACKAGE.parent))


def lines(values: Mapping[str, Any], indent: str = "  ") -> Iterator[str]:
    """Names and values, one a line; a mapping or a sequence is indented below its name."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from lines(value, indent + "  ")
        elif isinstance(value, (list, tuple)):
            yield f"{indent}{name}: {', '.join(map(str, value)) or 'none'}"
        elif value is None or value == "":
            yield f"{indent}{name}: none"
        else:
            continuation = "\n" + " " * (len(indent) + len(name) + 2)
            yield f"{indent}{name}: {continuation.join(str(value).splitlines())}"


def to_the_end(command: Callable[[], int]) -> int:
    """Run a command until all that it prints is written.

    Returns:
        Its exit status; 141, as of SIGPIPE, where the reader has gone, and 1 where stdout cannot be
        written otherwise, which is said on stderr.
    """
    try:
        try:
            status = command()
        except SystemExit:  # of argparse, which has printed a help
            print(end="", flush=True)
            raise
        print(end="", flush=True)
    except OSError as error:
        if not _output_is_lost():
            raise
        if isinstance(error, BrokenPipeError):
            return 141
        print(f"pkg: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return status


def _output_is_lost() -> bool:
    """Whether stdout cannot be written; then what is left for it goes nowhere."""
    try:
        print(flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return True
    return False


def main() -> int:
    """Print the report."""
    for title, values in collect():
        print(title, *lines(values), sep="\n")
    return 0


def describe_failed_import(error: Exception) -> int:
    """Print the report, and then why ``python -m pkg env`` could not import the package.

    Returns:
        The exit status of the command.
    """
    to_the_end(main)
    print(f"python -m pkg env: import pkg fails: {type(error).__name__}: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(to_the_end(main))
