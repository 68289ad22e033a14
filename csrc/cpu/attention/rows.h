// Rows of numbers, scaled, divided and stored.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu::attention {

template <class Number>
void scale_row(Number* row, int64_t count, Number factor) {
  for (int64_t i = 0; i < count; i += simd::kLanes<Number>) {
    simd::store(row + i, simd::load(row + i) * factor);
  }
}

// Writes `count` elements of a row, converted and multiplied by `factor`.
template <class Output, class Number>
void store_row(const Number* row, int64_t count, Number factor, Output* to) {
  constexpr int kLanes = simd::kLanes<Number>;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    simd::store(to + i, simd::load(row + i) * factor);
  }
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    simd::store_partial(to + i, simd::load_partial(row + i, rest) * factor,
                        rest);
  }
}

// row / sum by a product with the reciprocal and one Newton step, which
// leaves one rounding where the product has two; half precision does not
// notice.
template <class Output, class Number>
void divide_row(const Number* row, int64_t count, Number sum, Output* to) {
  constexpr int kLanes = simd::kLanes<Number>;
  const Number reciprocal = Number{1} / sum;
  if constexpr (!std::is_same_v<Output, Number>) {
    store_row(row, count, reciprocal, to);
    return;
  }
  for (int64_t i = 0; i < count; i += kLanes) {
    const auto lanes = static_cast<int>(std::min<int64_t>(kLanes, count - i));
    const Vector<Number> value = simd::load_up_to(row + i, lanes);
    const Vector<Number> quotient = value * reciprocal;
    const Vector<Number> nearer =
        (value - quotient * sum) * reciprocal + quotient;
    simd::store_partial(to + i, nearer == nearer ? nearer : quotient, lanes);
  }
}

}  // namespace pkg::cpu::attention
