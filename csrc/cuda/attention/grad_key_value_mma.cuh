// The gradients of attention's key and value by tensor cores, of half
// precision: dK = scale dS^T Q and dV = (M P)^T dO, see
// cuda/attention/gradients.cuh.
//
// A block owns 128 keys, a warp 16 of them, and up to 128 columns of both
// gradients; it walks the queries, those of all heads that share the key. Tiles
// of scores are transposed, their rows are keys and their columns queries: as
// they lie in registers they are operand A of the products that sum over the
// queries, rounded to the operands' type, as FlashAttention's are.
//
// Keys and values stay in shared memory, by slices of 64 columns. Queries and
// the gradient of the output, 32 rows of each, serve two products each, by rows
// and by columns; they have two places, where a block may have as much memory,
// so that the next ones are on their way meanwhile. Heads of 128 take 96 KiB,
// or 80 with one place. Those of 256 take 160 at least, more than a block of
// most GPUs has: there it owns 64 keys, by four warps, and takes 96.
//
// Sums of 16 x 128 for either gradient and two tiles of 16 x 32 are 160
// registers of each of 256 threads; 64 queries at a time would be 192, and for
// heads of 64, where they would be 128, the compiler spilled 128 bytes. The
// slope of a capped score would be 16 more: its product is computed again
// instead.
//
// 4 rows columns (head_size + value_size) operations for each matrix of the
// batch, a half if causal; wider heads repeat the first two of the four
// products. For 16 columns of a head and 32 queries a warp loads 10 times four
// matrices for 16 products: 40 cycles of a multiprocessor's shared memory, of
// which the products take 32 at the rate of an A100.
#pragma once

#include <cstdint>

#include "cuda/attention/gradients.cuh"
#include "cuda/attention/gradients_mma.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/tile_limits.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/gemm/mma_product.cuh"
#include "cuda/gemm/operand_tile.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// The gradient of the query is another kernel's.
template <class Element>
struct NoGradQuery {
  using Scores = AttentionScores<Element>;
  static constexpr int kTileRows = 1;
  static constexpr int kSharedElements = 0;

  __device__ __forceinline__ void begin(int64_t, const AttentionExtent&,
                                        int64_t, int64_t) {}
  __device__ __forceinline__ void begin_step(int) {}
  template <class Gradients>
  __device__ __forceinline__ NoGradQuery share(const Gradients&, int) {
    return {};
  }
  template <class Memory>
  __device__ __forceinline__ void add(NoGradQuery, const Memory&, int) {}
  __device__ __forceinline__ void end() {}
};

// GradQuery gets the gradients of the scores tile by tile: NoGradQuery, or
// JointGradQuery of cuda/attention/joint_gradients_mma.cuh.
template <class Element, int kWidth, int kBlockKeys,
          class GradQuery = NoGradQuery<Element>>
class GradKeyValueMma {
 public:
  static constexpr int kKeys = kBlockKeys;
  static constexpr int kQueries = 32;
  static constexpr int kWarpKeys = 16;
  static constexpr int kThreads = kKeys / kWarpKeys * kWarp;
  using Weights = Tile<float, kKeys, kQueries,
                       MmaThread<kKeys, kQueries, kWarpKeys, kQueries>>;
  using Sums =
      Tile<float, kKeys, kWidth, MmaThread<kKeys, kWidth, kWarpKeys, kWidth>>;

  static LaunchShape launch_shape(const AttentionProblem<Element>& problem,
                                  int query_places) {
    const int elements =
        Places(problem, query_places).end + GradQuery::kSharedElements;
    return {kThreads, elements * static_cast<int>(sizeof(Element))};
  }

  __device__ __forceinline__
  GradKeyValueMma(const AttentionGradKeyValue<Element>& call)
      : call_(call.backward),
        problem_(call.backward.problem),
        query_places_(call.places),
        places_(problem_, query_places_),
        memory_(dynamic_shared<Element>()) {}

  // What a block computes of its keys.
  struct Part {
    int head_begin;
    bool wants_key;
    bool wants_value;
  };

  // What is the gradient of the query's of the shared memory.
  __device__ __forceinline__ SharedSpan<Element> grad_query_memory() const {
    return memory_.part(places_.end, GradQuery::kSharedElements);
  }

