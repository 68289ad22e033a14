// The forward pass of scaled dot-product attention by products of warpgroups,
// of half precision; for compute capability 9.0 alone.
//
// Algorithm: FlashAttention-3 (Shah et al., arXiv 2407.08608, algorithms 1 and
// 2), with the softmax, the masks and all else of forward_mma.cuh. Two
// warpgroups have 64 of the block's 128 queries each and all keys of a tile; a
// thread of a third copies, by boxes of 64 lines: the queries of a tile once,
// keys and values in stages of their own. While a warpgroup makes weights of
// the scores of a tile, the tensor cores multiply the weights of the tile
// before with its values, and work for the other warpgroup: the two begin their
// products in turns. Weights, rounded to the operands' type, are operand A of
// that product and never leave the registers.
//
// Tiles: 128 queries by 128 keys: a thread has 64 scores, 64 outputs (of a head
// of 128) and 32 words of weights, 160 of 232 registers. What masks, slopes,
// caps and dropout take besides made the compiler spill 500 bytes of a thread;
// with them, and for heads above 128, whose outputs take 128 registers, a tile
// has 64 keys. (Heads above 128 with them take another kernel.) Heads are
// padded with zeros to 64, 128 or 256 columns by the copies.
//
// A value that is infinite or NaN spoils also the rows that see it not, with
// weights of zero. So that tiles of 128 keys spoil no more than those of 64 of
// the other kernels, the second half of a tile is copied as zeros where no
// query of the block sees any of it.
//
// Of packed sequences (mapped_operand.cuh) the last tile may have keys and
// values of the next one. Scores of such keys are masked, as those behind any
// last key are; the warp that copies waits for their values and puts zeros in
// their place. Tiles that a sequence does not have are left out. Results go by
// plain stores, up to the sequence's last row.
//
// For 128 queries, 128 keys and a head of 128 a multiprocessor of an H200 takes
// - tensor cores: 4 x 128^3 operations at 4096 a cycle: 2048 cycles;
// - shared memory, at 128 bytes a cycle: 6 KiB for each of 16 products of
//   64 x 128 scores over 16 columns, 4 KiB for each of 16 products with
//   values, 64 KiB that are copied: 768 + 512 + 512 = 1792;
// - special functions: 16384 exponentials at 16 a cycle: 1024;
// - instructions: for a score scale, maximum, difference, product,
//   exponential, sum and half a conversion, for an output a product: 8 warps x
//   64 x 7.5 at 4 a cycle, and a tenth for all else: 1060.
// So tensor cores are the bound, and what the other parts take has to happen
// meanwhile. Of a head of 64 the products take 1024 cycles and shared memory
// 896, the exponentials as many as before and the instructions 930: what does
// not overlap is dearer. (So it was expected. The compiler makes some 570
// instructions of a turn, 1150 cycles for either head: of a head of 64 they are
// the bound, at 89 % of the tensor cores' rate. Of 4 x 16 heads of 128 by 4096
// queries and keys in bfloat16 an H100 took 833 us, its tensor cores 70 % busy,
// of 4 x 32 heads of 64 1240 us; with a multiplication and a difference for a
// score, in place of one multiply-add, 942 and 1440.)
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/forward.cuh"
#include "cuda/attention/mapped_operand.cuh"
#include "cuda/attention/plain_scores.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/tile_turn.cuh"
#include "cuda/attention/warpgroup_lines.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/fast_math.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

template <class Element>
struct MappedAttentionForward {
  MappedOperand query;
  MappedOperand key;
  MappedOperand value;
  AttentionForward<Element> call;
};

template <class Element, int kWidth, bool kPlain>
class AttentionWarpgroups {
 public:
  static constexpr int kRows = 128;
  static constexpr int kKeys = kPlain && kWidth <= 128 ? 128 : 64;
  static constexpr int kStages = kWidth > 64 ? 2 : 4;
  static constexpr int kConsumers = 2 * kWarpgroup;
  static constexpr int kThreads = kConsumers + kWarpgroup;
  using Query = WarpgroupLines<Element, kRows, kWidth>;
  using Key = WarpgroupLines<Element, kKeys, kWidth>;  // values lie alike
  static constexpr int kSharedBytes = Query::kBytes + 2 * kStages * Key::kBytes;
  static constexpr int kBarriers = 4 * kStages + 5;
  // 384 threads begin with 168 registers each.
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kProducerRegisters = 40;

