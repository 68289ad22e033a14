// How a value is split into parts of bfloat16, and words of two values' parts.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "cpu/simd/simd.h"
#include "cpu/tiles/scheme.h"

namespace pkg::cpu::tiles {

// The upper half of a number's bits are bfloat16.
inline constexpr uint32_t kUpperHalf = 0xFFFF0000U;

// Whether the part's rounding is that of its value. What the first leaves is
// shorter by eight bits: of a float32's 24 bits the second of three takes eight
// as they stand, and the last of three, as of a float16's 11 the last of two,
// the rest.
template <class Scheme>
constexpr bool is_rounded(int part) {
  const bool exact =
      Scheme::kParts == 3 || std::is_same_v<typename Scheme::Input, Half>;
  return part == 0 || !exact;
}

// The parts of a register of values, each the upper half of its bits. Of the
// last, where it is not rounded, they are all that is left. Rounding is half
// away from zero.
template <class Scheme>
struct SplitValues {
  simd::Vector<uint32_t> parts[Scheme::kParts];

  [[gnu::always_inline]] explicit SplitValues(simd::Vector<float> values) {
    constexpr uint32_t kHalf = 0x8000U;
#pragma GCC unroll 3
    for (int part = 0; part < Scheme::kParts; ++part) {
      parts[part] = std::bit_cast<simd::Vector<uint32_t>>(values);
      if (is_rounded<Scheme>(part)) {
        parts[part] += kHalf;
      }
      if (part + 1 < Scheme::kParts) {
        values -= std::bit_cast<simd::Vector<float>>(parts[part] & kUpperHalf);
      }
    }
  }
};

// Words of two parts, the first in the low halves.
[[gnu::always_inline]] inline simd::Vector<uint32_t> words_of(
    simd::Vector<uint32_t> low, simd::Vector<uint32_t> high) {
  return (low >> 16) | (high & kUpperHalf);
}

}  // namespace pkg::cpu::tiles
