// The gradient of attention's query by tensor cores, of half precision:
// dQ = scale dS K, see cuda/attention/gradients.cuh.
//
// A block owns 128 queries, a warp 16 of them, and up to 128 columns of their
// gradient; it walks the keys half as many at a time. Scores and gradients of
// scores stay in a thread's registers, where they are operand A of the product
// with the keys, rounded to the operands' type, as FlashAttention's are.
//
// Queries, the gradient of the output, keys and values are in shared memory, by
// slices of 64 columns. The keys serve two products, by rows and by columns.
// They have two places, where a block may have as much memory, so that the next
// ones are on their way meanwhile; values have one, free after the second
// product. Heads of 128 take 112 KiB, or 96 with keys in one place. Those of
// 256 take 192, more than a block of most GPUs has: there it is 96, with 64
// queries, four warps, that walk 32 keys at a time.
//
// Sums of 16 x 128 and two tiles of 16 x 64 are 128 registers of each of 256
// threads. The slope of a capped score would be 32 more: its product is
// computed again instead.
//
// 2 rows columns (2 head_size + value_size) operations for each matrix of the
// batch, a half if causal; a head wider than 128 repeats the first two of the
// three products. For 16 columns of a head and 64 keys a warp loads 14 times
// four matrices for 24 products.
#pragma once

#include <cstdint>

#include "cuda/attention/gradients.cuh"
#include "cuda/attention/gradients_mma.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/gemm/mma_product.cuh"
#include "cuda/gemm/operand_tile.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

template <class Element, int kWidth, int kBlockRows>
class GradQueryMma {
 public:
  static constexpr int kRows = kBlockRows;
  static constexpr int kKeys = kRows / 2;
  static constexpr int kWarpRows = 16;
  static constexpr int kThreads = kRows / kWarpRows * kWarp;
  using Scores =
      Tile<float, kRows, kKeys, MmaThread<kRows, kKeys, kWarpRows, kKeys>>;
  using Sums =
      Tile<float, kRows, kWidth, MmaThread<kRows, kWidth, kWarpRows, kWidth>>;

  static LaunchShape launch_shape(const AttentionProblem<Element>& problem,
                                  int key_places) {
    const int elements = Places(problem, key_places).end;
    return {kThreads, elements * static_cast<int>(sizeof(Element))};
  }

  __device__ __forceinline__
  GradQueryMma(const AttentionGradQuery<Element>& call)
      : call_(call.backward),
        problem_(call.backward.problem),
        key_places_(call.places),
        places_(problem_, key_places_),
        memory_(dynamic_shared<Element>()) {}

  // sums += dS K of one matrix of the batch, for kRows queries from row_begin
  // on and kWidth columns from head_begin on.
  __device__ __forceinline__ void add(int64_t batch, int64_t row_begin,
                                      int64_t head_begin, Sums& sums) const {
    const AttentionExtent extent = problem_.extent(batch);
    int64_t begin = problem_.first_column(extent, row_begin);
    const int64_t end = problem_.column_end(extent, row_begin + kRows);
    if (begin >= end) {
      return;
    }
    const typename Scores::Thread thread;
    const AttentionScores<Element> attention(problem_, batch, extent);
    const auto row = [&](int i) { return row_begin + thread.row(i); };
    const Numbers log_sum_exp(call_.log_sum_exp, extent, row);
    const Numbers delta(call_.delta, extent, row);
    const auto keys =
        columns_of(problem_.key, batch, extent, problem_.head_size);
    const auto values =
        columns_of(problem_.value, batch, extent, problem_.value_size);
    const Query query = load_queries(batch, extent, row_begin);
    load_keys(keys, begin, 0);
    load_values(values, begin);
    for (int turn = 0; begin < end; begin += kKeys, ++turn) {
      const bool goes_on = begin + kKeys < end;
      const int place = key_places_ == 1 ? 0 : turn % 2;
      // Keys and values have come, and all are done with the keys before.
      wait_for_copies<0>();
      __syncthreads();
      if (goes_on && key_places_ > 1) {
        load_keys(keys, begin + kKeys, 1 - place);
      }
      const Key key(keys, begin, 0, false);
      const auto score = [&](Scores& tile) {
        multiply_all_slices<Element, kWarpRows, kKeys>(
            tile, query, query_memory(), key, key_memory(place),
            places_.head_slices);
      };
      Scores weights(0);
      score(weights);
      weigh(attention, weights, row_begin, begin, log_sum_exp);
      Scores gradients(0);
      multiply_all_slices<Element, kWarpRows, kKeys>(
          gradients, query, grad_output_memory(), key, value_memory(),
          places_.value_slices);
      if (goes_on) {
        __syncthreads();  // all are done with the values
        load_values(values, begin + kKeys);
      }

      attention.drop_tile(gradients, row_begin, begin);
      differentiate(weights, gradients, delta);
      multiply_by_cap_slopes(attention, gradients, score);
      multiply_from_registers<Element>(sums, gradients, KeysAsSteps(),
                                       keys_of_columns(place, head_begin));
      if (goes_on && key_places_ == 1) {
        __syncthreads();
        load_keys(keys, begin + kKeys, 0);
      }
    }
    __syncthreads();
  }

 private:
  // Of the operands whose rows are queries, and of those whose rows are keys.
  using Query =
      OperandTile<Element, kRows, kThreads, OperandLines::outer, false>;
  using Key = OperandTile<Element, kKeys, kThreads, OperandLines::outer, false>;
  using KeysAsSteps = LinesAsSteps<Element, kKeys>;
  using Numbers = QueryNumbers<Scores, false>;

