// The forward pass of scaled dot-product attention by tensor cores, of half
// precision.
//
// Algorithm: FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 1), as
// forward_panels.cuh, and its division of the work: a warp owns 32 or 16 of the
// block's queries and all keys of a tile, so that maximum and sum of a row
// stay in four lanes, and the weights, as the scores lie in registers, are
// operand A of the product with the values: they never pass through shared
// memory. They are rounded to the operands' type, as FlashAttention's are; the
// sum that they are divided by is that of the unrounded ones.
//
// Tiles: 128 queries by 64 keys. Queries stay in shared memory, the head by
// slices of 64 columns; keys have two places and values one, so that the next
// keys are on their way during the whole of a tile and its values while its
// scores are computed. A head of 128 takes 80 KiB.
//
// Warps of 32 rows, where a call is_plain() and heads have at most 128 columns:
// what is loaded of keys and values is multiplied twice. Two blocks of four
// warps, whose waits and weights do not coincide, fit into a multiprocessor.
// 32 x 64 scores and 32 x 128 outputs are 192 registers of a thread, which
// leaves few: places are counted in 32 bits, and those of keys and values in
// shared memory computed for each tile. The maximum is taken off the exponent
// by the multiply-add that scales it (ScaledExponents).
//
// For 128 queries, 64 keys and a head of 128 a multiprocessor takes, where the
// code is that of nvcc 13.0 for 9.0a,
// - tensor cores: 256 products of each warp, 2048 cycles at the rate of an
//   A100;
// - shared memory, at 128 bytes a cycle: 80 times four matrices for each of
//   four warps, and 32 KiB that are copied: 1280 + 256 = 1536 (warps of 16 rows
//   load 72 times for each of eight: 2304 + 256);
// - instructions, of one warp for each scheduler: 256 products, 80 loads, 16
//   copies and some 190 for their places, 64 exponentials, 64 multiply-adds,
//   comparisons and additions each, 128 products of outputs by corrections, 32
//   conversions, and some 100 else: 1150;
// - special functions: 64 exponentials of each warp at 4 lanes a cycle: 512.
// So it is expected, not measured.
//
// Warps of 16 rows otherwise: with what masks, caps, slopes and dropout take
// the compiler spilled 100 to 1200 bytes of every thread of warps of 32 rows
// (also with scores by 32 keys), and a head of 256 has 128 registers of outputs
// for 16 rows. A plain head above 128 has them all, so that its scores are
// computed once; others are divided into tiles of 128 columns, each of which
// computes the scores anew.
//
// A head of 256 takes 160 KiB, or 144 where it is divided, and a block of most
// GPUs has 99 (compute capability 8.6, 8.9 and 12.0). There heads above 128
// have blocks of 64 queries, and one place for keys: the next ones are on their
// way from when the scores are computed, during the weights and the product
// with the values. That is 96 KiB, or 80, four warps, and twice the reads of
// keys and values.
//
// 2 rows columns (head_size + value_size) operations, half of that if causal;
// each tile of keys and values is read by all blocks of a head, mostly from the
// L2 cache. The blocks with the most keys of a causal head are its first.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/forward.cuh"
#include "cuda/attention/plain_scores.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/fast_math.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/gemm/mma_product.cuh"
#include "cuda/gemm/operand_tile.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

constexpr int64_t kMostMmaHead = 256;  // of queries and keys

template <class Element, int kWidth, bool kPlain, int kBlockRows>
class AttentionMma {
 public:
  static constexpr int kRows = kBlockRows;
  static constexpr int kKeys = kAttentionTile;
  static constexpr int kKeyPlaces = kRows == kMmaLines ? 2 : 1;
  static constexpr int kWarpRows = kPlain && kWidth <= 128 ? 32 : 16;
  static constexpr int kThreads = kRows / kWarpRows * 32;
  static constexpr int kBlocks = 256 / kThreads;  // in a multiprocessor
  static constexpr int64_t kMostHead = kPlain ? kWidth : kMostMmaHead;
  using Attention = std::conditional_t<kPlain, ScaledExponents<Element>,
                                       AttentionScores<Element>>;
  using Scores =
      Tile<float, kRows, kKeys, MmaThread<kRows, kKeys, kWarpRows, kKeys>>;
  using Output =
      Tile<float, kRows, kWidth, MmaThread<kRows, kWidth, kWarpRows, kWidth>>;
  using Softmax = OnlineSoftmax<Scores, FastExponential>;
  using Query = OperandTile<Element, kRows, kThreads, OperandLines::outer>;
  using Key = OperandTile<Element, kKeys, kThreads, OperandLines::outer>;
  using Value = OperandTile<Element, kWidth, kThreads, OperandLines::steps>;
  static_assert(Value::kDepth == kKeys);

