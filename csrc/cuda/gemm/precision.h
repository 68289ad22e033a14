// How products of float32 are made, as the user chose:
// torch.set_float32_matmul_precision, torch.backends.cuda.matmul and
// PKG_FLOAT32_MATMUL, which pkg/_float32_matmul.py reads and brings here.
//
// "highest" is by six products of bfloat16 parts (cuda/gemm/six_products.cuh)
// where warpgroups make them and that takes less time, else by multiply-adds.
// Three products in TF32, of operands split into two parts, are not as exact
// where neighbouring terms cancel: their error is up to 3.5 times what the rule
// of pkg.testing.check_op allows beside that of multiply-adds (docs/design.md).
#pragma once

#include <atomic>
#include <cstdint>

namespace pkg::cuda {

// One in TF32 for each, or six of bfloat16; none: multiply-adds.
enum class Float32Products : int64_t { None = 0, One = 1, Six = 6 };

inline std::atomic<Float32Products>& chosen_float32_products() {
  static std::atomic<Float32Products> chosen{Float32Products::None};
  return chosen;
}
inline Float32Products float32_products() {
  return chosen_float32_products().load(std::memory_order_relaxed);
}

}  // namespace pkg::cuda
