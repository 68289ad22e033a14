// All gradients of attention by one kernel with tensor cores, of half
// precision: those of key and value as cuda/attention/grad_key_value_mma.cuh
// makes them and, from the gradients of the scores that are there, that of the
// query too. 5 products in place of the 7 of two kernels.
//
// Algorithm: FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 2). A block of
// 128 keys adds to the gradients of all queries that see them; to those of a
// tile of 64 queries in its turn, from the last keys to the first. So every sum
// runs in one order, and the result is the same to the last bit each time.
//
// Why that order: where causality or a window hides keys, later keys begin at
// later queries. From the last keys to the first, a block comes to a tile that
// another adds to before it when that one is two tiles further, and waits for
// nobody; in the other order each would wait for the first to have come to
// where it begins. Where nothing is hidden, all blocks of a head begin at the
// same tile, and each waits until the one before it has added; then they stay
// apart. To begin each at another tile instead would make a circle of blocks
// that wait for each other, all of which had to be resident. Blocks take their
// tiles of keys by tickets (cuda/device/turns.cuh), heads one after another.
//
// The gradients of the scores of 64 queries go to 16 KiB of shared memory, as
// they are summed over what are rows in the registers; from there 32 x 32 sums
// a warp (16 x 32 of heads of 64), times the keys that are there. Heads of 128
// take 112 KiB, or 96 with one place for the queries. The sums so far are in
// global memory in float32, as vectors of 16 bytes that are a lane's: the first
// block in turn stores them, the last one stores the gradient, scaled and
// rounded. While they are on their way, the warps add to the key's gradient. A
// turn is passed on after the next barrier that the block has anyway, and asked
// for 32 queries before it is needed: one warp of eight waits for memory then.
//
// By count, for 64 queries, 128 keys and heads of 128, a multiprocessor of an
// A100:
//                  tensor cores   shared memory      L2
//   two kernels     7168 cycles     9216 cycles   64 KiB
//   this one        5120 cycles     7040 cycles   96 KiB
//
// Shared memory, at 128 bytes a cycle: for 16 columns of a head and 32 queries
// a warp loads 10 times four matrices for the first four products as there, and
// 2 times for the fifth (3 of heads of 64), against 14 for 64 keys; 32 KiB of
// queries that are copied, against as many again of keys; 16 KiB of gradients
// of scores; and 64 KiB of sums, loaded and stored. L2: 14 bytes a cycle, of 47
// that an A100's share has.
//
// So at best 0.76 of the time of two kernels; if the two round trips to memory
// that pass a turn on and ask for one, some 1200 cycles, are not hidden at all,
// 0.89. Where nothing is hidden, a block waits half a tile for the one before
// it, a quarter of a block's time for the last of a head of as many queries as
// keys. That is once a launch: two rounds of blocks make up for it.
//
// Of more keys the blocks of a head wait for longer than they work. Simulated,
// 64 heads by 108 blocks at a time that lose nothing else, beside two kernels:
//
//   keys for each query      1      2      4      8     16
//   2048 keys             0.86   0.94   1.13   1.51   2.28
//   8192 keys             0.77   0.78   0.87   1.21   1.81
//
// gradient_kernels.cuh takes two from more than twice the keys on, of those
// that begin with the same queries.
//
// Masks, slopes, caps and dropout have a variant of their own, for which a
// thread has no registers: what they take of a matrix is in shared memory
// (SharedAttentionScores), the places of a mask's elements follow from one
// another, and queries are counted in 32 bits. Without these the compiler
// stored 28 of the value's sums in every step of heads of 128, 472 bytes of a
// thread in all; with them, and with what the block is at in shared memory too,
// nothing (nvcc 13.0). A mask is read once and dropout drawn once for the twice
// of two kernels; a cap costs a sixth product, for their nine.
//
// Not chosen: parts in memory that another kernel adds. Nobody waits, but that
// kernel reads 32 KiB, 2500 cycles at 2 TB/s, more than the 2200 that are
// saved, and the parts of heads of 128 are as large as the scores. Atomic
// additions have no order.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/grad_key_value_mma.cuh"
#include "cuda/attention/gradients.cuh"
#include "cuda/attention/joint_gradients.cuh"
#include "cuda/attention/plain_scores.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/turns.cuh"
#include "cuda/gemm/mma_product.cuh"
#include "cuda/gemm/operand_tile.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// Lines that are steps of the summed dimension as operand A: of the gradients
// of the scores the rows are keys.
template <class Element, int kLines>
class LinesAsStepsOfRows {
 public:
  static constexpr int kDepth = kLines;
  static constexpr int kStep = 16;
  using Slice = SwizzledTile<Element, kLines, 128 / sizeof(Element)>;

