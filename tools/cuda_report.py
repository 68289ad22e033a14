"""What the CUDA kernels were compiled to: a table, and a check that fails where it must not be so.

    python tools/cuda_report.py --write docs/cuda_kernels.md
    python tools/cuda_report.py --check matmul int4_linear
    python tools/cuda_report.py --check dist/pkg_kernels-*.whl

Registers, spills, shared memory, occupancy; what the main loop consists of; and the bound that
follows from it. Nothing is run, so no GPU is needed; ``docs/cuda_kernels.md`` tells how to read it.
Operators, libraries, wheels and cubins may be named. Without any, every ``csrc/cuda/*.cu`` is
compiled, and kept below ``build/cuda_report``.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cuda_cubins
import cuda_known
import cuda_model
import cuda_sass
from cuda_flow import Loop, main_loop
from cuda_known import Copied, Exemption
from cuda_model import Bound, Occupancy
from cuda_sass import Code, Instruction, Resources

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- made by tools/cuda_report.py -->", "<!-- end of the kernels -->"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel for one architecture, as compiled."""

    source: str
    architecture: str
    compiler: str
    name: str
    resources: Resources
    dynamic_shared: int | None
    local_loads: int
    local_stores: int
    double: int
    loop: Loop | None
    boxes: int = 0

    @property
    def gpu(self) -> cuda_model.Gpu:
        """The GPU that the bound is for."""
        return cuda_model.GPUS[self.architecture]

    @property
    def occupancy(self) -> Occupancy | None:
        """Blocks on a multiprocessor, where the launch bounds tell the threads of one."""
        if self.resources.threads is None or self.dynamic_shared is None:
            return None
        shared = self.resources.shared + self.dynamic_shared
        return cuda_model.occupancy(
            self.gpu, self.resources.threads, self.resources.registers, shared
        )

    def bound(self, predicated: bool = False) -> Bound | None:
        """The bound of the main loop, or None where it computes nothing."""
        if self.loop is None:
            return None
        copied = copied_by(self.name)
        return cuda_model.bound(
            self.gpu,
            self.loop.way,
            predicated,
            has_integers(self.name),
            copied.bytes_of_warp if copied else 0,
        )


def copied_by(name: str) -> Copied | None:
    """What the copy engine brings for a pass of this kernel's main loop, if anything."""
    for pattern, copied in cuda_known.COPIED.items():
        if re.fullmatch(pattern, name):
            return copied
    return None


def has_integers(name: str) -> bool:
    """Whether this kernel's multiply-adds of integers are its arithmetic."""
    return re.fullmatch(cuda_known.INTEGERS, name) is not None


def short_name(demangled: str) -> str:
    """A kernel's name as its launch says it: matmul_kernel<float, float, KeepSums>."""
    text = demangled.removeprefix("void ").replace("(anonymous namespace)::", "")
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            text = text[:place]
            break
    text = re.sub(r"\b(pkg|cuda|c10|at)::", "", text)
    text = re.sub(r"\((?:unsigned )?(?:int|long|bool)\)(\d+)", r"\1", text)
    # A formula, with its numbers that are not tensors.
    text = re.sub(r"BoundFormula<(\w+)(?:, \w+)*>", r"\1", text)
    for long, short in TYPES.items():
        text = re.sub(rf"\b{long}\b", short, text)
    return text.replace(" >", ">")


TYPES = {
    "__nv_bfloat16": "bfloat16",
    "__half": "float16",
    "unsigned char": "uint8",
    "signed char": "int8",
    "unsigned short": "uint16",
    "unsigned int": "uint32",
    "unsigned long": "uint64",
}


def dynamic_shared(name: str, static: int, code: Code) -> int | None:
    """Bytes that the launch adds, or None where it does and nobody wrote down how many.

    That it does is seen where shared memory is used and none is there. A kernel that has some of
    each kind has to be in tools/cuda_known.py, or it is taken to have the static one alone.
    """
    for pattern, size in cuda_known.DYNAMIC_SHARED.items():
        if re.fullmatch(pattern, name):
            return size
    return None if cuda_sass.uses_shared_memory(code) and not static else 0


