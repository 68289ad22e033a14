// The host side that linear and packed_linear share.
#pragma once

#include <optional>

#include "host/tensor.h"
#include "linear.h"

namespace pkg::cuda {

// A matrix of (in_features, out_features).
struct LinearWeight {
  const void* data;
  int64_t inner_stride;
  int64_t column_stride;
};

// The caller holds a DeviceGuard. pre_activation is null where it is not kept.
// In linear.cu: the kernels are compiled once for both.
void launch_linear(const char* op, const LinearPlan& plan, const Tensor& input,
                   const LinearWeight& weight,
                   const std::optional<Tensor>& bias, const Tensor& output,
                   const Tensor* pre_activation);

}  // namespace pkg::cuda
