"""tools/cuda_report.py: machine code of GPUs as it is read, and the bound that follows."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import cuda_cubins  # noqa: E402
import cuda_flow  # noqa: E402
import cuda_known  # noqa: E402
import cuda_model  # noqa: E402
import cuda_report  # noqa: E402
import cuda_sass  # noqa: E402
from cuda_known import Copied, Exemption, Expected  # noqa: E402
from cuda_model import A100, H200  # noqa: E402
from cuda_report import read  # noqa: E402

pytestmark = pytest.mark.checkout


def code(text: str) -> cuda_sass.Code:
    """A line is an instruction, or a label with a colon."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return cuda_sass.parse_code(
        line if line.endswith(":") else f"        /*{16 * place:04x}*/   {line} ;"
        for place, line in enumerate(lines)
    )


def work(instructions: Sequence[cuda_sass.Instruction]) -> float:
    return sum(map(cuda_model.operations, instructions))


def main_loop(text: str) -> cuda_flow.Loop:
    loop = cuda_flow.main_loop(code(text), work)
    assert loop is not None
    return loop


def instructions(text: str) -> list[cuda_sass.Instruction]:
    return code(text).instructions


# As nvdisasm prints a kernel, with a loop that multiplies on tensor cores, shortened.
LISTING = """\
	.target	sm_80
        /*0030*/ 	.string	"Cuda compilation tools, release 13.0, V13.0.88"
//--------------------- .nv.info._Z1kPf --------------------------
	.section	.nv.info._Z1kPf,"",@"SHT_CUDA_INFO"
	//----- nvinfo : EIATTR_MAX_THREADS
	.align		4
.L_7:
        /*0050*/ 	.byte	0x04, 0x05
        /*0052*/ 	.short	(.L_129 - .L_128)
.L_128:
        /*0054*/ 	.word	0x00000040
        /*0058*/ 	.word	0x00000002
        /*005c*/ 	.word	0x00000001
	.section	.nv.shared._Z1kPf,"aw",@nobits
	.section	.text._Z1kPf,"ax",@progbits
	.sectioninfo	@"SHI_REGISTERS=40"
	.align	128
.text._Z1kPf:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDSM.16.M88.4 R8, [R20] ;
        /*0020*/                   LDSM.16.MT88.2 R12, [R21+0x40] ;
        /*0030*/               @P1 LDGSTS.E.BYPASS.LTC128B.128 [R22], [R4.64] ;
        /*0040*/                   HMMA.16816.F32.BF16 R0, R8, R12, R0 ;
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R14, R4 ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0070*/              @!P0 BRA `(.L_x_0) ;
        /*0080*/                   STG.E.128 [R2.64], R4 ;
        /*0090*/                   EXIT ;
.L_x_1:
        /*00a0*/                   BRA `(.L_x_1);
        /*00b0*/                   NOP;
"""
USAGE = """
 Function _Z1kPf:
  REG:40 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:360 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def kernel(
    listing: str = LISTING, usage: str = USAGE, name: str = "void k<float>(float*)"
) -> cuda_report.Kernel:
    (found,) = cuda_report.kernels_of("k", usage, listing, {"_Z1kPf": name})
    return found


def test_a_listing_is_read() -> None:
    (found,) = cuda_sass.functions(LISTING).values()
    assert [each.base for each in found.instructions][:3] == ["MOV", "LDSM", "LDSM"]
    assert found.labels == {".L_x_0": 1, ".L_x_1": 10}
    copy = found.instructions[3]
    assert (copy.predicate, copy.bits) == ("P1", 128)
    taken = cuda_sass.resources(USAGE, LISTING)["_Z1kPf"]
    assert taken == cuda_sass.Resources(registers=40, stack=0, shared=0, threads=128)
    assert cuda_sass.uses_shared_memory(found)
    assert cuda_sass.compiler(LISTING) == "13.0, V13.0.88"


def test_cuda_counts_a_kib_of_its_own_on_hopper() -> None:
    usage = USAGE.replace("SHARED:0", "SHARED:5376")
    on_ampere = cuda_sass.resources(usage, LISTING)["_Z1kPf"]
    hopper = cuda_sass.resources(usage, LISTING.replace("sm_80", "sm_90a"))["_Z1kPf"]
    assert (on_ampere.shared, hopper.shared) == (5376, 4352)


@pytest.mark.parametrize(
    ("opcode", "bits"),
    [
        ("LDG.E", 32),
        ("LDG.E.U8.CONSTANT", 8),
        ("LDG.E.LTC128B.64", 64),
        ("LDS.U.128", 128),
        ("STS.U16", 16),
    ],
)
def test_widths(opcode: str, bits: int) -> None:
    assert cuda_sass.Instruction(opcode).bits == bits


def test_the_inner_loop_is_the_main_one_and_what_is_around_is_told() -> None:
    loop = main_loop("""
        MOV R0, RZ
        .L_x_0:
        LDG.E.128 R4, [R2.64]
        STS.128 [R3], R4
        BAR.SYNC.DEFER_BLOCKING 0x0
        .L_x_1:
        LDS.128 R8, [R5]
        FFMA R9, R8, R8, R9
        FFMA R10, R8, R8, R10
        @P0 BRA `(.L_x_1)
        FFMA R11, R8, R8, R11
        @P1 BRA `(.L_x_0)
        EXIT
    """)
    assert cuda_report.described(loop.instructions, False) == "2 FFMA, 1 LDS.128, 1 other"
    around = cuda_report.described(loop.around, False)
    assert around == "1 FFMA, 1 BAR, 1 LDG.128, 1 STS.128, 1 other"


def test_a_loop_of_waiting_inside_is_not_the_main_one() -> None:
    loop = main_loop("""
        .L_x_0:
        HMMA.16816.F32 R0, R8, R12, R0
        .L_x_1:
        FFMA R9, R8, R8, R9
        FFMA R9, R8, R8, R9
        @P0 BRA `(.L_x_1)
        HMMA.16816.F32 R4, R8, R12, R4
        @P1 BRA `(.L_x_0)
        EXIT
    """)
    assert cuda_report.described(loop.way, False) == "2 HMMA.16816, 1 other"


def test_rare_blocks_behind_the_end_belong_to_the_loop_but_not_to_its_way() -> None:
    loop = main_loop("""
        .L_x_0:
        LDG.E R4, [R2.64]
        @P2 BRA `(.L_x_2)
        .L_x_1:
        FFMA R9, R4, R4, R9
        @P0 BRA `(.L_x_0)
        EXIT
        .L_x_2:
        MUFU.RCP R5, R6
        MUFU.RCP R5, R6
        BRA `(.L_x_1)
    """)
    assert cuda_report.counts(loop.instructions)["MUFU"] == 2
    assert [each.base for each in loop.way] == ["LDG", "BRA", "FFMA", "BRA"]


def test_of_two_ways_it_is_that_with_the_arithmetic() -> None:
    loop = main_loop("""
        .L_x_0:
        @!P2 BRA `(.L_x_1)
        FFMA R9, R4, R4, R9
        FFMA R9, R4, R4, R9
        .L_x_1:
        @P0 BRA `(.L_x_0)
        EXIT
    """)
    assert [each.base for each in loop.way] == ["BRA", "FFMA", "FFMA", "BRA"]


def test_a_call_of_a_label_leaves_a_loop_and_one_of_a_function_returns() -> None:
    loop = main_loop("""
        .L_x_0:
        MOV R9, RZ
        .L_x_1:
        CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_s64)
        FFMA R9, R4, R4, R9
        @!P3 CALL.REL.NOINC `(.L_x_2)
        BRA `(.L_x_1)
        .L_x_2:
        STG.E [R2.64], R9
        @P0 BRA `(.L_x_0)
        EXIT
    """)
    assert [each.base for each in loop.way] == ["CALL", "FFMA", "CALL", "BRA"]
    assert [each.base for each in loop.around] == ["MOV", "STG", "BRA"]


def test_threads_that_diverge_meet_where_they_were_told() -> None:
    loop = main_loop("""
        .L_x_0:
        BSSY B0, `(.L_x_2)
        @P2 BRA `(.L_x_1)
        FFMA R9, R4, R4, R9
        .L_x_1:
        BSYNC B0
        EXIT
        .L_x_2:
        FFMA R9, R4, R4, R9
        @P0 BRA `(.L_x_0)
        EXIT
    """)
    assert work(loop.way) == 2 * 64


def test_a_kernel_that_only_traps_is_one_of_another_architecture() -> None:
    assert cuda_sass.is_for_another_architecture(code("MOV R1, c[0x0][0x28]\nBPT.TRAP 0x1"))
    ends = "MOV R1, c[0x0][0x28]\nIADD3 R0, R0, R0, RZ\nBPT.TRAP 0x1\nEXIT"
    assert not cuda_sass.is_for_another_architecture(code(ends))


def test_jumps_by_a_table() -> None:
    text = """
        .L_x_0:
        BRX R6 -0x1f50 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)
        .L_x_1:
        FFMA R9, R4, R4, R9
        BRA `(.L_x_0)
        .L_x_2:
        EXIT
    """
    assert [each.base for each in main_loop(text).way] == ["BRX", "FFMA", "BRA"]


def test_no_loop() -> None:
    assert cuda_flow.main_loop(code("FFMA R9, R4, R4, R9\nEXIT"), work) is None


# Instructions whose loop runs at the rate that NVIDIA publishes, in TFLOP/s.
PEAKS = [
    (A100, "FFMA R0, R1, R2, R0", 19.5),
    (A100, "DFMA R0, R2, R4, R0", 9.7),
    (A100, "DMMA.884 R0, R2, R4, R0", 19.5),
    (A100, "HMMA.16816.F32.BF16 R0, R4, R8, R0", 312),
    (A100, "HMMA.1688.F32.TF32 R0, R4, R8, R0", 156),
    (A100, "IMMA.16832.S8.S8 R0, R4.ROW, R8.COL, R0", 624),
    (A100, "IMMA.16864.S4.S4 R0, R4.ROW, R8.COL, R0", 1248),
    (A100, "HFMA2 R0, R1, R2, R0", 78),
    (H200, "FFMA R0, R1, R2, R0", 66.9),
    (H200, "DFMA R0, R2, R4, R0", 33.5),
    (H200, "DMMA.16816 R0, R2, R4, R0", 66.9),
    (H200, "HMMA.16816.F32 R0, R4, R8, R0", 989.4),
    (H200, "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, gsb0", 989.4),
    (H200, "HGMMA.64x128x8.F32.TF32 R24, gdesc[UR4], R24", 494.7),
    (H200, "IGMMA.64x256x32.S8.S8 R24, gdesc[UR4], R24", 1978.9),
    (H200, "QGMMA.64x256x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24", 1978.9),
]


@pytest.mark.parametrize(("gpu", "instruction", "peak"), PEAKS)
def test_published_peaks(gpu: cuda_model.Gpu, instruction: str, peak: float) -> None:
    bound = cuda_model.bound(gpu, instructions(instruction))
    assert bound is not None
    assert bound.tera == pytest.approx(peak, rel=0.006)  # they are published with two digits


def test_the_h200s_clocks() -> None:
    assert (H200.clock, H200.tensor_clock) == (1.98, 1.83)


def test_operations() -> None:
    def of(text: str, integers: bool = False) -> int:
        return cuda_model.operations(instructions(text)[0], integers)

    assert of("HMMA.16816.F32 R0, R4, R8, R0") == 4096
    assert of("HMMA.1688.F32.TF32 R0, R4, R8, R0") == 2048
    assert of("HGMMA.64x128x16.F32 R24, gdesc[UR4], R24") == 2 * 64 * 128 * 16 // 4
    assert of("IDP.4A.S8.S8 R0, R4, R8, R0") == 8 * 32
    assert of("HFMA2.MMA R5, -RZ, RZ, 0, 0") == 0
    assert of("IMAD R0, R4, R8, R0") == 0
    assert of("IMAD R0, R4, R8, R0", integers=True) == 64
    assert of("IMAD.WIDE R0, R4, R8, R0", integers=True) == 0


def test_the_part_that_is_kept_longest_sets_the_bound() -> None:
    products = ["FFMA R9, R4, R4, R9"] * 64
    # A multiprocessor of the A100: 32 cycles of its 64 lanes, 17 of four instructions each, 16 of
    # shared memory.
    way = instructions("\n".join([*products, *["LDS.128 R4, [R5]"] * 4]))
    bound = cuda_model.bound(A100, way)
    assert bound == cuda_model.Bound(pytest.approx(64 * 64 / 32 * 108 * 1.41 / 1000), "FMA")
    # The H200 has lanes for all of them: 68 instructions by four.
    bound = cuda_model.bound(H200, way)
    assert bound == cuda_model.Bound(pytest.approx(64 * 64 / 17 * 132 * 1.98 / 1000), "issue")
    # With four times the loads it is shared memory, of either.
    way = instructions("\n".join([*products, *["LDS.128 R4, [R5]"] * 16]))
    for gpu in (A100, H200):
        tera = 64 * 64 / 64 * gpu.multiprocessors * gpu.clock / 1000
        assert cuda_model.bound(gpu, way) == cuda_model.Bound(pytest.approx(tera), "memory")


def test_what_has_a_predicate_takes_shared_memorys_cycles_in_the_brackets() -> None:
    way = instructions("\n".join(["FFMA R9, R4, R4, R9", "@P0 LDS.128 R4, [R5]"]))
    bound = cuda_model.bound(H200, way)
    assert bound is not None
    assert bound.part == "issue"
    bound = cuda_model.bound(H200, way, predicated=True)
    assert bound == cuda_model.Bound(pytest.approx(64 / 4 * 132 * 1.98 / 1000), "memory")


def test_what_is_copied_meanwhile_takes_shared_memorys_cycles() -> None:
    way = instructions("\n".join(["HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24"] * 4))
    # 16 cycles of the tensor cores for a warp, 12 of shared memory; 8 more for 1024 bytes.
    assert cuda_model.bound(H200, way) == cuda_model.Bound(
        pytest.approx(989.4, rel=0.006), "tensor"
    )
    bound = cuda_model.bound(H200, way, copied=4 * 1024)
    assert bound == cuda_model.Bound(pytest.approx(989.4 * 16 / 20, rel=0.006), "memory")


@pytest.mark.parametrize(
    ("instruction", "least", "most"),
    [
        ("LDSM.16.M88.4 R8, [R20]", 4, 4),
        ("LDSM.16.M88 R8, [R20]", 1, 1),
        ("LDS.128 R8, [R20]", 4, 4),
        ("LDS.64 R8, [R20]", 2, 2),
        ("@P0 LDS.64 R8, [R20]", 0, 2),
        ("LDG.E.128 R8, [R20.64]", 4, 4),
        ("LDS.U8 R8, [R20]", 1, 1),
        ("STS.128 [R20], R8", 4, 4),
        ("@P0 STS.128 [R20], R8", 0, 4),
        ("LDGSTS.E.BYPASS.128 [R20], [R8.64]", 4, 4),
        ("SHFL.BFLY PT, R0, R0, 0x1, 0x1f", 1, 1),
        ("HGMMA.64x64x16.F32 R24, gdesc[UR4], R24", 8, 8),
        ("HGMMA.64x64x16.F32 R24, R4, gdesc[UR4], R24", 4, 4),
        ("IADD3 R0, R0, R1, RZ", 0, 0),
    ],
)
def test_cycles_of_shared_memory(instruction: str, least: float, most: float) -> None:
    (each,) = instructions(instruction)
    assert cuda_model.memory_cycles(each, predicated=False) == least
    assert cuda_model.memory_cycles(each, predicated=True) == most


def test_matrix_instructions_that_are_not_known_are_not_passed_over() -> None:
    with pytest.raises(ValueError, match=r"shape of HMMA\.12345"):
        cuda_model.operations(cuda_sass.Instruction("HMMA.12345.F32"))
    with pytest.raises(ValueError, match=r"the H200's rate of IMMA\.16864\.S4\.S4 is not known"):
        cuda_model.cycles(H200, cuda_sass.Instruction("IMMA.16864.S4.S4"))


@pytest.mark.parametrize(
    ("gpu", "threads", "registers", "shared", "blocks", "share", "limit"),
    [
        (A100, 256, 32, 0, 8, 1, "warps"),
        (A100, 256, 33, 0, 6, 0.75, "registers"),  # 40 a thread
        (A100, 256, 128, 16896, 2, 0.25, "registers"),
        (A100, 256, 255, 0, 1, 0.125, "registers"),
        (A100, 1024, 65, 0, 0, 0, "registers"),
        (A100, 32, 16, 0, 32, 0.5, "blocks"),
        (A100, 128, 32, 48 * 1024, 3, 0.1875, "shared memory"),
        (H200, 128, 32, 48 * 1024, 4, 0.25, "shared memory"),
        (A100, 128, 32, 163 * 1024, 1, 0.0625, "shared memory"),
        (A100, 128, 32, 164 * 1024, 0, 0, "shared memory"),
        (H200, 128, 32, 227 * 1024, 1, 0.0625, "shared memory"),
    ],
)
def test_occupancy(
    gpu: cuda_model.Gpu,
    threads: int,
    registers: int,
    shared: int,
    blocks: int,
    share: float,
    limit: str,
) -> None:
    found = cuda_model.occupancy(gpu, threads, registers, shared)
    assert found == cuda_model.Occupancy(blocks, blocks * -(-threads // 32), share, limit)


CALCULATOR = r"""
#include <cstdio>
#include <climits>
#include <initializer_list>
#include "cuda_occupancy.h"

