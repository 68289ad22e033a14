// The gradients of attention's key and value by products of warpgroups, of half
// precision: dK = scale dS^T Q and dV = (M P)^T dO, see
// cuda/attention/gradients.cuh; for compute capability 9.0 alone.
//
// A block owns 128 keys, a warpgroup 64 of them; it walks the queries, 64 at a
// time, those of all heads that share the key, from the last to the first: so
// the sums of one head are those of joint_gradients_warpgroups.cuh, to the last
// bit. As in grad_key_value_mma.cuh tiles of scores are transposed,
// and what is made of them is operand A, in registers, of the products that sum
// over the queries. Keys and values stay in shared memory; queries, the
// gradient of the output, log-sum-exp and D come in four stages.
//
// Sums of 64 x 128 for either gradient, two tiles of 64 x 64 and what is made
// of one of them are 208 of a thread's 240 registers. Only plain attention has
// the two tiles in registers while one becomes weights. All else needs
// registers for itself: it begins the second product later, leaves the tensor
// cores to the other warpgroup, and a block has 64 columns of the gradients, so
// that two compute the scores of a head of 128.
//
// Of heads of up to 256, of plain attention alone, a block owns 64 keys: both
// warpgroups compute their scores, and each sums half of the gradients'
// columns. So they make six products of 256 columns where four would do, and
// there is memory for two stages: keys and values take 64 KiB, what comes of 64
// queries as much. (With 128 keys and half of the columns in a block it would
// be six too, and one stage. Single warps made all gradients of 4 x 8 such
// heads at 123 TFLOP/s, 4096 queries and keys on an H100.)
//
// For 128 keys, 64 queries and heads of 128 (64) a multiprocessor takes
// - tensor cores: four products of 2 x 128 x 64 x 128 operations at 4096 a
//   cycle: 2048 (1024) cycles;
// - shared memory, at 128 bytes a cycle: 4 KiB for each of 32 products of
//   64 x 64 over 16 columns, and of 16 products of 64 x 128 over 16 queries,
//   32 KiB that are copied, and 16 loads of 8 bytes a lane of 8 warps:
//   1024 + 512 + 256 + 128 = 1920 (1024);
// - special functions: 8192 exponentials at 16 a cycle: 512;
// - instructions: for a score scale, comparison, difference, product,
//   exponential and selection, for its gradient difference, product, comparison
//   and selection, and two halves of a conversion: 8 warps x 32 x 11 at 4 a
//   cycle, and a tenth for all else: 775.
// The tensor cores are the bound where one warpgroup multiplies while the other
// does all else; shared memory comes close. (So it was expected. The compiler
// makes 515 instructions of a turn of heads of 128, where all is seen, and 494
// of 64: 1030 and 990 cycles. Those that make descriptors were forgotten. Of 4
// x 16 heads of 128 by 4096 queries and keys in bfloat16 an H100 took 1742 us,
// its tensor cores 65 % busy, and of 4 x 32 heads of 64 2437.)
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/gradients.cuh"
#include "cuda/attention/gradients_mma.cuh"
#include "cuda/attention/gradients_warpgroups.cuh"
#include "cuda/attention/key_value_stages.cuh"
#include "cuda/attention/plain_scores.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

template <class Element>
using MappedGradKeyValue = MappedGradients<AttentionGradKeyValue<Element>>;

