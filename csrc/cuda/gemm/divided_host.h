// What the launches of divided products share: memory for the sums of the parts
// of the summed dimension, what adds them up, and the choice between a whole
// product by warpgroups and a divided one.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "cuda/gemm/matmul.cuh"
#include "cuda/gemm/warpgroup_matmul.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"
#include "host/integer_math.h"

namespace pkg::cuda {

// Memory for the sums of a divided product's parts.
template <class Input, class Output>
Tensor allocate_parts(const MatmulProblem<Input, Output>& problem,
                      int64_t splits, const Tensor& output) {
  return empty_contiguous(
      std::array{problem.batch_count, splits, problem.rows, problem.columns},
      number_type<StoredSum<Input>>(), device_of(output));
}

// Adds the parts up.
template <class Input, class Output, class Epilogue>
void launch_sum(const MatmulProblem<Input, Output>& problem,
                const Tensor& parts, int64_t splits, const Epilogue& epilogue,
                cudaStream_t stream) {
  const auto* sums =
      static_cast<const StoredSum<Input>*>(parts.const_data_ptr());
  const auto sum = sum_of(problem, sums, splits);
  launch(matmul_sum_kernel<Input, Output, Epilogue>, sum.tiles,
         LaunchShape(SumThread::kThreads).that_waits(), stream, sum, epilogue);
}

// A product by blocks of Product's warpgroups, of so many panels a part. Calls
// launch_tiles(tiles, blocks, stream, epilogue): with the problem's epilogue,
// or where there are several parts with none, and then adds them up.
template <class Product, class Number, class Input, class Output,
          class Epilogue, class LaunchTiles>
void launch_whole_or_divided(const MatmulProblem<Number, Output>& problem,
                             const BulkOperands<Input>& operands,
                             int64_t panels_each, const Epilogue& epilogue,
                             const Tensor& output, LaunchTiles&& launch_tiles) {
  using Sum = StoredSum<Number>;
  const cudaStream_t stream = current_stream(output);
  const TensorMap a = encode_tensor_map(operands.a.tensor);
  const TensorMap b = encode_tensor_map(operands.b.tensor);
  const int64_t most_blocks = multiprocessor_count();
  const int64_t panels = tiles_of(problem.depth, Product::kDepth);
  if (panels_each >= panels) {
    const auto whole =
        warpgroup_problem<Product>(problem, operands, a, b, panels, problem.c);
    launch_tiles(whole, std::min<int64_t>(whole.tiles, most_blocks), stream,
                 epilogue);
    return;
  }
  const int64_t splits = ceil_div(panels, panels_each);
  const Tensor parts = allocate_parts(problem, splits, output);
  const auto divided =
      warpgroup_problem<Product>(problem, operands, a, b, panels_each,
                                 static_cast<Sum*>(parts.mutable_data_ptr()));
  launch_tiles(divided, std::min<int64_t>(divided.tiles, most_blocks), stream,
               KeepSums{});
  launch_sum(problem, parts, splits, epilogue, stream);
}

}  // namespace pkg::cuda