  // key_sums += dS^T Q and value_sums += (M P)^T dO of one matrix of the batch.
  // Ends with a barrier of the block.
  __device__ __forceinline__ void add(int64_t batch, const Part& part,
                                      Sums& key_sums, Sums& value_sums,
                                      GradQuery& grad_query) const {
    const AttentionExtent extent = problem_.extent(batch);
    auto [begin, end] = rows_of_tiles(extent, column_begin());
    if (begin >= end) {
      __syncthreads();
      return;
    }
    if (threadIdx.x == 0) {
      work()[kRowEnd] = end;
    }
    grad_query.begin(batch, extent, column_begin(), begin);
    const typename GradQuery::Scores attention(problem_, batch, extent);
    const Key key = load_keys(batch, extent, column_begin());
    const auto queries =
        rows_of(problem_.query, batch, extent, problem_.head_size);
    const auto grad_outputs =
        rows_of(call_.grad_output, batch, extent, problem_.value_size);
    load_queries(queries, grad_outputs, begin, 0);
    do {
      const int place = place_of(begin);
      const Numbers log_sum_exp = numbers_of(call_.log_sum_exp, extent, begin);
      begin_tile(queries, grad_outputs, begin, grad_query);
      const Query query(queries, begin, 0, false);
      const auto score = [&](Weights& tile) {
        multiply_all_slices<Element, kWarpKeys, kQueries>(
            tile, key, key_memory(), query, query_memory(place),
            places_.key_slices);
      };
      Weights weights(0);
      score(weights);
      weigh(attention, weights, begin, column_begin(), log_sum_exp);
      const Dropout dropout(attention, begin, column_begin());
      if (part.wants_value) {
        multiply_from_registers<Element>(
            value_sums, dropout.dropped(weights), QueriesAsSteps(),
            slices_of(grad_output_memory(place), part.head_begin));
      }
      if (part.wants_key) {
        const Numbers delta = numbers_of(call_.delta, extent, begin);
        Weights gradients(0);
        multiply_all_slices<Element, kWarpKeys, kQueries>(
            gradients, key, value_memory(), query, grad_output_memory(place),
            places_.value_slices);
        gradients = dropout.dropped(gradients);
        differentiate(weights, gradients, delta);
        multiply_by_cap_slopes(attention, gradients, score);
        auto query_sums = grad_query.share(gradients, begin);
        multiply_from_registers<Element>(
            key_sums, gradients, QueriesAsSteps(),
            slices_of(query_memory(place), part.head_begin));
        grad_query.add(query_sums, key_memory(), begin);
      }
      end_tile(queries, grad_outputs, begin);
      begin += kQueries;
    } while (begin < row_end());
    __syncthreads();
    grad_query.end();
  }

  // Both gradients of the part, of one matrix of the batch as the key sees it.
  __device__ __forceinline__ void make(
      const AttentionGradKeyValue<Element>& call, int64_t owned,
      int64_t first_key, const Part& part, GradQuery& grad_query) const {
    if (first_key >=
        problem_.extent(call.partition.batch_index(owned, 0)).columns) {
      return;
    }
    Sums key_sums(0);
    Sums value_sums(0);
    begin_work(owned, first_key);
    for (int64_t shared = 0; shared < call.partition.shared_count;
         shared = next_shared()) {
      add(batch_of_work(call, shared), part, key_sums, value_sums, grad_query);
    }
    const int64_t first = batch_of_work(call, 0);
    const AttentionExtent extent = problem_.extent(first);
    const auto store = [&](const Sums& sums,
                           const ResultBatch<Element>& gradient, int64_t size) {
      store_tile(sums, gradient.row(problem_.batch, first, extent.first_column),
                 extent.columns, size, gradient.row_stride, column_begin(),
                 part.head_begin);
    };
    if (part.wants_key) {
      key_sums.scale(static_cast<float>(problem_.scale));
      store(key_sums, call.grad_key, problem_.head_size);
    }
    if (part.wants_value) {
      store(value_sums, call.grad_value, problem_.value_size);
    }
  }

 private:
  // Of the operands whose rows are keys, and of those whose rows are queries.
  using Key = OperandTile<Element, kKeys, kThreads, OperandLines::outer, false>;
  using Query =
      OperandTile<Element, kQueries, kThreads, OperandLines::outer, false>;
  using QueriesAsSteps = LinesAsSteps<Element, kQueries>;
  using Numbers = QueryNumbers<Weights, true>;
  using Dropout = TransposedDropout<Weights>;

