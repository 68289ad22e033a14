// The transposes of matrices, of any strides, with rows that begin a pitch
// apart.
//
// Algorithm: tiles of 32 x 32 by way of shared memory, read along the matrix's
// rows and written along the result's (Ruetsch and Micikevicius, "Optimizing
// Matrix Transpose in CUDA", 2009). Read and written once: bound by memory.
#pragma once

#include <cstdint>

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/divisor.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

constexpr int kTransposeTile = 32;
constexpr int kTransposeRows = 8;  // of threads; a thread moves 4 elements
constexpr int kTransposeThreads = kTransposeTile * kTransposeRows;

// Word: an unsigned integer as wide as the element. Neighbours in a row should
// be neighbours in memory.
template <class Word>
struct TransposeProblem {
  const Word* from;
  Word* to;  // matrices, columns, pitch
  int64_t rows;
  int64_t columns;
  int64_t row_stride;
  int64_t column_stride;
  int64_t pitch;
  int64_t matrices = 1;
  int64_t matrix_stride = 0;
  WideDivisor row_tiles{};
  WideDivisor column_tiles{};

  int64_t count_tiles() {
    row_tiles = tiles_of(rows, kTransposeTile);
    column_tiles = tiles_of(columns, kTransposeTile);
    return tile_count();
  }
  __host__ __device__ int64_t tile_count() const {
    return matrices * row_tiles * column_tiles;
  }
};

template <class Word>
__global__ void __launch_bounds__(kTransposeThreads)
    transpose_kernel(const __grid_constant__ TransposeProblem<Word> problem) {
  let_next_kernel_begin();
  // A column more than the tile, so that its columns lie in different banks.
  PKG_SHARED(Word, tile, [kTransposeTile][kTransposeTile + 1]);
  const int lane = static_cast<int>(threadIdx.x) % kTransposeTile;
  const int line = static_cast<int>(threadIdx.x) / kTransposeTile;
  for (int64_t index = blockIdx.x; index < problem.tile_count();
       index += gridDim.x) {
    const auto [tiles, row_tile] = problem.row_tiles.divide(index);
    const auto [matrix, column_tile] = problem.column_tiles.divide(tiles);
    const int64_t row_begin = row_tile * kTransposeTile;
    const int64_t column_begin = column_tile * kTransposeTile;
    const Word* const from = problem.from + matrix * problem.matrix_stride;
    Word* const to = problem.to + matrix * problem.columns * problem.pitch;
    PKG_UNROLL
    for (int i = 0; i < kTransposeTile; i += kTransposeRows) {
      const int64_t row = row_begin + line + i;
      const int64_t column = column_begin + lane;
      if (row < problem.rows && column < problem.columns) {
        tile[line + i][lane] =
            from[row * problem.row_stride + column * problem.column_stride];
      }
    }
    __syncthreads();
    PKG_UNROLL
    for (int i = 0; i < kTransposeTile; i += kTransposeRows) {
      const int64_t row = row_begin + lane;
      const int64_t column = column_begin + line + i;
      if (row < problem.rows && column < problem.columns) {
        to[column * problem.pitch + row] = tile[lane][line + i];
      }
    }
    __syncthreads();
  }
}

}  // namespace pkg::cuda
