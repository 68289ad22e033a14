// What a block of warpgroups has in shared memory that makes gradients of keys
// and values: those that it owns, and in stages the queries that see them, the
// gradient of the output, log-sum-exp and D. For compute capability 9.0 alone.
//
// Queries are walked from the last to the first, and come by boxes of 32. Those
// behind the last that sees a key are zeros:
// what is not finite then reaches what it reaches in grad_key_value_mma.cuh,
// whose tiles have 32 queries.
#pragma once

#include <cstdint>

#include "cuda/attention/gradients_warpgroups.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// The keys that a block owns, and the queries that see them, of each matrix of
// the batch that shares the keys.
struct KeyValueWork {
  uint32_t owned;
  int head_begin;
  int column_begin;
  int begin;
  int end;

  // The first of the last 64 queries: before `begin` where there are none.
  __device__ __forceinline__ int last() const {
    return static_cast<int>(tiles_of(end, kAttentionTile) - 1) * kAttentionTile;
  }
};

// Stores the gradients of keys and values that were summed, of the work.
template <class Sums, class Element>
__device__ __forceinline__ void store_key_value(
    const AttentionGradKeyValue<Element>& call, const KeyValueWork& work,
    Sums& key_sums, const Sums& value_sums) {
  const AttentionProblem<Element>& problem = call.backward.problem;
  const uint32_t batch = call.partition.batch_index(work.owned, 0);
  const auto store = [&](const Sums& sums, const ResultBatch<Element>& gradient,
                         int64_t size) {
    store_tile(sums, gradient.row(problem.batch, batch, 0), problem.columns,
               size, gradient.row_stride, work.column_begin, work.head_begin);
  };
  key_sums.scale(static_cast<float>(problem.scale));
  store(key_sums, call.grad_key, problem.head_size);
  store(value_sums, call.grad_value, problem.value_size);
}

// Call: AttentionGradKeyValue, or what has one.
template <class Element, class Call, int kBlockKeys, int kWidth, int kCount>
class KeyValueStages {
 public:
  static constexpr int kTileKeys = 128;  // of both warpgroups, one by one
  static constexpr int kQueries = kAttentionTile;
  static constexpr int kStages = kCount;
  static constexpr int kBarriers = 2 * kStages + 2;

  using Key = WarpgroupLines<Element, kBlockKeys, kWidth>;
  using Query = WarpgroupLines<Element, kQueries, kWidth>;
  using Weights = Tile<float, kTileKeys, kQueries,
                       MmaThread<kTileKeys, kQueries, 16, kQueries>>;
  using Words = uint32_t[kQueries / 16][4];
  using Turn = TileTurn<kStages>;

  // Log-sum-exp and D lie behind the operands, each in place of two elements.
  static constexpr int kNumberElements = sizeof(float) / sizeof(Element);
  static constexpr int kNumbers =
      2 * Key::kElements + 2 * kStages * Query::kElements;
  static constexpr int kElements =
      kNumbers + 2 * kStages * kQueries * kNumberElements;

  // Log-sum-exp or D of the queries of a stage, the columns of a transposed
  // tile.
  struct Numbers {
    static constexpr bool kOfTransposed = true;
    SharedSpan<Element> memory;
    int index;

    __device__ __forceinline__ float of(int, int j) const {
      const typename Weights::Thread thread;
      return memory
          .template load<Packet<float, 2>>(index + thread.column(j / 2 * 2) *
                                                       kNumberElements)
          .values[j % 2];
    }
  };

  // The barriers of stages that have come, and of those that may be written.
  __device__ __forceinline__ static int full(int stage) { return stage; }
  __device__ __forceinline__ static int empty(int stage) {
    return kStages + stage;
  }
  static constexpr int kKeysFull = 2 * kStages;
  static constexpr int kKeysEmpty = 2 * kStages + 1;

  // Where each begins.
  static constexpr int kKeyIndex = 0;
  static constexpr int kValueIndex = Key::kElements;
  __device__ __forceinline__ static int query_index(int stage) {
    return 2 * Key::kElements + 2 * stage * Query::kElements;
  }
  __device__ __forceinline__ static int grad_output_index(int stage) {
    return query_index(stage) + Query::kElements;
  }

  __device__ __forceinline__ KeyValueStages(const MappedGradients<Call>& mapped,
                                            const Mbarriers& barriers)
      : mapped_(mapped),
        call_(mapped.call),
        barriers_(barriers),
        memory_(dynamic_shared<Element>()) {}

  __device__ __forceinline__ uint32_t shared_count() const {
    return static_cast<uint32_t>(call_.partition.shared_count);
  }

