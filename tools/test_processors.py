"""Runs the operators' tests as processors of other years: older ones emulated, this one as it is.

    python tools/test_processors.py [Nehalem Haswell native] [--tests tests/ops/test_mul.py …]

For each processor: the emulator refuses an instruction that it lacked; `import pkg`, told nothing,
loads the library that is meant for it; that library passes the operators' tests, among them the
values of every operator and the gradients of every one that has any. Needs qemu-user, on Linux.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/ops", "tests/test_c_functions.py")
# Emulated code is ten to twenty times as slow, so a part stands for the whole: values and gradients
# of every operator in every dtype, for one sample of so many. That a library is right for all of
# them is what `make test` proves; here it is that the processor can run it.
EMULATED_TESTS = "test_check and (values or gradients) or gives_the_bits or autograd_flows"
ONE_OF_SAMPLES = 12

# The program that emulates, as Debian and others name it.
EMULATORS = ("qemu-x86_64", "qemu-x86_64-static")

# Runs one instruction, given as bytes in hexadecimal.
RUN_INSTRUCTION = """
import ctypes, mmap, sys
code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex(sys.argv[1] + "c3"))
ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
"""
POPCNT = "f30fb8c0"  # popcnt eax, eax
AVX2 = "c5fdefc0"  # vpxor ymm0, ymm0, ymm0
AVX512 = "62f17d48efc0"  # vpxord zmm0, zmm0, zmm0

PRINT_LIBRARY = "import pkg; print(pkg._loader.cpu_capability)"

# Each operator's test class as JUnit names it, and which checks of check_op it has to pass.
PRINT_OPERATORS = """
import sys
from pathlib import Path
sys.path.insert(0, "tests")
from operator_collection import operator_classes
from pkg.testing import checks_for
for tested in operator_classes().values():
    checks = {"values", "gradients"} & set(checks_for(tested.options.get("without", ())))
    file = Path(sys.modules[tested.__module__].__file__)
    print(f"tests.ops.{file.stem}.{tested.__name__}", *sorted(checks))
