// The gradient of attention's mask: dS, summed wherever the mask is broadcast,
// see cuda/attention/gradients.cuh.
//
// What adds to a tile of the mask are steps: tiles of scores of the matrices of
// the batch, the rows and the columns that share it. Where the mask has too few
// tiles to occupy a device, the steps of each are split among blocks, which
// write their sums as parts, and a second kernel adds the parts of an element.
// Either sum runs in one fixed order, and how often is split depends on sizes
// alone: the result is the same to the last bit each time.
//
// 2 rows columns (head_size + value_size) operations for each matrix of the
// batch. The parts are no more than kGradMaskBlocks + tiles tiles, written and
// read once.
#pragma once

#include <cstdint>

#include "cuda/attention/gradients.cuh"
#include "cuda/attention/panel_shape.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/device/batch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/gemm/tile.cuh"
#include "host/integer_math.h"

namespace pkg::cuda {

// The tiles of gradients that the mask kernel adds up. A thread has 8 x 8 of
// them and of a product, for which shared memory takes 16 cycles to the 16 of
// an H200's multiply-adds, where 8 x 4 take 12 to 8.
template <class Number>
using GradMaskTile = typename AttentionGrid<Number>::Scores;

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
    tile.values[i][0] = row_sum<typename GradMaskTile<Number>::Thread>(sum);
  }
}

// Adds up the tile's rows into its first one, once all are done with what is in
// the panel.
template <class Number, class Panel>
__device__ __forceinline__ void sum_rows(GradMaskTile<Number>& tile,
                                         Panel&& lane_sums) {
  using Thread = typename GradMaskTile<Number>::Thread;
  __syncthreads();
  const Thread thread;
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
    for (int lane = 0; lane < Thread::kThreadsDown; ++lane) {
      sum += lane_sums[lane][thread.column(j)];
    }
    tile.values[0][j] = sum;
  }
  __syncthreads();
}

// Enough blocks for the largest devices, some 150 multiprocessors, to hold four
// each.
constexpr int64_t kGradMaskBlocks = 600;

// `rows` and `columns` are the mask's own: the problem's, or 1 where the mask
// is broadcast along them.
template <class Element, class MaskElement>
struct AttentionGradMask {
  using Number = Accumulator<Element>;
  AttentionBackward<Element> backward;
  BatchPartition partition;
  MaskElement* grad_mask;  // contiguous: owned, rows, columns
  int64_t rows;
  int64_t columns;
  int64_t splits = 1;       // of the steps of a tile
  Number* parts = nullptr;  // of several splits: splits, and then as grad_mask

  __host__ __device__ int64_t tile_count() const {
    return partition.owned_count * tiles_of(rows, kAttentionTile) *
           tiles_of(columns, kAttentionTile);
  }
  __host__ __device__ int64_t piece_count() const {
    return tile_count() * splits;
  }
  __host__ __device__ int64_t element_count() const {
    return partition.owned_count * rows * columns;
  }
  // Tiles of scores along the rows and the columns that a tile of the mask is
  // the sum of, and those of all matrices.
  __host__ __device__ int64_t row_steps() const {
    return rows != backward.problem.rows
               ? tiles_of(backward.problem.rows, kAttentionTile)
               : 1;
  }
  __host__ __device__ int64_t column_steps() const {
    return columns != backward.problem.columns
               ? tiles_of(backward.problem.columns, kAttentionTile)
               : 1;
  }
  __host__ __device__ int64_t step_count() const {
    return partition.shared_count * row_steps() * column_steps();
  }
  int64_t suitable_splits() const {
    const int64_t tiles = tile_count();
    const int64_t wanted = tiles == 0 ? 1 : ceil_div(kGradMaskBlocks, tiles);
    const int64_t steps = step_count();
    return steps < 1 ? 1 : wanted < steps ? wanted : steps;
  }
};

