// The launches of a product of float32 by six of bfloat16.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "cuda/gemm/divided_host.h"
#include "cuda/gemm/precision.h"
#include "cuda/gemm/six_products.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"

namespace pkg::cuda {

// By six products, where the user has not chosen otherwise, the device has
// products of warpgroups and they take less time than multiply-adds. Returns
// what is 1, when the kernels have run, where something was left of a number:
// nothing has been made then.
template <class Epilogue>
std::optional<Tensor> launch_by_six_products(
    const MatmulProblem<float, float>& problem, const Epilogue& epilogue,
    const Tensor& output) {
  if (float32_products() != Float32Products::Six || !has_warpgroup_products()) {
    return std::nullopt;
  }
  std::optional<SplitPlans> plans = plan_splits(problem);
  if (!plans) {
    return std::nullopt;
  }
  const int64_t blocks = multiprocessor_count();
  const int64_t panels = tiles_of(problem.depth, SixProducts::kDepth);
  const SixProductsPlan plan = plan_six_products(
      problem.batch_count, problem.rows, problem.columns, panels, blocks);
  if (plan.cycles + cycles_of_splitting(plans->elements()) >=
      cycles_of_multiply_adds(problem.batch_count, problem.rows,
                              problem.columns, problem.depth, blocks)) {
    return std::nullopt;
  }
  const cudaStream_t stream = current_stream(output);
  const DeviceId device = device_of(output);
  Tensor inexact =
      empty_contiguous(std::array{int64_t{1}}, ScalarType::Int, device);
  torch::stable::zero_(inexact);
  const Tensor memory =
      empty_contiguous(std::array{SixProducts::kParts * plans->elements()},
                       ScalarType::BFloat16, device);
  auto* const parts = static_cast<bfloat16*>(memory.mutable_data_ptr());
  plans->a.operand.parts = parts;
  plans->b.operand.parts =
      parts + SixProducts::kParts * plans->a.operand.elements_of_part();
  const SplitProblem split = {
      plans->a.operand, plans->b.operand,
      static_cast<int32_t*>(inexact.mutable_data_ptr())};
  launch(split_into_bfloat16_kernel<SixProducts::kParts>,
         tiles_of(plans->elements() / kSplitNeighbours, kSplitThreads),
         kSplitThreads, stream, split);

  const BulkOperands<bfloat16> operands = {plans->a.mapped(),
                                           plans->b.mapped()};
  const TensorMap a = encode_tensor_map(operands.a.tensor);
  const TensorMap b = encode_tensor_map(operands.b.tensor);
  const LaunchShape shape = launch_shape<SixProducts>();
  const auto* const left_over =
      static_cast<const int32_t*>(inexact.const_data_ptr());
  if (plan.panels_each >= panels) {
    const auto whole = warpgroup_problem<SixProducts>(problem, operands, a, b,
                                                      panels, problem.c);
    launch(matmul_six_products_kernel<Epilogue>,
           std::min<int64_t>(whole.tiles, blocks), shape, stream, whole,
           left_over, epilogue);
    return inexact;
  }
  const int64_t splits = (panels + plan.panels_each - 1) / plan.panels_each;
  const Tensor sums = allocate_parts(problem, splits, output);
  const auto divided = warpgroup_problem<SixProducts>(
      problem, operands, a, b, plan.panels_each,
      static_cast<float*>(sums.mutable_data_ptr()));
  launch(matmul_six_products_kernel<>, std::min<int64_t>(divided.tiles, blocks),
         shape, stream, divided, left_over, KeepSums{});
  launch_sum(problem, sums, splits, epilogue, stream);
  return inexact;
}

}  // namespace pkg::cuda
