// How exact a product of float32 matrices by tile registers is, as the user
// chose: torch.set_float32_matmul_precision and PKG_FLOAT32_MATMUL, which
// pkg/_float32_matmul.py reads and brings here.
#pragma once

#include <atomic>
#include <cstdint>

namespace pkg::cpu::tiles {

// Products of parts (cpu/tiles/scheme.h); none: fused multiply-adds.
enum class Float32Products : int64_t { None = 0, One = 1, Three = 3, Six = 6 };

inline std::atomic<Float32Products>& chosen_float32_products() {
  static std::atomic<Float32Products> chosen{Float32Products::Six};
  return chosen;
}
inline Float32Products float32_products() {
  return chosen_float32_products().load(std::memory_order_relaxed);
}

}  // namespace pkg::cpu::tiles
