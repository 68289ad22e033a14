// Checks of int4_linear, for every device.
#pragma once

#include <optional>

#include "linear.h"
#include "tensor_core_tiled_layout.h"

namespace pkg {

struct Int4LinearPlan {
  LinearPlan linear;
  TiledLayout layout;
  int64_t group_size;
};

inline Int4LinearPlan plan_int4_linear(const TensorView& input,
                                       const TensorView& packed_w,
                                       const TensorView& scales_and_zeros,
                                       int64_t group_size,
                                       int64_t inner_k_tiles,
                                       const std::optional<TensorView>& bias) {
  constexpr const char* kOp = "int4_linear";
  const TiledLayout layout =
      plan_tensor_core_tiled_layout(kOp, packed_w, inner_k_tiles);
  check_scales_and_zeros(kOp, layout, packed_w, scales_and_zeros, group_size);
  const LinearPlan plan =
      plan_linear_input(kOp, input, layout.rows, true, Activation::None);
  check_same_device(kOp, "input", input, "packed_w", packed_w);
  PKG_CHECK(plan.inner == layout.columns, kOp, ": input of shape ",
            shape_text(input), " and packed_w of shape ", shape_text(packed_w),
            " do not match: a row of input has ", plan.inner,
            " elements and one of the weight ", layout.columns);
  check_linear_bias(kOp, input, bias, layout.rows, true);
  return {plan, layout, group_size};
}

}  // namespace pkg
