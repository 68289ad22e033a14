// Checks and shape arithmetic of linear and its parts, for every device.
#pragma once

#include <algorithm>
#include <array>
#include <optional>

#include "activation.h"
#include "host/alike.h"
#include "host/pointwise.h"
#include "host/tensor.h"
#include "host/text.h"

namespace pkg {

inline Activation activation_of_name(const char* op,
                                     const std::optional<Text>& name) {
  if (!name) {
    return Activation::None;
  }
  if (name->value == "relu") {
    return Activation::Relu;
  }
  if (name->value == "gelu") {
    return Activation::Gelu;
  }
  if (name->value == "gelu_tanh") {
    return Activation::GeluTanh;
  }
  if (name->value == "silu") {
    return Activation::Silu;
  }
  fail(op, ": activation is '", name->value,
       "'; supported are None, 'relu', 'gelu', 'gelu_tanh' and 'silu'");
}

// Whether the derivative needs the activation's argument; relu's is known from
// its result.
inline bool needs_pre_activation(Activation activation) {
  return activation != Activation::None && activation != Activation::Relu;
}

// input (rows of `inner` elements) times the transpose of weight. The leading
// dimensions of input are rows as far as one stride leads through them, and
// batch dimensions beyond that, outermost first. The result is contiguous.
struct LinearPlan {
  ScalarType type;
  Activation activation;
  int64_t rows;
  int64_t columns;  // out_features; 1 for a weight of one dimension
  int64_t inner;    // in_features
  int64_t row_stride;
  int64_t inner_stride;
  size_t batch_dims;
  std::array<int64_t, kMaxDims> batch_sizes;
  std::array<int64_t, kMaxDims> batch_strides;
  std::array<int64_t, kMaxDims> output_sizes;
  size_t output_dims;