  static LaunchShape launch_shape(int64_t head_size) {
    const int elements =
        slices(head_size) * (Query::kElements + kKeyPlaces * Key::kElements) +
        Value::kElements;
    return {kThreads, elements * static_cast<int>(sizeof(Element))};
  }

  __device__ __forceinline__
  AttentionMma(const AttentionProblem<Element>& problem)
      : problem_(problem),
        slices_(slices(problem.head_size)),
        memory_(dynamic_shared<Element>()) {}

  // The output, not yet divided by the sums, of kRows queries from row_begin
  // on.
  __device__ __forceinline__ void run(int64_t batch,
                                      const AttentionExtent& extent,
                                      int64_t row_begin, int64_t output_begin,
                                      Output& output, Softmax& softmax) const {
    const Attention attention(problem_, batch, extent);
    const typename Scores::Thread thread;
    const Query query(
        problem_.query.by_row(problem_.batch, batch, extent.first_row,
                              extent.rows, problem_.head_size),
        row_begin, thread.warp_row, true);
    const auto keys =
        problem_.key.by_row(problem_.batch, batch, extent.first_column,
                            extent.columns, problem_.head_size);
    const auto values =
        problem_.value.by_column(problem_.batch, batch, extent.first_column,
                                 extent.columns, problem_.value_size);
    const int end =
        static_cast<int>(problem_.column_end(extent, row_begin + kRows));
    int begin = static_cast<int>(problem_.first_column(extent, row_begin));
    if (begin >= end) {
      return;
    }
    load_slices(query, query_memory(), slices_);
    load_keys(keys, begin, 0);
    for (int place = 0; begin < end;
         begin += kKeys, place = kKeyPlaces - 1 - place) {
      const bool goes_on = begin + kKeys < end;
      // The keys have come, and all are done with the keys and values before.
      wait_for_copies<0>();
      __syncthreads();
      const Value value(values, output_begin, 0, false, thread_here());
      value.load(value_memory(), begin);
      commit_copies();
      if (kKeyPlaces > 1 && goes_on) {
        load_keys(keys, begin + kKeys, 1 - place);
      }
      Scores scores(0);
      const Key key(keys, begin, 0, false, thread_here());
      multiply_keys(scores, query, key, place);
      if (kKeyPlaces == 1 && goes_on) {
        __syncthreads();  // all are done with the keys
        load_keys(keys, begin + kKeys, 0);
      }
      attention.score_tile(scores, row_begin, begin);
      PKG_UNROLL
      for (int i = 0; i < scores.kThreadRows; ++i) {
        output.scale_row(i, weigh_row(attention, i, scores, softmax));
      }
      attention.drop_tile(scores, row_begin, begin);
      wait_for_values(goes_on);
      __syncthreads();
      multiply_from_registers<Element>(output, scores, value, value_memory());
    }
    if constexpr (Attention::kScalesExponents) {
      softmax.scale_maxima(attention.scale_of_exponents());
    }
  }

 private:
  // For what would lie in registers during all of the loop else.
  __device__ __forceinline__ static int thread_here() {
    return computed_here(static_cast<int>(threadIdx.x));
  }

  // Slices of a head, where their number is known to the compiler.
  static constexpr bool kFixedSlices = kPlain && kWidth <= 128;
  static constexpr int kSlices = kWidth / Query::kDepth;

