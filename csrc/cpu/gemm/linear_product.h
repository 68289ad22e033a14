// What linear and packed_linear share: the bias as the epilogue reads it, and
// the loop over an input whose rows are not those of one matrix.
#pragma once

#include <algorithm>
#include <optional>

#include "cpu/gemm/activation.h"
#include "cpu/gemm/batch.h"
#include "cpu/runtime/workspace.h"
#include "linear.h"

namespace pkg::cpu {

// Calls product(input, output, pre_activation, threads) for each matrix of
// rows; pre_activation is null where it is not kept.
template <class T, class Product>
void for_each_matrix(const LinearPlan& plan, const T* input, T* output,
                     T* pre_activation, const Product& product) {
  const int64_t matrix = plan.rows * plan.columns;
  for_each_product(
      plan.batch(), matrix * plan.inner, [&](int64_t index, int64_t threads) {
        const int64_t offset =
            strided_offset({plan.batch_sizes.data(), plan.batch_dims},
                           plan.batch_strides, index);
        product(input + offset, output + index * matrix,
                pre_activation ? pre_activation + index * matrix : nullptr,
                threads);
      });
}

// The bias in the type of the sums, with a vector of zeros behind it; null
// without one. Valid until the next call in this thread.
template <class T>
const simd::Compute<T>* prepare_bias(const std::optional<TensorView>& bias,
                                     int64_t columns) {
  using Sum = simd::Compute<T>;
  if (!bias) {
    return nullptr;
  }
  Sum* values = Workspace::of_this_thread<Slot::Bias>().template request<Sum>(
      columns + simd::kLanes<Sum>);
  const T* from = static_cast<const T*>(bias->const_data_ptr());
  const int64_t stride = stride_of_bias(*bias);
  for (int64_t i = 0; i < columns; ++i) {
    values[i] = static_cast<Sum>(from[i * stride]);
  }
  std::fill_n(values + columns, simd::kLanes<Sum>, Sum{});
  return values;
}

}  // namespace pkg::cpu