  int64_t batch() const { return product({batch_sizes.data(), batch_dims}); }
};

// The part of the plan that input and the number of output features decide;
// `has_columns` says whether the result has a dimension for these.
inline LinearPlan plan_linear_input(const char* op, const TensorView& input,
                                    int64_t columns, bool has_columns,
                                    Activation activation) {
  check_floating(op, "input", input);
  const auto sizes = sizes_of(input);
  const auto strides = strides_of(input);
  PKG_CHECK(!sizes.empty(), op,
            ": input has no dimensions; it needs at least one, of in_features");
  PKG_CHECK(sizes.size() <= kMaxDims, op, ": input has ", sizes.size(),
            " dimensions; at most ", kMaxDims, " are supported");
  LinearPlan plan;
  plan.type = dtype_of(input);
  plan.activation = activation;
  plan.columns = columns;
  const size_t leading = sizes.size() - 1;
  plan.inner = sizes[leading];
  plan.inner_stride = strides[leading];
  plan.rows = 1;
  plan.row_stride = 0;
  plan.batch_dims = 0;
  for (size_t d = leading; d-- > 0;) {
    if (sizes[d] == 1) {
      continue;
    }
    if (plan.batch_dims == 0 &&
        (plan.rows == 1 || strides[d] == plan.rows * plan.row_stride)) {
      plan.row_stride = plan.rows == 1 ? strides[d] : plan.row_stride;
      plan.rows *= sizes[d];
    } else {
      plan.batch_sizes[plan.batch_dims] = sizes[d];
      plan.batch_strides[plan.batch_dims++] = strides[d];
    }
  }
  std::reverse(plan.batch_sizes.begin(),
               plan.batch_sizes.begin() + plan.batch_dims);
  std::reverse(plan.batch_strides.begin(),
               plan.batch_strides.begin() + plan.batch_dims);
  std::copy_n(sizes.begin(), leading, plan.output_sizes.begin());
  plan.output_dims = leading;
  if (has_columns) {
    plan.output_sizes[plan.output_dims++] = columns;
  }
  return plan;
}

inline void check_linear_bias(const char* op, const TensorView& input,
                              const std::optional<TensorView>& bias,
                              int64_t columns, bool has_columns) {
  if (!bias) {
    return;
  }
  check_floating(op, "bias", *bias);
  check_same_device(op, "input", input, "bias", *bias);
  PKG_CHECK(dtype_of(*bias) == dtype_of(input), op, ": bias is ",
            dtype_name(dtype_of(*bias)), " but input is ",
            dtype_name(dtype_of(input)), "; convert one of them");
  const auto sizes = sizes_of(*bias);
  if (has_columns) {
    PKG_CHECK(sizes.size() == 1 && sizes[0] == columns, op, ": bias has shape ",
              shape_text(*bias), " but must have shape (", columns,
              ",), one element for each output feature");
  } else {
    PKG_CHECK(sizes.empty(), op, ": bias has shape ", shape_text(*bias),
              " but must have no dimensions, as weight has only one");
  }
}

inline LinearPlan plan_linear(const TensorView& input, const TensorView& weight,
                              const std::optional<TensorView>& bias,
                              const std::optional<Text>& activation) {
  constexpr const char* kOp = "linear";
  check_floating(kOp, "weight", weight);
  const auto sizes = sizes_of(weight);
  PKG_CHECK(sizes.size() == 1 || sizes.size() == 2, kOp, ": weight has shape ",
            shape_text(weight),
            " but must have shape (out_features, in_features) or "
            "(in_features,)");
  const bool has_columns = sizes.size() == 2;
  const LinearPlan plan =
      plan_linear_input(kOp, input, has_columns ? sizes[0] : 1, has_columns,
                        activation_of_name(kOp, activation));
  check_same_device(kOp, "input", input, "weight", weight);
  PKG_CHECK(dtype_of(weight) == plan.type, kOp, ": weight is ",
            dtype_name(dtype_of(weight)), " but input is ",
            dtype_name(plan.type), "; convert one of them");
  PKG_CHECK(sizes.back() == plan.inner, kOp, ": input of shape ",
            shape_text(input), " and weight of shape ", shape_text(weight),
            " do not match: a row of input has ", plan.inner,
            " elements and one of weight ", sizes.back());
  check_linear_bias(kOp, input, bias, plan.columns, has_columns);
  return plan;
}

// The stride from one output feature to the next in weight.
inline int64_t column_stride_of(const TensorView& weight) {
  return sizes_of(weight).size() == 2 ? strides_of(weight)[0] : 0;
}

inline int64_t stride_of_bias(const TensorView& bias) {
  return sizes_of(bias).empty() ? 0 : strides_of(bias)[0];
}

inline Tensor allocate_linear_output(const LinearPlan& plan,
                                     const TensorView& input) {
  return empty_contiguous({plan.output_sizes.data(), plan.output_dims},
                          plan.type, device_of(input));
}

// The activation's argument, of the output's shape, or nothing where the
// derivative does not need it.
inline Tensor allocate_pre_activation(const LinearPlan& plan,
                                      const TensorView& input) {
  if (needs_pre_activation(plan.activation)) {
    return allocate_linear_output(plan, input);
  }
  constexpr int64_t kEmpty[] = {0};
  return empty_contiguous(kEmpty, plan.type, device_of(input));
}

// grad times the derivative, given the activation's argument or, for relu, its
// result.
inline Activation check_linear_activation_backward(const TensorView& grad,
                                                   const TensorView& saved,
                                                   const Text& activation) {
  constexpr const char* kOp = "linear_activation_backward";
  check_floating(kOp, "grad", grad);
  check_floating(kOp, "saved", saved);
  check_same_device(kOp, "saved", saved, "grad", grad);
  check_same_dtype(kOp, "grad", grad, "saved", saved);
  check_same_shape(kOp, "grad", grad, "saved", saved);
  return activation_of_name(kOp, activation);
}

}  // namespace pkg
