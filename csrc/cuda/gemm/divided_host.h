// What the launches of divided products share: memory for the sums of the parts
// of the summed dimension, and what adds them up.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/gemm/matmul.cuh"
#include "cuda/host/launch.h"

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
         SumThread::kThreads, stream, sum, epilogue);
}

}  // namespace pkg::cuda
