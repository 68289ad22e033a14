// The running maximum and sum of a row of the online softmax.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/attention/number.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu::attention {

// A row's largest score so far and the sum of its probabilities relative to
// that.
template <class Number>
struct SoftmaxState {
  Number maximum = -kInfinity<Number>;
  Number sum = 0;
};

// Scores that are scaled in the same instruction that subtracts the maximum are
// not rounded as the maximum was. Up to this the difference is at most an
// eighth; beyond, all have to be scaled before.
template <class Number>
inline bool compares_with_products(Number maximum) {
  constexpr Number kLargest =
      Number{1} / (4 * std::numeric_limits<Number>::epsilon());
  return std::abs(maximum) <= kLargest;
}

// The states of a block's rows, whose sums are SIMD accumulators, one lane for
// each key of a register; at() adds these up.
template <class Number>
struct SoftmaxStates {
  Number* maxima;
  Vector<Number>* sums;

  void reset(int64_t rows) const {
    std::fill_n(maxima, rows, -kInfinity<Number>);
    std::fill_n(sums, rows, Vector<Number>{});
  }
  SoftmaxStates from(int64_t row) const { return {maxima + row, sums + row}; }

  // Whether each of the first rows has a maximum that products may be compared
  // with: it has seen a key.
  bool are_known(int rows) const {
    return std::all_of(maxima, maxima + rows, &compares_with_products<Number>);
  }
  bool is_any_known(int rows) const {
    return std::any_of(maxima, maxima + rows,
                       [](Number m) { return m != -kInfinity<Number>; });
  }
  SoftmaxState<Number> at(int64_t row) const {
    return {maxima[row], simd::reduce_add(sums[row])};
  }
};

// What takes the maximum's place in differences, of one row or a register of
// them: while a row has no key its maximum is -inf, and -inf - -inf would be
// NaN.
template <class T>
inline T origin_of(T maximum) {
  if constexpr (std::is_floating_point_v<T>) {
    return maximum == -kInfinity<T> ? T{0} : maximum;
  } else {
    using Number = std::remove_cvref_t<decltype(maximum[0])>;
    return maximum == -kInfinity<Number> ? T{} : maximum;
  }
}

template <class Number>
struct LogSumExp {
  Number rounded;
  Number residual;  // what rounding took off it
};

// The gradients recompute probabilities from it: one rounding, not two.
template <class Number>
LogSumExp<Number> log_sum_exp_of(const SoftmaxState<Number>& state) {
  const auto maximum = static_cast<double>(state.maximum);
  const double log_sum = std::log(static_cast<double>(state.sum));
  const auto rounded = static_cast<Number>(maximum + log_sum);
  if (!std::isfinite(rounded)) {
    return {rounded, Number{0}};
  }
  // In this order: beside a large maximum nothing is left of the logarithm.
  return {rounded, static_cast<Number>(maximum - static_cast<double>(rounded) +
                                       log_sum)};
}

}  // namespace pkg::cpu::attention
