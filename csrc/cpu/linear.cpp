// linear: a matrix product whose write-back adds the bias and applies the
// activation to sums that are still in registers, before they are rounded; and
// the gradient of the activation, one pass over its argument.
//
// Operations: those of the product (cpu/gemm/matrix_product.h) and, for each
// element of the result, up to 30 for the activation; without a pass over the
// result in memory, which costs as much as a product with a few hundred
// elements a row.
#include "linear.h"

#include <tuple>

#include "cpu/gemm/linear_product.h"
#include "cpu/gemm/matrix_product.h"
#include "cpu/pointwise/activation.h"
#include "cpu/pointwise/pointwise.h"
#include "host/namespace.h"

namespace pkg::cpu {
namespace {

void run_linear(const LinearPlan& plan, const TensorView& input,
                const TensorView& weight, const std::optional<TensorView>& bias,
                const Tensor& output, const Tensor* pre_activation) {
  with_floating_type(plan.type, [&](auto example) {
    using T = decltype(example);
    const MatrixView<T> right{static_cast<const T*>(weight.const_data_ptr()),
                              strides_of(weight).back(),
                              column_stride_of(weight)};
    const auto* bias_data = prepare_bias<T>(bias, plan.columns);
    for_each_matrix<T>(
        plan, static_cast<const T*>(input.const_data_ptr()),
        static_cast<T*>(output.mutable_data_ptr()),
        pre_activation ? static_cast<T*>(pre_activation->mutable_data_ptr())
                       : nullptr,
        [&](const T* rows, T* to, T* kept, int64_t threads) {
          const MatrixView<T> left{rows, plan.row_stride, plan.inner_stride};
          matrix_product(left, right, plan.rows, plan.columns, plan.inner, to,
                         plan.columns, threads,
                         LinearEpilogue<T>{plan.activation, bias_data, kept,
                                           plan.columns});
        });
  });
}

Tensor linear(const TensorView& input, const TensorView& weight,
              const std::optional<TensorView>& bias,
              const std::optional<Text>& activation) {
  const LinearPlan plan = plan_linear(input, weight, bias, activation);
  const Tensor output = allocate_linear_output(plan, input);
  run_linear(plan, input, weight, bias, output, nullptr);
  return output;
}

std::tuple<Tensor, Tensor> linear_forward(
    const TensorView& input, const TensorView& weight,
    const std::optional<TensorView>& bias,
    const std::optional<Text>& activation) {
  const LinearPlan plan = plan_linear(input, weight, bias, activation);
  const Tensor output = allocate_linear_output(plan, input);
  const Tensor pre_activation = allocate_pre_activation(plan, input);
  run_linear(plan, input, weight, bias, output,
             needs_pre_activation(plan.activation) ? &pre_activation : nullptr);
  return {output, pre_activation};
}

template <Activation kActivation>
Tensor run_backward(const TensorView& grad, const TensorView& saved) {
  const ScalarType type = dtype_of(saved);
  const Shape shape = broadcast_shapes(
      "linear_activation_backward", saved.sizes, grad.sizes, "saved", "grad");
  const auto plan = plan_pointwise<3>(shape, type, {nullptr, &saved, &grad});
  with_floating_type(type, [&](auto example) {
    using T = decltype(example);
    run_pointwise<T>(plan.loop, destination_of(plan.output),
                     std::array{&saved, &grad},
                     ActivationGradient<kActivation>{});
  });
  return plan.output;
}

Tensor linear_activation_backward(const TensorView& grad,
                                  const TensorView& saved, Text activation) {
  switch (check_linear_activation_backward(grad, saved, activation)) {
    case Activation::Relu:
      return run_backward<Activation::Relu>(grad, saved);
    case Activation::Gelu:
      return run_backward<Activation::Gelu>(grad, saved);
    case Activation::GeluTanh:
      return run_backward<Activation::GeluTanh>(grad, saved);
    case Activation::Silu:
      return run_backward<Activation::Silu>(grad, saved);
    case Activation::None:
      break;
  }
  fail("linear_activation_backward: there is no activation");
}

PKG_IMPLEMENT(CPU, library) {
  library.impl<&linear>("linear");
  library.impl<&linear_forward>("linear_forward");
  library.impl<&linear_activation_backward>("linear_activation_backward");
}

}  // namespace
}  // namespace pkg::cpu