int main() {
  int capability, threads, registers, shared;
  while (std::scanf("%d %d %d %d", &capability, &threads, &registers, &shared) == 4) {
    cudaOccDeviceProp device;
    device.computeMajor = capability;
    device.computeMinor = 0;
    device.maxThreadsPerBlock = 1024;
    device.maxThreadsPerMultiprocessor = 2048;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.warpSize = 32;
    device.sharedMemPerBlock = 48 * 1024;
    device.sharedMemPerMultiprocessor = (capability == 8 ? 164 : 228) * 1024;
    device.sharedMemPerBlockOptin = device.sharedMemPerMultiprocessor - 1024;
    device.reservedSharedMemPerBlock = 1024;
    device.numSms = 1;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = 1024;
    kernel.numRegs = registers;
    kernel.sharedSizeBytes = 0;
    kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = shared;
    kernel.numBlockBarriers = 1;
    cudaOccDeviceState state;
    state.carveoutConfig = 100;
    cudaOccResult result;
    const auto error = cudaOccMaxActiveBlocksPerMultiprocessor(
        &result, &device, &kernel, &state, threads, shared);
    std::printf("%d\n", error == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : -1);
  }
}
"""


def header_of_occupancy() -> Path | None:
    compiler = shutil.which("nvcc")
    folders = [Path(compiler).resolve().parents[1]] if compiler else []
    folders += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"))]
    found = [folder / "include" for folder in folders]
    return next((each for each in found if (each / "cuda_occupancy.h").exists()), None)


def test_occupancy_is_that_of_the_toolkits_own_header(tmp_path: Path) -> None:
    include = header_of_occupancy()
    compiler = shutil.which("c++")
    if include is None or compiler is None:
        pytest.skip("no cuda_occupancy.h of a CUDA toolkit, or no C++ compiler")
    program = tmp_path / "calculator"
    command = [compiler, "-w", "-x", "c++", "-", f"-I{include}", "-o", str(program)]
    subprocess.run(command, input=CALCULATOR, text=True, check=True)
    cases = list(
        itertools.product(
            (A100, H200),
            (32, 96, 128, 160, 256, 384, 512, 1024),
            (16, 33, 64, 72, 80, 96, 128, 157, 168, 200, 255),
            (0, 100, 4352, 17000, 33792, 49152, 65536, 100 * 1024, 163 * 1024),
        )
    )
    lines = [f"{8 if gpu is A100 else 9} {t} {r} {s}" for gpu, t, r, s in cases]
    done = subprocess.run(
        [program], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    theirs = list(map(int, done.stdout.split()))
    ours = [cuda_model.occupancy(*case).blocks for case in cases]
    assert len(theirs) == len(ours) > 1000
    assert -1 not in theirs
    wrong = [(case[1:], a, b) for case, a, b in zip(cases, ours, theirs, strict=True) if a != b]
    assert not wrong


@pytest.mark.parametrize(
    ("mangled", "short"),
    [
        (
            "void pkg::cuda::matmul_kernel<float, float, pkg::cuda::KeepSums>"
            "(pkg::cuda::MatmulProblem<float, float>, pkg::cuda::KeepSums)",
            "matmul_kernel<float, float, KeepSums>",
        ),
        (
            "void pkg::cuda::pointwise_dense<__nv_bfloat16, pkg::BoundFormula<pkg::mul_formula, "
            "double> >(pkg::cuda::DenseOperands<__nv_bfloat16>, pkg::BoundFormula<pkg::mul_formula,"
            " double>)",
            "pointwise_dense<bfloat16, mul_formula>",
        ),
        ("void pkg::cuda::(anonymous namespace)::k<__half, (int)4>(int)", "k<float16, 4>"),
        ("dropout(float*)", "dropout"),
    ],
)
def test_names(mangled: str, short: str) -> None:
    assert cuda_report.short_name(mangled) == short


def test_what_is_in_order_has_no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cuda_known.DYNAMIC_SHARED, "k<float>", 49152)
    found = kernel()
    assert cuda_report.problems([found], ()) == []
    assert cuda_report.row(found)[5:] == [
        "0 + 49152",
        "128",
        "3 (19%, shared memory)",
        "2 HMMA.16816, 1 BAR, 1 LDGSTS.128, 1 LDSM.x2, 1 LDSM.x4, 1 other",
        # 8192 operations in 6 cycles of shared memory; with the copy in 10.
        "207.9, memory (124.7, memory)",
    ]


def spoiled(instruction: str) -> cuda_report.Kernel:
    listing = LISTING.replace("STG.E.128 [R2.64], R4", instruction)
    assert listing != LISTING
    return kernel(listing, USAGE.replace("SHARED:0", "SHARED:512"))


@pytest.mark.parametrize(
    ("planted", "fault", "words"),
    [
        (lambda: spoiled("LDL R4, [R1+0x8]"), "local memory", "1 loads and 0 stores"),
        (lambda: spoiled("STL.64 [R1], R4"), "local memory", "0 loads and 1 stores"),
        (lambda: spoiled("DFMA R4, R4, R4, R4"), "double", "1 instructions of double precision"),
        (lambda: spoiled("DSETP.LT.AND P0, PT, RZ, R4, PT"), "double", "1 instructions"),
        (lambda: kernel(usage=USAGE.replace("STACK:0", "STACK:24")), "local memory", "24 bytes"),
        (lambda: kernel(), "dynamic shared memory", "tools/cuda_known.py"),
        (
            lambda: kernel(LISTING.replace("MAX_THREADS", "NOTHING")),
            "launch bounds",
            "__launch_bounds__",
        ),
    ],
)
def test_planted_faults(planted: object, fault: str, words: str) -> None:
    assert callable(planted)
    found = planted()
    assert words in cuda_report.faults(found)[fault]
    problem = next(each for each in cuda_report.problems([found], ()) if words in each)
    assert problem.startswith("k.cu, sm_80: k<float>: ")


def test_bulk_copies_that_nobody_wrote_down(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = USAGE.replace("SHARED:0", "SHARED:512")
    listing = LISTING.replace("STG.E.128 [R2.64], R4", "UTMALDG.3D [UR24], [UR10]")
    copies = kernel(listing, usage)
    assert copies.boxes == 1
    assert "1 bulk copies" in cuda_report.faults(copies)["bulk copies"]
    monkeypatch.setitem(cuda_known.COPIED, r"k<\w+>", Copied(1, 8192, 4))
    assert cuda_report.faults(copies) == {}
    assert "; meanwhile 1 UTMALDG of 8192 bytes" in cuda_report.row(copies)[-2]
    assert "bulk copies" in cuda_report.faults(kernel(usage=usage))


def test_double_precision_is_right_in_kernels_of_double() -> None:
    listing = LISTING.replace("STG.E.128 [R2.64], R4", "DFMA R4, R4, R4, R4")
    usage = USAGE.replace("SHARED:0", "SHARED:512")
    assert cuda_report.faults(kernel(listing, usage, "void k<int, double>(float*)")) == {}


def test_fewer_matrix_instructions_than_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = (Expected(r"k<\w+>", {"HMMA.16816": 2, "LDGSTS.128": 1}),)
    monkeypatch.setattr(cuda_known, "EXPECTED", expected)
    usage = USAGE.replace("SHARED:0", "SHARED:512")
    assert cuda_report.problems([kernel(usage=usage)], ()) == []
    line = "        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R14, R4 ;\n"
    assert line in LISTING
    fewer = kernel(LISTING.replace(line, ""), usage)
    (problem,) = cuda_report.problems([fewer], ())
    assert problem.endswith("1 HMMA.16816 in the main loop, and not 2")


def test_what_is_behind_a_branch_is_not_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = (Expected(r"k<\w+>", {"HMMA.16816": 2}, {"LDSM.x2": 1}),)
    monkeypatch.setattr(cuda_known, "EXPECTED", expected)
    usage = USAGE.replace("SHARED:0", "SHARED:512")
    assert cuda_report.problems([kernel(usage=usage)], ()) == []
    line = "        /*0020*/                   LDSM.16.MT88.2 R12, [R21+0x40] ;\n"
    assert line in LISTING
    branch = "        /*0018*/              @!P3 BRA `(.L_x_9) ;\n"
    behind = LISTING.replace(line, f"{branch}{line}.L_x_9:\n")
    (problem,) = cuda_report.problems([kernel(behind, usage)], ())
    assert problem.endswith("0 LDSM.x2 on the way round the main loop, and not 1")


def test_exemptions_and_those_that_are_not_needed_any_more() -> None:
    spills, sound = spoiled("LDL R4, [R1]"), spoiled("STG.E [R2.64], R4")
    exemption = Exemption(r"k<\w+>", "local memory", "why", "sm_80")
    assert cuda_report.problems([spills], [exemption]) == []
    assert len(cuda_report.problems([spills], [dataclasses.replace(exemption, fault="x")])) == 2
    elsewhere = dataclasses.replace(exemption, architecture="sm_90a")
    assert len(cuda_report.problems([spills], [elsewhere])) == 1
    (problem,) = cuda_report.problems([sound], [exemption])
    assert "remove the exemption" in problem
    # Of kernels that were not looked at nothing is said.
    assert cuda_report.problems([], [exemption]) == []


def test_the_table_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{cuda_report.BEGIN}\nold\n{cuda_report.END}\nafter\n", "utf-8")
    twin = kernel(name="void k<int>(float*)")
    cuda_report.write(page, cuda_report.section([kernel(), twin]))
    text = page.read_text("utf-8")
    assert "| `k` `<float>` `<int>` | 80 | 40 | 0 | 0 | 0 | 0 + ? | 128 | ? |" in text
    assert "nvcc 13.0, V13.0.88" in text
    assert "Nothing here was measured" in text
    assert "old" not in text
    assert text.startswith("before\n<!--")
    assert text.endswith("-->\nafter\n")
    page.write_text("no marks", "utf-8")
    with pytest.raises(SystemExit, match="must have the lines"):
        cuda_report.write(page, "x")


def test_the_page_of_the_tree_has_a_table() -> None:
    text = (ROOT / "docs" / "cuda_kernels.md").read_text("utf-8")
    assert text.count(cuda_report.BEGIN) == text.count(cuda_report.END) == 1
    assert "Nothing here was measured" in text
    assert "\n### matmul\n" in text


def test_what_is_missing_is_said_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_cubins.sysconfig, "get_path", lambda key: str(tmp_path))
    monkeypatch.setattr(cuda_cubins.shutil, "which", lambda *names, **options: None)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(cuda_cubins.MissingProgramError, match="pip install nvidia-cuda-cuobjdump"):
        cuda_cubins.program("nothing-of-this-name")
    with pytest.raises(cuda_cubins.MissingProgramError, match="install_cuda_toolkit"):
        cuda_cubins.nvcc()


@pytest.fixture
def toolchain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Skips without a compiler and disassemblers; else the folder of what is compiled."""
    try:
        cuda_cubins.nvcc()
        for name in ("cuobjdump", "nvdisasm"):
            cuda_cubins.program(name)
    except cuda_cubins.MissingProgramError as missing:
        pytest.skip(str(missing))
    monkeypatch.setattr(cuda_cubins, "FOLDER", tmp_path / "cubins")
    return tmp_path