template <class Element, int kWidth, bool kPlain>
class GradKeyValueWarpgroups
    : public GradientWarpgroups<kPlain && kWidth >= 128 ? 240 : 232> {
  using Launch = GradientWarpgroups<kPlain && kWidth >= 128 ? 240 : 232>;

 public:
  // Whether both warpgroups have all of the keys.
  static constexpr bool kSharesKeys = kWidth > 128;
  static constexpr int kKeys = kSharesKeys ? 64 : 128;
  using Stages = KeyValueStages<Element, AttentionGradKeyValue<Element>, kKeys,
                                kWidth, kSharesKeys ? 2 : 4>;
  static constexpr int kQueries = Stages::kQueries;
  static constexpr int kBarriers = Stages::kBarriers;
  // Columns of the gradients that a warpgroup has.
  static constexpr int kOwnWidth = !kPlain       ? 64
                                   : kSharesKeys ? kWidth / 2
                                                 : kWidth;
  static constexpr int kHeadTiles = kSharesKeys ? 1 : kWidth / kOwnWidth;

  using Weights = typename Stages::Weights;
  using Sums = Tile<float, Stages::kTileKeys, kOwnWidth,
                    MmaThread<Stages::kTileKeys, kOwnWidth, 16, kOwnWidth>>;
  using Attention = std::conditional_t<kPlain, ScaledExponents<Element>,
                                       AttentionScores<Element>>;
  using Words = typename Stages::Words;
  static_assert(Weights::Thread::kThreads == Launch::kConsumers);

  static constexpr int kSharedBytes = Stages::kElements * sizeof(Element);

  __host__ __device__ static int64_t tile_count(
      const AttentionGradKeyValue<Element>& call) {
    return call.partition.owned_count *
           tiles_of(call.backward.problem.columns, kKeys) * kHeadTiles;
  }

  __device__ __forceinline__ GradKeyValueWarpgroups(
      const MappedGradKeyValue<Element>& mapped, const Mbarriers& barriers)
      : call_(mapped.call),
        problem_(mapped.call.backward.problem),
        barriers_(barriers),
        stages_(mapped, barriers) {}

  __device__ __forceinline__ void run() const {
    if (threadIdx.x == 0) {
      stages_.init_barriers(Launch::kConsumerWarps);
      publish_mbarriers();
    }
    __syncthreads();
    divide_warpgroups<Launch>([&] { compute(); },
                              [&](int operand) { copy(operand); });
  }

 private:
  using Turn = typename Stages::Turn;
  using Work = KeyValueWork;

  // Calls function(work) for what the block has to do.
  template <class Function>
  __device__ __forceinline__ void for_work(Function&& function) const {
    const auto column_tiles =
        static_cast<uint32_t>(tiles_of(problem_.columns, kKeys));
    const auto tiles = static_cast<uint32_t>(tile_count(call_));
    for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const uint32_t owned = tile / kHeadTiles / column_tiles;
      const int head_begin = static_cast<int>(tile % kHeadTiles) * kOwnWidth;
      const int column_begin =
          static_cast<int>(tile / kHeadTiles % column_tiles) * kKeys;
      const AttentionExtent extent = problem_.extent_of_one_length(0);
      function(Work{
          owned, head_begin, column_begin,
          static_cast<int>(problem_.first_row(extent, column_begin)),
          static_cast<int>(problem_.row_end(extent, column_begin + kKeys))});
    }
  }

  // What the calling warpgroup has of it: where the keys of a tile of both
  // would begin, so that its own are those of the block.
  __device__ __forceinline__ static Work of_warpgroup(Work work) {
    if constexpr (kSharesKeys) {
      work.column_begin -= key_line_of_tile();
      work.head_begin = kOwnWidth * warpgroup_of_thread();
    }
    return work;
  }
  // The first key of the calling warpgroup in such a tile, and among those in
  // shared memory.
  __device__ __forceinline__ static int key_line_of_tile() {
    return 64 * warpgroup_of_thread();
  }
  __device__ __forceinline__ static int key_line() {
    return kSharesKeys ? 0 : key_line_of_tile();
  }

  // A warp.
  __device__ __forceinline__ void copy(int operand) const {
    Turn turn;
    uint32_t key_parity = 1;
    for_work([&](const Work& work) {
      if (work.begin >= work.end) {
        return;
      }
      stages_.copy_keys(operand, work, key_parity);
      for (uint32_t shared = 0; shared < stages_.shared_count(); ++shared) {
        const auto queries = stages_.queries_of(
            operand, call_.partition.batch_index(work.owned, shared));
        PKG_UNROLL_BY(1)
        for (int begin = work.last(); begin >= work.begin; begin -= kQueries) {
          stages_.copy_queries(operand, queries, begin, work.end, turn);
        }
      }
    });
  }

  // Two warpgroups.
  __device__ __forceinline__ void compute() const {
    Turn turn;
    uint32_t key_parity = 0;
    for_work([&](const Work& of_block) {
      const Work work = of_warpgroup(of_block);
      Sums key_sums(0);
      Sums value_sums(0);
      if (work.begin < work.end) {
        barriers_.wait(Stages::kKeysFull, key_parity);
        key_parity ^= 1;
        for (uint32_t shared = 0; shared < stages_.shared_count(); ++shared) {
          add(work, call_.partition.batch_index(work.owned, shared), turn,
              key_sums, value_sums);
        }
        release(barriers_, Stages::kKeysEmpty);
      }
      store_key_value(call_, work, key_sums, value_sums);
    });
  }

  // key_sums += dS^T Q and value_sums += (M P)^T dO of one matrix of the batch.
  __device__ __forceinline__ void add(const Work& work, uint32_t batch,
                                      Turn& turn, Sums& key_sums,
                                      Sums& value_sums) const {
    const Attention attention(problem_, batch,
                              problem_.extent_of_one_length(batch));
    Weights weights(0);
    Weights gradients(0);
    PKG_UNROLL_BY(1)
    for (int begin = work.last(); begin >= work.begin; begin -= kQueries) {
      const int stage = turn.stage();
      Words weight_words;
      Words gradient_words;
      barriers_.wait(Stages::full(stage), turn.parity());
      if constexpr (kPlain) {
        weigh_plainly(attention, work, begin, stage, weights, gradients,
                      weight_words);
        stages_.begin_value_sums(value_sums, weight_words, work.head_begin,
                                 stage);
        wait_for_products<1>();
        hold_sums(gradients.values);
        differentiate(weights, gradients, stages_.delta(stage));
      } else {
        weigh_and_differentiate(attention, work, begin, stage, weights,
                                gradients, weight_words, value_sums);
      }
      round_tile<Element>(gradients, gradient_words);
      stages_.begin_key_sums(key_sums, gradient_words, work.head_begin, stage);
      wait_for_products<0>();
      hold_sums(value_sums.values);
      hold_sums(key_sums.values);
      release(barriers_, Stages::empty(stage));
      ++turn.count;
    }
  }

  // Makes weights; the product of the gradients of the output with the values
  // goes on.
  __device__ __forceinline__ void weigh_plainly(const Attention& attention,
                                                const Work& work, int64_t begin,
                                                int stage, Weights& weights,
                                                Weights& gradients,
                                                Words& weight_words) const {
    stages_.begin_products_of_keys(weights, key_line(), stage);
    stages_.begin_products_of_values(gradients, key_line(), stage);
    wait_for_products<1>();
    hold_sums(weights.values);
    weigh(attention, weights, begin, work.column_begin,
          stages_.log_sum_exp(stage));
    round_tile<Element>(weights, weight_words);
  }

  // The same with all that may become of a score, to the gradients of the
  // scores before their cap.
  __device__ __forceinline__ void weigh_and_differentiate(
      const Attention& attention, const Work& work, int begin, int stage,
      Weights& weights, Weights& gradients, Words& weight_words,
      Sums& value_sums) const {
    const auto score = [&](Weights& tile) {
      stages_.begin_products_of_keys(tile, key_line(), stage);
      wait_for_products<0>();
      hold_sums(tile.values);
    };
    score(weights);
    weigh(attention, weights, begin, work.column_begin,
          stages_.log_sum_exp(stage));
    const TransposedDropout<Weights> dropout(attention, begin,
                                             work.column_begin);
    round_tile<Element>(dropout.dropped(weights), weight_words);
    stages_.begin_products_of_values(gradients, key_line(), stage);
    stages_.begin_value_sums(value_sums, weight_words, work.head_begin, stage);
    wait_for_products<0>();
    hold_sums(gradients.values);
    hold_sums(value_sums.values);
    gradients = dropout.dropped(gradients);
    differentiate(weights, gradients, stages_.delta(stage));
    multiply_by_cap_slopes(attention, gradients, score);
  }

  const AttentionGradKeyValue<Element>& call_;
  const AttentionProblem<Element>& problem_;
  const Mbarriers& barriers_;
  const Stages stages_;
};

template <class Element, int kWidth, bool kPlain>
__global__ void __launch_bounds__(384, 1)
    attention_grad_key_value_warpgroups_kernel(
        const __grid_constant__ MappedGradKeyValue<Element> mapped) {
  wait_for_kernel_before();
  // Nothing of it is compiled for devices that lack the instructions.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Block = GradKeyValueWarpgroups<Element, kWidth, kPlain>;
  PKG_MBARRIERS(barriers, Block::kBarriers);
  Block(mapped, barriers).run();
#else
  __trap();
#endif
}

}  // namespace pkg::cuda
