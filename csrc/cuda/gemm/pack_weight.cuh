// pack_linear_weight: the transpose of the weight, (in_features, pitch), so
// that the 128 columns of a panel are neighbours in memory and one step of the
// summed dimension is whole cache lines, where the weight itself gives 16 bytes
// of each of 128 rows. The pitch keeps rows on 16-byte boundaries.
#pragma once

#include <cstdint>

#include "cuda/gemm/transpose.cuh"
#include "host/integer_math.h"

namespace pkg::cuda {

// Elements between the rows of a packed weight of so many columns.
__host__ __device__ constexpr int64_t packed_pitch(int64_t out_features) {
  constexpr int64_t kUnit = 8;  // 16 bytes of the narrowest element
  return round_up(out_features, kUnit);
}

template <class Word>
TransposeProblem<Word> pack_problem(const Word* weight, Word* packed,
                                    int64_t out_features, int64_t in_features,
                                    int64_t out_stride, int64_t in_stride) {
  TransposeProblem<Word> problem = {};
  problem.from = weight;
  problem.to = packed;
  problem.rows = out_features;
  problem.columns = in_features;
  problem.row_stride = out_stride;
  problem.column_stride = in_stride;
  problem.pitch = packed_pitch(out_features);
  problem.count_tiles();
  return problem;
}

}  // namespace pkg::cuda
