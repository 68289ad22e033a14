#include <tuple>

#include "cuda/gemm/linear.cuh"
#include "cuda/gemm/linear_host.h"
#include "cuda/gemm/matmul_host.h"
#include "cuda/pointwise/pointwise_host.h"
#include "host/namespace.h"

namespace pkg::cuda {
namespace {

// Calls function(activation) with the device's one.
template <class Function>
void with_activation(Activation activation, Function&& function) {
  switch (activation) {
    case Activation::None:
      return function(NoActivation{});
    case Activation::Relu:
      return function(Relu{});
    case Activation::Gelu:
      return function(Gelu{});
    case Activation::GeluTanh:
      return function(GeluTanh{});
    case Activation::Silu:
      return function(Silu{});
  }
}

LinearWeight in_place(const Tensor& weight) {
  return {weight.const_data_ptr(), strides_of(weight).back(),
          column_stride_of(weight)};
}

Tensor linear(const Tensor& input, const Tensor& weight,
              const std::optional<Tensor>& bias,
              const std::optional<Text>& activation) {
  const LinearPlan plan = plan_linear(input, weight, bias, activation);
  const DeviceGuard guard(device_of(input).index);
  const Tensor output = allocate_linear_output(plan, input);
  launch_linear("linear", plan, input, in_place(weight), bias, output, nullptr);
  return output;
}

std::tuple<Tensor, Tensor> linear_forward(
    const Tensor& input, const Tensor& weight,
    const std::optional<Tensor>& bias, const std::optional<Text>& activation) {
  const LinearPlan plan = plan_linear(input, weight, bias, activation);
  const DeviceGuard guard(device_of(input).index);
  const Tensor output = allocate_linear_output(plan, input);
  const Tensor pre_activation = allocate_pre_activation(plan, input);
  launch_linear(
      "linear", plan, input, in_place(weight), bias, output,
      needs_pre_activation(plan.activation) ? &pre_activation : nullptr);
  return {output, pre_activation};
}

Tensor linear_activation_backward(const TensorView& grad,
                                  const TensorView& saved, Text name) {
  constexpr const char* kOp = "linear_activation_backward";
  const Activation activation =
      check_linear_activation_backward(grad, saved, name);
  const DeviceGuard guard(device_of(saved).index);
  const ScalarType type = dtype_of(saved);
  const Shape shape =
      broadcast_shapes(kOp, saved.sizes, grad.sizes, "saved", "grad");
  const auto [output, loop] =
      plan_pointwise<3>(shape, type, {nullptr, &saved, &grad});
  const PointwiseCall<2> call = {loop, type, output, {&saved, &grad}};
  with_activation(activation, [&](auto chosen) {
    using Chosen = decltype(chosen);
    if constexpr (!std::is_same_v<Chosen, NoActivation>) {
      run_pointwise(kOp, call, ActivationBackward<Chosen>{});
    }
  });
  return output;
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&linear>("linear");
  library.impl<&linear_forward>("linear_forward");
  library.impl<&linear_activation_backward>("linear_activation_backward");
}

}  // namespace

void launch_linear(const char* op, const LinearPlan& plan, const Tensor& input,
                   const LinearWeight& weight,
                   const std::optional<Tensor>& bias, const Tensor& output,
                   const Tensor* pre_activation) {
  check_batch_dims(op, static_cast<int64_t>(plan.batch_dims));
  with_floating_type(plan.type, [&](auto example) {
    using Element = decltype(example);
    MatmulProblem<Element, Element> problem = {};
    problem.a = static_cast<const Element*>(input.const_data_ptr());
    problem.b = static_cast<const Element*>(weight.data);
    problem.c = static_cast<Element*>(output.mutable_data_ptr());
    problem.rows = plan.rows;
    problem.columns = plan.columns;
    problem.depth = plan.inner;
    problem.a_row_stride = plan.row_stride;
    problem.a_depth_stride = plan.inner_stride;
    problem.b_depth_stride = weight.inner_stride;
    problem.b_column_stride = weight.column_stride;
    problem.batch_count = plan.batch();
    problem.batch.count = static_cast<int>(plan.batch_dims);
    for (size_t d = 0; d < plan.batch_dims; ++d) {
      problem.batch.sizes[d] = plan.batch_sizes[d];
      problem.a_batch_strides.strides[d] = plan.batch_strides[d];
    }
    with_activation(plan.activation, [&](auto activation) {
      using Epilogue = LinearEpilogue<Element, decltype(activation)>;
      const Epilogue epilogue = {
          bias ? static_cast<const Element*>(bias->const_data_ptr()) : nullptr,
          bias ? stride_of_bias(*bias) : 0,
          pre_activation
              ? static_cast<Element*>(pre_activation->mutable_data_ptr())
              : nullptr};
      launch_product(problem, epilogue, output);
    });
  });
}

}  // namespace pkg::cuda
