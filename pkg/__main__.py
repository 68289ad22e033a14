"""``python -m pkg``: what is installed, and how fast it is."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

import pkg

from . import _pictures, environment, tune

BENCHMARKS = "pkg._benchmarks"
# Runs only where it is named: it takes minutes.
WHOLE_MODELS = "models"


def load_benchmarks(name: str = "harness") -> ModuleType:
    """A module of the benchmarks: of the checkout that pkg is in, or else of the install.

    Args:
        name: the module; the one that runs them, unless said otherwise.

    Raises:
        ImportError: there is neither, or a package that the benchmarks need is missing.
    """
    checkout = Path(__file__).resolve().parent.parent
    folder = checkout / "benchmarks"
    # An editable install of another checkout would offer the benchmarks of that one.
    if (checkout / "csrc").exists() and folder.exists() and BENCHMARKS not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            BENCHMARKS, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"the benchmarks in {folder} cannot be imported")
        sys.modules[BENCHMARKS] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[BENCHMARKS])
    try:
        return importlib.import_module(f"{BENCHMARKS}.{name}")
    except ModuleNotFoundError as error:
        if error.name == BENCHMARKS:
            raise ImportError(
                "this install has no benchmarks; they are in the folder benchmarks of the sources"
            ) from error
        raise _missing(error) from error


def _missing(error: ModuleNotFoundError) -> ImportError:
    package = (error.name or "").partition(".")[0]
    return ImportError(f"the benchmarks need {package}: pip install 'pkg-kernels[bench]'")


def numbers(text: str) -> list[int]:
    """Numbers of threads with commas between them.

    Raises:
        argparse.ArgumentTypeError: a number is larger than that of the machine's processors, of
            which thousands are more threads than a process can have.
    """
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    processors = os.cpu_count() or 1
    if max(found) > processors:
        raise argparse.ArgumentTypeError(
            f"'{text}' is more threads than the {processors} processors of this machine"
        )
    return found


def seconds(text: str) -> float:
    """A positive number, and a finite one.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is no positive number of seconds")
    return found


