// Checks and shape arithmetic of matmul, for every device.
#pragma once

#include <algorithm>
#include <array>
#include <optional>

#include "host/tensor.h"

namespace pkg {

// A batch of products C[i] = A[i] B[i], with every operand's strides in
// elements. A 1-D operand is a matrix of one row (a) or one column (b).
struct MatmulPlan {
  ScalarType input_type;
  ScalarType output_type;
  int64_t rows;     // of a and of the result
  int64_t columns;  // of b and of the result
  int64_t inner;    // the dimension that is summed over
  int64_t a_row_stride, a_column_stride;
  int64_t b_row_stride, b_column_stride;
  // Batch dimensions, outermost first; a stride of 0 where an operand is
  // broadcast. The result is contiguous.
  size_t batch_dims;
  std::array<int64_t, kMaxDims> batch_sizes;
  std::array<int64_t, kMaxDims> a_batch_strides;
  std::array<int64_t, kMaxDims> b_batch_strides;
  std::array<int64_t, kMaxDims> output_sizes;
  size_t output_dims;

  int64_t batch() const { return product({batch_sizes.data(), batch_dims}); }
};

inline ScalarType matmul_output_type(ScalarType input,
                                     std::optional<ScalarType> out_dtype) {
  if (input == ScalarType::Char) {
    PKG_CHECK(
        out_dtype == ScalarType::Int,
        "matmul: torch.int8 inputs are summed in torch.int32 and out_dtype "
        "is ",
        out_dtype ? dtype_name(*out_dtype) : "None",
        "; pass out_dtype=torch.int32");
    return ScalarType::Int;
  }
  const ScalarType output = out_dtype.value_or(input);
  PKG_CHECK(output == input ||
                (is_half_precision(input) && output == ScalarType::Float),
            "matmul: out_dtype is ", dtype_name(output), " for inputs of ",
            dtype_name(input), "; supported are None, the inputs' own dtype",
            is_half_precision(input) ? " and torch.float32" : "");
  return output;
}

namespace detail {

inline void check_matmul_operands(const TensorView& a, const TensorView& b) {
  check_strided("matmul", "a", a);
  check_strided("matmul", "b", b);
  const ScalarType type = dtype_of(a);
  PKG_CHECK(is_floating(type) || type == ScalarType::Char, "matmul: a is ",
            dtype_name(type),
            "; supported are torch.float16, bfloat16, float32, float64, and "
            "int8 with out_dtype=torch.int32");
  PKG_CHECK(dtype_of(b) == type, "matmul: a is ", dtype_name(type),
            " but b is ", dtype_name(dtype_of(b)),
            "; convert one, both must have the same dtype");
  check_same_device("matmul", "a", a, "b", b);
}

inline void check_matmul_dimensions(const TensorView& a, const TensorView& b) {
  const size_t a_dims = sizes_of(a).size();
  const size_t b_dims = sizes_of(b).size();
  PKG_CHECK(a_dims >= 1 && b_dims >= 1, "matmul: ", a_dims == 0 ? "a" : "b",
            " has no dimensions; both operands need at least one");
  PKG_CHECK(a_dims <= kMaxDims && b_dims <= kMaxDims,
            "matmul: an operand has more than ", kMaxDims, " dimensions");
}

// Sizes and strides of one product, of the last two dimensions.
inline void plan_matrices(MatmulPlan& plan, const TensorView& a,
                          const TensorView& b) {
  const auto a_sizes = sizes_of(a);
  const auto b_sizes = sizes_of(b);
  const auto a_strides = strides_of(a);
  const auto b_strides = strides_of(b);
  const size_t a_dims = a_sizes.size();
  const size_t b_dims = b_sizes.size();
  plan.rows = a_dims == 1 ? 1 : a_sizes[a_dims - 2];
  plan.inner = a_sizes[a_dims - 1];
  plan.a_row_stride = a_dims == 1 ? 0 : a_strides[a_dims - 2];
  plan.a_column_stride = a_strides[a_dims - 1];
  const int64_t b_inner = b_dims == 1 ? b_sizes[0] : b_sizes[b_dims - 2];
  plan.columns = b_dims == 1 ? 1 : b_sizes[b_dims - 1];
  plan.b_row_stride = b_dims == 1 ? b_strides[0] : b_strides[b_dims - 2];
  plan.b_column_stride = b_dims == 1 ? 0 : b_strides[b_dims - 1];
  PKG_CHECK(plan.inner == b_inner, "matmul: a of shape ", shape_text(a),
            " and b of shape ", shape_text(b), " do not match: a has ",
            plan.inner, " columns but b has ", b_inner, " rows");
}

// The dimensions before them, broadcast.
inline void plan_batch(MatmulPlan& plan, const TensorView& a,
                       const TensorView& b) {
  const auto a_sizes = sizes_of(a);
  const auto b_sizes = sizes_of(b);
  const auto a_strides = strides_of(a);
  const auto b_strides = strides_of(b);
  const size_t a_batch = a_sizes.size() > 2 ? a_sizes.size() - 2 : 0;
  const size_t b_batch = b_sizes.size() > 2 ? b_sizes.size() - 2 : 0;
  plan.batch_dims = std::max(a_batch, b_batch);
  for (size_t i = 0; i < plan.batch_dims; ++i) {  // from the last dimension
    const size_t to = plan.batch_dims - 1 - i;
    const int64_t a_size = i < a_batch ? a_sizes[a_batch - 1 - i] : 1;
    const int64_t b_size = i < b_batch ? b_sizes[b_batch - 1 - i] : 1;
    PKG_CHECK(a_size == b_size || a_size == 1 || b_size == 1,
              "matmul: the batch dimensions of a, shape ", shape_text(a),
              ", and b, shape ", shape_text(b), ", do not broadcast: ", a_size,
              " and ", b_size, " meet in dimension ", to);
    plan.batch_sizes[to] = a_size == 1 ? b_size : a_size;
    plan.a_batch_strides[to] = a_size == 1 ? 0 : a_strides[a_batch - 1 - i];
    plan.b_batch_strides[to] = b_size == 1 ? 0 : b_strides[b_batch - 1 - i];
    plan.output_sizes[to] = plan.batch_sizes[to];
  }
}

}  // namespace detail

inline MatmulPlan plan_matmul(const TensorView& a, const TensorView& b,
                              std::optional<ScalarType> out_dtype) {
  MatmulPlan plan;
  detail::check_matmul_operands(a, b);
  plan.input_type = dtype_of(a);
  plan.output_type = matmul_output_type(plan.input_type, out_dtype);
  detail::check_matmul_dimensions(a, b);
  detail::plan_matrices(plan, a, b);
  detail::plan_batch(plan, a, b);
  plan.output_dims = plan.batch_dims;
  if (sizes_of(a).size() > 1) {
    plan.output_sizes[plan.output_dims++] = plan.rows;
  }
  if (sizes_of(b).size() > 1) {
    plan.output_sizes[plan.output_dims++] = plan.columns;
  }
  return plan;
}

// Where every batch of a multiplies the same b and the rows of a follow one
// another through the batches, the batch is one taller matrix.
inline void fold_batch_into_rows(MatmulPlan& plan) {
  int64_t rows = plan.rows;
  int64_t row_stride = plan.a_row_stride;
  for (size_t d = plan.batch_dims; d-- > 0;) {
    if (plan.batch_sizes[d] == 1) {
      continue;
    }
    if (rows == 1) {
      row_stride = plan.a_batch_strides[d];  // that of one row means nothing
    }
    if (plan.b_batch_strides[d] != 0 ||
        plan.a_batch_strides[d] != rows * row_stride) {
      return;
    }
    rows *= plan.batch_sizes[d];
  }
  plan.rows = rows;
  plan.a_row_stride = row_stride;
  plan.batch_dims = 0;
}

inline Tensor allocate_matmul_output(const MatmulPlan& plan,
                                     const TensorView& a) {
  return empty_contiguous({plan.output_sizes.data(), plan.output_dims},
                          plan.output_type, device_of(a));
}

}  // namespace pkg
