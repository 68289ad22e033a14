// The launches of a product, whole or divided, that matmul and linear share.
#pragma once

#include <array>

#include "cuda/gemm/matmul.cuh"
#include "cuda/host/launch.h"

namespace pkg::cuda {

// The caller holds a DeviceGuard. The output is written whole.
template <class Input, class Output, class Epilogue>
void launch_product(MatmulProblem<Input, Output> problem,
                    const Epilogue& epilogue, const Tensor& output) {
  using Product = BlockProduct<Input>;
  using Sum = StoredSum<Input>;
  const LaunchShape shape = launch_shape<Product>();
  const cudaStream_t stream = current_stream(output);
  const int64_t tiles = problem.count_tiles();
  const int64_t panels = tiles_of(problem.depth, Product::kDepth);
  const int64_t each = panels_of_split(
      tiles, panels, int64_t{multiprocessor_count()} * Product::kBlocks);
  if (each >= panels || problem.batch.count == kMaxBatchDims) {
    launch(matmul_kernel<Input, Output, Epilogue>, tiles, shape, stream,
           problem, epilogue);
    return;
  }
  const int64_t splits = (panels + each - 1) / each;
  const Tensor parts = empty_contiguous(
      std::array{problem.batch_count, splits, problem.rows, problem.columns},
      number_type<Sum>(), device_of(output));
  auto parts_of_product = divided(problem, each * Product::kDepth,
                                  static_cast<Sum*>(parts.mutable_data_ptr()));
  const int64_t pieces = parts_of_product.count_tiles();
  launch(matmul_kernel<Input, Sum>, pieces, shape, stream, parts_of_product,
         KeepSums{});
  launch(matmul_sum_kernel<Input, Output, Epilogue>, tiles, Product::kThreads,
         stream, sum_of(problem, parts_of_product), epilogue);
}

}  // namespace pkg::cuda
