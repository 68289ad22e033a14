"""Machine code of GPUs as nvdisasm prints it, and what cuobjdump says that a kernel takes."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable

_SECTION = re.compile(r"\t\.section\t\.text\.([^,]+),")
_INSTRUCTION = re.compile(
    r"\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<predicate>!?U?PT?\d*)\s+)?"
    r"(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*)"
)
_LABEL = re.compile(r"(\.L_x?_?\w+):")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_TARGETS_OF_TABLE = re.compile(r'BRANCH_TARGETS ([^"]+)"')
_MAX_THREADS = re.compile(
    r"section\t\.nv\.info\.(?P<name>[^,]+),|EIATTR_MAX_THREADS\n(?P<lines>(?:.*\n){8})"
)
_USAGE = re.compile(r"Function (\S+):\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")

DOUBLE = re.compile(r"(DADD|DMUL|DFMA|DSETP|DMNMX|DMMA)\b")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a warp. ``targets`` are the labels that it may go to."""

    opcode: str
    operands: str = ""
    predicate: str = ""
    targets: tuple[str, ...] = ()

    @property
    def base(self) -> str:
        """The operation without its variants: HMMA of HMMA.16816.F32."""
        return self.opcode.split(".", 1)[0]

    @property
    def variants(self) -> list[str]:
        """What follows the operation: 16816 and F32 of HMMA.16816.F32."""
        return self.opcode.split(".")[1:]

    @property
    def bits(self) -> int:
        """How much each thread loads or stores."""
        for variant in self.variants:
            if match := re.fullmatch(r"[US]?(8|16|32|64|128|256)", variant):
                return int(match[1])
        return 32

    @property
    def is_conditional(self) -> bool:
        """Whether a branch may be passed over: by its predicate, or by an operand."""
        return bool(self.predicate) or (self.base == "BRA" and not self.operands.startswith("`"))


@dataclasses.dataclass
class Code:
    """A kernel's instructions, and where its labels stand among them."""

    instructions: list[Instruction]
    labels: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a kernel takes of a multiprocessor, as compiled."""

    registers: int
    stack: int
    shared: int
    threads: int | None


def parse_instruction(line: str) -> Instruction | None:
    """The instruction on a line, or None where there is none."""
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    operands = match["operands"].strip()
    targets = tuple(_TARGET.findall(operands))
    if table := _TARGETS_OF_TABLE.search(operands):
        targets = tuple(table[1].split(","))
    return Instruction(match["opcode"], operands, match["predicate"] or "", targets)


def parse_code(lines: Iterable[str]) -> Code:
    """The code in the lines of a section, or of a part of one."""
    code = Code([], {})
    for line in lines:
        if label := _LABEL.match(line):
            code.labels[label[1]] = len(code.instructions)
        elif instruction := parse_instruction(line):
            code.instructions.append(instruction)
    while code.instructions and code.instructions[-1].base == "NOP":
        code.instructions.pop()
    return code


def functions(text: str) -> dict[str, Code]:
    """Code of every kernel by its mangled name, of what nvdisasm printed."""
    sections: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in text.splitlines():
        if line.startswith("\t.section\t"):
            match = _SECTION.match(line)
            lines = sections.setdefault(match[1], []) if match else None
        elif lines is not None:
            lines.append(line)
    return {name: parse_code(lines) for name, lines in sections.items()}


def architecture(text: str) -> str:
    """The architecture that a cubin is for, as sm_80."""
    match = re.search(r"\.target\s+(sm_\w+)", text)
    if match is None:
        raise ValueError("this is not what nvdisasm prints: it has no line .target")
    return match[1]


def compiler(text: str) -> str:
    """The release of the compiler that made a cubin, as it wrote it there: 13.0, V13.0.88."""
    match = re.search(r'"Cuda compilation tools, release ([^"]+)"', text)
    return match[1] if match else "of an unknown release"


def _max_threads(text: str) -> dict[str, int]:
    """Threads of a block by kernel, where its launch bounds say so."""
    found: dict[str, int] = {}
    kernel = ""
    for match in _MAX_THREADS.finditer(text):
        if match["name"]:
            kernel = match["name"]
            continue
        sizes = re.findall(r"\.word\s+0x([0-9a-f]{8})", match["lines"])[:3]
        product = 1
        for size in sizes:
            product *= int(size, 16)
        found[kernel] = product
    return found


def resources(usage: str, text: str) -> dict[str, Resources]:
    """Resources by mangled name, of what cuobjdump and nvdisasm printed.

    From compute capability 9.0 on CUDA 13 counts its own KiB to a kernel's shared memory.
    """
    reserved = 0 if int(re.sub(r"\D", "", architecture(text))) < 90 else 1024
    threads = _max_threads(text)
    found = {}
    for name, *numbers in _USAGE.findall(usage):
        registers, stack, shared, local = map(int, numbers)
        if f".section\t.nv.shared.{name}," in text:
            shared -= min(reserved, shared)
        found[name] = Resources(registers, stack + local, shared, threads.get(name))
    return found


def local_accesses(code: Code) -> tuple[int, int]:
    """Loads and stores of local memory: spilled registers, arrays that are indexed."""
    counts = Counter(each.base for each in code.instructions)
    return counts["LDL"], counts["STL"]


def uses_shared_memory(code: Code) -> bool:
    """Whether a kernel reads or writes shared memory."""
    direct = ("LDS", "STS", "LDSM", "STSM", "LDGSTS", "ATOMS", "UTMALDG")
    return any(each.base in direct or "gdesc" in each.operands for each in code.instructions)


def bulk_copies(code: Code) -> int:
    """Instructions by which a kernel has boxes copied to shared memory."""
    return sum(each.base == "UTMALDG" for each in code.instructions)


def is_for_another_architecture(code: Code) -> bool:
    """Whether a kernel does nothing but to trap: its instructions are those of another device."""
    return [each.base for each in code.instructions][1:2] == ["BPT"]


def double_arithmetic(code: Code) -> int:
    """Instructions that compute in double precision."""
    return sum(bool(DOUBLE.match(each.opcode)) for each in code.instructions)