def kernels_of(source: str, usage: str, text: str, names: dict[str, str]) -> list[Kernel]:
    """The kernels of a cubin, from what cuobjdump and nvdisasm printed of it.

    ``names`` are the demangled names.
    """
    taken = cuda_sass.resources(usage, text)
    found = []
    for mangled, code in cuda_sass.functions(text).items():
        if mangled not in taken or cuda_sass.is_for_another_architecture(code):
            continue
        name = short_name(names[mangled])
        integers = has_integers(name)

        def work(instructions: Sequence[Instruction], integers: bool = integers) -> float:
            return sum(cuda_model.operations(each, integers) for each in instructions)

        loads, stores = cuda_sass.local_accesses(code)
        found.append(
            Kernel(
                source,
                cuda_sass.architecture(text),
                cuda_sass.compiler(text),
                name,
                taken[mangled],
                dynamic_shared(name, taken[mangled].shared, code),
                loads,
                stores,
                cuda_sass.double_arithmetic(code),
                main_loop(code, work),
                cuda_sass.bulk_copies(code),
            )
        )
    return found


def read(cubin: cuda_cubins.Cubin) -> list[Kernel]:
    """The kernels of a cubin, in the order of their names."""
    usage, text = cuda_cubins.resource_usage(cubin.file), cuda_cubins.disassembly(cubin.file)
    mangled = re.findall(r"Function (\S+):", usage)
    names = dict(zip(mangled, cuda_cubins.demangled(mangled), strict=True))
    return sorted(kernels_of(cubin.source, usage, text, names), key=lambda kernel: kernel.name)


def kind(instruction: Instruction) -> str | None:
    """What an instruction of a loop is counted as, or None where it is one of the others."""
    base = instruction.base
    if size := cuda_model.shape(instruction):
        return f"{base}.{instruction.variants[0]}" if size else None
    if base in ("LDSM", "STSM"):
        return f"{base}.x{cuda_model.matrices(instruction)}"
    if base in cuda_model.MEMORY:
        return f"{base}.{instruction.bits}"
    if base in ("FFMA", "FADD", "FMUL", "DFMA", "DADD", "DMUL", "HFMA2", "IDP", "MUFU"):
        return base if cuda_model.operations(instruction) or base not in ("HFMA2", "FFMA") else None
    if base in ("BAR", "SHFL", "SYNCS", "UTMALDG", "UTMASTG"):
        return base
    return base if base.startswith(("ATOM", "RED")) else None


def counts(instructions: Iterable[Instruction], integers: bool = False) -> Counter[str]:
    """How many there are of each kind, and of the ``other``."""
    return Counter(
        "IMAD" if integers and each.opcode == "IMAD" else kind(each) or "other"
        for each in instructions
    )


def is_double(name: str) -> bool:
    """Whether a kernel computes in double precision by its name."""
    return re.search(r"[<, ]double\b", name) is not None


def faults(kernel: Kernel) -> dict[str, str]:
    """What must not be, by the word that an exemption has for it."""
    found = {}
    stack = kernel.resources.stack
    if stack or kernel.local_loads or kernel.local_stores:
        found["local memory"] = (
            f"{stack} bytes of stack, {kernel.local_loads} loads and {kernel.local_stores} stores "
            "of local memory: registers were spilled, or an array is indexed by a variable"
        )
    if kernel.double and not is_double(kernel.name):
        found["double"] = f"{kernel.double} instructions of double precision"
    if kernel.dynamic_shared is None:
        found["dynamic shared memory"] = (
            "its launch gives the size of shared memory, which belongs in tools/cuda_known.py"
        )
    if kernel.resources.threads is None:
        found["launch bounds"] = "it has no __launch_bounds__, which the compiler and this need"
    copied = copied_by(kernel.name)
    if kernel.boxes < (copied.boxes if copied else 0) or (kernel.boxes and not copied):
        found["bulk copies"] = (
            f"{kernel.boxes} bulk copies, and not what tools/cuda_known.py has: "
            f"{copied or 'nothing'}"
        )
    has = counts(kernel.loop.instructions) if kernel.loop else Counter()
    on_the_way = counts(kernel.loop.way) if kernel.loop else Counter()
    for expected in cuda_known.EXPECTED:
        if re.fullmatch(expected.kernel, kernel.name):
            for where, there, wanted in (
                ("in the main loop", has, expected.counts),
                ("on the way round the main loop", on_the_way, expected.on_the_way),
            ):
                for instruction, least in wanted.items():
                    if there[instruction] < least:
                        found["main loop"] = (
                            f"{there[instruction]} {instruction} {where}, and not {least}"
                        )
    return found


