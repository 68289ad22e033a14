// Checks of muladd, for every device.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>

#include "pointwise.h"

namespace pkg {

inline void check_muladd(const TensorView& a, const TensorView& b) {
  check_binary("muladd", a, b);
}

// torch.get_default_dtype(), which the stable ABI only shows in what a factory
// makes when no dtype is given.
inline ScalarType default_dtype() {
  std::array<StableIValue, 6> stack{
      torch::stable::detail::from(std::vector<int64_t>{}),
      torch::stable::detail::from(std::nullopt),
      torch::stable::detail::from(std::nullopt),
      torch::stable::detail::from(std::nullopt),
      torch::stable::detail::from(std::nullopt),
      torch::stable::detail::from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(
      "aten::empty", "memory_format", stack.data(), TORCH_ABI_VERSION));
  return dtype_of(torch::stable::detail::to<Tensor>(stack[0]));
}

// a * b + c with a float c is floating whatever a and b are.
inline ScalarType muladd_result_type(const TensorView& a, const TensorView& b) {
  const ScalarType type = result_type(a, b);
  return is_floating(type) ? type : default_dtype();
}

}  // namespace pkg
