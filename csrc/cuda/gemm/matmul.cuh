// matmul: c[batch] = a[batch] b[batch], for operands of any strides. A block
// computes one tile of c by cuda/gemm/block_product.cuh, which says how, and
// what moves.
//
// A product of few tiles and a long summed dimension is divided along it, so
// that there is work for every multiprocessor: the parts' sums go to memory and
// are added up in one order by a second kernel. (CUTLASS calls it split-K.)
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "cuda/device/batch.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/block_product.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/tile_order.cuh"
#include "host/integer_math.h"

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
  // Null, or what says whether the product is to be made at all: not where it
  // is 0 when the kernel runs.
  const int32_t* wanted = nullptr;

  // The last dimension of the batch may be parts of the summed dimension, of
  // split_depth steps each: then c holds their sums, which matmul_sum_kernel
  // adds up.
  WideDivisor splits{};
  int64_t split_depth = 0;

  TileOrder order{};
  int64_t tiles = 0;

  // Of the tiles that Product's blocks compute.
  template <class Product = BlockProduct<Input>>
  int64_t count_tiles() {
    split_depth = splits > 1 ? split_depth : depth;
    const int64_t row_tiles = tiles_of(rows, Product::kRows);
    const int64_t column_tiles = tiles_of(columns, Product::kColumns);
    order = TileOrder(row_tiles, column_tiles);
    tiles = batch_count * row_tiles * column_tiles;
    return tiles;
  }

  // The steps that the matrices of one index of the batch have.
  __device__ __forceinline__ int64_t depth_of(int64_t index) const {
    const int64_t left = depth - splits.divide(index).remainder * split_depth;
    return left < split_depth ? left : split_depth;
  }
};

// Panels of the summed dimension that each part of a divided product has: all
// of them where there are tiles for half of the blocks that the device runs at
// a time; else so many that the parts fill it, and `least` of them or more, for
// which writing
// and reading a part's sums costs little.
inline int64_t panels_of_split(int64_t tiles, int64_t panels, int64_t blocks,
                               int64_t least = 8) {
  if (tiles == 0 || 2 * tiles > blocks || panels < 2 * least) {
    return panels;
  }
  const int64_t splits = blocks / tiles;
  const int64_t each = ceil_div(panels, splits);
  return each > least ? each : least;
}

// What all multiprocessors together read or write of memory in a cycle: some
// 2.5 TB/s.
constexpr int64_t kMemoryBytesOfCycle = 1500;

// What it takes to divide a product: one more kernel, and the parts written and
// read again. (1024 x 1024 halves in two parts of 8 panels took an H100 9.9 us
// and their sum 6.5, where 16 panels are 6 by the count of
// plan_warpgroups().)
inline int64_t cycles_of_parts(int64_t parts, int64_t elements) {
  constexpr int64_t kLaunch = 5000;
  return parts > 1 ? kLaunch + 2 * int64_t{sizeof(float)} * parts * elements /
                                   kMemoryBytesOfCycle
                   : 0;
}

// Sums as a tensor holds them: those of int8, modulo 2^32, as int32.
template <class Input>
using StoredSum = std::conditional_t<std::is_same_v<Input, int8_t>, int32_t,
                                     Accumulator<Input>>;

// The same product of the same bytes, multiplied as elements of another type,
// into another memory.
template <class Element, class Input, class Output, class Number>
MatmulProblem<Element, Number> multiplied_as(
    const MatmulProblem<Input, Output>& problem, Number* c) {
  static_assert(sizeof(Element) == sizeof(Input));
  return {
      reinterpret_cast<const Element*>(problem.a),
      reinterpret_cast<const Element*>(problem.b),
      c,
      problem.rows,
      problem.columns,
      problem.depth,
      problem.a_row_stride,
      problem.a_depth_stride,
      problem.b_depth_stride,
      problem.b_column_stride,
      problem.batch_count,
      problem.batch,
      problem.a_batch_strides,
      problem.b_batch_strides,
  };
}

// The same product with its operands exchanged, whose result is that of one
// column as a row.
template <class Input, class Output>
MatmulProblem<Input, Output> exchanged(
    const MatmulProblem<Input, Output>& problem) {
  auto result = problem;
  std::swap(result.a, result.b);
  std::swap(result.rows, result.columns);
  std::swap(result.a_row_stride, result.b_column_stride);
  std::swap(result.a_depth_stride, result.b_depth_stride);
  std::swap(result.a_batch_strides, result.b_batch_strides);
  return result;
}

// The same product with its summed dimension divided, into `parts`, which are
// contiguous: batch, splits, rows, columns.
template <class Input, class Output, class Number>
MatmulProblem<Input, Number> divided(
    const MatmulProblem<Input, Output>& problem, int64_t split_depth,
    Number* parts) {
  auto result = multiplied_as<Input>(problem, parts);
  result.splits = ceil_div(problem.depth, split_depth);
  result.split_depth = split_depth;
  result.batch_count *= result.splits;
  const int dimension = result.batch.count++;
  result.batch.sizes[dimension] = result.splits;
  result.a_batch_strides.strides[dimension] =
      split_depth * problem.a_depth_stride;
  result.b_batch_strides.strides[dimension] =
      split_depth * problem.b_depth_stride;
  return result;
}

// What becomes of a tile of finished sums before it is rounded and stored:
// nothing. Others take the tile, the problem, the batch index and the tile's
// first row and column, and may change the tile.
struct KeepSums {
  template <class... Arguments>
  __device__ __forceinline__ void operator()(const Arguments&...) const {}

