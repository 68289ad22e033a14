// The gradient of attention's query by products of warpgroups, of half
// precision: dQ = scale dS K, see cuda/attention/gradients.cuh; for compute
// capability 9.0 alone.
//
// A block owns 128 queries, a warpgroup 64 of them; it walks the keys, 128 at a
// time. Scores and gradients of scores stay in registers, where they are
// operand A of the product with the keys. Queries and the gradient of the
// output stay in shared memory; keys, which serve two products, and values come
// in stages of their own: two of heads of 128, four of 64.
//
// Sums of 64 x 128 and two tiles of 64 x 128 are 192 of a thread's 232
// registers. Where more becomes of a score than a weight tiles have 64 keys.
// The keys of a tile's second 64 that no query of the block sees are zeros, so
// that tiles of both widths give the same.
//
// Heads of up to 256, of plain attention alone, have tiles of 64 keys and one
// stage of each operand: keys of the next tile are copied while nothing is
// multiplied, values while keys are.
//
// For 128 queries, 128 keys and heads of 128 (64) a multiprocessor takes
// - tensor cores: three products of 2 x 128^3 operations at 4096 a cycle: 3072
//   (1536) cycles;
// - shared memory, at 128 bytes a cycle: 6 KiB for each of 32 products of
//   64 x 128 over 16 columns, 4 KiB for each of 16 products of 64 x 128 over 16
//   keys, 64 KiB that are copied: 1536 + 512 + 512 = 2560 (1280);
// - special functions: 16384 exponentials at 16 a cycle: 1024;
// - instructions: those of grad_key_value_warpgroups.cuh with one conversion in
//   place of two: 8 warps x 64 x 10.5 at 4 a cycle, and a tenth for all else:
//   1480.
// The tensor cores are the bound where one warpgroup multiplies while the other
// does all else; of heads of 64 instructions come close. (So it was expected.
// The compiler makes 823 instructions of a turn of heads of 128, where all is
// seen, and 799 of 64: 1650 and 1600 cycles. Of heads of 64 they are the bound,
// at 96 % of the tensor cores' rate. Of 4 x 16 heads of 128 by 4096 queries and
// keys in bfloat16 an H100 took 1200 us, its tensor cores 73 % busy, and of 4 x
// 32 heads of 64 1536.)
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/gradients.cuh"
#include "cuda/attention/gradients_mma.cuh"
#include "cuda/attention/gradients_warpgroups.cuh"
#include "cuda/attention/plain_scores.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/tensor_map.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

template <class Element>
using MappedGradQuery = MappedGradients<AttentionGradQuery<Element>>;

template <class Element, int kWidth, bool kPlain>
class GradQueryWarpgroups : public GradientWarpgroups<232> {
 public:
  static constexpr int kRows = 128;
  static constexpr int kKeys = kPlain && kWidth <= 128 ? 128 : 64;
  static constexpr int kStages = kWidth > 128            ? 1
                                 : kPlain && kWidth > 64 ? 2
                                                         : 4;
  static constexpr int kBarriers = 4 * kStages + 2;

  using Query = WarpgroupLines<Element, kRows, kWidth>;
  using Key = WarpgroupLines<Element, kKeys, kWidth>;
  using Scores = Tile<float, kRows, kKeys, MmaThread<kRows, kKeys, 16, kKeys>>;
  using Sums = Tile<float, kRows, kWidth, MmaThread<kRows, kWidth, 16, kWidth>>;
  using Attention = std::conditional_t<kPlain, ScaledExponents<Element>,
                                       AttentionScores<Element>>;
  using Words = uint32_t[kKeys / 16][4];
  static_assert(Scores::Thread::kThreads ==
                GradientWarpgroups<232>::kConsumers);

  static constexpr int kSharedBytes =
      2 * (Query::kElements + kStages * Key::kElements) * sizeof(Element);

  __host__ __device__ static int64_t tile_count(
      const AttentionGradQuery<Element>& call) {
    return call.partition.owned_count *
           tiles_of(call.backward.problem.rows, kRows);
  }

  __device__ __forceinline__ GradQueryWarpgroups(
      const MappedGradQuery<Element>& mapped, const Mbarriers& barriers)
      : mapped_(mapped),
        call_(mapped.call),
        problem_(mapped.call.backward.problem),
        barriers_(barriers),
        memory_(dynamic_shared<Element>()) {}

  __device__ __forceinline__ void run() const {
    if (threadIdx.x == 0) {
      init_barriers();
    }
    __syncthreads();
    divide_warpgroups<Launch>([&] { compute(); },
                              [&](int operand) { copy(operand); });
  }

