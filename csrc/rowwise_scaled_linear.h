// Checks and plan of rowwise_scaled_linear_s8s4 and _s4s4, for every device:
// rows of int8, or of int4 packed two to a byte, times a matrix of packed int4,
// in integers, and then scaled by row and by column.
#pragma once

#include <algorithm>
#include <array>
#include <optional>

#include "host/rows.h"
#include "host/tensor.h"

namespace pkg {

// Of the left operand. The right one is packed int4 in either operator.
enum class RowValues { Int8, Int4 };

// The longest rows whose sums fit in int32 whatever the values are: products of
// int8 and int4 reach (-128)(-8), those of two int4 (-8)(-8).
constexpr int64_t longest_exact_row(RowValues values) {
  const int64_t most = values == RowValues::Int8 ? 128 * 8 : 8 * 8;
  return INT32_MAX / most / 2 * 2;
}

struct RowwiseScaledLinearPlan {
  RowValues values;
  int64_t rows;     // over all leading dimensions
  int64_t columns;  // out_features
  int64_t inner;    // in_features, even
  // Sums are scaled in float64 where a scale, the bias or the output is that,
  // and otherwise in float32.
  bool in_double;
  ScalarType output_type;
  size_t leading_dims;
  std::array<int64_t, kMaxDims> output_sizes;
};

namespace detail {

inline void check_packed_int4(const char* op, const char* name,
                              const TensorView& tensor) {
  check_strided(op, name, tensor);
  const ScalarType type = dtype_of(tensor);
  PKG_CHECK(type == ScalarType::Char || type == ScalarType::Byte, op, ": ",
            name, " is ", dtype_name(type),
            "; it must be torch.int8 or torch.uint8 with two int4 values in "
            "each byte, as pkg.ops.pack_int4 returns them");
}

// (columns,), or as the scales of a weight's rows that a reduction kept or
// turned, (columns, 1) or (1, columns).
inline void check_weight_scale(const char* op, const TensorView& scale,
                               int64_t columns) {
  check_floating(op, "weight_scale", scale);
  const auto& sizes = scale.sizes;
  const bool is_row = sizes.size() == 1 && sizes[0] == columns;
  const bool is_matrix =
      sizes.size() == 2 && ((sizes[0] == columns && sizes[1] == 1) ||
                            (sizes[0] == 1 && sizes[1] == columns));
  PKG_CHECK(is_row || is_matrix, op, ": weight_scale has shape ",
            shape_text(scale), " but must have shape (", columns, ",), (",
            columns, ", 1) or (1, ", columns,
            "), one element for each row of weight");
}

inline void check_column_values(const char* op, const char* name,
                                const TensorView& tensor, int64_t columns) {
  check_floating(op, name, tensor);
  PKG_CHECK(tensor.sizes.size() == 1 && tensor.sizes[0] == columns, op, ": ",
            name, " has shape ", shape_text(tensor), " but must have shape (",
            columns, ",), one element for each row of weight");
}

inline void check_rowwise_input(const char* op, RowValues values,
                                const TensorView& input) {
  const auto& sizes = input.sizes;
  if (values == RowValues::Int8) {
    check_strided(op, "input", input);
    PKG_CHECK(dtype_of(input) == ScalarType::Char, op, ": input is ",
              dtype_name(dtype_of(input)), "; it must be torch.int8");
  } else {
    check_packed_int4(op, "input", input);
  }
  PKG_CHECK(!sizes.empty(), op,
            ": input has no dimensions; it needs at least one, of in_features");
  PKG_CHECK(sizes.size() <= kMaxDims, op, ": input has ", sizes.size(),
            " dimensions; at most ", kMaxDims, " are supported");
}

inline void check_rowwise_weight(const char* op, const TensorView& weight) {
  check_packed_int4(op, "weight", weight);
  PKG_CHECK(weight.sizes.size() == 2, op, ": weight has shape ",
            shape_text(weight),
            " but must have shape (out_features, in_features / 2)");
}

// Values in a row of input, which those of weight match.
inline int64_t check_rowwise_inner(const char* op, RowValues values,
                                   const TensorView& input,
                                   const TensorView& weight) {
  int64_t inner = 0;
  const int64_t width = input.sizes.back();
  if (values == RowValues::Int8) {
    PKG_CHECK(width % 2 == 0, op, ": input of shape ", shape_text(input),
              " has ", width,
              " elements in a row; there must be an even number of them, as "
              "weight holds two in each byte");
    inner = width;
  } else {
    inner = 2 * width;
  }
  PKG_CHECK(weight.sizes[1] == inner / 2, op, ": input of shape ",
            shape_text(input), " and weight of shape ", shape_text(weight),
            " do not match: a row of input has ", inner,
            " values, for which one of weight must have ", inner / 2,
            " bytes of two");
  PKG_CHECK(inner <= longest_exact_row(values), op, ": a row of input has ",
            inner, " values; sums are exact in int32 up to ",
            longest_exact_row(values), ", so split longer rows");
  return inner;
}

inline void check_rowwise_scales(const char* op, const TensorView& input,
                                 const TensorView& input_scale,
                                 const TensorView& weight,
                                 const TensorView& weight_scale,
                                 const std::optional<TensorView>& bias) {
  const auto leading = input.sizes.first(input.sizes.size() - 1);
  const int64_t columns = weight.sizes[0];
  check_floating(op, "input_scale", input_scale);
  PKG_CHECK(std::ranges::equal(input_scale.sizes, leading), op,
            ": input_scale has shape ", shape_text(input_scale),
            " but must have shape ", shape_text(leading),
            ", one element for each row of input");
  check_weight_scale(op, weight_scale, columns);
  check_same_device(op, "input", input, "input_scale", input_scale);
  check_same_device(op, "input", input, "weight", weight);
  check_same_device(op, "input", input, "weight_scale", weight_scale);
  if (bias) {
    check_column_values(op, "bias", *bias, columns);
    check_same_device(op, "input", input, "bias", *bias);
  }
}

}  // namespace detail

inline RowwiseScaledLinearPlan plan_rowwise_scaled_linear(
    const char* op, RowValues values, const TensorView& input,
    const TensorView& input_scale, const TensorView& weight,
    const TensorView& weight_scale, const std::optional<TensorView>& bias,
    std::optional<ScalarType> out_dtype) {
  detail::check_rowwise_input(op, values, input);
  detail::check_rowwise_weight(op, weight);
  const auto& sizes = input.sizes;
  RowwiseScaledLinearPlan plan;
  plan.values = values;
  plan.leading_dims = sizes.size() - 1;
  plan.columns = weight.sizes[0];
  plan.inner = detail::check_rowwise_inner(op, values, input, weight);
  plan.rows = product(sizes.first(plan.leading_dims));
  detail::check_rowwise_scales(op, input, input_scale, weight, weight_scale,
                               bias);
  plan.output_type = out_dtype.value_or(dtype_of(input_scale));
  PKG_CHECK(is_floating(plan.output_type), op, ": out_dtype is ",
            dtype_name(plan.output_type),
            "; supported are None (the dtype of input_scale), torch.float16, "
            "bfloat16, float32 and float64");
  plan.in_double = plan.output_type == ScalarType::Double ||
                   dtype_of(input_scale) == ScalarType::Double ||
                   dtype_of(weight_scale) == ScalarType::Double ||
                   (bias && dtype_of(*bias) == ScalarType::Double);
  std::copy_n(sizes.begin(), plan.leading_dims, plan.output_sizes.begin());
  plan.output_sizes[plan.leading_dims] = plan.columns;
  return plan;
}

// From one element of weight_scale to the next.
inline int64_t weight_scale_stride(const TensorView& weight_scale) {
  const bool is_row =
      weight_scale.sizes.size() == 2 && weight_scale.sizes[0] == 1;
  return weight_scale.strides[is_row ? 1 : 0];
}

inline Tensor allocate_rowwise_scaled_output(
    const RowwiseScaledLinearPlan& plan, const TensorView& input) {
  return empty_contiguous({plan.output_sizes.data(), plan.leading_dims + 1},
                          plan.output_type, device_of(input));
}

}  // namespace pkg
