// The gradient of attention's query by multiply-adds: of float64 and float32,
// and of heads that the tensor cores' kernel has no room for. dQ = scale dS K,
// see cuda/attention/gradients.cuh.
//
// A block owns 64 queries and 64 or 128 columns of their gradient, and walks
// the keys 64 at a time. 2 rows columns (2 head_size + value_size) operations
// for each matrix of the batch, a half if causal; a wider head repeats the
// first two of the three products.
//
// One block in a multiprocessor is enough to ask for: to make room for a second
// one the compiler spilled up to 11 words of heads of 128, and 4 of 64 (nvcc
// 13.0). For compute capability 8.0 and heads of 64 there is room for it
// anyway.
#pragma once

#include <cstdint>

#include "cuda/attention/gradients.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/tile_product.cuh"

namespace pkg::cuda {

template <class Element, int kWidth>
__global__ void __launch_bounds__(kTileThreads, 1)
    attention_grad_query_panels_kernel(
        const __grid_constant__ AttentionGradQuery<Element> call) {
  using Number = Accumulator<Element>;
  constexpr int kTile = kAttentionTile;
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
    Tile<Number, kTile, kWidth> sum(0);
    for (int64_t shared = 0; shared < call.partition.shared_count; ++shared) {
      const int64_t batch = call.partition.batch_index(owned, shared);
      const AttentionExtent extent = problem.extent(batch);
      const int64_t column_end = problem.column_end(extent, row_begin + kTile);
      const auto key =
          problem.key.by_column(problem.batch, batch, extent.first_column,
                                extent.columns, problem.head_size);
      for (int64_t column_begin = problem.first_column(extent, row_begin);
           column_begin < column_end; column_begin += kTile) {
        store_transposed(
            grad_score_tile<true>(call.backward, batch, row_begin, column_begin,
                                  a_panels, b_panels),
            weights);
        multiply_shared<kDepth, kTile>(sum, weights, key, head_begin,
                                       column_begin, b_panels);
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