  __device__ __forceinline__ void init_barriers(int consumer_warps) const {
    for (int stage = 0; stage < kStages; ++stage) {
      barriers_.init(full(stage), 4);  // two copies, two kinds of numbers
      barriers_.init(empty(stage), consumer_warps);
    }
    barriers_.init(kKeysFull, 2);
    barriers_.init(kKeysEmpty, consumer_warps);
  }

  // A warp, the keys that are owned, or the values. The parity is that of their
  // phases, 1 at first.
  __device__ __forceinline__ void copy_keys(int operand,
                                            const KeyValueWork& work,
                                            uint32_t& key_parity) const {
    const auto& problem = call_.backward.problem;
    const MappedOperand& keys = mapped_.keys[operand];
    barriers_.wait(kKeysEmpty, key_parity);
    key_parity ^= 1;
    // They are the same in all matrices of the batch that share them.
    if (threadIdx.x % kWarp == 0) {
      const uint32_t batch = call_.partition.batch_index(work.owned, 0);
      Key::template copy<kBoxLines>(
          memory_, operand * Key::kElements, keys.map,
          keys.matrix(problem.batch, batch), work.column_begin,
          static_cast<int>(problem.columns), barriers_, kKeysFull);
    }
  }

  // What comes with a matrix of the batch: the query and log-sum-exp, or the
  // gradient of the output and D.
  struct Queries {
    BoxedMatrix matrix;
    const float* numbers;
  };
  __device__ __forceinline__ Queries queries_of(int operand,
                                                uint32_t batch) const {
    const auto& problem = call_.backward.problem;
    const float* const numbers =
        operand == 0 ? call_.backward.log_sum_exp : call_.backward.delta;
    return {mapped_.queries[operand].matrix(problem.batch, batch),
            numbers + batch * problem.rows};
  }

  // A warp, the queries from `begin` on, of those before `end`.
  __device__ __forceinline__ void copy_queries(int operand,
                                               const Queries& queries,
                                               int begin, int end,
                                               Turn& turn) const {
    const int stage = turn.stage();
    barriers_.wait(empty(stage), turn.parity() ^ 1);
    if (threadIdx.x % kWarp == 0) {
      Query::template copy<kQueryBoxLines>(
          memory_, query_index(stage) + operand * Query::kElements,
          mapped_.queries[operand].map, queries.matrix, begin, end, barriers_,
          full(stage));
    }
    copy_numbers(queries.numbers, begin, numbers_index(operand, stage));
    release(barriers_, full(stage));
    ++turn.count;
  }

  __device__ __forceinline__ Numbers log_sum_exp(int stage) const {
    return {memory_, numbers_index(0, stage)};
  }
  __device__ __forceinline__ Numbers delta(int stage) const {
    return {memory_, numbers_index(1, stage)};
  }

  // Begins the products of the keys from `line` on and the queries of a stage,
  // or of the values and the gradient of the output.
  __device__ __forceinline__ void begin_products_of_keys(Weights& tile,
                                                         int line,
                                                         int stage) const {
    begin_scores<Element, Key, Query>(
        tile, Key::by_line(memory_, kKeyIndex, line),
        Query::by_line(memory_, query_index(stage)));
  }
  __device__ __forceinline__ void begin_products_of_values(Weights& tile,
                                                           int line,
                                                           int stage) const {
    begin_scores<Element, Key, Query>(
        tile, Key::by_line(memory_, kValueIndex, line),
        Query::by_line(memory_, grad_output_index(stage)));
  }

  // Begins dV += P^T dO, or dK += dS^T Q, from a column on.
  template <class Sums>
  __device__ __forceinline__ void begin_value_sums(Sums& sums, Words& words,
                                                   int head_begin,
                                                   int stage) const {
    begin_sums<Element>(
        sums, words,
        Query::by_column(memory_, grad_output_index(stage), head_begin));
  }
  template <class Sums>
  __device__ __forceinline__ void begin_key_sums(Sums& sums, Words& words,
                                                 int head_begin,
                                                 int stage) const {
    begin_sums<Element>(
        sums, words, Query::by_column(memory_, query_index(stage), head_begin));
  }

 private:
  __device__ __forceinline__ static int numbers_index(int operand, int stage) {
    return kNumbers + (2 * stage + operand) * kQueries * kNumberElements;
  }

  __device__ __forceinline__ void copy_numbers(const float* numbers, int begin,
                                               int index) const {
    PKG_UNROLL
    for (int i = 0; i < kQueries; i += kWarp) {
      const int query = i + static_cast<int>(threadIdx.x) % kWarp;
      const int row = begin + query;
      memory_.store(index + query * kNumberElements,
                    row < call_.backward.problem.rows ? numbers[row] : 0.0f);
    }
  }

  const MappedGradients<Call>& mapped_;
  const Call& call_;
  const Mbarriers& barriers_;
  SharedSpan<Element> memory_;
};

}  // namespace pkg::cuda