def device(text: str) -> torch.device:
    """The CPU, or a CUDA device that is there.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    try:
        found = torch.device(text)
    except RuntimeError:
        found = None
    if found is None or found.type not in {"cpu", "cuda"}:
        raise argparse.ArgumentTypeError(f"'{text}' is no device that it can use; use cpu or cuda")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise argparse.ArgumentTypeError(
                f"'{text}' is not there: PyTorch {torch.__version__} finds no CUDA device; use cpu"
            )
        count = torch.cuda.device_count()
        if found.index is not None and found.index >= count:
            raise argparse.ArgumentTypeError(f"'{text}' is not there: cuda:{count - 1} is the last")
    return found


def output_file(text: str) -> Path:
    """A file that can be written, as far as can be told before the results are there.

    Raises:
        argparse.ArgumentTypeError: it is a folder, or in none, or must not be written.
    """
    file = Path(text)
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {file.parent}; make it first")
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{file} is a folder; name a file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{file} cannot be written; name another file")
    return file


def picture_file(text: str) -> Path:
    """A file that can be written, and drawn by its ending.

    Raises:
        argparse.ArgumentTypeError: it cannot.
    """
    file = output_file(text)
    try:
        _pictures.check_ending(file)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return file


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m pkg", description="The package pkg-kernels.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    env = commands.add_parser("env", help="describe this installation")
    env.add_argument(
        "--capabilities",
        action="store_true",
        help="only the CPU libraries that can be used here, one a line, the best first",
    )
    bench = commands.add_parser("bench", help="time operators beside PyTorch's")
    bench.add_argument(
        "operators",
        nargs="*",
        metavar="OPERATOR",
        help="those to time, named as in pkg.ops, before any --cases; all when none is named; "
        "models: whole models with pkg.accelerate() and without",
    )
    bench.add_argument("--device", type=device, default="cpu", help="cpu (the default) or cuda")
    bench.add_argument(
        "--threads",
        type=numbers,
        default=[],
        metavar="N[,N...]",
        help="a run with each number of threads (default: PyTorch's choice)",
    )
    bench.add_argument("--seconds", type=seconds, default=0.3, help="to spend on a case (0.3)")
    bench.add_argument("--full", action="store_true", help="the whole grid of cases")
    bench.add_argument(
        "--cases", nargs="+", default=[], metavar="WORD", help="only cases named with all of these"
    )
    bench.add_argument("--compiled", action="store_true", help="beside torch.compile too: slow")
    bench.add_argument(
        "--zentorch",
        metavar="PYTHON",
        help="an interpreter that has zentorch, to time that too (default: this one, if it has it)",
    )
    bench.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the results there too"
    )
    bench.add_argument(
        "--picture", type=picture_file, metavar="FILE", help="draw the results there"
    )
    new = commands.add_parser("new", help="write the files of a new operator, in a checkout")
    new.add_argument("name", help="of the operator: my_op")
    new.add_argument("schema", help="'my_op(Tensor x, float alpha) -> Tensor'")
    tune_parser = commands.add_parser(
        "tune",
        help="measure where pkg.accelerate() is faster on this processor (a minute or two)",
        description="Measures, in a minute or two, which of PyTorch's operators run faster here on "
        "this processor, shows it, and names the file that keeps it; pkg.accelerate() then reads "
        "that before the table that comes with the package. Deleting the file undoes it.",
    )
    disturbed = "keep it even if other processes used more than a fifth of the processors meanwhile"
    tune_parser.add_argument("--keep", action="store_true", help=disturbed)
    doctor = commands.add_parser(
        "doctor", help="how fast PyTorch's own operators are on this machine (under a minute)"
    )
    doctor.add_argument("--picture", type=picture_file, metavar="FILE", help="draw it there too")
    return top


def bench(options: argparse.Namespace) -> int:
    """Run benchmarks; 0 when every result was right, 1 when not, 2 when they cannot be run."""
    try:
        known = load_benchmarks("_operators").operators()
        unknown = sorted(set(options.operators) - set(known))
        if unknown:
            print(
                f"pkg bench: no benchmark of {', '.join(unknown)}; there are {', '.join(known)}",
                file=sys.stderr,
            )
            return 2
        harness = load_benchmarks()
    except ImportError as error:
        print(f"pkg bench: {error}", file=sys.stderr)
        return 2
    run = harness.Options(
        device=options.device,
        seconds=options.seconds,
        threads=options.threads,
        full=options.full,
        words=options.cases,
        compiled=options.compiled,
        zentorch=options.zentorch or harness.zentorch_here(),
        json=options.json,
        picture=options.picture,
    )
    try:
        right = harness.run(
            [*dict.fromkeys(options.operators)] or sorted({*known} - {WHOLE_MODELS}), run
        )
    except ImportError as error:
        problem = _missing(error) if isinstance(error, ModuleNotFoundError) else error
        print(f"pkg bench: {problem}", file=sys.stderr)
        return 2
    except harness.NoCasesError as error:
        print(f"pkg bench: {error}", file=sys.stderr)
        return 2
    return 0 if right else 1


def diagnose(options: argparse.Namespace) -> int:
    """Measure PyTorch's operators; 0 when that was done, 2 when the picture cannot be drawn."""
    try:
        load = load_benchmarks("_load")
        before = load.Counters.now()
        print(pkg.doctor(options.picture))
    except ImportError as error:
        print(f"pkg doctor: {error}", file=sys.stderr)
        return 2
    after = load.Counters.now()
    print(load.describe([(after - before).others if before and after else None]))
    return 0


def new(options: argparse.Namespace) -> int:
    """Write an operator's files; 0 when that was done, 2 when it was refused."""
    tool = Path(__file__).resolve().parent.parent / "tools" / "new_operator.py"
    if not tool.exists():
        print(
            f"pkg new: this pkg, {Path(__file__).parent}, is an install without its sources; run "
            "it in a checkout that is installed with pip install -e",
            file=sys.stderr,
        )
        return 2
    spec = importlib.util.spec_from_file_location("pkg_new_operator", tool)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    status: int = module.main([options.name, options.schema])
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not to fail in the end, of one character
    options = parser().parse_args(arguments)
    if options.command is None:
        parser().print_help(sys.stderr)
        return 2
    if options.command == "new":
        return new(options)
    if options.command == "bench":
        return bench(options)
    if options.command == "tune":
        return tune.main(keeps_disturbed=options.keep)
    if options.command == "doctor":
        return diagnose(options)
    if options.capabilities:
        files = environment.target_files()
        usable = [name for name in pkg._C.cpu_capabilities() if files[f"_cpu_{name}"]]
        print(*reversed(usable), sep="\n")
        return 0
    return environment.main()


def run() -> int:
    """Run the command of this process; 130 where the user has interrupted it."""
    try:
        return environment.to_the_end(main)
    except KeyboardInterrupt:
        # Of what a terminal shows in a line that has not ended, how far it is.
        print("\n" * sys.stderr.isatty() + "pkg: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
