// The forward pass of scaled dot-product attention by multiply-adds: of float64
// and float32, and of heads that the tensor cores' kernel has no room for.
//
// Algorithm: FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 1). A block
// owns 64 queries and up to 64 or 128 columns of their output. It walks as many
// keys at a time (of float64 64): scores S = Q K^T in registers, the running
// row maximum m and sum l updated online, the output so far rescaled by
// exp(m_old - m), the weights exp(S - m) passed through shared memory into O +=
// P V. Nothing of the size queries x keys is ever in global memory.
//
// Tiles: of float32 a thread has 8 x 8 scores and 8 x 8 of the output, and so
// there are 64 threads for 64 columns and 128 for 128. A step of either product
// loads 16 numbers for 64 products: 16 cycles of a multiprocessor's shared
// memory for 16 of an H200's multiply-adds, where 8 x 4 scores took 12 for 8
// and 4 x 4 took 8 for 4. Of float64, whose numbers take two registers, 256
// threads have 4 x 4. The weights of 64 keys at a time pass through shared
// memory, which with the panels of both products stay under 48 KiB. Q, K and V
// pass through the panels in slices of the head, so that a head of any size
// will do; an output wider than a block's columns is computed by several
// blocks, which repeat the scores. 128 columns serve a head of 128 with one;
// the narrower variant wastes none of its work on a head of 64.
//
// The running maximum and sum are in shared memory, and what a tile's end needs
// is found out there, so that eight warps have room in a multiprocessor and the
// compiler spills nothing (nvcc 13.0). It did, up to 10 registers, where all
// scores were made of their products before the first row's weights.
//
// 2 rows columns (head_size + value_size) operations, half of that if causal,
// for (rows + columns)(head_size + value_size) elements that must move; each
// tile of keys and values is read by rows / 64 blocks, mostly from the L2
// cache.
#pragma once

#include <cstdint>

#include "cuda/attention/forward.cuh"
#include "cuda/attention/panel_shape.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/fast_math.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/tile_product.cuh"

namespace pkg::cuda {

// The running maximum and sum of the rows of a block, between its tiles: all
// threads that share a row have the same, and outputs of 128 columns leave them
// no registers for it.
template <class Softmax, class Scores>
class SharedSoftmax {
 public:
  using Number = typename Softmax::Number;
  using Thread = typename Scores::Thread;

  __device__ __forceinline__ static void load(Softmax& softmax, int i) {
    const Thread thread;
    softmax.maximum[i] = place(0)[thread.row(i)];
    softmax.sum[i] = place(1)[thread.row(i)];
  }

  // Once all that share the row have loaded it.
  __device__ __forceinline__ static void store(const Softmax& softmax, int i) {
    const Thread thread;
    __syncwarp();
    if (thread.is_first_of_row()) {
      place(0)[thread.row(i)] = softmax.maximum[i];
      place(1)[thread.row(i)] = softmax.sum[i];
    }
  }

  // Of rows without any key yet.
  __device__ __forceinline__ static void begin() {
    const Softmax softmax;
    PKG_UNROLL
    for (int i = 0; i < kRows; ++i) {
      store(softmax, i);
    }
    __syncwarp();
  }

  __device__ __forceinline__ static Softmax end() {
    Softmax softmax;
    __syncwarp();
    PKG_UNROLL
    for (int i = 0; i < kRows; ++i) {
      load(softmax, i);
    }
    return softmax;
  }

 private:
  static constexpr int kRows = Scores::kThreadRows;