  // What the block is at. In shared memory, since registers are few: the first
  // thread writes it after one barrier, and all read it after the next. With
  // these four in registers nvcc 13.0 spilled up to 10 words of a thread.
  enum Work {
    kOwned,   // matrix of the batch, as keys are counted
    kShared,  // of the matrices of queries that share the keys
    kColumn,  // the first key
    kRowEnd,  // behind the last query that sees one
    kNumbers,
  };
  __device__ __forceinline__ static auto work() {
    PKG_SHARED(int64_t, key_value_work, [kNumbers]);
    return key_value_work;
  }
  // Places are below kMostTiledLength.
  __device__ __forceinline__ static int column_begin() {
    return static_cast<int>(work()[kColumn]);
  }
  __device__ __forceinline__ static int row_end() {
    return static_cast<int>(work()[kRowEnd]);
  }

  __device__ __forceinline__ static void begin_work(int64_t owned,
                                                    int64_t first_key) {
    __syncthreads();
    if (threadIdx.x == 0) {
      const auto at = work();
      at[kOwned] = owned;
      at[kShared] = 0;
      at[kColumn] = first_key;
    }
    __syncthreads();
  }
  // After a barrier: which of the matrices of queries comes after this one.
  __device__ __forceinline__ static int64_t next_shared() {
    if (threadIdx.x == 0) {
      work()[kShared] += 1;
    }
    __syncthreads();
    return work()[kShared];
  }
  __device__ __forceinline__ static int64_t batch_of_work(
      const AttentionGradKeyValue<Element>& call, int64_t shared) {
    const int64_t owned = work()[kOwned];
    return call.partition.batch_index(owned, shared);
  }

  // Where the operands are in shared memory. There are as many slices of the
  // queries, and of the gradient of the output, as the columns of the last
  // block need.
  struct Places {
    int key_slices;
    int value_slices;
    int value;
    int query;
    int query_elements;
    int grad_output_elements;
    int end;

    __host__ __device__ Places(const AttentionProblem<Element>& problem,
                               int query_places)
        : key_slices(slices(problem.head_size, Key::kDepth)),
          value_slices(slices(problem.value_size, Key::kDepth)),
          value(key_slices * Key::kElements),
          query(value + value_slices * Key::kElements),
          query_elements(slices(problem.head_size, kWidth) * kWidth * kQueries),
          grad_output_elements(slices(problem.value_size, kWidth) * kWidth *
                               kQueries),
          end(query + query_places * (query_elements + grad_output_elements)) {}
  };

  __host__ __device__ static int slices(int64_t size, int width) {
    return static_cast<int>(tiles_of(size, width));
  }

  __device__ __forceinline__ static Numbers numbers_of(
      const float* numbers, const AttentionExtent& extent, int64_t row_begin) {
    const typename Weights::Thread thread;
    return Numbers(numbers, extent,
                   [&](int j) { return row_begin + thread.column(j); });
  }

  __device__ __forceinline__ SharedSpan<Element> key_memory() const {
    return memory_.part(0, places_.value);
  }
  __device__ __forceinline__ SharedSpan<Element> value_memory() const {
    return memory_.part(places_.value, places_.query - places_.value);
  }
  __device__ __forceinline__ SharedSpan<Element> query_memory(int place) const {
    return memory_.part(place_of_queries(place), places_.query_elements);
  }
  __device__ __forceinline__ SharedSpan<Element> grad_output_memory(
      int place) const {
    return memory_.part(place_of_queries(place) + places_.query_elements,
                        places_.grad_output_elements);
  }
  __device__ __forceinline__ int place_of_queries(int place) const {
    return places_.query +
           place * (places_.query_elements + places_.grad_output_elements);
  }
  // The slices of kWidth columns.
  __device__ __forceinline__ static SharedSpan<Element> slices_of(
      const SharedSpan<Element>& memory, int head_begin) {
    return memory.part(head_begin * kQueries, kWidth * kQueries);
  }

  __device__ __forceinline__ PanelSource<Element> rows_of(
      const MatrixBatch<Element>& matrix, int64_t batch,
      const AttentionExtent& extent, int64_t size) const {
    return matrix.by_row(problem_.batch, batch, extent.first_row, extent.rows,
                         size);
  }

