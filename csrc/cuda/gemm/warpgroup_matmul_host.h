// The launches of a product by warpgroups.
#pragma once

#include <cstdint>
#include <optional>

#include "cuda/gemm/divided_host.h"
#include "cuda/gemm/warpgroup_matmul.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"

namespace pkg::cuda {

// The product of operands that the copy engine takes, be they the problem's or
// made of them, of so many panels a part.
template <int kTileColumns, class Number, class Input, class Output,
          class Epilogue>
void launch_warpgroups(const MatmulProblem<Number, Output>& problem,
                       const BulkOperands<Input>& operands, int64_t panels_each,
                       const Epilogue& epilogue, const Tensor& output) {
  using Product = WarpgroupProduct<Input, kTileColumns>;
  launch_whole_or_divided<Product>(
      problem, operands, panels_each, epilogue, output,
      []<class Result, class Kept>(const WarpgroupProblem<Input, Result>& tiles,
                                   int64_t blocks, cudaStream_t stream,
                                   const Kept& kept) {
        launch(matmul_warpgroup_kernel<Input, Result, kTileColumns, Kept>,
               blocks, launch_shape<Product>(), stream, tiles, kept);
      });
}

// Of operands that are multiplied as `Input`.
template <class Input, class Number, class Output>
WarpgroupPlan plan_warpgroups(const MatmulProblem<Number, Output>& problem) {
  return plan_warpgroups(
      problem.batch_count, problem.rows, problem.columns,
      tiles_of(problem.depth, WarpgroupProduct<Input, 128>::kDepth),
      multiprocessor_count());
}

template <class Number, class Input, class Output, class Epilogue>
void launch_warpgroups(const MatmulProblem<Number, Output>& problem,
                       const BulkOperands<Input>& operands,
                       const WarpgroupPlan& plan, const Epilogue& epilogue,
                       const Tensor& output) {
  if (plan.tile_columns == 256) {
    launch_warpgroups<256>(problem, operands, plan.panels_each, epilogue,
                           output);
  } else {
    launch_warpgroups<128>(problem, operands, plan.panels_each, epilogue,
                           output);
  }
}

// Where the device has the products of warpgroups and the operands can be
// copied in bulk; returns whether.
template <class Input, class Output, class Epilogue>
bool launch_by_warpgroups(const MatmulProblem<Input, Output>& problem,
                          const Epilogue& epilogue, const Tensor& output) {
  if (!has_warpgroup_products()) {
    return false;
  }
  const std::optional<BulkOperands<Input>> operands = bulk_operands(problem);
  if (!operands) {
    return false;
  }
  launch_warpgroups(problem, *operands, plan_warpgroups<Input>(problem),
                    epilogue, output);
  return true;
}

}  // namespace pkg::cuda
