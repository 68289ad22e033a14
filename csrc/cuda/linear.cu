#include <tuple>

#include "cuda/gemm/linear_host.h"
#include "cuda/pointwise/pointwise_host.h"
#include "host/namespace.h"

namespace pkg::cuda {
namespace {

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
  const auto [output, loop] = plan_binary(kOp, saved, grad, type);
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
}  // namespace pkg::cuda
