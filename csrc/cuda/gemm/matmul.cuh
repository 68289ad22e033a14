// matmul: c[batch] = a[batch] b[batch], for operands of any strides.
//
// Algorithm: the classic blocked product (Volkov and Demmel, "Benchmarking GPUs
// to tune dense linear algebra", SC 2008): a block computes one tile of c, the
// sum running in registers over double-buffered panels of a and b in shared
// memory. See cuda/gemm/tile.cuh for the roles of the threads.
//
// Tiles: 128 x 128 by 8 steps for float32, where a thread's 8 x 8 products need
// 16 reads of shared memory for 64 multiplications, and by 16 for halves and
// int8, whose 16-byte loads hold more elements; 64 x 64 by 8 for float64, whose
// accumulators take two registers each. At most 34 KiB of shared memory.
//
// 2 m n k operations. Global memory is read (m n k)(1/rows + 1/columns)
// elements, so 128 x 128 float32 tiles do 32 operations a byte: bound by the
// multiply-add units once a tile's panels come from the L2 cache.
#pragma once

#include <cstdint>

#include "cuda/device/batch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/tile_product.cuh"

namespace pkg::cuda {

template <class Input>
struct MatmulTile {
  static constexpr int kRows = 128;
  static constexpr int kColumns = 128;
  static constexpr int kDepth = 16;
};
template <>
struct MatmulTile<float> {
  static constexpr int kRows = 128;
  static constexpr int kColumns = 128;
  static constexpr int kDepth = 8;
};
template <>
struct MatmulTile<double> {
  static constexpr int kRows = 64;
  static constexpr int kColumns = 64;
  static constexpr int kDepth = 8;
};

template <class Input, class Output>
struct MatmulProblem {
  const Input* a;
  const Input* b;
  Output* c;  // contiguous: batch, rows, columns
  int64_t rows;
  int64_t columns;
  int64_t depth;
  int64_t a_row_stride;
  int64_t a_depth_stride;
  int64_t b_depth_stride;
  int64_t b_column_stride;
  int64_t batch_count;
  BatchSizes batch;
  BatchStrides a_batch_strides;
  BatchStrides b_batch_strides;

  __host__ __device__ int64_t row_tiles() const {
    return tiles_of(rows, MatmulTile<Input>::kRows);
  }
  __host__ __device__ int64_t column_tiles() const {
    return tiles_of(columns, MatmulTile<Input>::kColumns);
  }
  __host__ __device__ int64_t tile_count() const {
    return batch_count * row_tiles() * column_tiles();
  }
};

// What becomes of a tile of finished sums before it is rounded and stored:
// nothing. Others take the tile, the problem, the batch index and the tile's
// first row and column, and may change the tile.
struct KeepSums {
  template <class... Arguments>
  __device__ __forceinline__ void operator()(const Arguments&...) const {}
};

template <class Input, class Output, class Epilogue = KeepSums>
__global__ void __launch_bounds__(kTileThreads)
    matmul_kernel(const __grid_constant__ MatmulProblem<Input, Output> problem,
                  Epilogue epilogue) {
  using Shape = MatmulTile<Input>;
  using Number = Accumulator<Input>;
  PKG_SHARED(Number,
             a_panels, [2][Shape::kDepth][Shape::kRows + kPanelPadding]);
  PKG_SHARED(Number,
             b_panels, [2][Shape::kDepth][Shape::kColumns + kPanelPadding]);

  const int64_t row_tiles = problem.row_tiles();
  const int64_t column_tiles = problem.column_tiles();
  const int64_t tiles = problem.tile_count();
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t batch = index / (row_tiles * column_tiles);
    const int64_t row_begin = index / column_tiles % row_tiles * Shape::kRows;
    const int64_t column_begin = index % column_tiles * Shape::kColumns;

    const PanelSource<Input> a = {
        problem.a + batch_offset(problem.batch, problem.a_batch_strides, batch),
        problem.rows, problem.depth, problem.a_row_stride,
        problem.a_depth_stride};
    const PanelSource<Input> b = {
        problem.b + batch_offset(problem.batch, problem.b_batch_strides, batch),
        problem.columns, problem.depth, problem.b_column_stride,
        problem.b_depth_stride};

    Tile<Number, Shape::kRows, Shape::kColumns> tile(0);
    multiply<Shape::kDepth>(tile, a, row_begin, b, column_begin, a_panels,
                            b_panels);
    epilogue(tile, problem, batch, row_begin, column_begin);
    store_tile(tile, problem.c + batch * problem.rows * problem.columns,
               problem.rows, problem.columns, problem.columns, row_begin,
               column_begin);
  }
}

}  // namespace pkg::cuda