  using Scores = Tile<float, kRows, kKeys, MmaThread<kRows, kKeys, 16, kKeys>>;
  using Output =
      Tile<float, kRows, kWidth, MmaThread<kRows, kWidth, 16, kWidth>>;
  using Attention = std::conditional_t<kPlain, ScaledExponents<Element>,
                                       AttentionScores<Element>>;
  using Softmax = OnlineSoftmax<Scores, FastExponential>;
  using Words = uint32_t[kKeys / 16][4];
  static_assert(Scores::Thread::kThreads == kConsumers);

  __device__ __forceinline__ AttentionWarpgroups(
      const MappedAttentionForward<Element>& mapped, const Mbarriers& barriers)
      : mapped_(mapped),
        problem_(mapped.call.problem),
        barriers_(barriers),
        memory_(dynamic_shared<Element>()),
        warpgroup_(warpgroup_of_thread()) {}

  __device__ __forceinline__ void run() const {
    if (threadIdx.x == 0) {
      init_barriers();
    }
    __syncthreads();
    if (warpgroup_ < kConsumers / kWarpgroup) {
      take_registers<kConsumerRegisters>();
      compute();
    } else {
      give_registers<kProducerRegisters>();
      if (static_cast<int>(threadIdx.x) / kWarp == kConsumers / kWarp) {
        copy();
      }
    }
  }

 private:
  // The queries of one matrix of the batch that the block attends from, and the
  // keys that they see.
  struct Work {
    int64_t batch;
    AttentionExtent extent;
    int row_begin;
    int begin;
    int end;
  };

  using Turn = TileTurn<kStages>;  // of the tiles of keys, and of values

  enum class Operand { key, value };