 private:
  using Launch = GradientWarpgroups<232>;
  using Turn = TileTurn<kStages>;
  using Numbers = QueryNumbers<Scores, false>;

  // The queries that the block owns, and the keys that they see, of each matrix
  // of the batch that shares the queries.
  struct Work {
    uint32_t owned;
    int row_begin;
    int begin;
    int end;
  };

  // Of a pair of operands: the query and the key, and the gradient of the
  // output and the value.
  static constexpr int kKey = 0;
  static constexpr int kValue = 1;

  // The barriers of stages that have come, and of those that may be written.
  __device__ __forceinline__ static int full(int operand, int stage) {
    return operand * kStages + stage;
  }
  __device__ __forceinline__ static int empty(int operand, int stage) {
    return (2 + operand) * kStages + stage;
  }
  static constexpr int kQueriesFull = 4 * kStages;
  static constexpr int kQueriesEmpty = 4 * kStages + 1;

  __device__ __forceinline__ void init_barriers() const {
    for (int operand = 0; operand < 2; ++operand) {
      for (int stage = 0; stage < kStages; ++stage) {
        barriers_.init(full(operand, stage), 1);
        barriers_.init(empty(operand, stage), Launch::kConsumerWarps);
      }
    }
    barriers_.init(kQueriesFull, 2);
    barriers_.init(kQueriesEmpty, Launch::kConsumerWarps);
    publish_mbarriers();
  }

  // Where each begins.
  __device__ __forceinline__ static int query_index(int operand) {
    return operand * Query::kElements;
  }
  __device__ __forceinline__ static int key_index(int operand, int stage) {
    return 2 * Query::kElements + (operand * kStages + stage) * Key::kElements;
  }

  __device__ __forceinline__ uint32_t shared_count() const {
    return static_cast<uint32_t>(call_.partition.shared_count);
  }