  __device__ __forceinline__ explicit LinesAsStepsOfRows(int warp_row) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    lane_index_ = Slice::index(lane / 16 * 8 + lane % 8,
                               warp_row + lane / 8 % 2 * Slice::kVector);
  }

  // The words of mma for 16 rows, the `part`-th, and the `step`-th 16 lines.
  __device__ __forceinline__ void fragments(const SharedSpan<Element>& from,
                                            int part, int step,
                                            uint32_t (&words)[4]) const {
    from.load_matrices((lane_index_ ^ part * 16) + step * kStep * Slice::kLine,
                       true, words);
  }

 private:
  int lane_index_;
};

// The gradient of the query as the blocks of keys add to it. kPlain: of a
// problem that is_plain().
template <class Element, int kWidth, bool kPlain>
class JointGradQuery {
 public:
  using Scores = std::conditional_t<kPlain, PlainScores<Element>,
                                    SharedAttentionScores<Element>>;
  static constexpr int kTileRows = kJointRows;
  static constexpr int kSharedElements = kJointKeys<Element> * kTileRows;
  static constexpr int kWarpRows = kWidth / 4;
  static constexpr int kWarpColumns = 32;
  using Sums = Tile<float, kTileRows, kWidth,
                    MmaThread<kTileRows, kWidth, kWarpRows, kWarpColumns>>;

  __device__ __forceinline__
  JointGradQuery(const AttentionJointGradients<Element>& call,
                 const SharedSpan<Element>& memory)
      : call_(call), problem_(call.backward.problem), memory_(memory) {}

  // The first tile of queries of a matrix, for which `share` and `add` are
  // called with every step of 32 queries, and where it begins. After a barrier
  // of the block. Until the first step the block is at the tile before, as if
  // it had been the last in turn there.
  __device__ __forceinline__ void begin(int64_t batch,
                                        const AttentionExtent& extent,
                                        int64_t column_begin,
                                        int64_t row_begin) const {
    if (threadIdx.x == 0) {
      const auto at = place();
      at[kBatch] = batch;
      at[kColumnTile] = column_begin / kJointKeys<Element>;
      at[kRow] = row_begin - kTileRows;
      at[kSum] =
          (call_.sum_tile(batch, extent, row_begin) - 1) * kTileRows * kWidth;
      at[kCounter] = batch * call_.row_tiles() + row_begin / kTileRows;
      at[kIsLast] = 1;
    }
  }

  // After a barrier of the block: the turn at the tile before is over; that at
  // this one may have come.
  __device__ __forceinline__ void begin_step(int row) const {
    if (threadIdx.x == 0) {
      if (!is_last_of_tile(row)) {
        pass_turn();
        go_on();
      } else {
        take_turn();
      }
    }
  }

  // Gives the gradients of the scores of 32 queries to all warps. Of the last
  // of a tile, when the block has its turn: the sums so far, on their way.
  template <class Gradients>
  __device__ __forceinline__ Sums share(const Gradients& gradients,
                                        int row) const {
    static_assert(Gradients::kTileColumns == kStepRows);
    put(gradients, row % kTileRows);
    Sums sums(0);
    if (is_last_of_tile(row)) {
      if (threadIdx.x == 0 && place()[kHasTurn] == 0) {
        counter().wait(static_cast<int>(place()[kTurn]));
      }
      __syncthreads();
      if (place()[kTurn] > 0) {
        load_sums(sums, call_.sums + place()[kSum]);
      }
    }
    return sums;
  }

  // Adds the product with the keys.
  __device__ __forceinline__ void add(Sums& sums,
                                      const SharedSpan<Element>& keys,
                                      int row) const {
    if (!is_last_of_tile(row)) {
      return;
    }
    multiply(sums, keys);
    if (place()[kIsLast] != 0) {
      store(sums);
    } else {
      store_sums(sums, call_.sums + place()[kSum]);
    }
  }

  // After a barrier of the block.
  __device__ __forceinline__ void end() const {
    if (threadIdx.x == 0) {
      pass_turn();
    }
  }

