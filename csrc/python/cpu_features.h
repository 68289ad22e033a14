// What this processor and its operating system can run.
#pragma once

#include <optional>
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
  kAvx512,
  kAvx512Vnni,
  kAvx512Bf16,
  kAmx,
  kNeonDotProd,
  kNeonBf16
};

// What a processor may run where best_capability() is the last of it.
inline constexpr CpuCapability kX86Capabilities[] = {
    CpuCapability::kBaseline,   CpuCapability::kAvx2,
    CpuCapability::kAvx512,     CpuCapability::kAvx512Vnni,
    CpuCapability::kAvx512Bf16, CpuCapability::kAmx};
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

// The best level that all of the features allow; none where even the baseline's
// instructions are missing.
std::optional<CpuCapability> best_capability(const X86Features& features);
std::optional<CpuCapability> best_capability(const ArmFeatures& features);

// Of this processor and its system, and all that they run, the best one last.
std::optional<CpuCapability> best_capability();
std::vector<CpuCapability> runnable_capabilities();

std::string_view capability_name(CpuCapability capability);

}  // namespace pkg
