// The host side that linear and packed_linear share.
#pragma once

#include <optional>

#include "cuda/gemm/linear.cuh"
#include "cuda/gemm/matmul_host.h"
#include "linear.h"

namespace pkg::cuda {

// A matrix of (in_features, out_features).
struct LinearWeight {
  const void* data;
  int64_t inner_stride;
  int64_t column_stride;
};

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

// The caller holds a DeviceGuard. pre_activation is null where it is not kept.
inline void launch_linear(const char* op, const LinearPlan& plan,
                          const Tensor& input, const LinearWeight& weight,
                          const std::optional<Tensor>& bias,
                          const Tensor& output, const Tensor* pre_activation) {
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