KERNELS = """
extern "C" __global__ void __launch_bounds__(128) spills(float* x, int n) {
  float kept[300];
#pragma unroll
  for (int i = 0; i < 300; ++i) kept[i] = x[i * 128 + threadIdx.x];
  for (int j = 0; j < n; ++j)
#pragma unroll
    for (int i = 0; i < 300; ++i) kept[i] = kept[i] * kept[(i + 7) % 300] + x[j];
#pragma unroll
  for (int i = 0; i < 300; ++i) x[i * 128 + threadIdx.x] = kept[i];
}
extern "C" __global__ void __launch_bounds__(64, 2) doubles(float* x) {
  x[threadIdx.x] = x[threadIdx.x] * 0.1;
}
extern "C" __global__ void __launch_bounds__(64) dynamic(float* x) {
  extern __shared__ float shared[];
  shared[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = shared[63 - threadIdx.x];
}
extern "C" __global__ void unbounded(float* x) { x[threadIdx.x] += 1.0F; }
extern "C" __global__ void __launch_bounds__(256) sound(float* x, int n) {
  __shared__ float shared[256];
  float sum = 0;
  for (int j = 0; j < n; ++j) {
    shared[threadIdx.x] = x[j * 256 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i) sum += shared[i] * shared[i + threadIdx.x % 64];
    __syncthreads();
  }
  x[threadIdx.x] = sum;
}
"""