def applies(exemption: Exemption, kernel: Kernel) -> bool:
    """Whether an exemption is for this kernel."""
    names = ((exemption.kernel, kernel.name), (exemption.architecture, kernel.architecture))
    return all(re.fullmatch(pattern, name) for pattern, name in names)


def problems(
    kernels: Sequence[Kernel], exemptions: Sequence[Exemption] = cuda_known.EXEMPTIONS
) -> list[str]:
    """What is wrong: faults that no exemption knows of, and exemptions without a fault."""
    found = []
    seen: set[Exemption] = set()
    needed: set[Exemption] = set()
    for kernel in kernels:
        here = faults(kernel)
        known = set()
        for exemption in exemptions:
            if applies(exemption, kernel):
                seen.add(exemption)
                if exemption.fault in here:
                    needed.add(exemption)
                    known.add(exemption.fault)
        where = f"{kernel.source}.cu, {kernel.architecture}: {kernel.name}"
        found += [f"{where}: {text}" for fault, text in here.items() if fault not in known]
    found += [
        f"{each.kernel}, {each.architecture}: no fault of {each.fault} any more: remove the "
        "exemption from tools/cuda_known.py"
        for each in exemptions
        if each in seen - needed
    ]
    return found


TENSOR = ("HGMMA", "IGMMA", "QGMMA", "HMMA", "IMMA", "DMMA")
ORDER = (*TENSOR, "IDP", "FFMA", "HFMA2", "DFMA", "IMAD")


def described(instructions: Iterable[Instruction], integers: bool) -> str:
    """Counts in words: the arithmetic first, the others last."""

    def rank(name: str) -> tuple[int, str]:
        base = name.split(".")[0]
        return (ORDER.index(base) if base in ORDER else 99 + (name == "other"), name)

    found = counts(instructions, integers)
    return ", ".join(f"{found[name]} {name}" for name in sorted(found, key=rank))


def row(kernel: Kernel) -> list[str]:
    """What the table says of a kernel, after its name."""
    resources, occupancy = kernel.resources, kernel.occupancy
    shared = str(resources.shared)
    if kernel.dynamic_shared is None:
        shared += " + ?"
    elif kernel.dynamic_shared:
        shared += f" + {kernel.dynamic_shared}"
    held = "?"
    if occupancy:
        held = f"{occupancy.blocks} ({occupancy.share:.0%}, {occupancy.limit})"
    local = kernel.local_loads + kernel.local_stores
    loop = bounds = "–"
    if kernel.loop:
        integers = has_integers(kernel.name)
        loop = described(kernel.loop.instructions, integers)
        if kernel.loop.around:
            loop += f"; around it {described(kernel.loop.around, integers)}"
        if copied := copied_by(kernel.name):
            loop += f"; meanwhile {copied.boxes} UTMALDG of {copied.box_bytes} bytes"
        if best := kernel.bound():
            bounds = f"{best.tera:.1f}, {best.part}"
            most = kernel.bound(predicated=True)
            if most and most.tera < best.tera * 0.99:
                bounds += f" ({most.tera:.1f}, {most.part})"
    numbers = (resources.registers, resources.stack, local, kernel.double)
    return [
        kernel.architecture.removeprefix("sm_"),
        *map(str, numbers),
        shared,
        str(resources.threads or "?"),
        held,
        loop,
        bounds,
    ]


HEAD = (
    "kernel",
    "sm",
    "registers",
    "stack",
    "local",
    "double",
    "shared",
    "threads",
    "blocks",
    "main loop",
    "bound",
)


