// pack_linear_weight: the transpose of the weight, (in_features, pitch), so
// that the 128 columns of a panel are neighbours in memory and one step of the
// summed dimension is whole cache lines, where the weight itself gives 16 bytes
// of each of 128 rows. The pitch keeps rows on 16-byte boundaries.
//
// Algorithm: tiles of 32 x 32 by way of shared memory, read along the weight's
// rows and written along the result's (Ruetsch and Micikevicius, "Optimizing
// Matrix Transpose in CUDA", 2009). Read and written once: bound by memory.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

constexpr int kTransposeTile = 32;
constexpr int kTransposeRows = 8;  // of threads; a thread moves 4 elements
constexpr int kTransposeThreads = kTransposeTile * kTransposeRows;

// Elements between the rows of a packed weight of so many columns.
__host__ __device__ constexpr int64_t packed_pitch(int64_t out_features) {
  constexpr int64_t kUnit = 8;  // 16 bytes of the narrowest element
  return (out_features + kUnit - 1) / kUnit * kUnit;
}

// Word: an unsigned integer as wide as the element.
template <class Word>
struct PackProblem {
  const Word* weight;
  Word* packed;
  int64_t out_features;
  int64_t in_features;
  int64_t out_stride;
  int64_t in_stride;

  __host__ __device__ int64_t out_tiles() const {
    return tiles_of(out_features, kTransposeTile);
  }
  __host__ __device__ int64_t tile_count() const {
    return out_tiles() * tiles_of(in_features, kTransposeTile);
  }
};

template <class Word>
__global__ void __launch_bounds__(kTransposeThreads)
    pack_linear_weight_kernel(PackProblem<Word> problem) {
  // A column more than the tile, so that its columns lie in different banks.
  PKG_SHARED(Word, tile, [kTransposeTile][kTransposeTile + 1]);
  const int lane = static_cast<int>(threadIdx.x) % kTransposeTile;
  const int row = static_cast<int>(threadIdx.x) / kTransposeTile;
  const int64_t pitch = packed_pitch(problem.out_features);
  for (int64_t index = blockIdx.x; index < problem.tile_count();
       index += gridDim.x) {
    const int64_t out_begin = index % problem.out_tiles() * kTransposeTile;
    const int64_t in_begin = index / problem.out_tiles() * kTransposeTile;
    PKG_UNROLL
    for (int i = 0; i < kTransposeTile; i += kTransposeRows) {
      const int64_t out = out_begin + row + i;
      const int64_t in = in_begin + lane;
      if (out < problem.out_features && in < problem.in_features) {
        tile[row + i][lane] =
            problem.weight[out * problem.out_stride + in * problem.in_stride];
      }
    }
    __syncthreads();
    PKG_UNROLL
    for (int i = 0; i < kTransposeTile; i += kTransposeRows) {
      const int64_t out = out_begin + lane;
      const int64_t in = in_begin + row + i;
      if (out < problem.out_features && in < problem.in_features) {
        problem.packed[in * pitch + out] = tile[lane][row + i];
      }
    }
    __syncthreads();
  }
}

}  // namespace pkg::cuda
