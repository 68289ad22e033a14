#include "python/cpu_features.h"

#include <cstdint>

#if defined(__x86_64__)
#define PKG_X86_64 1
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace pkg {

#if defined(PKG_X86_64)

namespace {

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

}  // namespace

CpuFeatures detect_cpu_features() {
  CpuFeatures features;
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
  features.avx512_bf16 = bit(cpuid(7, 1).eax, 5);
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

std::optional<CpuCapability> best_capability(const CpuFeatures& f) {
  if (!(f.sse42 && f.popcnt)) {
    return std::nullopt;
  }
  const bool avx2 = f.avx && f.avx2 && f.fma && f.f16c && f.bmi1 && f.bmi2 &&
                    f.lzcnt && f.movbe && f.os_saves_ymm;
  const bool avx512 = avx2 && f.avx512f && f.avx512bw && f.avx512cd &&
                      f.avx512dq && f.avx512vl && f.os_saves_zmm;
  if (avx512 && f.avx512_vnni && f.avx512_bf16) {
    return f.amx_tile && f.amx_bf16 && f.amx_int8 && f.os_saves_tiles
               ? CpuCapability::kAmx
               : CpuCapability::kAvx512Bf16;
  }
  if (avx512) {
    return f.avx512_vnni ? CpuCapability::kAvx512Vnni : CpuCapability::kAvx512;
  }
  return avx2 ? CpuCapability::kAvx2 : CpuCapability::kBaseline;
}

#else

CpuFeatures detect_cpu_features() { return {}; }

std::optional<CpuCapability> best_capability(const CpuFeatures&) {
  return CpuCapability::kBaseline;
}

#endif

std::string_view capability_name(CpuCapability capability) {
  switch (capability) {
    case CpuCapability::kBaseline:
      return "baseline";
    case CpuCapability::kAvx2:
      return "avx2";
    case CpuCapability::kAvx512:
      return "avx512";
    case CpuCapability::kAvx512Vnni:
      return "avx512_vnni";
    case CpuCapability::kAvx512Bf16:
      return "avx512_bf16";
    case CpuCapability::kAmx:
      return "amx";
  }
  return "unknown";
}

}  // namespace pkg