"""


@dataclass(frozen=True)
class Processor:
    """A processor to run as, and the library that it should get.

    ``model`` is qemu's name of it, or None for the processor that is here; ``told`` is the value of
    PKG_CPU_CAPABILITY, which is unset unless a lower library than the best is to be tested.
    """

    name: str
    library: str
    model: str | None = None
    runs: str | None = None
    refuses: str | None = None
    told: str | None = None


# The first processors with SSE4.2 and POPCNT, and with AVX2; qemu emulates no AVX-512. Left out are
# features that qemu would announce, at every start, to lack.
EMULATED = (
    Processor("Nehalem", "baseline", "Nehalem", runs=POPCNT, refuses=AVX2),
    Processor(
        "Haswell",
        "avx2",
        "Haswell-noTSX,-pcid,-x2apic,-tsc-deadline,-invpcid",
        runs=AVX2,
        refuses=AVX512,
    ),
)


class FaultError(Exception):
    """What is wrong, in words."""


def native() -> list[Processor]:
    """This processor: untold, then its lower libraries, but for those that are emulated."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    baseline = {"sse4_2", "popcnt"}
    avx2 = baseline | {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"}
    avx512 = avx2 | {f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl")}
    bf16 = avx512 | {"avx512_vnni", "avx512_bf16"}
    levels = {
        "baseline": baseline,
        "avx2": avx2,
        "avx2_vnni": avx2 | {"avx_vnni"},
        "avx512": avx512,
        "avx512_vnni": avx512 | {"avx512_vnni"},
        "avx512_bf16": bf16,
        "amx": bf16 | {"amx_tile", "amx_bf16", "amx_int8"},
    }
    runnable = [level for level, needed in levels.items() if needed <= flags]
    if not runnable:
        raise FaultError("this processor lacks SSE4.2 or POPCNT, which every library needs")
    emulated = {processor.library for processor in EMULATED}
    lower = [level for level in runnable[:-1] if level not in emulated]
    return [
        Processor("native", runnable[-1]),
        *(Processor(f"native, {level}", level, told=level) for level in lower),
    ]


class Python:
    """Python as a processor runs it."""

    def __init__(self, processor: Processor, folder: Path) -> None:
        kept = {k: v for k, v in os.environ.items() if k != "PKG_CPU_CAPABILITY"}
        # Test processes share the cores: a thread that waits must not spin. They find here what is
        # written for them.
        paths = [str(folder), kept.get("PYTHONPATH", "")]
        self.environment = kept | {
            "OMP_WAIT_POLICY": "passive",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        if processor.told is not None:
            self.environment["PKG_CPU_CAPABILITY"] = processor.told
        self.command = [sys.executable]
        if processor.model is not None:
            self.emulate(processor.model, folder)

    def emulate(self, model: str, folder: Path) -> None:
        """Lets this Python, and those that a test starts as sys.executable, run emulated.

        The kernel would start those without the emulator, so the name is that of a script here; to
        change it is what Python reads sitecustomize for.
        """
        found = filter(None, map(shutil.which, EMULATORS))
        emulator = next(found, None)
        if emulator is None:
            raise FaultError(
                "there is no qemu-x86_64 to emulate an older processor. Debian, Ubuntu: "
                "apt-get install qemu-user. Or ask for the processor native alone"
            )
        script = folder / "python"
        script.write_text(
            f"#!/bin/sh\nexec '{emulator}' -cpu '{model}' '{sys.executable}' \"$@\"\n"
        )
        script.chmod(0o755)
        (folder / "sitecustomize.py").write_text(f"import sys\nsys.executable = {str(script)!r}\n")
        self.command = [str(script)]

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """Starts it in the checkout."""
        return subprocess.Popen(
            [*self.command, *arguments], cwd=ROOT, env=self.environment | environment
        )

    def status(self, program: str, *arguments: str) -> int:
        """How a program ends, whose words do not matter."""
        done = subprocess.run(
            [*self.command, "-c", program, *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            check=False,
        )
        return done.returncode

    def output(self, program: str) -> str:
        """What a program prints."""
        command = [*self.command, "-c", program]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, text=True, capture_output=True, check=False
        )
        if done.returncode != 0:
            raise FaultError(f"{program.strip().splitlines()[0]} … fails:\n{done.stderr}")
        return done.stdout.strip()


def check_instructions(processor: Processor, python: Python) -> None:
    """An emulator that ran what the processor had not would prove nothing."""
    wanted = {processor.runs: 0, processor.refuses: -signal.SIGILL}
    for code, expected in wanted.items():
        if code is None:
            continue
        status = python.status(RUN_INSTRUCTION, code)
        if status != expected:
            raise FaultError(f"the instruction {code} ends with {status}, not with {expected}")


def run_tests(
    processor: Processor, python: Python, given: argparse.Namespace, report: Path
) -> list[ElementTree.Element]:
    """The tests that passed, as JUnit reports them; raises where one failed."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    # In one process there need be no second one, which would import PyTorch too.
    jobs = 0 if given.jobs == 1 else given.jobs
    command += ["-n", str(jobs), "--dist", "worksteal", "-m", "not tracing"]
    environment = {}
    if processor.model is not None:
        command += ["-k", given.select]
        environment = {"PKG_TEST_EVERY": str(given.every)}
    with python.start(*command, *given.tests, **environment) as run:
        try:
            status = run.wait(given.limit)
        except subprocess.TimeoutExpired:
            run.terminate()
            raise FaultError(f"the tests are not through after {given.limit:.0f} s") from None
    if status:
        raise FaultError(f"pytest ends with {status}")
    cases = ElementTree.parse(report).iter("testcase")
    return [case for case in cases if not list(case)]  # that were not skipped


def check_operators(cases: Sequence[ElementTree.Element]) -> int:
    """Every operator's values, and the gradients of each that has some, are among what passed."""
    passed = {(case.get("classname"), case.get("name")) for case in cases}
    python = Python(native()[0], ROOT)
    operators = [line.split() for line in python.output(PRINT_OPERATORS).splitlines()]
    missing = [
        f"{tested} {check}"
        for tested, *checks in operators
        for check in checks
        if not any(
            (tested, f"test_check[{name}]") in passed for name in (f"cpu-{check}", f"{check}-cpu")
        )
    ]
    if missing or not operators:
        raise FaultError(f"these checks did not run: {', '.join(missing) or 'any'}")
    return len(operators)


def test(processor: Processor, given: argparse.Namespace) -> str:
    """A line that says what passed; raises otherwise."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pkg-processor-") as temporary:
        python = Python(processor, Path(temporary))
        check_instructions(processor, python)
        library = python.output(PRINT_LIBRARY)
        if library != processor.library:
            raise FaultError(f"it gets the library {library}, not {processor.library}")
        passed = run_tests(processor, python, given, Path(temporary, "report.xml"))
    count = f"{len(passed)} tests"
    if set(given.tests) == set(TESTS):
        count += f", of each of {check_operators(passed)} operators"
    seconds = time.monotonic() - started
    return f"{processor.name}: library {library}, {count}, {seconds:.0f} s"


def main() -> None:
    """One processor after another; fails when the tests of any fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*(processor.name for processor in EMULATED), "native"]
    parser.add_argument("processors", nargs="*", metavar="PROCESSOR", help=", ".join(names))
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="test processes")
    parser.add_argument("--limit", type=float, default=7200, help="seconds for each processor")
    parser.add_argument("--select", default=EMULATED_TESTS, help="pytest's -k where emulated")
    parser.add_argument("--every", type=int, default=ONE_OF_SAMPLES, help="one of so many samples")
    given = parser.parse_args()
    asked = given.processors or names
    if unknown := set(asked) - set(names):
        parser.error(f"{', '.join(sorted(unknown))} is none of {', '.join(names)}")
    if sys.platform != "linux" or platform.machine() != "x86_64":
        sys.exit("this needs Linux on x86-64: qemu's user mode runs programs of this very system")
    chosen = [processor for processor in EMULATED if processor.name in asked]
    chosen += native() if "native" in asked else []
    lines, failed = [], False
    for processor in chosen:
        print(f"== {processor.name}", flush=True)
        try:
            lines.append(test(processor, given))
        except FaultError as fault:
            lines.append(f"{processor.name}: FAILED: {fault}")
            failed = True
    print(*lines, sep="\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