 private:
  static constexpr int kStepRows = kTileRows / 2;
  using Keys = LinesAsSteps<Element, kJointKeys<Element>>;
  using GradScores = LinesAsStepsOfRows<Element, kJointKeys<Element>>;

  __device__ __forceinline__ static bool is_last_of_tile(int row) {
    return row % kTileRows == kTileRows - kStepRows;
  }

  // Where the block is. In shared memory, since registers are few: the first
  // thread writes it after one barrier, and all read it after the next.
  enum Place {
    kBatch,
    kColumnTile,
    kRow,      // the first one of the tile of queries
    kSum,      // of the tile
    kCounter,  // of its turns
    kTurn,     // of the block
    kIsLast,   // turn of all
    kHasTurn,  // has come
    kPlaces,
  };
  __device__ __forceinline__ static auto place() {
    PKG_SHARED(int64_t, joint_place, [kPlaces]);
    return joint_place;
  }

  // These are the first thread's.
  __device__ __forceinline__ TurnCounter counter() const {
    return TurnCounter(call_.turns + place()[kCounter]);
  }
  __device__ __forceinline__ void take_turn() const {
    const auto at = place();
    const JointTurn turn =
        joint_turn<kJointKeys<Element>>(problem_.extent(at[kBatch]), at[kRow],
                                        static_cast<int>(at[kColumnTile]));
    at[kTurn] = turn.index;
    at[kIsLast] = turn.is_last;
    at[kHasTurn] = turn.index == 0 || counter().is(turn.index);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (place()[kIsLast] == 0) {
      counter().pass_to(static_cast<int>(place()[kTurn]) + 1);
    }
  }
  __device__ __forceinline__ void go_on() const {
    const auto at = place();
    at[kRow] += kTileRows;
    at[kSum] += kTileRows * kWidth;
    at[kCounter] += 1;
  }

  // A lane's neighbours are queries: a word of a key's line.
  template <class Gradients>
  __device__ __forceinline__ void put(const Gradients& gradients,
                                      int first_query) const {
    const typename Gradients::Thread thread;
    PKG_UNROLL
    for (int i = 0; i < Gradients::kThreadRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < Gradients::kThreadColumns; j += 2) {
        memory_.store(GradScores::Slice::index(thread.row(i),
                                               first_query + thread.column(j)),
                      pair_of<Element>(gradients.values[i][j],
                                       gradients.values[i][j + 1]));
      }
    }
  }

  __device__ __forceinline__ void multiply(
      Sums& sums, const SharedSpan<Element>& keys) const {
    const typename Sums::Thread thread;
    constexpr int kSlice = Keys::Slice::kLine;
    const int slice = thread.warp_column / kSlice;
    if (slice < tiles_of(problem_.head_size, kSlice)) {
      multiply_slices<Element, kWarpRows, kWarpColumns>(
          sums, GradScores(thread.warp_row), memory_,
          Keys(thread.warp_column % kSlice),
          keys.part(slice * Keys::Slice::kElements, Keys::Slice::kElements));
    }
  }

  __device__ __forceinline__ Element* result(
      int64_t batch, const AttentionExtent& extent) const {
    return call_.grad_query.row(problem_.batch, batch, extent.first_row);
  }

  __device__ __forceinline__ void store(Sums& sums) const {
    const int64_t batch = place()[kBatch];
    const AttentionExtent extent = problem_.extent(batch);
    sums.scale(static_cast<float>(problem_.scale));
    store_tile(sums, result(batch, extent), extent.rows, problem_.head_size,
               call_.grad_query.row_stride, place()[kRow], 0);
  }

  const AttentionJointGradients<Element>& call_;
  const AttentionProblem<Element>& problem_;
  SharedSpan<Element> memory_;
};

template <class Element, int kWidth, bool kPlain>
__global__ void __launch_bounds__(256) attention_joint_gradients_mma_kernel(
    const __grid_constant__ AttentionJointGradients<Element> call) {
  using GradQuery = JointGradQuery<Element, kWidth, kPlain>;
  using Mma = GradKeyValueMma<Element, kWidth, kJointKeys<Element>, GradQuery>;
  const Mma mma(call);
  GradQuery grad_query(call, mma.grad_query_memory());
  for_joint_tiles(call, [&](int64_t owned, int64_t column_tile) {
    mma.make(call, owned, column_tile * kJointKeys<Element>, {0, true, true},
             grad_query);
  });
  zero_unseen_queries<typename GradQuery::Sums>(call);
}

}  // namespace pkg::cuda
