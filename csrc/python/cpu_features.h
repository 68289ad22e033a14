// What this processor and its operating system can run.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pkg {

// The instruction sets that a library of the package may be compiled for, from
// the least to the most demanding.
enum class CpuCapability {
  kBaseline,
  kAvx2,
  kAvx512,
  kAvx512Vnni,
  kAvx512Bf16,
  kAmx
};

inline constexpr CpuCapability kCpuCapabilities[] = {
    CpuCapability::kBaseline,   CpuCapability::kAvx2,
    CpuCapability::kAvx512,     CpuCapability::kAvx512Vnni,
    CpuCapability::kAvx512Bf16, CpuCapability::kAmx};

// The features that the levels are told apart by: a bit of CPUID, and for the
// wider registers also the operating system's promise to save them. Linux has
// to be asked for the tile registers, for the whole process.
struct CpuFeatures {
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

CpuFeatures detect_cpu_features();

// The best level that all of `features` allow; none where even the baseline's
// instructions are missing. On processors other than x86-64 always the
// baseline.
std::optional<CpuCapability> best_capability(const CpuFeatures& features);

std::string_view capability_name(CpuCapability capability);

}  // namespace pkg
