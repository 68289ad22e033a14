// The gradient of attention's output, its rows divided by the sums of the
// weights that the backward pass makes of the log-sum-exp, where these sums are
// not 1: see attention_large_log_sum_exp.h. The gradients of query, key, value
// and mask are linear in that of the output, row by row, so that what is right
// of the quotients is right of them, and no kernel of theirs has to know.
//
// Of a call whose mask is of numbers: nothing else makes such scores of numbers
// that still say something. Its matrices are of one length. The quotients are
// rounded once, in half precision in place of the weights, of which those of
// rows that a mask hides are 1.
//
// A block owns 64 rows. If the log-sum-exp of any is large it makes the scores
// of all of them, by multiply-adds, 4 x 4 of a thread; and then it writes
// their quotients, of most rows the gradient itself. 2 rows value_size elements
// move, and where rows are hidden there are 2 columns head_size operations for
// each.
#pragma once

#include <cstdint>

#include "attention_large_log_sum_exp.h"
#include "cuda/attention/gradients.cuh"
#include "cuda/attention/panel_shape.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/tile_product.cuh"

namespace pkg::cuda {

template <class Element>
struct AttentionNormalizedGradOutput {
  AttentionBackward<Element> backward;  // the delta is not read
  ResultBatch<Element> normalized;      // of the output's sizes

  __host__ __device__ int64_t tile_count() const {
    return backward.problem.batch_count *
           tiles_of(backward.problem.rows, kAttentionTile);
  }
};

template <class Element>
using NormalizedScores =
    Tile<Accumulator<Element>, kAttentionTile, kAttentionTile, TileThread>;

// By whole warps, all of which find the same.
template <class Number>
__device__ __forceinline__ bool has_large_log_sum_exp(const Number* log_sum_exp,
                                                      int64_t rows) {
  bool is_large = false;
  PKG_UNROLL
  for (int first = 0; first < kAttentionTile; first += kWarp) {
    const int64_t row = first + static_cast<int>(threadIdx.x) % kWarp;
    is_large |= row < rows && is_large_log_sum_exp(log_sum_exp[row]);
  }
  return __ballot_sync(0xffffffffu, is_large) != 0;
}

// To factors[row] what the gradient of that row is to be multiplied by. A row
// whose weights are all 0 has no gradient.
template <class Element, class Factors>
__device__ __forceinline__ void store_factors(
    const AttentionBackward<Element>& call, int64_t batch, int64_t row_begin,
    Factors& factors) {
  using Number = Accumulator<Element>;
  using Scores = NormalizedScores<Element>;
  constexpr int kTile = kAttentionTile;
  constexpr int kDepth = kAttentionDepth<Element>;
  PKG_SHARED(Number, query_panels, [2][kDepth][kTile + kPanelPadding]);
  PKG_SHARED(Number, key_panels, [2][kDepth][kTile + kPanelPadding]);

  const AttentionProblem<Element>& problem = call.problem;
  const AttentionExtent extent = problem.extent_of_one_length(batch);
  const AttentionGradients<Element> attention(call, batch, extent);
  const auto query = problem.query.by_row(
      problem.batch, batch, extent.first_row, extent.rows, problem.head_size);
  const auto key = problem.key.by_row(problem.batch, batch, extent.first_column,
                                      extent.columns, problem.head_size);
  const typename Scores::Thread thread;
  Number sums[Scores::kThreadRows] = {};
  const int64_t column_end = problem.column_end(extent, row_begin + kTile);
  for (int64_t column_begin = problem.first_column(extent, row_begin);
       column_begin < column_end; column_begin += kTile) {
    Scores scores(0);
    multiply<kDepth, PanelPlaces::of_product>(
        scores, query, row_begin, key, column_begin, query_panels, key_panels);
    PKG_UNROLL
    for (int i = 0; i < Scores::kThreadRows; ++i) {
      const int64_t row = row_begin + thread.row(i);
      PKG_UNROLL
      for (int j = 0; j < Scores::kThreadColumns; ++j) {
        // Rows beyond the last have no log-sum-exp to be read.
        sums[i] += row < extent.rows
                       ? attention.weight(row, column_begin + thread.column(j),
                                          scores.values[i][j])
                       : Number(0);
      }
    }
  }
  PKG_UNROLL
  for (int i = 0; i < Scores::kThreadRows; ++i) {
    const Number sum = row_sum<typename Scores::Thread>(sums[i]);
    const int64_t row = row_begin + thread.row(i);
    if (thread.is_first_of_row() && row < extent.rows) {
      const bool is_large =
          is_large_log_sum_exp(call.log_sum_exp[extent.statistics + row]);
      factors[thread.row(i)] = !is_large          ? Number(1)
                               : sum == Number(0) ? Number(0)
                                                  : Number(1) / sum;
    }
  }
}

template <class Element>
__global__ void __launch_bounds__(NormalizedScores<Element>::Thread::kThreads)
    attention_normalized_grad_output_kernel(
        const __grid_constant__ AttentionNormalizedGradOutput<Element> call) {
  using Number = Accumulator<Element>;
  constexpr int kWarps = NormalizedScores<Element>::Thread::kThreads / kWarp;
  PKG_SHARED(Number, factors, [kAttentionTile]);
  const AttentionBackward<Element>& backward = call.backward;
  const AttentionProblem<Element>& problem = backward.problem;
  const int64_t row_tiles = tiles_of(problem.rows, kAttentionTile);
  const int64_t tiles = call.tile_count();
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t batch = index / row_tiles;
    const int64_t row_begin = index % row_tiles * kAttentionTile;
    const int64_t left = problem.rows - row_begin;
    const int rows =
        left < kAttentionTile ? static_cast<int>(left) : kAttentionTile;
    const bool has_large = has_large_log_sum_exp(
        backward.log_sum_exp + batch * problem.rows + row_begin, rows);
    if (has_large) {
      store_factors(backward, batch, row_begin, factors);
      __syncthreads();
    }
    const MatrixBatch<Element>& given = backward.grad_output;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    for (int row = warp; row < rows; row += kWarps) {
      const Number factor = has_large ? factors[row] : Number(1);
      const Element* const from =
          given.row(problem.batch, batch, row_begin + row);
      Element* const to =
          call.normalized.row(problem.batch, batch, row_begin + row);
      for (int64_t column = lane; column < problem.value_size;
           column += kWarp) {
        to[column] = convert<Element>(
            factor * convert<Number>(from[column * given.column_stride]));
      }
    }
    if (has_large) {
      __syncthreads();  // before the next tile's factors
    }
  }
}

}  // namespace pkg::cuda
