// Whether an operand is finite. Only then may a key be left out that is hidden:
// 0 times infinity is NaN.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "cpu/attention/blocking.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu::attention {

// Whether `count` k-groups are all finite.
template <class Arithmetic>
bool all_finite(const KGroupOf<Arithmetic>* packed, int64_t count) {
  using KGroup = KGroupOf<Arithmetic>;
  Vector<uint32_t> bad{};
  for (int64_t i = 0; i < count; i += simd::kLanes<KGroup>) {
    const Vector<KGroup> groups = simd::load_up_to(packed + i, count - i);
    if constexpr (std::is_floating_point_v<KGroup>) {
      const Vector<KGroup> zero = groups * KGroup{0};
      bad |= std::bit_cast<Vector<uint32_t>>(zero != zero);
    } else {
      static_assert(Arithmetic::kKGroupSize == 2, "pairs of bfloat16");
      bad |= std::bit_cast<Vector<uint32_t>>(
          ((groups & 0x7F80U) == 0x7F80U) |
          ((groups & 0x7F800000U) == 0x7F800000U));
    }
  }
  return !simd::any_bit(bad);
}

}  // namespace pkg::cpu::attention
