// The rounding residual of the output: what rounding to the output's type took
// off it. The backward pass sums the output times its gradient (D), of which
// little may be left against the other sums; with output and residual together
// it has D as exact as its sums.
#pragma once

#include <cstdint>

#include "cpu/attention/softmax_state.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu::attention {

// Of a row. Where either is not finite it is 0: infinity less itself would be
// NaN.
template <class Output, class Number>
void store_residual(const SoftmaxState<Number>& state, const Number* row,
                    int64_t count, const Output* output, Output* residual) {
  constexpr int kLanes = simd::kLanes<Number>;
  const Number reciprocal =
      state.sum == Number{0} ? Number{0} : Number{1} / state.sum;
  const auto residual_of = [&](Vector<Number> value, Vector<Number> rounded) {
    const Vector<Number> rest = value * reciprocal - rounded;
    return rest - rest == Number{0} ? rest : Vector<Number>{};
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    simd::store(residual + i,
                residual_of(simd::load(row + i), simd::load(output + i)));
  }
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    simd::store_partial(residual + i,
                        residual_of(simd::load_partial(row + i, rest),
                                    simd::load_partial(output + i, rest)),
                        rest);
  }
}

}  // namespace pkg::cpu::attention
