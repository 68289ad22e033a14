// matmul: c[batch] = a[batch] b[batch], for operands of any strides. A block
// computes one tile of c by cuda/gemm/block_product.cuh, which says how, and
// what moves.
#pragma once

#include <cstdint>

#include "cuda/device/batch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/block_product.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

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

  // Known to the launch and not computed by each thread, whose registers the
  // sums take.
  int64_t row_tiles = 0;
  int64_t column_tiles = 0;
  int64_t tiles = 0;

  int64_t count_tiles() {
    row_tiles = tiles_of(rows, BlockProduct<Input>::kRows);
    column_tiles = tiles_of(columns, BlockProduct<Input>::kColumns);
    tiles = batch_count * row_tiles * column_tiles;
    return tiles;
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
__global__ void __launch_bounds__(BlockProduct<Input>::kThreads,
                                  BlockProduct<Input>::kBlocks)
    matmul_kernel(const __grid_constant__ MatmulProblem<Input, Output> problem,
                  const __grid_constant__ Epilogue epilogue) {
  using Product = BlockProduct<Input>;
  for (int64_t index = blockIdx.x; index < problem.tiles; index += gridDim.x) {
    const int64_t batch = index / problem.column_tiles / problem.row_tiles;
    const int64_t row_begin =
        index / problem.column_tiles % problem.row_tiles * Product::kRows;
    const int64_t column_begin =
        index % problem.column_tiles * Product::kColumns;

    const PanelSource<Input> a = {
        problem.a + batch_offset(problem.batch, problem.a_batch_strides, batch),
        problem.rows, problem.depth, problem.a_row_stride,
        problem.a_depth_stride};
    const PanelSource<Input> b = {
        problem.b + batch_offset(problem.batch, problem.b_batch_strides, batch),
        problem.columns, problem.depth, problem.b_column_stride,
        problem.b_depth_stride};

    typename Product::Sums sums(0);
    Product::multiply(sums, a, row_begin, b, column_begin);
    epilogue(sums, problem, batch, row_begin, column_begin);
    store_tile(sums, problem.c + batch * problem.rows * problem.columns,
               problem.rows, problem.columns, problem.columns, row_begin,
               column_begin);
  }
}

}  // namespace pkg::cuda
