// Packed weights: their shape on every device, and the checks of the operators
// that write and read them.
#pragma once

#include "linear.h"

namespace pkg {

// A packed weight is a contiguous tensor of (out_features + kPackedRows,
// in_features + kPackedColumns) elements of the weight's dtype: its shape tells
// what it was packed from, and leaves room for what the kernels of any device
// pad it with. What lies where in it is the kernels' own business.
inline constexpr int64_t kPackedRows = 64;
inline constexpr int64_t kPackedColumns = 4;

inline void check_pack_linear_weight(const TensorView& weight) {
  constexpr const char* kOp = "pack_linear_weight";
  check_floating(kOp, "weight", weight);
  PKG_CHECK(sizes_of(weight).size() == 2, kOp, ": weight has shape ",
            shape_text(weight),
            " but must have shape (out_features, in_features)");
}

// With every element zero, so that padding is.
inline Tensor allocate_packed_weight(const TensorView& weight) {
  const auto sizes = sizes_of(weight);
  const std::array packed{sizes[0] + kPackedRows, sizes[1] + kPackedColumns};
  Tensor result = empty_contiguous(packed, dtype_of(weight), device_of(weight));
  return torch::stable::zero_(result);
}

inline LinearPlan plan_packed_linear(const TensorView& input,
                                     const TensorView& packed_weight,
                                     int64_t out_features,
                                     const std::optional<TensorView>& bias,
                                     const std::optional<Text>& activation) {
  constexpr const char* kOp = "packed_linear";
  PKG_CHECK(out_features >= 0, kOp, ": out_features is ", out_features,
            "; it must not be negative");
  check_floating(kOp, "packed_weight", packed_weight);
  const LinearPlan plan = plan_linear_input(
      kOp, input, out_features, true, activation_of_name(kOp, activation));
  check_same_device(kOp, "input", input, "packed_weight", packed_weight);
  PKG_CHECK(dtype_of(packed_weight) == plan.type, kOp, ": packed_weight is ",
            dtype_name(dtype_of(packed_weight)), " but input is ",
            dtype_name(plan.type),
            "; pack the weight again in the dtype of input");
  const std::array packed{out_features + kPackedRows,
                          plan.inner + kPackedColumns};
  const auto sizes = sizes_of(packed_weight);
  const auto strides = strides_of(packed_weight);
  PKG_CHECK(std::ranges::equal(sizes, packed) && strides[0] == packed[1] &&
                strides[1] == 1,
            kOp, ": packed_weight has shape ", shape_text(packed_weight),
            ", and for out_features ", out_features, " and ", plan.inner,
            " elements in a row of input it must be a contiguous tensor of "
            "shape ",
            shape_text(packed), ", as pack_linear_weight returns it");
  check_linear_bias(kOp, input, bias, out_features, true);
  return plan;
}

}  // namespace pkg