template <class Element, class MaskElement>
__global__ void __launch_bounds__(
    GradMaskTile<Accumulator<Element>>::Thread::kThreads)
    attention_grad_mask_kernel(
        const __grid_constant__ AttentionGradMask<Element, MaskElement> call) {
  using Number = Accumulator<Element>;
  constexpr int kTile = kAttentionTile;
  constexpr int kDepth = kAttentionDepth<Element>;
  PKG_SHARED(Number, a_panels, [2][kDepth][kTile + kPanelPadding]);
  PKG_SHARED(Number, b_panels, [2][kDepth][kTile + kPanelPadding]);
  PKG_SHARED(Number, parked, [kTile][kTile + kPanelPadding]);

  const int64_t row_tiles = tiles_of(call.rows, kTile);
  const int64_t column_tiles = tiles_of(call.columns, kTile);
  const int64_t row_steps = call.row_steps();
  const int64_t column_steps = call.column_steps();
  const int64_t steps = call.step_count();
  const int64_t steps_of_split = ceil_div(steps, call.splits);
  for (int64_t index = blockIdx.x; index < call.piece_count();
       index += gridDim.x) {
    const int64_t split = index % call.splits;
    const int64_t tile = index / call.splits;
    const int64_t owned = tile / column_tiles / row_tiles;
    const int64_t row_begin = tile / column_tiles % row_tiles * kTile;
    const int64_t column_begin = tile % column_tiles * kTile;
    const int64_t step_end = steps_of_split * (split + 1) < steps
                                 ? steps_of_split * (split + 1)
                                 : steps;

    GradMaskTile<Number> sum(0);
    for (int64_t step = steps_of_split * split; step < step_end; ++step) {
      const int64_t shared = step / column_steps / row_steps;
      take_grad_scores<true, GradMaskTile<Number>>(
          call.backward, call.partition.batch_index(owned, shared),
          row_begin + step / column_steps % row_steps * kTile,
          column_begin + step % column_steps * kTile, a_panels, b_panels,
          parked, [&](int i, int j, const Number(&four)[kFragment][kFragment]) {
            PKG_UNROLL
            for (int r = 0; r < kFragment; ++r) {
              PKG_UNROLL
              for (int c = 0; c < kFragment; ++c) {
                sum.values[i + r][j + c] += four[r][c];
              }
            }
          });
    }
    if (call.columns != call.backward.problem.columns) {
      sum_columns<Number>(sum);
    }
    if (call.rows != call.backward.problem.rows) {
      sum_rows<Number>(sum, parked);
    }
    const int64_t first = owned * call.rows * call.columns;
    if (call.splits == 1) {
      store_tile(sum, call.grad_mask + first, call.rows, call.columns,
                 call.columns, row_begin, column_begin);
    } else {
      store_tile(sum, call.parts + split * call.element_count() + first,
                 call.rows, call.columns, call.columns, row_begin,
                 column_begin);
    }
  }
}

// Neighbouring lanes of a warp add the parts of neighbouring elements; the
// warps of a block share the parts out.
constexpr int kPartWarps = 8;

template <class Element, class MaskElement>
__global__ void __launch_bounds__(kPartWarps* kWarp)
    attention_grad_mask_sum_kernel(
        const __grid_constant__ AttentionGradMask<Element, MaskElement> call) {
  using Number = Accumulator<Element>;
  PKG_SHARED(Number, warp_sums, [kPartWarps][kWarp]);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t elements = call.element_count();
  const int64_t blocks = tiles_of(elements, kWarp);
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t element = block * kWarp + lane;
    Number sum = 0;
    if (element < elements) {
      PKG_UNROLL_BY(4)
      for (int64_t split = warp; split < call.splits; split += kPartWarps) {
        sum += call.parts[split * elements + element];
      }
    }
    warp_sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && element < elements) {
      for (int other = 1; other < kPartWarps; ++other) {
        sum += warp_sums[other][lane];
      }
      call.grad_mask[element] = convert<MaskElement>(sum);
    }
    __syncthreads();
  }
}

}  // namespace pkg::cuda
