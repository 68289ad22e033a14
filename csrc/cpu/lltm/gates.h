// What lltm does element by element, on vectors of float or double.
//
// The gates are kept before their activations, so that a derivative is computed
// from what it is a function of and no digits cancel: sigma' = e / (1 + e)^2 of
// e = exp(-|g|), and 1 - tanh^2 likewise. Recomputing the exponentials costs
// under 1 % of a pass.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/gemm/packing.h"
#include "cpu/simd/math.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu {

// `count` elements of a row, whatever its stride, and zeros behind them.
template <class T>
[[gnu::always_inline]] inline Vector<simd::Compute<T>> load_columns(
    const MatrixView<T>& rows, int64_t row, int64_t column, int count) {
  using C = simd::Compute<T>;
  const T* from = rows.at(row, column);
  if (rows.column_stride == 1) [[likely]] {
    return simd::load_up_to(from, count);
  }
  // A sum's gradient is one number for all.
  if (rows.column_stride == 0 && count > 0) {
    return Vector<C>{} + static_cast<C>(*from);
  }
  Vector<C> values{};
  for (int i = 0; i < count; ++i) {
    values[i] = static_cast<C>(from[i * rows.column_stride]);
  }
  return values;
}

// exp(x) and exp(x) - 1 for x <= 0, both without cancellation.
template <class V>
struct ExpOfNonpositive {
  V value;
  V less_one;

  [[gnu::always_inline]] inline explicit ExpOfNonpositive(V x) {
    using T = std::remove_cvref_t<decltype(x[0])>;
    const auto [tail, n] = simd::detail::reduce_exp<T>(x);
    const V scale = simd::detail::times_power_of_two<T>(V{} + 1, n);
    value = tail * scale + scale;
    less_one = tail * scale + (scale - 1);
  }
};

// tanh(x) and 1 - tanh(x)^2: the latter as 4q / (1 + q)^2 with q = exp(-2|x|)
// where it is small, and as it stands where that has fewer roundings.
template <class V>
struct Tanh {
  V value;
  V slope;

  [[gnu::always_inline]] inline explicit Tanh(V x) {
    const ExpOfNonpositive q(simd::abs(x) * -2);
    const V sum = q.less_one + 2;
    const V magnitude = -q.less_one / sum;
    value = x < 0 ? -magnitude : magnitude;
    slope = q.less_one < V{} - std::remove_cvref_t<decltype(x[0])>(0.625)
                ? 4 * q.value / (sum * sum)
                : 1 - value * value;
  }
};

// sigmoid(x) and its derivative.
template <class V>
struct Sigmoid {
  V value;
  V slope;

  [[gnu::always_inline]] inline explicit Sigmoid(V x) {
    const V e = simd::exp(-simd::abs(x));
    const V sum = e + 1;
    value = (x < 0 ? e : V{} + 1) / sum;
    slope = e / (sum * sum);
  }
};

// elu(x), x or exp(x) - 1, and its derivative.
template <class V>
struct Elu {
  V value;
  V slope;

  [[gnu::always_inline]] inline explicit Elu(V x) {
    const ExpOfNonpositive below(x > 0 ? V{} : x);
    value = x > 0 ? x : below.less_one;
    slope = below.value;  // exp(0) for a positive x
  }
};

}  // namespace pkg::cpu
