// The forward pass of scaled dot-product attention by multiply-adds: of float64
// and float32, and of heads that the tensor cores' kernel has no room for.
//
// Algorithm: FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 1). A block
// owns 64 queries and up to 64 or 128 columns of their output. It walks the
// keys 64 at a time: scores S = Q K^T in registers, the running row maximum m
// and sum l updated online, the output so far rescaled by exp(m_old - m), the
// weights exp(S - m) passed through shared memory into O += P V. Nothing of the
// size queries x keys is ever in global memory.
//
// Tiles: 64 x 64 scores let one tile of weights and the panels of both products
// stay under 48 KiB of shared memory. Of float32, 128 threads have them, 32
// registers of each, so that what a thread loads is multiplied more often: 12
// numbers for 32 products, and 16 for 64 where the output has 128 columns. That
// is 12 and 16 cycles of a multiprocessor's shared memory for 8 and 16 of an
// H200's multiply-adds; 256 threads took 8 for 4, and 12 for 8. Of float64,
// whose numbers take two registers, 256 have 16. Q, K and V pass through the
// panels in slices of the head, so that a head of any size will do; an output
// wider than a block's columns is computed by several blocks, which repeat the
// scores. 128 columns serve a head of 128 with one; the narrower variant wastes
// none of its work on a head of 64.
//
// The running maximum and sum are in shared memory, and what a tile's end needs
// is found out there, so that two blocks have room in a multiprocessor, three
// of float32 with 64 columns, and the compiler spills nothing (nvcc 13.0).
//
// 2 rows columns (head_size + value_size) operations, half of that if causal,
// for (rows + columns)(head_size + value_size) elements that must move; each
// tile of keys and values is read by rows / 64 blocks, mostly from the L2
// cache.
#pragma once

#include <cstdint>

#include "cuda/attention/attention.cuh"
#include "cuda/attention/forward.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/fast_math.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/tile_product.cuh"

namespace pkg::cuda {

// The running maximum and sum of the rows of a block, between its tiles: all
// threads that share a row have the same, and outputs of 128 columns leave them
// no registers for it.
template <class Softmax, class Thread>
class SharedSoftmax {
 public:
  using Number = typename Softmax::Number;

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
  static constexpr int kRows = Thread::own_rows(kAttentionTile);

  __device__ __forceinline__ static auto place(int part) {
    PKG_SHARED(Number, statistics, [2][kAttentionTile]);
    return statistics[part];
  }
};

// Replaces scores by weights, after dropout, and rescales the output so far.
template <class Softmax, class Attention, class Scores, class Output>
__device__ __forceinline__ void weigh_tile(const Attention& attention,
                                           Scores& scores, Output& output,
                                           int64_t row_begin,
                                           int64_t column_begin) {
  using Thread = typename Scores::Thread;
  const Thread thread;
  Softmax softmax;
  PKG_UNROLL
  for (int i = 0; i < scores.kThreadRows; ++i) {
    SharedSoftmax<Softmax, Thread>::load(softmax, i);
    output.scale_row(i, softmax.update_row(i, scores));
    SharedSoftmax<Softmax, Thread>::store(softmax, i);
    static_assert(Scores::kThreadColumns == 4);
    typename Scores::Value factors[4];
    attention.dropout_factors(row_begin + thread.row(i),
                              column_begin + thread.column(0), factors);
    PKG_UNROLL
    for (int j = 0; j < scores.kThreadColumns; ++j) {
      scores.values[i][j] *= factors[j];
    }
  }
}

template <class Element, int kWidth>
__global__ void __launch_bounds__(
    AttentionThread<Accumulator<Element>>::kThreads)
    attention_forward_panels_kernel(
        const __grid_constant__ AttentionForward<Element> call) {
  using Number = Accumulator<Element>;
  using Thread = AttentionThread<Number>;
  constexpr int kTile = kAttentionTile;
  constexpr int kDepth = kAttentionDepth<Element>;
  PKG_SHARED(Number, query_panels, [2][kDepth][kTile + kPanelPadding]);
  PKG_SHARED(Number, key_panels, [2][kDepth][kWidth + kPanelPadding]);
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

    using Scores = Tile<Number, kTile, kTile, Thread>;
    using Softmax = OnlineSoftmax<Scores, Exponential>;
    SharedSoftmax<Softmax, Thread>::begin();
    Tile<Number, kTile, kWidth, Thread> output(0);
    const int64_t column_end = problem.column_end(extent, row_begin + kTile);
    for (int64_t column_begin = problem.first_column(extent, row_begin);
         column_begin < column_end; column_begin += kTile) {
      Scores scores(0);
      multiply<kDepth, PanelPlaces::of_product>(scores, query, row_begin, key,
                                                column_begin, query_panels,
                                                key_panels);
      scores.transform([&](int row, int column, Number product) {
        return attention.score(row_begin + row, column_begin + column, product);
      });
      weigh_tile<Softmax>(attention, scores, output, row_begin, column_begin);
      store_transposed(scores, weights);
      multiply_shared<kDepth, kTile>(output, weights, value, output_begin,
                                     column_begin, key_panels);
    }
    const int64_t stored = computed_here(batch);
    store_attention(call, problem.extent(stored), stored, row_begin,
                    output_begin, output,
                    SharedSoftmax<Softmax, Thread>::end());
  }
}

}  // namespace pkg::cuda
