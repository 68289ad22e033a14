// The launches of a product of float32 in TF32 by warpgroups.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "cuda/gemm/tf32_products.cuh"
#include "cuda/gemm/warpgroup_matmul_host.h"
#include "cuda/host/launch.h"

namespace pkg::cuda {

// Transposes the operands that need it, into memory that is returned.
inline std::optional<Tensor> transpose_operands(Tf32Operands& operands,
                                                const Tensor& output) {
  const int64_t elements = operands.transposed_elements();
  if (elements == 0) {
    return std::nullopt;
  }
  const Tensor memory = empty_contiguous(
      std::array{elements}, number_type<float>(), device_of(output));
  operands.transpose_into(static_cast<Tf32*>(memory.mutable_data_ptr()),
                          [&](const TransposeProblem<uint32_t>& problem) {
                            launch(transpose_kernel<uint32_t>,
                                   problem.tile_count(), kTransposeThreads,
                                   current_stream(output), problem);
                          });
  return memory;
}

// By warpgroups, where the device has their products, their operands are such
// as the copy engine takes, or transposes of such, and that takes less time
// than products by warps; returns whether.
template <class Epilogue>
bool launch_tf32_by_warpgroups(const MatmulProblem<float, float>& problem,
                               const Epilogue& epilogue, const Tensor& output) {
  if (!has_warpgroup_products()) {
    return false;
  }
  std::optional<Tf32Operands> operands =
      tf32_operands(multiplied_as<Tf32>(problem, problem.c));
  if (!operands) {
    return false;
  }
  const WarpgroupPlan plan = plan_warpgroups<Tf32>(problem);
  if (plan.cycles + cycles_of_transposing(operands->transposed_elements()) >=
      cycles_of_warps(problem.batch_count, problem.rows, problem.columns,
                      problem.depth, multiprocessor_count())) {
    return false;
  }
  const std::optional<Tensor> transposed =
      transpose_operands(*operands, output);
  launch_warpgroups(problem,
                    BulkOperands<Tf32>{operands->a.bulk(), operands->b.bulk()},
                    plan, epilogue, output);
  return true;
}

}  // namespace pkg::cuda
