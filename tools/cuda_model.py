"""What a GPU can do at most: how many blocks it holds, and how fast a loop can go.

The figures are of NVIDIA's publications; docs/cuda_kernels.md names them one by one and says what
the model leaves out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from cuda_sass import Instruction

WARP = 32
SCHEDULERS = 4  # of a multiprocessor; each issues an instruction of a warp a cycle
SHARED_BYTES = 128  # a cycle: 32 banks of 4 bytes, and as much of the L1 cache beside them


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU. Rates are those of a multiprocessor in a cycle, clocks in GHz.

    ``tensor`` has operations, of dense matrices; ``lanes`` has results.
    """

    name: str
    architecture: str
    multiprocessors: int
    clock: float
    tensor_clock: float
    shared_memory: int  # bytes of a multiprocessor
    tensor: Mapping[str, int]
    lanes: Mapping[str, int]


A100 = Gpu(
    name="A100",
    architecture="sm_80",
    multiprocessors=108,
    clock=1.41,
    tensor_clock=1.41,
    shared_memory=164 * 1024,
    tensor={"half": 2048, "tf32": 1024, "int8": 4096, "int4": 8192, "double": 128},
    lanes={
        "FMA": 64,
        "IMAD": 64,
        "ALU": 64,
        "half": 128,
        "bfloat16": 64,
        "FP64": 32,
        "special": 16,
    },
)
H200 = Gpu(
    name="H200",
    architecture="sm_90a",
    multiprocessors=132,
    # What 67 TFLOP/s of float32 and 989.4 of dense bfloat16 are.
    clock=round(66.9e3 / (132 * 128 * 2), 2),
    tensor_clock=round(989.4e3 / (132 * 4096), 2),
    shared_memory=228 * 1024,
    tensor={"half": 4096, "tf32": 2048, "int8": 8192, "fp8": 8192, "double": 256},
    lanes={
        "FMA": 128,
        "IMAD": 64,
        "ALU": 64,
        "half": 128,
        "bfloat16": 128,
        "FP64": 64,
        "special": 16,
    },
)
GPUS = {gpu.architecture: gpu for gpu in (A100, H200)}


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """Blocks and warps that a multiprocessor holds at a time, and what keeps it from more."""

    blocks: int
    warps: int
    share: float
    limit: str


