// What a forward pass stores of a row.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/attention/residual.h"
#include "cpu/attention/rows.h"
#include "cpu/attention/softmax_state.h"
#include "cpu/simd/simd.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

// The output of a row: its sum of P V divided by the sum of P, or zero without
// any key.
template <class Output, class Number>
void store_output(const SoftmaxState<Number>& state, const Number* row,
                  int64_t count, Output* output) {
  if (state.sum == Number{0}) {
    std::fill_n(output, count, Output{0});
  } else {
    divide_row(row, count, state.sum, output);
  }
}

// Of a result that may be left empty.
template <class T>
T* data_or_null(const Tensor& result) {
  return has_elements(result) ? static_cast<T*>(result.mutable_data_ptr())
                              : nullptr;
}

template <class Input>
struct ForwardOutputs {
  using Number = simd::Compute<Input>;
  Input* output;
  Input* residual;          // what rounding took off the output, or null
  AttentionOperand layout;  // of both; the columns are contiguous
  Number* log_sum_exp;
  int64_t log_sum_exp_stride;  // from one matrix of the batch to the next
  Number* log_sum_exp_residual = nullptr;  // likewise, or null
  bool has_backward = true;  // one may follow, which makes the scores again

  // Of a row, from its state and its sum of P V.
  void store(const AttentionShape& shape, int64_t batch, int64_t row,
             const SoftmaxState<Number>& state,
             const Number* output_sums) const {
    const int64_t at = layout.offset(shape, batch) + row * layout.row_stride;
    store_output(state, output_sums, shape.value_size, output + at);
    if (residual != nullptr) {
      store_residual(state, output_sums, shape.value_size, output + at,
                     residual + at);
    }
    const int64_t to = batch * log_sum_exp_stride + row;
    const LogSumExp<Number> exact = log_sum_exp_of(state);
    log_sum_exp[to] = exact.rounded;
    if (log_sum_exp_residual != nullptr) {
      log_sum_exp_residual[to] = exact.residual;
    }
  }
};

}  // namespace pkg::cpu::attention
