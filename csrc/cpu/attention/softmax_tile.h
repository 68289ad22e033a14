// The online softmax of scores that are still in registers: an epilogue of the
// product Q K^T.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/attention/mask_elements.h"
#include "cpu/attention/prefetch.h"
#include "cpu/attention/probabilities.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/math.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu::attention {

// Once a strip's rows have seen keys, their maxima seldom grow by much, and
// probabilities need not be relative to the very largest score: what counts is
// that none overflows. So the probabilities of another block are made relative
// to the maxima so far, of scores that are still in registers, and nothing has
// to be rescaled; where a sum of probabilities comes out beyond this or is not
// a number, the block is done again in full (softmax_strip). Values up to 2^100
// do not overflow for it.
inline constexpr int kLargestProbability = 1 << 16;

// A mask's elements for the tiles of a strip. Booleans hide probabilities,
// numbers are added to scores.
template <class Element>
struct MaskRows {
  const Element* data;
  int64_t stride;

  const Element* at(int64_t row, int64_t column) const {
    return data + row * stride + column;
  }
};
struct NoMaskRows {};

// Probabilities of a strip, in rows of kStride.
template <class Arithmetic, int64_t kStride>
struct ProbabilityRows {
  using Number = typename Arithmetic::Accumulator;
  Probability<Arithmetic>* data;

  // Stores registers of a row from `column` on; returns the sum of what is
  // stored and what is there.
  template <int kVectors>
  [[gnu::always_inline]] Vector<Number> store_row(
      int64_t row, int64_t column, const Vector<Number>* probabilities,
      Vector<Number> sum) const {
    return ProbabilityFormat<Arithmetic>::template store_row<kVectors>(
        data + row * kStride + column, probabilities, sum);
  }
};

// Rows' maxima in the units of exp, for SoftmaxTile: as they are, or `scaled`.
template <bool kPrecise, int kRows, class Number>
const Number* in_exp_units(const Number* maxima, Number (&scaled)[kRows]) {
  constexpr Number kUnits = simd::kExpUnits<Number, kPrecise>;
  if constexpr (kUnits == 1) {
    return maxima;
  }
  for (int i = 0; i < kRows; ++i) {
    scaled[i] = maxima[i] * kUnits;
  }
  return scaled;
}

// Makes probabilities of the scores of a tile, times a positive scale, and adds
// them to the rows' sums. Two rows go side by side, as exp_of_nonpositive wants
// it.
template <bool kPrecise, class Probabilities, class Number, class Mask>
struct SoftmaxTile {
  Probabilities probabilities;  // as ProbabilityRows
  Number scale;
  const Number* maxima;  // in the units of exp
  Vector<Number>* sums;
  Mask mask;
  PrefetchRows to_prefetch;

  static constexpr bool kInOrder = true;
  static constexpr bool kHides = std::is_same_v<Mask, MaskRows<bool>>;
  static constexpr bool kAdds = !kHides && !std::is_same_v<Mask, NoMaskRows>;

  template <int kRows, int kVectors>
  [[gnu::always_inline]] void prefetch(int64_t row, int64_t column) const {
    if constexpr (kHides || kAdds) {
      to_prefetch.prefetch<kRows>(row, column, kVectors * simd::kLanes<Number>);
    }
  }

  template <int kRows, int kVectors>
  [[gnu::always_inline]] void operator()(
      int64_t row, int64_t column, Vector<Number> (&scores)[kRows][kVectors],
      int /*tail*/) const {
    constexpr int kPair = 2;
    constexpr Number kUnits = simd::kExpUnits<Number, kPrecise>;
    static_assert(kRows % kPair == 0);
    const auto column_of = [&](int i) {
      return column + i % kVectors * simd::kLanes<Number>;
    };
#pragma GCC unroll 16
    for (int first = 0; first < kRows; first += kPair) {
      Vector<Number> probability[kPair * kVectors];
#pragma GCC unroll 4
      for (int i = 0; i < kPair * kVectors; ++i) {
        const int r = first + i / kVectors;
        probability[i] =
            scores[r][i % kVectors] * (scale * kUnits) - maxima[row + r];
        if constexpr (kAdds) {
          probability[i] += simd::load(mask.at(row + r, column_of(i))) * kUnits;
        }
      }
      simd::exp_of_units<kPrecise, kAdds ? simd::ExpRange::kAny
                                         : simd::ExpRange::kFinite>(
          probability);
#pragma GCC unroll 4
      for (int i = 0; kHides && i < kPair * kVectors; ++i) {
        if constexpr (kHides) {
          const auto* const hides =
              mask.at(row + first + i / kVectors, column_of(i));
          probability[i] = detail::load_booleans<Number>(hides) != 0
                               ? probability[i]
                               : Vector<Number>{};
        }
      }
#pragma GCC unroll 2
      for (int i = 0; i < kPair; ++i) {
        const int64_t r = row + first + i;
        sums[r] = probabilities.template store_row<kVectors>(
            r, column, probability + i * kVectors, sums[r]);
      }
    }
  }
};

}  // namespace pkg::cpu::attention