  // Where the operands are in shared memory. There are as many slices of the
  // keys as the columns of the gradient's last block need.
  struct Places {
    int head_slices;
    int key_slices;
    int value_slices;
    int grad_output;
    int value;
    int key;
    int end;

    __host__ __device__ Places(const AttentionProblem<Element>& problem,
                               int key_places)
        : head_slices(slices(problem.head_size, Key::kDepth)),
          key_slices(slices(problem.head_size, kWidth) *
                     (kWidth / Key::kDepth)),
          value_slices(slices(problem.value_size, Key::kDepth)),
          grad_output(head_slices * Query::kElements),
          value(grad_output + value_slices * Query::kElements),
          key(value + value_slices * Key::kElements),
          end(key + key_places * key_slices * Key::kElements) {}
  };

  __host__ __device__ static int slices(int64_t size, int width) {
    return static_cast<int>(tiles_of(size, width));
  }

  __device__ __forceinline__ SharedSpan<Element> query_memory() const {
    return memory_.part(0, places_.grad_output);
  }
  __device__ __forceinline__ SharedSpan<Element> grad_output_memory() const {
    return memory_.part(places_.grad_output,
                        places_.value - places_.grad_output);
  }
  __device__ __forceinline__ SharedSpan<Element> value_memory() const {
    return memory_.part(places_.value, places_.key - places_.value);
  }
  __device__ __forceinline__ SharedSpan<Element> key_memory(int place) const {
    const int elements = places_.key_slices * Key::kElements;
    return memory_.part(places_.key + place * elements, elements);
  }
  __device__ __forceinline__ SharedSpan<Element> keys_of_columns(
      int place, int64_t head_begin) const {
    const int first = static_cast<int>(head_begin) * kKeys;
    return key_memory(place).part(first, kWidth * kKeys);
  }

  __device__ __forceinline__ PanelSource<Element> columns_of(
      const MatrixBatch<Element>& matrix, int64_t batch,
      const AttentionExtent& extent, int64_t size) const {
    return matrix.by_row(problem_.batch, batch, extent.first_column,
                         extent.columns, size);
  }

  // Queries and the gradient of the output: what is returned knows where
  // either's words are.
  __device__ __forceinline__ Query load_queries(int64_t batch,
                                                const AttentionExtent& extent,
                                                int64_t row_begin) const {
    const typename Scores::Thread thread;
    const auto rows_of = [&](const MatrixBatch<Element>& matrix, int64_t size) {
      return Query(matrix.by_row(problem_.batch, batch, extent.first_row,
                                 extent.rows, size),
                   row_begin, thread.warp_row, true);
    };
    const Query query = rows_of(problem_.query, problem_.head_size);
    load_slices(query, query_memory(), places_.head_slices);
    load_slices(rows_of(call_.grad_output, problem_.value_size),
                grad_output_memory(), places_.value_slices);
    return query;
  }

  __device__ __forceinline__ void load_keys(const PanelSource<Element>& keys,
                                            int64_t begin, int place) const {
    load_slices(Key(keys, begin, 0, false), key_memory(place),
                places_.key_slices);
    commit_copies();
  }
  __device__ __forceinline__ void load_values(
      const PanelSource<Element>& values, int64_t begin) const {
    load_slices(Key(values, begin, 0, false), value_memory(),
                places_.value_slices);
    commit_copies();
  }

  const AttentionBackward<Element>& call_;
  const AttentionProblem<Element>& problem_;
  int key_places_;
  Places places_;
  SharedSpan<Element> memory_;
};

template <class Element, int kWidth, int kRows>
__global__ void __launch_bounds__(
    GradQueryMma<Element, kWidth, kRows>::kThreads)
    attention_grad_query_mma_kernel(
        const __grid_constant__ AttentionGradQuery<Element> call) {
  wait_for_kernel_before();
  using Mma = GradQueryMma<Element, kWidth, kRows>;
  const AttentionProblem<Element>& problem = call.backward.problem;
  const Mma mma(call);
  const int64_t row_tiles = tiles_of(problem.rows, Mma::kRows);
  const int64_t head_tiles = tiles_of(problem.head_size, kWidth);
  const int64_t tiles = call.template tile_count<Mma::kRows, kWidth>();
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t owned = index / head_tiles / row_tiles;
    const int64_t row_tile = index / head_tiles % row_tiles;
    const int64_t row_begin =
        (problem.is_causal ? row_tiles - 1 - row_tile : row_tile) * Mma::kRows;
    const int64_t head_begin = index % head_tiles * kWidth;
    const int64_t first = call.partition.batch_index(owned, 0);
    const AttentionExtent extent = problem.extent(first);
    if (row_begin >= extent.rows) {
      continue;
    }
    typename Mma::Sums sums(0);
    for (int64_t shared = 0; shared < call.partition.shared_count; ++shared) {
      mma.add(call.partition.batch_index(owned, shared), row_begin, head_begin,
              sums);
    }
    sums.scale(static_cast<float>(problem.scale));
    store_tile(sums,
               call.grad_query.row(problem.batch, first, extent.first_row),
               extent.rows, problem.head_size, call.grad_query.row_stride,
               row_begin, head_begin);
  }
}

}  // namespace pkg::cuda
