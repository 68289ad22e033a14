// The product of rows of integers with a matrix of packed int4, and what
// becomes of its sums; cpu/int4/rowwise.cpp has the kernel.
#pragma once

#include <optional>

#include "rowwise_scaled_linear.h"

namespace pkg::cpu {

// Checks, allocates and runs either operator.
Tensor rowwise_scaled_linear(const char* op, RowValues values,
                             const TensorView& input,
                             const TensorView& input_scale,
                             const TensorView& weight,
                             const TensorView& weight_scale,
                             const std::optional<TensorView>& bias,
                             std::optional<ScalarType> out_dtype);

}  // namespace pkg::cpu
