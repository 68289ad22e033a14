// Checks and shape arithmetic of lltm and its parts, for every device.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>
#include <tuple>

#include "host/tensor.h"

namespace pkg {

inline constexpr int64_t kLltmGates = 3;

// A cell, or a sequence of `steps` of them. Matrices of all gates have
// kLltmGates * hidden columns: those of the input gate, of the output gate and
// of the candidate cell.
struct LltmPlan {
  ScalarType type;
  bool is_sequence;  // whether tensors have a dimension of steps
  int64_t steps;
  int64_t batch;
  int64_t features;
  int64_t hidden;

  int64_t gates() const { return kLltmGates * hidden; }
  int64_t inner() const { return hidden + features; }
  int64_t rows() const { return steps * batch; }
};

// Which gradients lltm_backward computes beside those that cost next to
// nothing.
struct LltmNeeds {
  bool input;
  bool weights;
  bool old_h;
};

namespace detail {

inline void check_lltm_shape(const char* op, const char* name,
                             const TensorView& tensor,
                             std::initializer_list<int64_t> shape,
                             const char* meaning) {
  PKG_CHECK(std::ranges::equal(sizes_of(tensor), shape), op, ": ", name,
            " has shape ", shape_text(tensor), " but must have shape ",
            shape_text({shape.begin(), shape.size()}), ", ", meaning);
}

inline void check_lltm_operand(const char* op, const TensorView& input,
                               const char* name, const TensorView& tensor) {
  check_floating(op, name, tensor);
  check_same_device(op, "input", input, name, tensor);
  PKG_CHECK(dtype_of(tensor) == dtype_of(input), op, ": ", name, " is ",
            dtype_name(dtype_of(tensor)), " but input is ",
            dtype_name(dtype_of(input)), "; convert one of them");
}

// By input, weights and old_h, which all operators here have.
inline LltmPlan plan_lltm_sizes(const char* op, const TensorView& input,
                                const TensorView& weights,
                                const TensorView& old_h, bool takes_cell,
                                bool takes_sequence) {
  check_floating(op, "input", input);
  check_lltm_operand(op, input, "weights", weights);
  check_lltm_operand(op, input, "old_h", old_h);
  const auto sizes = sizes_of(input);
  PKG_CHECK((takes_cell && sizes.size() == 2) ||
                (takes_sequence && sizes.size() == 3),
            op, ": input has shape ", shape_text(input), " but must have ",
            takes_cell ? "two dimensions, (batch, input_features)" : "",
            takes_cell && takes_sequence ? ", or " : "",
            takes_sequence ? "three, (steps, batch, input_features)" : "");
  PKG_CHECK(sizes_of(old_h).size() == 2, op, ": old_h has shape ",
            shape_text(old_h),
            " but must have two dimensions, (batch, state_size)");
  LltmPlan plan;
  plan.type = dtype_of(input);
  plan.is_sequence = sizes.size() == 3;
  plan.steps = plan.is_sequence ? sizes[0] : 1;
  plan.batch = sizes[sizes.size() - 2];
  plan.features = sizes.back();
  plan.hidden = sizes_of(old_h)[1];
  check_lltm_shape(op, "old_h", old_h, {plan.batch, plan.hidden},
                   "(batch, state_size), with the batch of input");
  check_lltm_shape(op, "weights", weights, {plan.gates(), plan.inner()},
                   "(3 * state_size, state_size + input_features)");
  return plan;
}

}  // namespace detail

inline LltmPlan plan_lltm(const char* op, const TensorView& input,
                          const TensorView& weights, const TensorView& bias,
                          const TensorView& old_h, const TensorView& old_cell,
                          bool takes_cell, bool takes_sequence) {
  const LltmPlan plan = detail::plan_lltm_sizes(op, input, weights, old_h,
                                                takes_cell, takes_sequence);
  detail::check_lltm_operand(op, input, "bias", bias);
  detail::check_lltm_operand(op, input, "old_cell", old_cell);
  const auto bias_sizes = sizes_of(bias);
  PKG_CHECK((bias_sizes.size() == 1 && bias_sizes[0] == plan.gates()) ||
                (bias_sizes.size() == 2 && bias_sizes[0] == 1 &&
                 bias_sizes[1] == plan.gates()),
            op, ": bias has shape ", shape_text(bias), " but must have shape (",
            plan.gates(), ",) or (1, ", plan.gates(),
            "), one element for each gate of each of the ", plan.hidden,
            " states");
  detail::check_lltm_shape(op, "old_cell", old_cell, {plan.batch, plan.hidden},
                           "(batch, state_size), as old_h");
  return plan;
}

inline LltmPlan plan_lltm_cell(const TensorView& input,
                               const TensorView& weights,
                               const TensorView& bias, const TensorView& old_h,
                               const TensorView& old_cell) {
  return plan_lltm("lltm", input, weights, bias, old_h, old_cell, true, false);
}

inline LltmPlan plan_lltm_sequence(const TensorView& input,
                                   const TensorView& weights,
                                   const TensorView& bias,
                                   const TensorView& old_h,
                                   const TensorView& old_cell) {
  return plan_lltm("lltm_sequence", input, weights, bias, old_h, old_cell,
                   false, true);
}

inline LltmPlan plan_lltm_forward(const TensorView& input,
                                  const TensorView& weights,
                                  const TensorView& bias,
                                  const TensorView& old_h,
                                  const TensorView& old_cell) {
  return plan_lltm("lltm_forward", input, weights, bias, old_h, old_cell, true,
                   true);
}

// What lltm_forward gave, and gradients of it, of which any may be missing.
inline LltmPlan plan_lltm_backward(
    const std::optional<TensorView>& grad_hidden,
    const std::optional<TensorView>& grad_cells,
    const std::optional<TensorView>& grad_gates, const TensorView& gates,
    const TensorView& hidden, const TensorView& cells, const TensorView& input,
    const TensorView& weights, const TensorView& old_h) {
  constexpr const char* kOp = "lltm_backward";
  const LltmPlan plan =
      detail::plan_lltm_sizes(kOp, input, weights, old_h, true, true);
  const auto check = [&](const char* name, const TensorView& tensor,
                         int64_t columns) {
    detail::check_lltm_operand(kOp, input, name, tensor);
    const char* words = columns == plan.hidden
                            ? "a state for each row of input"
                            : "all gates for each row of input";
    if (plan.is_sequence) {
      detail::check_lltm_shape(kOp, name, tensor,
                               {plan.steps, plan.batch, columns}, words);
    } else {
      detail::check_lltm_shape(kOp, name, tensor, {plan.batch, columns}, words);
    }
  };
  check("gates", gates, plan.gates());
  check("hidden", hidden, plan.hidden);
  check("cells", cells, plan.hidden);
  if (grad_hidden) {
    check("grad_hidden", *grad_hidden, plan.hidden);
  }
  if (grad_cells) {
    check("grad_cells", *grad_cells, plan.hidden);
  }
  if (grad_gates) {
    check("grad_gates", *grad_gates, plan.gates());
  }
  return plan;
}

// A result with `columns` for each row of input.
inline Tensor allocate_lltm_rows(const LltmPlan& plan, int64_t columns,
                                 DeviceId device) {
  const std::array sizes{plan.steps, plan.batch, columns};
  return empty_contiguous(
      std::span<const int64_t>(sizes).subspan(plan.is_sequence ? 0 : 1),
      plan.type, device);
}

// A result of a shape of its own, or an empty one where it is not needed.
inline Tensor allocate_lltm(const LltmPlan& plan,
                            std::initializer_list<int64_t> shape, bool needed,
                            DeviceId device) {
  constexpr int64_t kEmpty[] = {0};
  if (!needed) {
    return empty_contiguous(kEmpty, plan.type, device);
  }
  return empty_contiguous({shape.begin(), shape.size()}, plan.type, device);
}

struct LltmGradients {
  Tensor input;
  Tensor weights;
  Tensor bias;  // of one dimension
  Tensor old_h;
  Tensor old_cell;

  LltmGradients(const LltmPlan& plan, const LltmNeeds& needs, DeviceId device)
      : input(needs.input ? allocate_lltm_rows(plan, plan.features, device)
                          : allocate_lltm(plan, {0}, false, device)),
        weights(allocate_lltm(plan, {plan.gates(), plan.inner()}, needs.weights,
                              device)),
        bias(allocate_lltm(plan, {plan.gates()}, true, device)),
        old_h(allocate_lltm(plan, {plan.batch, plan.hidden}, needs.old_h,
                            device)),
        old_cell(allocate_lltm(plan, {plan.batch, plan.hidden}, true, device)) {
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> all() const {
    return {input, weights, bias, old_h, old_cell};
  }
};

// The strides of a tensor with a row of columns for each step and batch index.
struct LltmStrides {
  int64_t step;
  int64_t row;
  int64_t column;
};

// Of a tensor of two dimensions, or of three with steps first.
inline LltmStrides lltm_strides(const TensorView& tensor) {
  const auto strides = strides_of(tensor);
  const size_t dims = strides.size();
  return {dims == 3 ? strides[0] : 0, strides[dims - 2], strides[dims - 1]};
}

}  // namespace pkg