  // Calls function(work) for what the block has to do.
  template <class Function>
  __device__ __forceinline__ void for_work(Function&& function) const {
    const auto row_tiles =
        static_cast<uint32_t>(tiles_of(problem_.rows, kRows));
    const auto tiles = static_cast<uint32_t>(tile_count(call_));
    for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const uint32_t row_tile = tile % row_tiles;
      const int row_begin =
          static_cast<int>(problem_.is_causal ? row_tiles - 1 - row_tile
                                              : row_tile) *
          kRows;
      const AttentionExtent extent = problem_.extent_of_one_length(0);
      function(Work{
          tile / row_tiles, row_begin,
          static_cast<int>(problem_.first_column(extent, row_begin)),
          static_cast<int>(problem_.column_end(extent, row_begin + kRows))});
    }
  }

  // A warp, of which a lane is enough: the query and the key, or the gradient
  // of the output and the value.
  __device__ __forceinline__ void copy(int operand) const {
    if (threadIdx.x % kWarp != 0) {
      return;
    }
    const MappedOperand& queries = mapped_.queries[operand];
    Turn turn;
    uint32_t query_parity = 1;
    for_work([&](const Work& work) {
      if (work.begin >= work.end) {
        return;
      }
      for (uint32_t shared = 0; shared < shared_count(); ++shared) {
        const uint32_t batch = call_.partition.batch_index(work.owned, shared);
        barriers_.wait(kQueriesEmpty, query_parity);
        query_parity ^= 1;
        Query::template copy<kBoxLines>(
            memory_, query_index(operand), queries.map,
            queries.matrix(problem_.batch, batch), work.row_begin,
            static_cast<int>(problem_.rows), barriers_, kQueriesFull);
        copy_keys(operand, work, batch, turn);
      }
    });
  }

  __device__ __forceinline__ void copy_keys(int operand, const Work& work,
                                            uint32_t batch, Turn& turn) const {
    const MappedOperand& keys = mapped_.keys[operand];
    const BoxedMatrix matrix = keys.matrix(problem_.batch, batch);
    PKG_UNROLL_BY(1)
    for (int begin = work.begin; begin < work.end;
         begin += kKeys, ++turn.count) {
      const int stage = turn.stage();
      barriers_.wait(empty(operand, stage), turn.parity() ^ 1);
      Key::template copy<kBoxLines>(memory_, key_index(operand, stage),
                                    keys.map, matrix, begin, work.end,
                                    barriers_, full(operand, stage));
    }
  }

  // Two warpgroups.
  __device__ __forceinline__ void compute() const {
    Turn turn;
    uint32_t query_parity = 0;
    for_work([&](const Work& work) {
      Sums sums(0);
      if (work.begin < work.end) {
        for (uint32_t shared = 0; shared < shared_count(); ++shared) {
          barriers_.wait(kQueriesFull, query_parity);
          query_parity ^= 1;
          add(work, call_.partition.batch_index(work.owned, shared), turn,
              sums);
          release(barriers_, kQueriesEmpty);
        }
      }
      store(work, sums);
    });
  }

  __device__ __forceinline__ void store(const Work& work, Sums& sums) const {
    const uint32_t batch = call_.partition.batch_index(work.owned, 0);
    sums.scale(static_cast<float>(problem_.scale));
    store_tile(sums, call_.grad_query.row(problem_.batch, batch, 0),
               problem_.rows, problem_.head_size, call_.grad_query.row_stride,
               work.row_begin, 0);
  }

  // sums += dS K of one matrix of the batch.
  __device__ __forceinline__ void add(const Work& work, uint32_t batch,
                                      Turn& turn, Sums& sums) const {
    const typename Scores::Thread thread;
    const AttentionExtent extent = problem_.extent_of_one_length(batch);
    const auto row = [&](int i) { return work.row_begin + thread.row(i); };
    const Numbers log_sum_exp(call_.backward.log_sum_exp, extent, row);
    const Numbers delta(call_.backward.delta, extent, row);
    const Attention attention(problem_, batch, extent);
    Scores weights(0);
    Scores gradients(0);
    PKG_UNROLL_BY(1)
    for (int begin = work.begin; begin < work.end; begin += kKeys) {
      const int stage = turn.stage();
      const auto score = [&](Scores& tile) {
        begin_products(kKey, tile, stage);
        wait_for_products<0>();
        hold_sums(tile.values);
      };
      barriers_.wait(full(kKey, stage), turn.parity());
      if constexpr (kPlain) {
        begin_products(kKey, weights, stage);
        barriers_.wait(full(kValue, stage), turn.parity());
        begin_products(kValue, gradients, stage);
        wait_for_products<1>();
        hold_sums(weights.values);
        weigh(attention, weights, work.row_begin, begin, log_sum_exp);
      } else {
        score(weights);
        weigh(attention, weights, work.row_begin, begin, log_sum_exp);
        barriers_.wait(full(kValue, stage), turn.parity());
        begin_products(kValue, gradients, stage);
      }
      wait_for_products<0>();
      hold_sums(gradients.values);
      release(barriers_, empty(kValue, stage));
      attention.drop_tile(gradients, work.row_begin, begin);
      differentiate(weights, gradients, delta);
      if constexpr (!kPlain) {
        multiply_by_cap_slopes(attention, gradients, score);
      }
      add_products_of_keys(gradients, stage, sums);
      release(barriers_, empty(kKey, stage));
      ++turn.count;
    }
  }

  // Begins the products of the queries and the keys of a stage, or of the
  // gradient of the output and the values.
  __device__ __forceinline__ void begin_products(int operand, Scores& tile,
                                                 int stage) const {
    begin_scores<Element, Query, Key>(
        tile,
        Query::by_line(memory_, query_index(operand),
                       64 * warpgroup_of_thread()),
        Key::by_line(memory_, key_index(operand, stage)));
  }

  __device__ __forceinline__ void add_products_of_keys(const Scores& gradients,
                                                       int stage,
                                                       Sums& sums) const {
    Words words;
    round_tile<Element>(gradients, words);
    begin_sums<Element>(sums, words,
                        Key::by_column(memory_, key_index(kKey, stage)));
    wait_for_products<0>();
    hold_sums(sums.values);
  }

  const MappedGradQuery<Element>& mapped_;
  const AttentionGradQuery<Element>& call_;
  const AttentionProblem<Element>& problem_;
  const Mbarriers& barriers_;
  SharedSpan<Element> memory_;
};

template <class Element, int kWidth, bool kPlain>
__global__ void __launch_bounds__(384, 1)
    attention_grad_query_warpgroups_kernel(
        const __grid_constant__ MappedGradQuery<Element> mapped) {
  wait_for_kernel_before();
  // Nothing of it is compiled for devices that lack the instructions.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Block = GradQueryWarpgroups<Element, kWidth, kPlain>;
  PKG_MBARRIERS(barriers, Block::kBarriers);
  Block(mapped, barriers).run();
#else
  __trap();
#endif
}

}  // namespace pkg::cuda
