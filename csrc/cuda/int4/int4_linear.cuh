// int4_linear: what its kernels compute, and how that is shared out to blocks;
// in half precision by tensor cores, int4_linear_mma.cuh, of many rows by
// warpgroups, int4_linear_warpgroups.cuh; in float32 and float64 by
// multiply-adds, int4_linear_wide.cuh.
//
// Few rows leave few tiles of the result: then the summed dimension is divided
// too, and a second kernel adds the parts up in one order.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda/device/batch.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// Of a block that adds parts up, and the columns of each.
constexpr int kInt4SumThreads = 128;
constexpr int kInt4SumColumns = 4;

// A piece of a block's work: a tile of the result, or a part of its sums.
template <class Block>
struct Int4Place {
  int64_t batch;
  int row_tile;
  int column_tile;
  int split;

  __device__ __forceinline__ int64_t row() const {
    return int64_t{row_tile} * Block::kRows;
  }
  __device__ __forceinline__ int64_t column() const {
    return int64_t{column_tile} * Block::kColumns;
  }
};

template <class Element>
struct Int4LinearProblem {
  const Element* input;
  const uint32_t* words;
  const bfloat16* scales_and_zeros;  // (groups, columns, 2)
  const Element* bias;               // null without one
  Element* output;                   // contiguous: batch, rows, columns
  int64_t rows;
  int64_t columns;  // a multiple of 8
  int64_t depth;    // a multiple of 32
  int64_t row_stride;
  int64_t depth_stride;
  int64_t bias_stride;
  int64_t batch_count;
  BatchSizes batch;
  BatchStrides batch_strides;
  int group_shift;  // a group has 2^group_shift columns of the weight
  int word_shift;   // a lane has 2^word_shift words side by side

  // The summed dimension may be divided into parts of split_depth steps: then
  // int4_linear_sum_kernel adds up their sums.
  int64_t splits = 1;
  int64_t split_depth = 0;
  float* parts = nullptr;  // contiguous: batch, splits, rows, columns

  // Known to the launch and not computed by each thread.
  int64_t row_tiles = 0;
  int64_t pieces = 0;

  // Of blocks that compute Block::kRows by Block::kColumns of the result.
  template <class Block>
  int64_t count_pieces() {
    split_depth = splits > 1 ? split_depth : depth;
    row_tiles = tiles_of(rows, Block::kRows);
    pieces =
        row_tiles * batch_count * splits * tiles_of(columns, Block::kColumns);
    return pieces;
  }

  // Pieces that need the same of the weight follow one another.
  template <class Block>
  __device__ __forceinline__ Int4Place<Block> place(int64_t index) const {
    Int4Place<Block> at;
    at.row_tile = static_cast<int>(index % row_tiles);
    index /= row_tiles;
    at.batch = index % batch_count;
    index /= batch_count;
    at.split = static_cast<int>(index % splits);
    at.column_tile = static_cast<int>(index / splits);
    return at;
  }

  __host__ __device__ int64_t sum_pieces() const {
    return tiles_of(batch_count * rows * columns / kInt4SumColumns,
                    kInt4SumThreads);
  }

  __device__ __forceinline__ const Element* matrix(int64_t batch_index) const {
    return input + batch_offset(batch, batch_strides, batch_index);
  }

  __device__ __forceinline__ Accumulator<Element> bias_of(
      int64_t column) const {
    using Number = Accumulator<Element>;
    return bias != nullptr && column < columns
               ? convert<Number>(bias[column * bias_stride])
               : Number(0);
  }
};

// The exponent of a power of two.
inline int shift_of(int64_t power_of_two) {
  return std::countr_zero(static_cast<uint64_t>(power_of_two));
}

// The output = the sum of the parts, the first first, and the bias. Four
// columns a thread; reads `splits` numbers for each that it writes, those of
// four parts at a time.
template <class Element>
__global__ void __launch_bounds__(kInt4SumThreads) int4_linear_sum_kernel(
    const __grid_constant__ Int4LinearProblem<Element> problem) {
  wait_for_kernel_before();
  constexpr int kFour = kInt4SumColumns;
  using Numbers = Packet<float, kFour>;
  const int64_t across = problem.columns / kFour;
  const int64_t matrix = problem.rows * problem.columns;
  const int64_t count = problem.batch_count * problem.rows * across;
  for (int64_t index = global_thread_index(); index < count;
       index += global_thread_count()) {
    const int64_t column = index % across * kFour;
    const int64_t row = index / across;
    const float* part = problem.parts +
                        row / problem.rows * problem.splits * matrix +
                        row % problem.rows * problem.columns + column;
    Numbers sums = *reinterpret_cast<const Numbers*>(part);
    PKG_UNROLL_BY(4)
    for (int64_t split = 1; split < problem.splits; ++split) {
      const auto more =
          *reinterpret_cast<const Numbers*>(part + split * matrix);
      PKG_UNROLL
      for (int i = 0; i < kFour; ++i) {
        sums.values[i] += more.values[i];
      }
    }
    Packet<Element, kFour> result;
    PKG_UNROLL
    for (int i = 0; i < kFour; ++i) {
      result.values[i] =
          convert<Element>(sums.values[i] + problem.bias_of(column + i));
    }
    *reinterpret_cast<Packet<Element, kFour>*>(
        problem.output + row * problem.columns + column) = result;
  }
}

}  // namespace pkg::cuda
