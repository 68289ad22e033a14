// The range of an operand's values, seen while they are packed.
//
// Parts in bfloat16 cannot say everything: rounding a value above 3.39e38 gives
// infinity, infinity minus infinity a NaN in the next part, and a tile takes
// denormal numbers for zero, as parts, products and sums. A product of operands
// whose ranges do not rule that out is made by fused multiply-adds.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "cpu/simd/simd.h"

namespace pkg::cpu::tiles {

class Range {
 public:
  // A row of words of the first part: two values each, rounded to bfloat16.
  [[gnu::always_inline]] void add(simd::Vector<uint32_t> first_parts) {
    const auto parts = std::bit_cast<Parts>(first_parts);
    const Parts magnitudes = parts + parts;  // less the sign
    largest_ = largest_ > magnitudes ? largest_ : magnitudes;
    // Zero becomes the largest number of all.
    const Parts less_one = magnitudes - 1;
    least_ = least_ < less_one ? least_ : less_one;
  }
  // What the parts do not say: the last parts of two rows of values as they are
  // left, which have no bits in the lower half but of a denormal number.
  [[gnu::always_inline]] void add_rest(simd::Vector<uint32_t> low,
                                       simd::Vector<uint32_t> high) {
    rest_ |= low | high;
  }
  // Ones where a value is lost whatever the range.
  [[gnu::always_inline]] void add_lost(simd::Vector<uint32_t> lost) {
    rest_ |= lost;
  }

  // Of float16 only infinities and NaN matter: the rest lies well within.
  bool is_finite() const { return largest_exponent() < kInfinite; }

  // The exponent of the least number but zero.
  int least() const { return least_exponent() - kBias; }
  // Whether all numbers but zero lie between 2^least and 2^most.
  bool lies_within(int least, int most) const {
    return lies_below(most) && this->least() >= least;
  }
  // Whether all are finite, also those of which rounding makes zeros, and below
  // 2^most.
  bool lies_below(int most) const {
    return is_whole() && largest_exponent() - kBias < most;
  }

  // Whether sums of `inner` products of this operand's values and the other's
  // come out as by fused multiply-adds, but for rounding.
  //
  // At the top: the largest sum of products stays below 2^126, and so do sums
  // of rounded parts. At the bottom: a value's last bit is 2^-23 of it; what is
  // lost where a part or a product of parts is denormal is below 2^-126, and
  // the least product of values is 2^-100.
  bool allows_products_with(const Range& other, int64_t inner) const {
    constexpr int kLeastExponent = -102;
    constexpr int kLeastProduct = -100;
    constexpr int kLargestSum = 125;
    const int bits = std::bit_width(static_cast<uint64_t>(inner));
    const int most = largest_exponent() - kBias;
    const int other_most = other.largest_exponent() - kBias;
    const int least = least_exponent() - kBias;
    const int other_least = other.least_exponent() - kBias;
    return is_whole() && other.is_whole() && is_finite() && other.is_finite() &&
           most + other_most + bits < kLargestSum &&
           std::min(least, other_least) >= kLeastExponent &&
           least + other_least >= kLeastProduct;
  }

 private:
  using Parts = simd::Vector<uint16_t>;
  static constexpr int kBias = 127;
  static constexpr int kInfinite = 255;

  // The magnitudes have the exponent in their upper bytes.
  int largest_exponent() const {
    uint16_t value = 0;
    for (int i = 0; i < simd::kLanes<uint16_t>; ++i) {
      value = std::max<uint16_t>(value, largest_[i]);
    }
    return value >> 8;
  }
  // Of zeros alone, that of infinity.
  int least_exponent() const {
    uint16_t value = UINT16_MAX;
    for (int i = 0; i < simd::kLanes<uint16_t>; ++i) {
      value = std::min<uint16_t>(value, least_[i]);
    }
    return value >> 8;
  }
  bool is_whole() const {
    uint32_t bits = 0;
    for (int i = 0; i < simd::kLanes<uint32_t>; ++i) {
      bits |= rest_[i];
    }
    return (bits & 0xFFFFU) == 0;
  }

  Parts largest_{};
  Parts least_ = Parts{} + UINT16_MAX;
  simd::Vector<uint32_t> rest_{};
};

}  // namespace pkg::cpu::tiles
