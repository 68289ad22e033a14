// What this processor and its operating system can run.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace pkg {

// The instruction sets that a library of the package may be compiled for: those
// of x86-64, from the least to the most demanding, then those of Arm, whose
// baseline is NEON.
enum class CpuCapability {
  kBaseline,
  kAvx2,
  kAvx2Vnni,
  kAvx512,
  kAvx512Vnni,
  kAvx512Bf16,
  kAmx,
  kNeonDotProd,
  kNeonBf16
};

// Those of each architecture, the better one later. Of those before one that a
// processor runs it may lack some: Zen 4 has VNNI in AVX-512 alone.
inline constexpr CpuCapability kX86Capabilities[] = {
    CpuCapability::kBaseline,   CpuCapability::kAvx2,
    CpuCapability::kAvx2Vnni,   CpuCapability::kAvx512,
    CpuCapability::kAvx512Vnni, CpuCapability::kAvx512Bf16,
    CpuCapability::kAmx};
inline constexpr CpuCapability kArmCapabilities[] = {
    CpuCapability::kBaseline, CpuCapability::kNeonDotProd,
    CpuCapability::kNeonBf16};

// The features that the levels of x86-64 are told apart by: a bit of CPUID, and
// for the wider registers also the operating system's promise to save them.
// Linux has to be asked for the tile registers, for the whole process.
struct X86Features {
  bool sse42 = false;
  bool popcnt = false;
  bool avx = false;
  bool avx2 = false;
  bool fma = false;
  bool f16c = false;
  bool bmi1 = false;
  bool bmi2 = false;
  bool lzcnt = false;
  bool movbe = false;
  bool avx_vnni = false;
  bool avx512f = false;
  bool avx512bw = false;
  bool avx512cd = false;
  bool avx512dq = false;
  bool avx512vl = false;
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool amx_tile = false;
  bool amx_bf16 = false;
  bool amx_int8 = false;
  bool os_saves_ymm = false;
  bool os_saves_zmm = false;
  bool os_saves_tiles = false;
};

// And those of Arm, by its names: FEAT_DotProd (since Armv8.2: Neoverse N1,
// Apple's M1) and FEAT_BF16 (Armv8.6: Neoverse V1 and N2, Apple's M2).
struct ArmFeatures {
  bool dotprod = false;
  bool bf16 = false;
};

// Whether the features allow a level.
bool runs(const X86Features& features, CpuCapability capability);
bool runs(const ArmFeatures& features, CpuCapability capability);

// All that this processor and its system run, the best one last; none where
// even the baseline's instructions are missing.
std::vector<CpuCapability> runnable_capabilities();

std::string_view capability_name(CpuCapability capability);

}  // namespace pkg