  __device__ __forceinline__ static auto place(int part) {
    PKG_SHARED(Number, statistics, [2][Scores::kTileRows]);
    return statistics[part];
  }
};

// Replaces products by weights, after dropout, and rescales the output so far.
template <class Softmax, class Attention, class Scores, class Output>
__device__ __forceinline__ void weigh_tile(const Attention& attention,
                                           Scores& scores, Output& output,
                                           int64_t row_begin,
                                           int64_t column_begin) {
  using Thread = typename Scores::Thread;
  using Shared = SharedSoftmax<Softmax, Scores>;
  const bool are_products =
      attention.template are_products<Scores>(row_begin, column_begin);
  typename Attention::template Mask<Scores> mask;
  if (!are_products) {
    attention.load_mask(mask, 0, row_begin, column_begin);
  }
  Softmax softmax;
  PKG_UNROLL
  for (int i = 0; i < scores.kThreadRows; ++i) {
    const Thread thread;
    const int64_t row = row_begin + thread.row(i);
    if (are_products) {
      scores.scale_row(i, attention.scale());
    } else {
      attention.score_row(scores, i, row_begin, column_begin, mask);
      if (i + 1 < scores.kThreadRows) {
        attention.load_mask(mask, i + 1, row_begin, column_begin);
      }
    }
    Shared::load(softmax, i);
    output.scale_row(i, softmax.update_row(i, scores));
    Shared::store(softmax, i);
    PKG_UNROLL
    for (int j = 0; j < scores.kThreadColumns; j += 4) {
      typename Scores::Value factors[4];
      attention.dropout_factors(row, column_begin + thread.column(j), factors);
      PKG_UNROLL
      for (int k = 0; k < 4; ++k) {
        scores.values[i][j + k] *= factors[k];
      }
    }
  }
}

template <class Element, int kWidth>
using ForwardGrid = AttentionGrid<Accumulator<Element>, kWidth>;

template <class Element, int kWidth>
__global__ void __launch_bounds__(
    ForwardGrid<Element, kWidth>::Thread::kThreads)
    attention_forward_panels_kernel(
        const __grid_constant__ AttentionForward<Element> call) {
  using Number = Accumulator<Element>;
  using Scores = typename ForwardGrid<Element, kWidth>::Scores;
  using Thread = typename Scores::Thread;
  constexpr int kTile = kAttentionTile;
  constexpr int kColumns = Scores::kTileColumns;
  constexpr int kDepth = kAttentionDepth<Element>;
  PKG_SHARED(Number, query_panels, [2][kDepth][kTile + kPanelPadding]);
  PKG_SHARED(Number, key_panels, [2][kDepth][kWidth + kPanelPadding]);
  static_assert(kColumns == kWidth);  // the panels are the values' too
  PKG_SHARED(Number, weights, [kTile][kTile + kPanelPadding]);

  const AttentionProblem<Element>& problem = call.problem;
  const int64_t row_tiles = tiles_of(problem.rows, kTile);
  const int64_t output_tiles = call.template output_tiles<kWidth>();
  const int64_t tiles = call.template tile_count<kTile, kWidth>();
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t batch = index / output_tiles / row_tiles;
    const int64_t row_begin = index / output_tiles % row_tiles * kTile;
    const int64_t output_begin = index % output_tiles * kWidth;

    const AttentionExtent extent = problem.extent(batch);
    if (row_begin >= extent.rows) {
      continue;
    }
    const AttentionScores<Element> attention(problem, batch, extent);
    const auto query = problem.query.by_row(
        problem.batch, batch, extent.first_row, extent.rows, problem.head_size);
    const auto key =
        problem.key.by_row(problem.batch, batch, extent.first_column,
                           extent.columns, problem.head_size);
    const auto value =
        problem.value.by_column(problem.batch, batch, extent.first_column,
                                extent.columns, problem.value_size);

    using Softmax = OnlineSoftmax<Scores, Exponential>;
    SharedSoftmax<Softmax, Scores>::begin();
    Tile<Number, kTile, kWidth, Thread> output(0);
    const int64_t column_end = problem.column_end(extent, row_begin + kTile);
    for (int64_t column_begin = problem.first_column(extent, row_begin);
         column_begin < column_end; column_begin += kColumns) {
      Scores scores(0);
      multiply<kDepth, PanelPlaces::of_product>(scores, query, row_begin, key,
                                                column_begin, query_panels,
                                                key_panels);
      weigh_tile<Softmax>(attention, scores, output, row_begin, column_begin);
      PKG_UNROLL
      for (int part = 0; part < kColumns; part += kTile) {
        store_transposed<kTile>(scores, part, weights);
        multiply_shared<kDepth, kTile>(output, weights, value, output_begin,
                                       column_begin + part, key_panels);
      }
    }
    const int64_t stored = computed_here(batch);
    store_attention(call, problem.extent(stored), stored, row_begin,
                    output_begin, output,
                    SharedSoftmax<Softmax, Scores>::end());
  }
}

}  // namespace pkg::cuda