def test_compiled_faults_are_found(toolchain: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = toolchain / "planted.cu"
    source.write_text(KERNELS, "utf-8")
    for architecture in ("sm_80", "sm_90a"):
        (cubin,) = cuda_cubins.compiled([source], [architecture], 1)
        found = {each.name: each for each in read(cubin)}
        faults = {name: set(cuda_report.faults(each)) for name, each in found.items()}
        assert faults == {
            "spills": {"local memory"},
            "doubles": {"double"},
            "dynamic": {"dynamic shared memory"},
            "unbounded": {"launch bounds"},
            "sound": set(),
        }
        sound = found["sound"]
        assert (sound.architecture, sound.resources.shared) == (architecture, 1024)
        assert sound.resources.threads == 256
        assert sound.loop is not None
        counts = cuda_report.counts(sound.loop.instructions)
        assert (counts["FFMA"], counts["BAR"], counts["STS.32"]) == (64, 2, 1)
        assert sound.bound() is not None
    assert "nvcc: planted.cu for sm_80" in capfd.readouterr().err
    # What is there is not compiled again; a header or a source that changed is.
    cuda_cubins.compiled([source], ["sm_80"], 1)
    assert capfd.readouterr().err == ""
    source.write_text(KERNELS.replace("0.1", "0.1F"), "utf-8")
    cuda_cubins.digest.cache_clear()
    (cubin,) = cuda_cubins.compiled([source], ["sm_80"], 1)
    assert "nvcc: planted.cu" in capfd.readouterr().err
    assert all(each.double == 0 for each in read(cubin))


def test_libraries_and_wheels_are_read_as_they_are(toolchain: Path) -> None:
    source, library = toolchain / "one.cu", toolchain / "pkg" / "_cuda.abi3.so"
    source.write_text(
        'extern "C" __global__ void __launch_bounds__(64) one(float* x) { *x = 1.0F; }', "utf-8"
    )
    library.parent.mkdir()
    command = [cuda_cubins.nvcc(), "-shared", "-Xcompiler=-fPIC", source, "-o", library]
    for architecture, kind in (("80", "sm"), ("80", "compute"), ("90a", "sm")):
        command.append(f"-gencode=arch=compute_{architecture},code={kind}_{architecture}")
    subprocess.run(command, check=True)
    wheel = toolchain / "one.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.write(library, "pkg/_cuda.abi3.so")
    for number, what in enumerate((library, wheel)):
        folder = toolchain / str(number)
        folder.mkdir()
        found = [each for cubin in cuda_cubins.extracted(what, folder) for each in read(cubin)]
        assert [(each.architecture, each.name) for each in found] == [
            ("sm_80", "one"),
            ("sm_90a", "one"),
        ]
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("pkg/_C.abi3.so", "")
    with pytest.raises(SystemExit, match="built without nvcc"):
        cuda_cubins.extracted(wheel, toolchain)


def test_a_source_of_the_tree_passes(toolchain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["cuda_report.py", "--check", "unpack_tensor_core_tiled_layout"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        assert cuda_report.main() == 0, capsys.readouterr().err
    assert re.search(r"^2 kernels, 0 problems$", capsys.readouterr().out, re.MULTILINE)
