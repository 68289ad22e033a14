#include "python/cpu_features.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace pkg {

namespace {

#if defined(__x86_64__)

struct CpuidRegisters {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidRegisters cpuid(uint32_t leaf, uint32_t subleaf) {
  CpuidRegisters r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

// Extended control register 0: the register files that the system saves.
uint64_t read_xcr0() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Asks the system to save the tile registers of this process from now on.
bool request_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool bit(uint64_t word, int position) { return (word >> position) & 1U; }

X86Features features_of_this_processor() {
  X86Features features;
  const CpuidRegisters leaf1 = cpuid(1, 0);
  features.sse42 = bit(leaf1.ecx, 20);
  features.popcnt = bit(leaf1.ecx, 23);
  features.avx = bit(leaf1.ecx, 28);
  features.fma = bit(leaf1.ecx, 12);
  features.f16c = bit(leaf1.ecx, 29);
  features.movbe = bit(leaf1.ecx, 22);

  const CpuidRegisters leaf7 = cpuid(7, 0);
  features.bmi1 = bit(leaf7.ebx, 3);
  features.avx2 = bit(leaf7.ebx, 5);
  features.bmi2 = bit(leaf7.ebx, 8);
  features.avx512f = bit(leaf7.ebx, 16);
  features.avx512dq = bit(leaf7.ebx, 17);
  features.avx512cd = bit(leaf7.ebx, 28);
  features.avx512bw = bit(leaf7.ebx, 30);
  features.avx512vl = bit(leaf7.ebx, 31);
  features.avx512_vnni = bit(leaf7.ecx, 11);
  const CpuidRegisters leaf7_1 = cpuid(7, 1);
  features.avx_vnni = bit(leaf7_1.eax, 4);
  features.avx512_bf16 = bit(leaf7_1.eax, 5);
  features.amx_bf16 = bit(leaf7.edx, 22);
  features.amx_tile = bit(leaf7.edx, 24);
  features.amx_int8 = bit(leaf7.edx, 25);
  features.lzcnt = bit(cpuid(0x80000001U, 0).ecx, 5);

  const bool os_uses_xsave = bit(leaf1.ecx, 27);
  if (os_uses_xsave) {
    constexpr uint64_t kYmmState = 0x6;       // SSE and AVX
    constexpr uint64_t kZmmState = 0xE6;      // and the three parts of AVX-512
    constexpr uint64_t kTileState = 0x60000;  // configuration and data
    const uint64_t saved = read_xcr0();
    features.os_saves_ymm = (saved & kYmmState) == kYmmState;
    features.os_saves_zmm = (saved & kZmmState) == kZmmState;
    features.os_saves_tiles = features.amx_tile &&
                              (saved & kTileState) == kTileState &&
                              request_tiles();
  }
  return features;
}

constexpr std::span<const CpuCapability> kCapabilities = kX86Capabilities;

#else

#if defined(__aarch64__) && defined(__APPLE__)
bool has(const char* name) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
ArmFeatures features_of_this_processor() {
  return {.dotprod = has("hw.optional.arm.FEAT_DotProd"),
          .bf16 = has("hw.optional.arm.FEAT_BF16")};
}
#elif defined(__aarch64__) && defined(__linux__)
// By numbers: older headers have no name for the last one.
ArmFeatures features_of_this_processor() {
  constexpr unsigned long kDotProd = 1UL << 20;  // HWCAP_ASIMDDP
  constexpr unsigned long kBf16 = 1UL << 14;     // HWCAP2_BF16
  return {.dotprod = (getauxval(AT_HWCAP) & kDotProd) != 0,
          .bf16 = (getauxval(AT_HWCAP2) & kBf16) != 0};
}
#else
ArmFeatures features_of_this_processor() { return {}; }
#endif

constexpr std::span<const CpuCapability> kCapabilities = kArmCapabilities;

#endif

}  // namespace

bool runs(const X86Features& f, CpuCapability capability) {
  const bool baseline = f.sse42 && f.popcnt;
  const bool avx2 = baseline && f.avx && f.avx2 && f.fma && f.f16c && f.bmi1 &&
                    f.bmi2 && f.lzcnt && f.movbe && f.os_saves_ymm;
  const bool avx512 = avx2 && f.avx512f && f.avx512bw && f.avx512cd &&
                      f.avx512dq && f.avx512vl && f.os_saves_zmm;
  const bool avx512_bf16 = avx512 && f.avx512_vnni && f.avx512_bf16;
  switch (capability) {
    case CpuCapability::kBaseline:
      return baseline;
    case CpuCapability::kAvx2:
      return avx2;
    case CpuCapability::kAvx2Vnni:
      return avx2 && f.avx_vnni;
    case CpuCapability::kAvx512:
      return avx512;
    case CpuCapability::kAvx512Vnni:
      return avx512 && f.avx512_vnni;
    case CpuCapability::kAvx512Bf16:
      return avx512_bf16;
    case CpuCapability::kAmx:
      return avx512_bf16 && f.amx_tile && f.amx_bf16 && f.amx_int8 &&
             f.os_saves_tiles;
    default:
      return false;
  }
}

bool runs(const ArmFeatures& f, CpuCapability capability) {
  switch (capability) {
    case CpuCapability::kBaseline:
      return true;
    case CpuCapability::kNeonDotProd:
      return f.dotprod;
    case CpuCapability::kNeonBf16:
      return f.dotprod && f.bf16;
    default:
      return false;
  }
}

std::vector<CpuCapability> runnable_capabilities() {
  const auto features = features_of_this_processor();
  std::vector<CpuCapability> runnable;
  std::ranges::copy_if(
      kCapabilities, std::back_inserter(runnable),
      [&](CpuCapability capability) { return runs(features, capability); });
  return runnable;
}

std::string_view capability_name(CpuCapability capability) {
  switch (capability) {
    case CpuCapability::kBaseline:
      return "baseline";
    case CpuCapability::kAvx2:
      return "avx2";
    case CpuCapability::kAvx2Vnni:
      return "avx2_vnni";
    case CpuCapability::kAvx512:
      return "avx512";
    case CpuCapability::kAvx512Vnni:
      return "avx512_vnni";
    case CpuCapability::kAvx512Bf16:
      return "avx512_bf16";
    case CpuCapability::kAmx:
      return "amx";
    case CpuCapability::kNeonDotProd:
      return "neon_dotprod";
    case CpuCapability::kNeonBf16:
      return "neon_bf16";
  }
  return "unknown";
}

}  // namespace pkg