  // The barriers of stages that have come, and of those that may be written.
  __device__ __forceinline__ static int full(Operand operand, int stage) {
    return (operand == Operand::key ? 0 : kStages) + stage;
  }
  __device__ __forceinline__ static int empty(Operand operand, int stage) {
    return 2 * kStages + full(operand, stage);
  }
  static constexpr int kQueryFull = 4 * kStages;
  static constexpr int kQueryEmpty = kQueryFull + 1;
  // Of each warpgroup: it may begin products.
  static constexpr int kOrder = kQueryEmpty + 1;
  // The last values of a sequence, and others behind them, have come.
  static constexpr int kEnded = kOrder + 2;

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = kConsumers / kWarp;
    for (int stage = 0; stage < kStages; ++stage) {
      for (const Operand operand : {Operand::key, Operand::value}) {
        barriers_.init(full(operand, stage), 1);
        barriers_.init(empty(operand, stage), kWarps);
      }
    }
    barriers_.init(kQueryFull, 1);
    barriers_.init(kQueryEmpty, kWarps);
    barriers_.init(kOrder, kWarps / 2);
    barriers_.init(kOrder + 1, kWarps / 2);
    barriers_.init(kEnded, 1);
    publish_mbarriers();
  }

  // Where a tile begins: 64 columns of the head after 64, each of all lines.
  __device__ __forceinline__ static int index(Operand operand, int stage) {
    return Query::kElements +
           (stage + (operand == Operand::key ? 0 : kStages)) * Key::kElements;
  }

  // Calls function(work) for what the block has to do. Tiles are counted in 32
  // bits, as suits_warpgroups() says that they can be: beside 128 outputs of a
  // thread the compiler spilled the counts of 64 bits (nvcc 13.0).
  template <class Function>
  __device__ __forceinline__ void for_work(Function&& function) const {
    const int row_tiles = static_cast<int>(tiles_of(problem_.rows, kRows));
    const int tiles = static_cast<int>(problem_.batch_count) * row_tiles;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const int64_t batch = tile / row_tiles;
      const int row_tile = tile % row_tiles;
      const int row_begin =
          (problem_.is_causal ? row_tiles - 1 - row_tile : row_tile) * kRows;
      const AttentionExtent extent = problem_.extent(batch);
      if (row_begin >= extent.rows) {
        continue;
      }
      function(Work{
          batch, extent, row_begin,
          static_cast<int>(problem_.first_column(extent, row_begin)),
          static_cast<int>(problem_.column_end(extent, row_begin + kRows))});
    }
  }

  // One warp, whose first thread asks for the copies.
  __device__ __forceinline__ void copy() const {
    Turn turn;
    uint32_t query_parity = 1;
    uint32_t ended_parity = 0;
    for_work([&](const Work& work) {
      if (work.begin >= work.end) {
        return;
      }
      const BoxedMatrix key = mapped_.key.matrix(problem_.batch, work.batch);
      const BoxedMatrix value =
          mapped_.value.matrix(problem_.batch, work.batch);
      barriers_.wait(kQueryEmpty, query_parity);
      query_parity ^= 1;
      copy_query(work);
      // From here on as lines of the map.
      const int first = static_cast<int>(work.extent.first_column);
      const int end = first + work.end;
      const int last = first + static_cast<int>(work.extent.columns);
      int begin = first + work.begin;
      copy_tile(Operand::key, key, begin, end, turn);
      PKG_UNROLL_BY(1)
      for (; begin < end; begin += kKeys, turn = turn.next()) {
        if (begin + kKeys < end) {
          copy_tile(Operand::key, key, begin + kKeys, end, turn.next());
        }
        if (problem_.is_packed() && begin + kKeys > last) {
          copy_last_values(value, begin, end, last - begin, turn, ended_parity);
        } else {
          copy_tile(Operand::value, value, begin, end, turn);
        }
      }
    });
  }

  // Values of which only the first `own` are the sequence's. Of the others
  // there are to be zeros: a weight of zero times another's NaN would be NaN.
  __device__ __forceinline__ void copy_last_values(
      const BoxedMatrix& value, int begin, int end, int own, Turn turn,
      uint32_t& ended_parity) const {
    using Vector = Packet<Element, 8>;
    constexpr int kOfLine = Key::kLine / 8;
    const int stage = turn.stage();
    copy_tile(Operand::value, value, begin, end, turn, kEnded);
    barriers_.wait(kEnded, ended_parity);
    ended_parity ^= 1;
    PKG_UNROLL_BY(1)
    for (int vector = own * kOfLine + static_cast<int>(threadIdx.x) % kWarp;
         vector < kKeys * kOfLine; vector += kWarp) {
      PKG_UNROLL
      for (int slice = 0; slice < Key::kSlices; ++slice) {
        memory_.store(index(Operand::value, stage) +
                          slice * kKeys * Key::kLine + 8 * vector,
                      Vector{});
      }
    }
    publish_shared_memory();
    __syncwarp();
    release(full(Operand::value, stage));
  }

  // All lines, of which those beyond the tensor are zeros: to compare with the
  // number of rows would take a register that the thread does not have.
  __device__ __forceinline__ void copy_query(const Work& work) const {
    const BoxedMatrix query = mapped_.query.matrix(problem_.batch, work.batch);
    const int row = static_cast<int>(work.extent.first_row) + work.row_begin;
    if (threadIdx.x % kWarp == 0) {
      Query::template copy<kBoxLines>(memory_, 0, mapped_.query.map, query, row,
                                      row + kRows, barriers_, kQueryFull);
    }
  }

  // From where tiles of 64 keys would have ended, nothing but zeros is copied.
  __device__ __forceinline__ void copy_tile(Operand operand,
                                            const BoxedMatrix& matrix,
                                            int begin, int end, Turn turn,
                                            int barrier) const {
    const int stage = turn.stage();
    barriers_.wait(empty(operand, stage), turn.parity() ^ 1);
    if (threadIdx.x % kWarp == 0) {
      Key::template copy<kBoxLines>(
          memory_, index(operand, stage),
          operand == Operand::key ? mapped_.key.map : mapped_.value.map, matrix,
          begin, end, barriers_, barrier);
    }
  }
  __device__ __forceinline__ void copy_tile(Operand operand,
                                            const BoxedMatrix& matrix,
                                            int begin, int end,
                                            Turn turn) const {
    copy_tile(operand, matrix, begin, end, turn, full(operand, turn.stage()));
  }

  // Two warpgroups.
  __device__ __forceinline__ void compute() const {
    Turn turn;
    uint32_t query_parity = 0;
    for_work([&](const Work& work) {
      Output output(0);
      Softmax softmax;
      if (work.begin < work.end) {
        barriers_.wait(kQueryFull, query_parity);
        query_parity ^= 1;
        attend(work, turn, output, softmax);
      }
      store_attention(mapped_.call, work.extent, work.batch, work.row_begin, 0,
                      output, softmax);
    });
  }

  // The output, not yet divided by the sums. A turn begins the next scores and
  // the product of the weights before with their values, and makes weights of
  // the scores while the values are multiplied.
  __device__ __forceinline__ void attend(const Work& work, Turn& turn,
                                         Output& output,
                                         Softmax& softmax) const {
    const Attention attention(problem_, work.batch, work.extent);
    Scores scores(0);
    Words words;
    float corrections[Scores::kThreadRows];
    wait_for(Operand::key, turn);
    take_order(turn);
    begin_products_of_keys(scores, turn);
    pass_order();
    wait_for_products<0>();
    finish_scores(scores, turn);
    weigh(attention, work, work.begin, turn, scores, softmax, corrections);
    round_tile<Element>(scores, words);
    PKG_UNROLL_BY(1)
    for (int begin = work.begin + kKeys; begin < work.end; begin += kKeys) {
      const Turn before = turn;
      turn = turn.next();
      take_order(turn);
      begin_products_of_keys(scores, turn);
      begin_output(output, words, before);
      pass_order();
      wait_for_products<1>();
      finish_scores(scores, turn);
      weigh(attention, work, begin, turn, scores, softmax, corrections);
      wait_for_products<0>();
      finish_output(output, before);
      rescale(output, corrections);
      round_tile<Element>(scores, words);
    }
    release(kQueryEmpty);
    begin_output(output, words, turn);
    wait_for_products<0>();
    finish_output(output, turn);
    turn = turn.next();
    if constexpr (Attention::kScalesExponents) {
      softmax.scale_maxima(attention.scale_of_exponents());
    }
  }

  // Makes weights of products of queries and keys; corrections are for what was
  // added with the weights before. Then waits for the next keys: across that
  // branch the compiler moves no part of it behind a wait for products.
  __device__ __forceinline__ void weigh(
      const Attention& attention, const Work& work, int begin, Turn turn,
      Scores& scores, Softmax& softmax,
      float (&corrections)[Scores::kThreadRows]) const {
    attention.score_tile(scores, work.row_begin, begin);
    PKG_UNROLL
    for (int i = 0; i < scores.kThreadRows; ++i) {
      if constexpr (Attention::kScalesExponents) {
        corrections[i] =
            softmax.update_row(i, scores, attention.scale_of_exponents());
      } else {
        corrections[i] = softmax.update_row(i, scores);
      }
    }
    attention.drop_tile(scores, work.row_begin, begin);
    hold_sums(scores.values);
    if (begin + kKeys < work.end) {
      wait_for(Operand::key, turn.next());
    }
  }

  __device__ __forceinline__ static void rescale(
      Output& output, const float (&corrections)[Scores::kThreadRows]) {
    PKG_UNROLL
    for (int i = 0; i < output.kThreadRows; ++i) {
      output.scale_row(i, corrections[i]);
    }
  }

  // By a lane of each warp: what its warpgroup has read may be written.
  __device__ __forceinline__ void release(int barrier) const {
    if (threadIdx.x % kWarp == 0) {
      barriers_.arrive(barrier);
    }
  }

  __device__ __forceinline__ void wait_for(Operand operand, Turn turn) const {
    barriers_.wait(full(operand, turn.stage()), turn.parity());
  }

  // The warpgroups begin their products one after the other, so that one makes
  // weights while the tensor cores work for the other. The first goes first.
  __device__ __forceinline__ void take_order(Turn turn) const {
    barriers_.wait(kOrder + warpgroup_,
                   static_cast<uint32_t>(turn.count + warpgroup_ + 1) & 1);
  }
  __device__ __forceinline__ void pass_order() const {
    release(kOrder + 1 - warpgroup_);
  }

  // Begins scores = Q K^T.
  __device__ __forceinline__ void begin_products_of_keys(Scores& scores,
                                                         Turn turn) const {
    begin_scores<Element, Query, Key>(
        scores, Query::by_line(memory_, 0, 64 * warpgroup_),
        Key::by_line(memory_, index(Operand::key, turn.stage())));
  }

  // When they have come; their keys may go.
  __device__ __forceinline__ void finish_scores(Scores& scores,
                                                Turn turn) const {
    hold_sums(scores.values);
    release(empty(Operand::key, turn.stage()));
  }

  // Begins output += weights V.
  __device__ __forceinline__ void begin_output(Output& output, Words& words,
                                               Turn turn) const {
    wait_for(Operand::value, turn);
    begin_sums<Element>(
        output, words,
        Key::by_column(memory_, index(Operand::value, turn.stage())));
  }

  __device__ __forceinline__ void finish_output(Output& output,
                                                Turn turn) const {
    hold_sums(output.values);
    release(empty(Operand::value, turn.stage()));
  }

  const MappedAttentionForward<Element>& mapped_;
  const AttentionProblem<Element>& problem_;
  const Mbarriers& barriers_;
  SharedSpan<Element> memory_;
  int warpgroup_;
};

template <class Element, int kWidth, bool kPlain>
__global__ void __launch_bounds__(384, 1) attention_forward_warpgroups_kernel(
    const __grid_constant__ MappedAttentionForward<Element> mapped) {
  if constexpr (kCompilesWarpgroups) {
    using Block = AttentionWarpgroups<Element, kWidth, kPlain>;
    PKG_MBARRIERS(barriers, Block::kBarriers);
    Block(mapped, barriers).run();
  } else {
    commit_products();  // which traps
  }
}

}  // namespace pkg::cuda
