// The launches of a product of float32 by six of bfloat16.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstdint>
#include <optional>

#include "cuda/gemm/divided_host.h"
#include "cuda/gemm/precision.h"
#include "cuda/gemm/six_products.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"

namespace pkg::cuda {

// Splits both operands; what is returned is the parts' memory. `inexact`
// becomes 1 where something is left of a number.
inline Tensor split_operands(SplitPlans& plans, const Tensor& inexact,
                             const Tensor& output) {
  const Tensor memory =
      empty_contiguous(std::array{SixProducts::kParts * plans.elements()},
                       ScalarType::BFloat16, device_of(output));
  auto* const parts = static_cast<bfloat16*>(memory.mutable_data_ptr());
  plans.a.operand.parts = parts;
  plans.b.operand.parts =
      parts + SixProducts::kParts * plans.a.operand.elements_of_part();
  const SplitProblem split = {
      plans.a.operand, plans.b.operand,
      static_cast<int32_t*>(inexact.mutable_data_ptr())};
  launch(split_into_bfloat16_kernel<SixProducts::kParts>,
         tiles_of(plans.elements() / kSplitNeighbours, kSplitThreads),
         kSplitThreads, current_stream(output), split);
  return memory;
}

// The product of operands that were split, of so many panels a part.
template <class Epilogue>
void launch_six_products(const MatmulProblem<float, float>& problem,
                         const SplitPlans& plans, int64_t panels_each,
                         const Tensor& inexact, const Epilogue& epilogue,
                         const Tensor& output) {
  const BulkOperands<bfloat16> operands = {plans.a.mapped(), plans.b.mapped()};
  const auto* const left_over =
      static_cast<const int32_t*>(inexact.const_data_ptr());
  launch_whole_or_divided<SixProducts>(
      problem, operands, panels_each, epilogue, output,
      [&]<class Kept>(const WarpgroupProblem<bfloat16, float>& tiles,
                      int64_t blocks, cudaStream_t stream, const Kept& kept) {
        launch(matmul_six_products_kernel<Kept>, blocks,
               launch_shape<SixProducts>().that_waits(), stream, tiles,
               left_over, kept);
      });
}

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
  const WarpgroupPlan plan =
      plan_six_products(problem.batch_count, problem.rows, problem.columns,
                        tiles_of(problem.depth, SixProducts::kDepth), blocks);
  if (plan.cycles + cycles_of_splitting(plans->elements()) >=
      cycles_of_multiply_adds(problem.batch_count, problem.rows,
                              problem.columns, problem.depth, blocks)) {
    return std::nullopt;
  }
  Tensor inexact = empty_contiguous(std::array{int64_t{1}}, ScalarType::Int,
                                    device_of(output));
  torch::stable::zero_(inexact);
  const Tensor parts = split_operands(*plans, inexact, output);
  launch_six_products(problem, *plans, plan.panels_each, inexact, epilogue,
                      output);
  return inexact;
}

}  // namespace pkg::cuda