  // As every epilogue has: the same where the kind of it is known only when the
  // kernel runs, and the same for a product of one column that is made as a
  // row.
  KeepSums of_any_kind() const { return {}; }
  KeepSums of_one_column() const { return {}; }
};

template <class Input, class Output, class Epilogue = KeepSums,
          class Product = BlockProduct<Input>>
__global__ void __launch_bounds__(Product::kThreads, Product::kBlocks)
    matmul_kernel(const __grid_constant__ MatmulProblem<Input, Output> problem,
                  const __grid_constant__ Epilogue epilogue) {
  let_next_kernel_begin();
  if (problem.wanted != nullptr && *problem.wanted == 0) {
    return;
  }
  for (int64_t index = blockIdx.x; index < problem.tiles; index += gridDim.x) {
    const auto [batch, tile] = problem.order.place(index);
    const int64_t row_begin = tile.row * Product::kRows;
    const int64_t column_begin = tile.column * Product::kColumns;

    const PanelSource<Input> a = {
        problem.a + batch_offset(problem.batch, problem.a_batch_strides, batch),
        problem.rows, problem.depth_of(batch), problem.a_row_stride,
        problem.a_depth_stride};
    const PanelSource<Input> b = {
        problem.b + batch_offset(problem.batch, problem.b_batch_strides, batch),
        problem.columns, problem.depth_of(batch), problem.b_column_stride,
        problem.b_depth_stride};

    typename Product::Sums sums(0);
    Product::multiply(sums, a, row_begin, b, column_begin);
    epilogue(sums, problem, batch, row_begin, column_begin);
    store_tile(sums, problem.c + batch * problem.rows * problem.columns,
               problem.rows, problem.columns, problem.columns, row_begin,
               column_begin);
  }
}

// The places of a block that adds stored sums up: four neighbours of a row a
// thread, and a warp to a row. A divided product has few tiles; the blocks that
// add its parts up are to be many, or they take longer than the product: by the
// product's own tiles a product of 1024 x 1024 halves in two parts took 41 us
// in all, so 16 (H100).
struct SumThread {
  static constexpr int kNeighbours = kFragment;
  static constexpr int kRows = 8;
  static constexpr int kColumns = kWarp * kFragment;
  static constexpr int kThreads = kRows * kWarp;
  static constexpr int own_rows(int rows) { return rows / kRows; }
  static constexpr int own_columns(int columns) { return columns / kWarp; }

  __device__ __forceinline__ int row(int i) const {
    return i * kRows + static_cast<int>(threadIdx.x) / kWarp;
  }
  __device__ __forceinline__ int column(int j) const {
    return static_cast<int>(threadIdx.x) % kWarp * kFragment + j;
  }
};

// What a divided product's parts become.
template <class Input, class Output>
struct MatmulSum {
  const Accumulator<Input>* parts;  // contiguous: batch, splits, rows, columns
  Output* c;                        // contiguous: batch, rows, columns
  int64_t rows;
  int64_t columns;
  int64_t splits;
  WideDivisor row_tiles;
  WideDivisor column_tiles;
  int64_t tiles;
};

template <class Input, class Output, class Number>
MatmulSum<Input, Output> sum_of(const MatmulProblem<Input, Output>& problem,
                                const Number* parts, int64_t splits) {
  using Sum = Accumulator<Input>;
  static_assert(sizeof(Sum) == sizeof(Number));
  const int64_t row_tiles = tiles_of(problem.rows, SumThread::kRows);
  const int64_t column_tiles = tiles_of(problem.columns, SumThread::kColumns);
  return {reinterpret_cast<const Sum*>(parts),
          problem.c,
          problem.rows,
          problem.columns,
          splits,
          WideDivisor(row_tiles),
          WideDivisor(column_tiles),
          problem.batch_count * row_tiles * column_tiles};
}

// c = the sum of the parts, the first first, with what the epilogue makes of
// it. Reads `splits` numbers for each element that it writes.
template <class Input, class Output, class Epilogue = KeepSums>
__global__ void __launch_bounds__(SumThread::kThreads)
    matmul_sum_kernel(const __grid_constant__ MatmulSum<Input, Output> sum,
                      const __grid_constant__ Epilogue epilogue) {
  wait_for_kernel_before();
  const int64_t matrix = sum.rows * sum.columns;
  for (int64_t index = blockIdx.x; index < sum.tiles; index += gridDim.x) {
    const auto [rows, column_tile] = sum.column_tiles.divide(index);
    const auto [batch, row_tile] = sum.row_tiles.divide(rows);
    const int64_t row_begin = row_tile * SumThread::kRows;
    const int64_t column_begin = column_tile * SumThread::kColumns;
    Tile<Accumulator<Input>, SumThread::kRows, SumThread::kColumns, SumThread>
        sums(0);
    PKG_UNROLL_BY(4)
    for (int64_t split = 0; split < sum.splits; ++split) {
      add_stored(sums, sum.parts + (batch * sum.splits + split) * matrix,
                 sum.rows, sum.columns, row_begin, column_begin);
    }
    epilogue(sums, sum, batch, row_begin, column_begin);
    store_tile(sums, sum.c + batch * matrix, sum.rows, sum.columns, sum.columns,
               row_begin, column_begin);
  }
}

}  // namespace pkg::cuda
