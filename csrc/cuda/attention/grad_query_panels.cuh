// The gradient of attention's query by multiply-adds: of float64 and float32,
// and of heads that the tensor cores' kernel has no room for. dQ = scale dS K,
// see cuda/attention/gradients.cuh.
//
// A block owns 64 queries and 64 or 128 columns of their gradient, and walks
// as many keys at a time (of float64 64). Of float32 a thread has 8 x 8 of the
// gradient and 8 x 8 of a product of scores at a time, see forward_panels.cuh
// and take_grad_scores(). 2 rows columns (2 head_size + value_size) operations
// for each matrix of the batch, a half if causal; a wider head repeats the
// first two of the three products.
#pragma once

#include <cstdint>

#include "cuda/attention/gradients.cuh"
#include "cuda/attention/panel_shape.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/tile_product.cuh"

namespace pkg::cuda {

template <class Element, int kWidth>
using GradQueryGrid = AttentionGrid<Accumulator<Element>, kWidth>;

// Four rows by four columns of a thread's gradients of scores, to where the
// product with the keys finds them: the first kAttentionTile columns in shared
// memory, [column][row], what is behind them in `others`.
template <class Others, class Weights, class Number>
__device__ __forceinline__ void put_grad_scores(
    int i, int j, const Number (&four)[kFragment][kFragment], Weights& weights,
    Others& others) {
  using Thread = typename Others::Thread;
  const Thread thread;
  PKG_UNROLL
  for (int c = 0; c < kFragment; ++c) {
    PKG_UNROLL
    for (int r = 0; r < kFragment; ++r) {
      if (j < Thread::own_columns(kAttentionTile)) {
        weights[thread.column(j + c)][thread.row(i + r)] = four[r][c];
      } else {
        others.values[i + r][j + c] = four[r][c];
      }
    }
  }
}

// Adds the gradients of scores times the keys from column_begin on, those that
// put_grad_scores() has put in shared memory first.
template <class Element, class Sum, class Others, class Weights, class Panels>
__device__ __forceinline__ void add_grad_query(
    Sum& sum, const AttentionProblem<Element>& problem, int64_t batch,
    int64_t column_begin, int64_t head_begin, const Others& others,
    Weights& weights, Panels& panels) {
  const AttentionExtent keys = problem.extent(batch);
  const auto key = problem.key.by_column(
      problem.batch, batch, keys.first_column, keys.columns, problem.head_size);
  PKG_UNROLL
  for (int part = 0; part < Others::kTileColumns; part += kAttentionTile) {
    if (part > 0) {
      store_transposed<kAttentionTile>(others, part, weights);
    }
    multiply_shared<kAttentionDepth<Element>, kAttentionTile>(
        sum, weights, key, head_begin, column_begin + part, panels);
  }
}

template <class Element, int kWidth>
__global__ void __launch_bounds__(
    GradQueryGrid<Element, kWidth>::Thread::kThreads)
    attention_grad_query_panels_kernel(
        const __grid_constant__ AttentionGradQuery<Element> call) {
  wait_for_kernel_before();
  using Number = Accumulator<Element>;
  using Scores = typename GradQueryGrid<Element, kWidth>::Scores;
  constexpr int kTile = kAttentionTile;
  constexpr int kColumns = Scores::kTileColumns;
  constexpr int kDepth = kAttentionDepth<Element>;
  PKG_SHARED(Number, a_panels, [2][kDepth][kTile + kPanelPadding]);
  PKG_SHARED(Number, b_panels, [2][kDepth][kWidth + kPanelPadding]);
  PKG_SHARED(Number, weights, [kTile][kTile + kPanelPadding]);

  const AttentionProblem<Element>& problem = call.backward.problem;
  const int64_t row_tiles = tiles_of(problem.rows, kTile);
  const int64_t head_tiles = tiles_of(problem.head_size, kWidth);
  const int64_t tiles = call.template tile_count<kTile, kWidth>();
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t owned = index / head_tiles / row_tiles;
    const int64_t row_begin = index / head_tiles % row_tiles * kTile;
    const int64_t head_begin = index % head_tiles * kWidth;

    // As in grad_key_value_panels.cuh, nothing of a matrix is kept for longer
    // than it is needed.
    const int64_t first = call.partition.batch_index(owned, 0);
    if (row_begin >= problem.extent(first).rows) {
      continue;
    }
    Tile<Number, kTile, kWidth, typename Scores::Thread> sum(0);
    for (int64_t shared = 0; shared < call.partition.shared_count; ++shared) {
      const int64_t batch = call.partition.batch_index(owned, shared);
      const AttentionExtent extent = problem.extent(batch);
      const int64_t column_end = problem.column_end(extent, row_begin + kTile);
      for (int64_t column_begin = problem.first_column(extent, row_begin);
           column_begin < column_end; column_begin += kColumns) {
        Tile<Number, kTile, kColumns, typename Scores::Thread> others(0);
        take_grad_scores<false, Scores>(
            call.backward, batch, row_begin, column_begin, a_panels, b_panels,
            weights,
            [&](int i, int j, const Number(&four)[kFragment][kFragment]) {
              put_grad_scores(i, j, four, weights, others);
            });
        add_grad_query(sum, problem, computed_here(batch), column_begin,
                       head_begin, others, weights, b_panels);
      }
    }
    sum.scale(static_cast<Number>(problem.scale));
    const int64_t stored = call.partition.batch_index(computed_here(owned), 0);
    const AttentionExtent extent = problem.extent(stored);
    store_tile(sum,
               call.grad_query.row(problem.batch, stored, extent.first_row),
               extent.rows, problem.head_size, call.grad_query.row_stride,
               row_begin, head_begin);
  }
}

}  // namespace pkg::cuda
