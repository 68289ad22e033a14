// The host side that rowwise_scaled_linear_s8s4 and _s4s4 share.
#pragma once

#include <array>
#include <optional>

#include "cuda/gemm/matmul.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/rows.h"
#include "cuda/int4/rowwise.cuh"
#include "cuda/int4/rowwise_cutlass.h"
#include "cuda/int4/rowwise_few_rows.cuh"
#include "cuda/int4/rowwise_scale.cuh"
#include "cuda/int4/rowwise_scale_host.h"
#include "cuda/int4/rowwise_warpgroups_host.h"
#include "cuda/pointwise/pointwise_host.h"
#include "rowwise_scaled_linear.h"

namespace pkg::cuda {

inline FloatingValues floating_values(const TensorView& tensor) {
  return {tensor.const_data_ptr(), element_type(tensor.dtype)};
}

// The package's own kernels for few rows, and those that take any strides. The
// caller holds a DeviceGuard; divide() is done.
template <bool kPacked>
void launch_rowwise(RowwiseScaledProblem<kPacked> problem,
                    const Tensor& output) {
  using Product = RowwiseProduct<kPacked>;
  const cudaStream_t stream = current_stream(output);
  const bool few_rows = has_few_rows(problem);
  if (few_rows) {
    problem.splits = 1;  // which its warps do themselves
  } else {
    problem.divide(panels_of_split(problem.tiles, problem.slices(),
                                   int64_t{2} * multiprocessor_count()));
  }
  Tensor parts;
  if (problem.has_parts()) {
    parts = allocate_parts(problem, output);
  }
  if (few_rows) {
    launch(rowwise_few_rows_kernel<kPacked>,
           tiles_of(problem.columns, kFewColumns), kFewThreads, stream,
           problem);
  } else {
    launch(rowwise_scaled_linear_kernel<kPacked>,
           problem.tiles * problem.splits, launch_shape<Product>(), stream,
           problem);
  }
  if (problem.has_parts()) {
    launch_scale(problem, stream);
  }
}

template <bool kPacked>
Tensor rowwise_scaled_linear(const char* op, const Tensor& input_tensor,
                             const Tensor& input_scale_tensor,
                             const Tensor& weight_tensor,
                             const Tensor& weight_scale_tensor,
                             const std::optional<Tensor>& bias_tensor,
                             std::optional<ScalarType> out_dtype) {
  const TensorView input(input_tensor);
  const TensorView input_scale(input_scale_tensor);
  const TensorView weight(weight_tensor);
  const TensorView weight_scale(weight_scale_tensor);
  std::optional<TensorView> bias;
  if (bias_tensor) {
    bias.emplace(*bias_tensor);
  }
  const RowwiseScaledLinearPlan plan = plan_rowwise_scaled_linear(
      op, kPacked ? RowValues::Int4 : RowValues::Int8, input, input_scale,
      weight, weight_scale, bias, out_dtype);
  const DeviceGuard guard(device_of(input_tensor).index);
  const Tensor output = allocate_rowwise_scaled_output(plan, input);
  RowwiseScaledProblem<kPacked> problem = {};
  problem.input = static_cast<const int8_t*>(input.const_data_ptr());
  problem.input_stride = input.strides[plan.leading_dims];
  merge_rows(op, plan.leading_dims, input, input_scale, problem.rows_of,
             problem.input_strides, problem.scale_strides);
  problem.input_scale = floating_values(input_scale);
  problem.weight = static_cast<const int8_t*>(weight.const_data_ptr());
  problem.weight_column_stride = weight.strides[0];
  problem.weight_stride = weight.strides[1];
  problem.weight_scale = floating_values(weight_scale);
  problem.weight_scale_stride = weight_scale_stride(weight_scale);
  if (bias) {
    problem.bias = floating_values(*bias);
    problem.bias_stride = bias->strides[0];
  }
  problem.output = output.mutable_data_ptr();
  problem.output_type = element_type(plan.output_type);
  problem.in_double = plan.in_double;
  problem.rows = plan.rows;
  problem.columns = plan.columns;
  problem.bytes = plan.inner / 2;
  problem.divide(problem.slices());
  if (!launch_by_warpgroups(problem, output) &&
      (has_few_rows(problem) ||
       !launch_cutlass(problem, current_stream(output)))) {
    launch_rowwise(problem, output);
  }
  return output;
}

}  // namespace pkg::cuda
