// The online softmax of a strip of scores: a row's probabilities relative to
// its largest score so far (FlashAttention-2, arXiv 2307.08691, 3.1).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/attention/number.h"
#include "cpu/attention/probabilities.h"
#include "cpu/attention/rows.h"
#include "cpu/attention/softmax_state.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/math.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/transpose.h"

namespace pkg::cpu::attention {

namespace detail {

template <class Number>
inline Vector<Number> largest_of_row(const Number* scores, int64_t count) {
  Vector<Number> largest = Vector<Number>{} - kInfinity<Number>;
  for (int64_t i = 0; i < count; i += simd::kLanes<Number>) {
    largest = larger(simd::load(scores + i), largest);
  }
  return largest;
}

// Of up to a register of rows.
template <int64_t kStride, class Number>
inline Vector<Number> largest_of_rows(const Number* scores, int rows,
                                      int64_t count) {
  constexpr int kLanes = simd::kLanes<Number>;
  Vector<Number> largest[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    largest[i] = i < rows ? largest_of_row(scores + i * kStride, count)
                          : Vector<Number>{};
  }
  return simd::combine_each(largest, larger<Vector<Number>>);
}

// Registers of scores whose exponentials are taken side by side.
inline constexpr int kExpRegisters = 3;

// Makes probabilities of a row's scores, adds them to `sum`, and only then
// multiplies them by dropout's factors, if there are such.
template <class Arithmetic, bool kPrecise, class Number>
[[gnu::always_inline]] inline Vector<Number> exponentials_of_row(
    const Number* scores, int64_t count, Number scale, Number origin,
    const Number* factors, Vector<Number> sum,
    Probability<Arithmetic>* probabilities) {
  constexpr int kLanes = simd::kLanes<Number>;
  const auto add_exponentials = [&](int64_t from, auto registers) {
    Vector<Number> probability[registers()];
    for (int i = 0; i < registers(); ++i) {
      probability[i] = simd::load(scores + from + i * kLanes) * scale - origin;
    }
    simd::exp_of_nonpositive<kPrecise>(probability);
    for (int i = 0; i < registers(); ++i) {
      Probability<Arithmetic>* to = probabilities + from + i * kLanes;
      if (factors == nullptr) {
        sum = ProbabilityFormat<Arithmetic>::store(to, probability[i], sum);
      } else {
        sum += probability[i];
        ProbabilityFormat<Arithmetic>::store(
            to, probability[i] * simd::load(factors + from + i * kLanes));
      }
    }
  };
  int64_t i = 0;
  for (; i + kExpRegisters * kLanes <= count; i += kExpRegisters * kLanes) {
    add_exponentials(i, std::integral_constant<int, kExpRegisters>{});
  }
  for (; i < count; i += kLanes) {
    add_exponentials(i, std::integral_constant<int, 1>{});
  }
  return sum;
}

}  // namespace detail

// The largest of each row's scores, times a positive scale.
template <int kRows, int64_t kStride, class Number>
void store_maxima(const Number* scores, int64_t count, Number scale,
                  Number* maxima) {
  constexpr int kLanes = simd::kLanes<Number>;
  for (int first = 0; first < kRows; first += kLanes) {
    const int rows = std::min(kLanes, kRows - first);
    simd::store_partial(maxima + first,
                        detail::largest_of_rows<kStride>(
                            scores + first * kStride, rows, count) *
                            scale,
                        rows);
  }
}

// Makes probabilities, kProbabilityStride elements from row to row, of the
// scores of a strip of rows, kStride elements apart, of `count` keys, a whole
// number of registers, times a positive scale, and updates the rows' states.
// rescales[row] becomes exp(m_old - m), the factor for all that was accumulated
// before; returns whether any of them is not 1. factors_of(row) gives a row's
// factors of dropout, or nothing. A NaN among the scores may be lost to the
// maximum, never to the sum.
template <class Arithmetic, bool kPrecise, int kRows, int64_t kStride,
          int64_t kProbabilityStride, class Number, class FactorsOf>
bool softmax_strip(Number* scores, int64_t count, Number scale,
                   const SoftmaxStates<Number>& states,
                   const FactorsOf& factors_of,
                   Probability<Arithmetic>* probabilities,
                   Number (&rescales)[kRows]) {
  constexpr int kLanes = simd::kLanes<Number>;
  Number origins[kRows];
  for (int first = 0; first < kRows; first += kLanes) {
    const int rows = std::min(kLanes, kRows - first);
    const auto before = simd::load_partial(states.maxima + first, rows);
    const auto maximum = larger(detail::largest_of_rows<kStride>(
                                    scores + first * kStride, rows, count) *
                                    scale,
                                before);
    const auto origin = origin_of(maximum);
    Vector<Number> rescale[1] = {before - origin};
    simd::exp_of_nonpositive(rescale);
    simd::store_partial(states.maxima + first, maximum, rows);
    simd::store_partial(origins + first, origin, rows);
    simd::store_partial(rescales + first, rescale[0], rows);
  }
  if (!std::all_of(origins, origins + kRows, &compares_with_products<Number>)) {
    for (int i = 0; i < kRows; ++i) {
      scale_row(scores + i * kStride, count, scale);
    }
    scale = Number{1};
  }
  bool any_rescale = false;
  for (int i = 0; i < kRows; ++i) {
    // Summed apart: each addition to the sum of all keys rounds off more.
    const auto sum = detail::exponentials_of_row<Arithmetic, kPrecise>(
        scores + i * kStride, count, scale, origins[i], factors_of(i),
        Vector<Number>{}, probabilities + i * kProbabilityStride);
    states.sums[i] = states.sums[i] * rescales[i] + sum;
    any_rescale |= rescales[i] != Number{1};
  }
  return any_rescale;
}

}  // namespace pkg::cpu::attention