def round_up(number: int, step: int) -> int:
    """The next multiple of ``step``."""
    return -(-number // step) * step


def occupancy(gpu: Gpu, threads: int, registers: int, shared: int) -> Occupancy:
    """How many blocks a multiprocessor of compute capability 8.0 or 9.0 holds at a time.

    ``shared`` are the bytes of a block, static and dynamic, without the KiB that CUDA takes.
    Registers are given to warps by 256, in each quarter of a multiprocessor; shared memory to
    blocks by 128 bytes (cuda_occupancy.h of the CUDA toolkit).
    """
    warps_of_block = round_up(threads, WARP) // WARP
    of_warp = round_up(max(registers, 1) * WARP, 256)
    quarter = 65536 // SCHEDULERS // of_warp
    by_registers = quarter * SCHEDULERS // warps_of_block
    if of_warp * round_up(warps_of_block, SCHEDULERS) > 65536:
        by_registers = 0
    limits = {
        "blocks": 32,
        "warps": 64 // warps_of_block,
        "registers": by_registers,
        "shared memory": gpu.shared_memory // round_up(shared + 1024, 128),
    }
    blocks = min(limits.values())
    limit = next(name for name, count in limits.items() if count == blocks)
    return Occupancy(blocks, blocks * warps_of_block, blocks * warps_of_block / 64, limit)


def shape(instruction: Instruction) -> tuple[int, int, int] | None:
    """Rows, columns and depth of a matrix instruction: 16, 8, 16 of HMMA.16816, or None."""
    if instruction.base not in ("HMMA", "IMMA", "DMMA", "BMMA", "HGMMA", "IGMMA", "QGMMA"):
        return None
    text = instruction.variants[0]
    if match := re.fullmatch(r"(\d+)x(\d+)x(\d+)", text):
        return int(match[1]), int(match[2]), int(match[3])
    match = re.fullmatch(r"(16|8)(8)(\d+)", text)
    if match is None:
        raise ValueError(f"the shape of {instruction.opcode} is not known: tools/cuda_model.py")
    return int(match[1]), int(match[2]), int(match[3])


def operations(instruction: Instruction, integers: bool = False) -> int:
    """Multiplications and additions of a warp: of matrices, and fused ones.

    Those of a warp group's instruction are shared out among its four warps. ``integers``: the
    kernel computes with integers, whose multiply-adds otherwise make addresses.
    """
    if size := shape(instruction):
        rows, columns, depth = size
        done = 2 * rows * columns * depth
        return done // 4 if "GMMA" in instruction.base else done
    if instruction.base in ("HFMA2", "FFMA", "DFMA") and "-RZ, RZ" in instruction.operands:
        return 0  # a constant goes into a register
    each = {"FFMA": 2, "DFMA": 2, "HFMA2": 4}.get(instruction.base, 0)
    if instruction.base == "IDP":
        each = 8 if "4A" in instruction.variants else 4
    if integers and instruction.opcode == "IMAD":
        each = 2
    return each * WARP


def number_type(instruction: Instruction) -> str:
    """Which rate of the tensor cores a matrix instruction has."""
    variants = instruction.variants
    by_name = {"DMMA": "double", "QGMMA": "fp8", "BMMA": "bits"}
    if instruction.base in by_name:
        return by_name[instruction.base]
    if instruction.base in ("IMMA", "IGMMA"):
        return "int4" if {"S4", "U4"} & set(variants) else "int8"
    return "tf32" if "TF32" in variants else "half"


INTEGER = ("IADD3", "VIADD", "IABS", "LEA", "LOP3", "SHF", "PRMT", "IMNMX", "VIMNMX")
COMPARISON = ("ISETP", "FSETP", "SEL", "FSEL", "FMNMX")
ALU = (*INTEGER, *COMPARISON, "F2FP")
MEMORY = ("LDS", "STS", "LDG", "STG", "LDGSTS", "LDL", "STL", "LD", "ST")


def memory_cycles(instruction: Instruction, predicated: bool) -> float:
    """Cycles that shared memory and the L1 cache take for an instruction, without bank conflicts.

    They give 128 bytes a cycle, one register of a warp: a load takes a cycle for each register
    that it fills, whatever its lanes share. ``predicated``: so do instructions with a predicate,
    which else do nothing.
    """
    base = instruction.base
    if base in ("LDSM", "STSM"):
        return float(matrices(instruction))
    if "GMMA" in base:
        _, columns, _ = shape(instruction) or (64, 0, 0)
        # 32 bytes of a row of A and of a column of B, whatever the type; A may be in registers.
        a_is_shared = "gdesc" in instruction.operands.split(",")[1]
        return 32 * (columns + (64 if a_is_shared else 0)) / SHARED_BYTES / 4
    if base == "SHFL" or base.startswith(("ATOM", "RED")):
        return 1
    if base not in MEMORY:
        return 0
    if instruction.predicate and not predicated:
        return 0
    return max(1, instruction.bits // 32)


def matrices(instruction: Instruction) -> int:
    """How many 8 x 8 matrices of 16-bit numbers an LDSM or STSM moves: 128 bytes each."""
    last = instruction.variants[-1]
    return int(last) if last in ("2", "4") else 1


def cycles(gpu: Gpu, instruction: Instruction, predicated: bool = False) -> dict[str, float]:
    """Cycles of a multiprocessor's parts that an instruction of a warp takes."""
    base, variants = instruction.base, instruction.variants
    taken = {"issue": 1 / SCHEDULERS, "memory": memory_cycles(instruction, predicated)}

    def lanes(part: str, rate: str) -> None:
        taken[part] = WARP / gpu.lanes[rate]

    if shape(instruction):
        rate = gpu.tensor.get(number_type(instruction))
        if rate is None:
            raise ValueError(f"the {gpu.name}'s rate of {instruction.opcode} is not known here")
        taken["tensor"] = operations(instruction) / rate
    elif base in ("FFMA", "FADD", "FMUL"):
        lanes("FMA", "FMA")
    elif base in ("IMAD", "IDP", "IMUL"):
        lanes("FMA", "FMA")
        lanes("IMAD", "IMAD")
    elif base in ("HFMA2", "HADD2", "HMUL2"):
        lanes("half", "bfloat16" if any("BF16" in each for each in variants) else "half")
    elif base in ALU:
        lanes("ALU", "ALU")
    elif base in ("DFMA", "DADD", "DMUL", "DSETP"):
        lanes("FP64", "FP64")
    elif base == "MUFU":
        lanes("special", "special")
    return taken


@dataclasses.dataclass(frozen=True)
class Bound:
    """What a loop cannot surpass: operations a second in 10^12, and the part that sets it."""

    tera: float
    part: str


def bound(
    gpu: Gpu,
    way: Sequence[Instruction],
    predicated: bool = False,
    integers: bool = False,
    copied: float = 0,
) -> Bound | None:
    """The bound of a loop whose every pass takes this way, or None where it computes nothing.

    Every part works at its rate, all at the same time, and nothing is ever waited for. Meanwhile
    the copy engine writes ``copied`` bytes to shared memory.
    """
    done = sum(operations(each, integers) for each in way)
    if not done:
        return None
    total: dict[str, float] = {}
    for each in way:
        for part, taken in cycles(gpu, each, predicated).items():
            total[part] = total.get(part, 0) + taken
    total["memory"] += copied / SHARED_BYTES
    part = max(total, key=total.__getitem__)
    on_tensor_cores = any(shape(each) and each.base != "DMMA" for each in way)
    clock = gpu.tensor_clock if on_tensor_cores else gpu.clock
    return Bound(done / total[part] * gpu.multiprocessors * clock / 1000, part)