  // Keys and values: what is returned knows where either's words are.
  __device__ __forceinline__ Key load_keys(int64_t batch,
                                           const AttentionExtent& extent,
                                           int64_t column_begin) const {
    const typename Weights::Thread thread;
    const auto columns_of = [&](const MatrixBatch<Element>& matrix,
                                int64_t size) {
      return Key(matrix.by_row(problem_.batch, batch, extent.first_column,
                               extent.columns, size),
                 column_begin, thread.warp_row, true);
    };
    const Key key = columns_of(problem_.key, problem_.head_size);
    load_slices(key, key_memory(), places_.key_slices);
    load_slices(columns_of(problem_.value, problem_.value_size), value_memory(),
                places_.value_slices);
    return key;
  }

  __device__ __forceinline__ void load_queries(
      const PanelSource<Element>& queries,
      const PanelSource<Element>& grad_outputs, int64_t begin,
      int place) const {
    load_slices(Query(queries, begin, 0, false), query_memory(place),
                places_.query_elements / Query::kElements);
    load_slices(Query(grad_outputs, begin, 0, false), grad_output_memory(place),
                places_.grad_output_elements / Query::kElements);
    commit_copies();
  }

  // Where the queries lie from `begin` on.
  __device__ __forceinline__ int place_of(int begin) const {
    return query_places_ == 1 ? 0 : begin / kQueries % 2;
  }

  // Once the queries at `begin` have come and all are done with those before;
  // the next ones are loaded meanwhile where they have a place.
  __device__ __forceinline__ void begin_tile(
      const PanelSource<Element>& queries,
      const PanelSource<Element>& grad_outputs, int begin,
      GradQuery& grad_query) const {
    wait_for_copies<0>();
    __syncthreads();
    grad_query.begin_step(begin);
    if (begin + kQueries < row_end() && query_places_ > 1) {
      load_queries(queries, grad_outputs, begin + kQueries,
                   place_of(begin + kQueries));
    }
  }

  // Once the warp is done with the queries at `begin`: the next ones are loaded
  // behind a barrier where all have one place.
  __device__ __forceinline__ void end_tile(
      const PanelSource<Element>& queries,
      const PanelSource<Element>& grad_outputs, int begin) const {
    if (begin + kQueries < row_end() && query_places_ == 1) {
      __syncthreads();
      load_queries(queries, grad_outputs, begin + kQueries, 0);
    }
  }

  struct Rows {
    int begin;
    int end;
  };

  // The queries that see some of the keys of a block, in whole tiles of the
  // gradient of the query.
  __device__ __forceinline__ Rows rows_of_tiles(const AttentionExtent& extent,
                                                int64_t column_begin) const {
    const int64_t begin = problem_.first_row(extent, column_begin);
    const int64_t end = problem_.row_end(extent, column_begin + kKeys);
    const int64_t size =
        tiles_of(end - begin, GradQuery::kTileRows) * GradQuery::kTileRows;
    return {static_cast<int>(begin), static_cast<int>(begin + size)};
  }

  const AttentionBackward<Element>& call_;
  const AttentionProblem<Element>& problem_;
  int query_places_;
  Places places_;
  SharedSpan<Element> memory_;
};

template <class Element, int kWidth, int kKeys>
__global__ void __launch_bounds__(
    GradKeyValueMma<Element, kWidth, kKeys>::kThreads)
    attention_grad_key_value_mma_kernel(
        const __grid_constant__ AttentionGradKeyValue<Element> call) {
  wait_for_kernel_before();
  using Mma = GradKeyValueMma<Element, kWidth, kKeys>;
  const AttentionProblem<Element>& problem = call.backward.problem;
  const Mma mma(call);
  const int64_t column_tiles = tiles_of(problem.columns, Mma::kKeys);
  const int64_t head_tiles = call.template head_tiles<kWidth>();
  const int64_t tiles = call.template tile_count<Mma::kKeys, kWidth>();
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t owned = index / head_tiles / column_tiles;
    const int head_begin = static_cast<int>(index % head_tiles) * kWidth;
    const int64_t first_key = index / head_tiles % column_tiles * Mma::kKeys;
    const typename Mma::Part part = {
        head_begin,
        call.grad_key.data != nullptr && head_begin < problem.head_size,
        call.grad_value.data != nullptr && head_begin < problem.value_size};
    NoGradQuery<Element> none;
    mma.make(call, owned, first_key, part, none);
  }
}

}  // namespace pkg::cuda