  __host__ __device__ static int slices(int64_t head_size) {
    if constexpr (kFixedSlices) {
      return kSlices;
    } else {
      return static_cast<int>(tiles_of(head_size, Query::kDepth));
    }
  }

  __device__ __forceinline__ void multiply_keys(Scores& scores,
                                                const Query& query,
                                                const Key& key,
                                                int place) const {
    if constexpr (kFixedSlices) {
      PKG_UNROLL
      for (int slice = 0; slice < kSlices; ++slice) {
        multiply_slices<Element, kWarpRows, kKeys>(
            scores, query,
            query_memory().part(slice * Query::kElements, Query::kElements),
            key,
            key_memory(place).part(slice * Key::kElements, Key::kElements));
      }
    } else {
      multiply_all_slices<Element, kWarpRows, kKeys>(
          scores, query, query_memory(), key, key_memory(place), slices_);
    }
  }

  // Makes weights of the thread's i-th row of scores, and returns the factor
  // for what was added with those before.
  __device__ __forceinline__ static float weigh_row(const Attention& attention,
                                                    int i, Scores& scores,
                                                    Softmax& softmax) {
    if constexpr (Attention::kScalesExponents) {
      return softmax.update_row(i, scores, attention.scale_of_exponents());
    } else {
      return softmax.update_row(i, scores);
    }
  }

  __device__ __forceinline__ SharedSpan<Element> query_memory() const {
    return memory_.part(0, slices_ * Query::kElements);
  }
  __device__ __forceinline__ SharedSpan<Element> key_memory(int place) const {
    const int elements = slices_ * Key::kElements;
    return memory_.part(slices_ * Query::kElements + place * elements,
                        elements);
  }
  __device__ __forceinline__ SharedSpan<Element> value_memory() const {
    return memory_.part(
        slices_ * (Query::kElements + kKeyPlaces * Key::kElements),
        Value::kElements);
  }

  // Of two groups of copies the values are the first.
  __device__ __forceinline__ static void wait_for_values(bool keys_follow) {
    if (keys_follow) {
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
  }

  __device__ __forceinline__ void load_keys(const PanelSource<Element>& keys,
                                            int64_t begin, int place) const {
    load_slices(Key(keys, begin, 0, false, thread_here()), key_memory(place),
                slices_);
    commit_copies();
  }

  const AttentionProblem<Element>& problem_;
  int slices_;
  SharedSpan<Element> memory_;
};

template <class Element, int kWidth, bool kPlain, int kRows>
__global__ void __launch_bounds__(
    AttentionMma<Element, kWidth, kPlain, kRows>::kThreads,
    AttentionMma<Element, kWidth, kPlain, kRows>::kBlocks)
    attention_forward_mma_kernel(
        const __grid_constant__ AttentionForward<Element> call) {
  using Mma = AttentionMma<Element, kWidth, kPlain, kRows>;
  const AttentionProblem<Element>& problem = call.problem;
  const Mma mma(problem);
  const int64_t row_tiles = tiles_of(problem.rows, Mma::kRows);
  const int64_t output_tiles = call.template output_tiles<kWidth>();
  const int64_t tiles = call.template tile_count<Mma::kRows, kWidth>();
  const int64_t blocks = gridDim.x;
  // An index of 64 bits would take registers through a tile, which has none.
  for (int turn = 0; blockIdx.x + turn * blocks < tiles; ++turn) {
    const int64_t index = blockIdx.x + turn * blocks;
    const int64_t batch = index / output_tiles / row_tiles;
    const int64_t row_tile = index / output_tiles % row_tiles;
    const int64_t row_begin =
        (problem.is_causal ? row_tiles - 1 - row_tile : row_tile) * Mma::kRows;
    const int64_t output_begin = index % output_tiles * kWidth;
    const AttentionExtent extent = problem.extent(batch);
    if (row_begin >= extent.rows) {
      continue;
    }
    typename Mma::Output output(0);
    typename Mma::Softmax softmax;
    mma.run(batch, extent, row_begin, output_begin, output, softmax);
    store_attention(call, extent, batch, row_begin, output_begin, output,
                    softmax);
  }
}

}  // namespace pkg::cuda