def table(kernels: Sequence[Kernel]) -> str:
    """Kernels of a source; those of one name and the same figures stand in one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for kernel in kernels:
        name, *types = kernel.name.split("<", 1)
        rows.setdefault((name, *row(kernel)), []).extend(f"`<{each}`" for each in types)
    lines = [f"| {' | '.join(HEAD)} |", "| --- |" + " --- |" * (len(HEAD) - 1)]
    for (name, *cells), types in sorted(rows.items(), key=lambda each: (each[0][0], each[1])):
        lines.append(f"| {' '.join([f'`{name}`', *types])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def known_faults(kernels: Sequence[Kernel]) -> Iterable[str]:
    """A line for each exemption that a kernel needs."""
    for each in cuda_known.EXEMPTIONS:
        found = [
            kernel for kernel in kernels if applies(each, kernel) and each.fault in faults(kernel)
        ]
        if not found:
            continue
        names = dict.fromkeys(kernel.name.split("<")[0] for kernel in found)
        where = " and ".join(dict.fromkeys(kernel.architecture for kernel in found))
        what = f"{', '.join(f'`{name}`' for name in names)}, {len(found)} for {where}"
        yield f"- {what}, {each.fault}: {each.reason}."


def section(kernels: Sequence[Kernel]) -> str:
    """What stands between the marks of the page."""
    made_by = " and ".join(sorted({kernel.compiler for kernel in kernels}))
    parts = [
        BEGIN,
        f"{len(kernels)} kernels, those of two architectures counted twice, by nvcc {made_by}.\n"
        "Nothing here was measured: what a GPU did stands in [cuda_measured.md](cuda_measured.md).",
    ]
    if lines := list(known_faults(kernels)):
        parts += ["What is known, and should not be:", "\n".join(lines)]
    for source in dict.fromkeys(kernel.source for kernel in kernels):
        parts += [f"### {source}", table([each for each in kernels if each.source == source])]
    return "\n\n".join([*parts, END])


def write(page: Path, text: str) -> None:
    """Puts the section in the place of the one that is there.

    Raises:
        SystemExit: the page does not have the marks once.
    """
    before = page.read_text("utf-8")
    after, count = re.subn(f"{BEGIN}.*?{END}", lambda _: text, before, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{page} must have the lines {BEGIN} and {END} once")
    page.write_text(after, "utf-8")


def cubins(named: Sequence[str], jobs: int, folder: Path) -> list[cuda_cubins.Cubin]:
    """What was asked for: libraries as they are, sources compiled."""
    found: list[cuda_cubins.Cubin] = []
    sources: list[Path] = []
    for name in named:
        source = cuda_cubins.ROOT / "csrc" / "cuda" / f"{Path(name).stem}.cu"
        if Path(name).suffix in (".so", ".whl", ".cubin"):
            target = folder / str(len(found))
            target.mkdir()
            found += cuda_cubins.extracted(Path(name), target)
        elif source.exists():
            sources.append(source)
        else:
            raise SystemExit(f"'{name}' is no operator of csrc/cuda, no library and no wheel")
    if not named:
        sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    if sources:
        found += cuda_cubins.compiled(sources, cuda_cubins.ARCHITECTURES, jobs)
    return found


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", help="operators of csrc/cuda, libraries, wheels")
    parser.add_argument("--check", action="store_true", help="fail where a kernel has a fault")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page with the marks")
    parser.add_argument("--jobs", type=int, default=2, help="files compiled at a time")
    options = parser.parse_args()
    if options.write and not all(name.endswith((".so", ".whl")) for name in options.what):
        parser.error("--write takes all kernels: name a library or a wheel, or nothing")
    return options


def run(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Compiles, reads, and tells what was asked; 1 where the check failed."""
    with tempfile.TemporaryDirectory() as folder:
        found = cubins(options.what, options.jobs, Path(folder))
        with ThreadPoolExecutor(options.jobs) as pool:
            kernels = [kernel for each in pool.map(read, found) for kernel in each]
    kernels = [kernel for kernel in kernels if kernel.architecture in cuda_model.GPUS]
    text = section(kernels)
    if options.write:
        write(options.write, text)
    elif not options.check:
        say(text)
    wrong = problems(kernels) if options.check else []
    for each in wrong:
        print(f"cuda_report: {each}", file=sys.stderr)
    if options.check:
        say(f"{len(kernels)} kernels, {len(wrong)} problems")
    return 1 if wrong else 0


def main() -> int:
    """Read the command line and do what it says."""
    try:
        return run(arguments(), print)
    except cuda_cubins.MissingProgramError as missing:
        raise SystemExit(f"cuda_report: {missing}") from None


if __name__ == "__main__":
    sys.exit(main())
