// A product whose inner dimension is 0: sums of nothing, of which an epilogue
// may make something.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/gemm/gemm.h"
#include "cpu/gemm/gemv.h"

namespace pkg::cpu {

template <class Input, class Output, class Epilogue>
void multiply_nothing(const Product<Input, Output>& product,
                      const Epilogue& epilogue) {
  using Accumulator = typename ProductArithmeticOf<Input>::type::Accumulator;
  constexpr int64_t kZeros = 8 * simd::kLanes<Accumulator>;
  const Accumulator zeros[kZeros] = {};
  for (int64_t row = 0; row < product.rows; ++row) {
    const detail::EpilogueFrom<Epilogue> place{epilogue, row, 0};
    for (int64_t column = 0; column < product.columns; column += kZeros) {
      detail::store_finished(
          zeros, column, std::min(kZeros, product.columns - column),
          product.output + row * product.output_stride, place);
    }
  }
}

}  // namespace pkg::cpu
