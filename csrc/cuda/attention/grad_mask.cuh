// The gradient of attention's mask: dS, summed wherever the mask is broadcast,
// see cuda/attention/gradients.cuh.
//
// A block owns a tile of the mask and walks the matrices of the batch, the rows
// and the columns that share it: a mask of one number is the work of one block.
// 2 rows columns (head_size + value_size) operations for each matrix of the
// batch. Bound by the multiply-add units.
#pragma once

#include <cstdint>

#include "cuda/attention/gradients.cuh"
#include "cuda/device/batch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// The tiles of gradients that the mask kernel adds up.
template <class Number>
using GradMaskTile = Tile<Number, kAttentionTile, kAttentionTile>;

// Adds up the tile's columns into its first one.
template <class Number>
__device__ __forceinline__ void sum_columns(GradMaskTile<Number>& tile) {
  PKG_UNROLL
  for (int i = 0; i < tile.kThreadRows; ++i) {
    Number sum = tile.values[i][0];
    PKG_UNROLL
    for (int j = 1; j < tile.kThreadColumns; ++j) {
      sum += tile.values[i][j];
    }
    tile.values[i][0] = row_sum<TileThread>(sum);
  }
}

// Adds up the tile's rows into its first one.
template <class Number, class Panel>
__device__ __forceinline__ void sum_rows(GradMaskTile<Number>& tile,
                                         Panel&& lane_sums) {
  const TileThread thread;
  PKG_UNROLL
  for (int j = 0; j < tile.kThreadColumns; ++j) {
    Number sum = tile.values[0][j];
    PKG_UNROLL
    for (int i = 1; i < tile.kThreadRows; ++i) {
      sum += tile.values[i][j];
    }
    lane_sums[thread.row_lane][thread.column(j)] = sum;
  }
  __syncthreads();
  PKG_UNROLL
  for (int j = 0; j < tile.kThreadColumns; ++j) {
    Number sum = 0;
    for (int lane = 0; lane < 16; ++lane) {
      sum += lane_sums[lane][thread.column(j)];
    }
    tile.values[0][j] = sum;
  }
  __syncthreads();
}

// `rows` and `columns` are the mask's own: the problem's, or 1 where the mask
// is broadcast along them.
template <class Element, class MaskElement>
struct AttentionGradMask {
  AttentionBackward<Element> backward;
  BatchPartition partition;
  MaskElement* grad_mask;  // contiguous: owned, rows, columns
  int64_t rows;
  int64_t columns;

  __host__ __device__ int64_t tile_count() const {
    return partition.owned_count * tiles_of(rows, kAttentionTile) *
           tiles_of(columns, kAttentionTile);
  }
};

template <class Element, class MaskElement>
__global__ void __launch_bounds__(kTileThreads) attention_grad_mask_kernel(
    const __grid_constant__ AttentionGradMask<Element, MaskElement> call) {
  using Number = Accumulator<Element>;
  constexpr int kTile = kAttentionTile;
  constexpr int kDepth = kAttentionDepth<Element>;
  PKG_SHARED(Number, a_panels, [2][kDepth][kTile + kPanelPadding]);
  PKG_SHARED(Number, b_panels, [2][kDepth][kTile + kPanelPadding]);
  PKG_SHARED(Number, lane_sums, [16][kTile]);

  const AttentionProblem<Element>& problem = call.backward.problem;
  const TileThread thread;
  const int64_t row_tiles = tiles_of(call.rows, kTile);
  const int64_t column_tiles = tiles_of(call.columns, kTile);
  const bool sums_rows = call.rows != problem.rows;
  const bool sums_columns = call.columns != problem.columns;
  const int64_t tiles = call.tile_count();
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t owned = index / column_tiles / row_tiles;
    const int64_t row_begin = index / column_tiles % row_tiles * kTile;
    const int64_t column_begin = index % column_tiles * kTile;
    const int64_t row_end = sums_rows ? problem.rows : row_begin + kTile;
    const int64_t column_end =
        sums_columns ? problem.columns : column_begin + kTile;

    GradMaskTile<Number> sum(0);
    for (int64_t shared = 0; shared < call.partition.shared_count; ++shared) {
      const int64_t batch = call.partition.batch_index(owned, shared);
      for (int64_t row = row_begin; row < row_end; row += kTile) {
        for (int64_t column = column_begin; column < column_end;
             column += kTile) {
          sum.add(grad_score_tile<false>(call.backward, batch, row, column,
                                         a_panels, b_panels));
        }
      }
    }
    if (sums_columns) {
      sum_columns<Number>(sum);
    }
    if (sums_rows) {
      sum_rows<Number>(sum, lane_sums);
    }
    store_tile(sum, call.grad_mask + owned * call.rows * call.columns,
               call.rows, call.columns, call.columns, row_begin, column_begin);
  }
}

}  // namespace pkg::cuda
