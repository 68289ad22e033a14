// All gradients of plain attention by one kernel with products of warpgroups,
// of half precision: those of key and value as
// cuda/attention/grad_key_value_warpgroups.cuh makes them and, from the
// gradients of the scores that are there, that of the query too. 5 products in
// place of the 7 of two kernels; for compute capability 9.0 alone.
//
// Algorithm: that of cuda/attention/joint_gradients_mma.cuh, but for the order
// of turns and tickets. A block owns 128 keys, a warpgroup 64 of them, and
// walks the queries, 64 at a time, from the last to the first. Tiles of scores
// are transposed, so that what is made of them is operand A, in registers, of
// the products that sum over queries. The product that sums over keys needs
// what both warpgroups make: they write the gradients of scores to shared
// memory, a line for each key, which is operand A by its columns, of dS K, and
// by its lines, of dS^T Q. Either warpgroup makes half of the columns of dS K.
//
// What comes of it is 64 x 64 (64 x 32) numbers of a warpgroup, a piece. It
// goes to shared memory, and from there a warp of the third warpgroup has the
// copy engine add it to the sums in global memory, when it is the block's turn:
// the first in turn stores, so that nobody has to write zeros. Then that warp
// waits until the numbers have arrived, and passes the turn on. The warpgroups
// go on meanwhile, and wait only for room: there is that for pieces of two
// turns. Of the last in turn that warp has the sums so far loaded to where its
// own would be, a tile of queries ahead; the warpgroups add theirs in registers
// and store the gradient, scaled and rounded.
//
// While a piece is waited for and written, the scores of the next queries are
// multiplied; they are waited for in the same turn, or the compiler would have
// all products wait for one another. (After the last queries they are
// multiplied in vain.) What a block is at is in shared memory, the parities of
// barriers are bits of one register, and where operands lie is computed for
// every product: registers are few. A ticket is taken before the last one's
// gradients are stored, so that keys and queries come meanwhile.
//
// For 128 keys, 64 queries and heads of 128 (64) a multiprocessor takes, by
// these counts:
// - tensor cores: five products of 2 x 128 x 64 x 128 operations at 4096 a
//   cycle: 2560 (1280) cycles, where two kernels take 3584 (1792);
// - shared memory, at 128 bytes a cycle: 4 KiB for each of 32 (16) products of
//   64 x 64 over 16 columns; of 8 over 16 queries each 4 and 6 (2 and 4) KiB,
//   and of 16 over 16 keys 4 (3) KiB; 16 KiB of gradients of scores that are
//   written; 32 (16) KiB of pieces, written and read; 32 (16) KiB that are
//   copied; and 16 loads of 8 bytes a lane of 8 warps:
//   1024 + 256 + 384 + 512 + 128 + 512 + 256 + 128 = 3200
//   (512 + 128 + 256 + 384 + 128 + 256 + 128 + 128 = 1920),
//   where two kernels take 1920 + 1280 = 3200 (1024 + 640 = 1664);
// - special functions: 8192 exponentials at 16 a cycle: 512;
// - L2: 32 (16) KiB of queries, and 32 (16) KiB that are added: 20 (17) bytes
//   a cycle, of 24 that are a multiprocessor's share. To load, to add and to
//   store would be 96 (48) KiB.
// So shared memory is the bound, and the tensor cores come close.
//
// An H100 took 2.84 ms for 4 x 16 x 4096 x 128, 5200 cycles a turn, and 4.01 ms
// for 4 x 32 x 4096 x 64; whole calls took 3.95 to 4.00 ms and 5.59 to 5.62,
// with two kernels 4.10 and 5.53. Its counters say: instructions are issued in
// 29 % (38 %) of the cycles, the L2 cache is busy for 58 % (48 %). Of a turn's
// time the warpgroups spend a sixth waiting for room for a piece, a seventh on
// writing one and the fences behind it, a fifth on weights; the warp that adds
// a quarter each on waiting for its turn, until 32 KiB have been read, and
// until they have arrived. Scores a turn ahead and room for pieces of two turns
// took 2.90 ms to 2.84 (with causality whole calls of 2358 us to 2163), a
// second warp that adds, every other turn, nothing more. (All of that with
// turns from the last keys to the first, a head after the other.)
//
// A turn is passed on when the numbers have arrived and another block has seen
// the counter: after some 2500 cycles, half of the work for a tile of queries.
// Turns and tickets go from the first keys to the last: with causality the last
// ones see the fewest queries, so that what is left at the end of a launch is
// short. All blocks of a head begin at the last queries that see their keys,
// each half a turn after the one before it. If a block walked the queries of
// one head after those of another that shares the keys, one that has few of
// them would wait at the second head until those that have all come there: so
// of each 64 queries come those of all such heads, then the 64 before them.
// Tickets go through several heads of keys at once, as few as have four tiles
// for each block: of one alone, blocks begin faster than the turn is passed on;
// of all, fewer blocks would find the same queries in the L2 cache.
//
// Simulated, 132 blocks that take the lowest ticket when they are free, a turn
// passed on after half of its work, room for pieces of two turns, 4096 queries
// and keys, causal; time beside that of all work shared out evenly:
//
//   heads, those of keys                          64, 16   64, 64   16, 16
//   last keys and tickets of them first, a head
//     after the other                               1.33     1.09     1.34
//   first keys first, a head after the other        1.86     1.20     1.43
//   and of several heads, their queries apart       1.17     1.02     1.05
//   this one                                        1.02     1.02     1.05
//
// of all keys for 64 heads 1.07 becomes 1.04. (An H200 took 1.99 ms for the
// first of the left column, and 2.84 for all keys of 64 heads, which is twice
// as much work. This order has not been measured.)
//
// Not chosen: additions by the threads, of vectors from registers. They would
// leave 64 KiB out of shared memory, but a thread that adds has to wait for the
// turn, and whoever passes it on for the numbers of all.
#pragma once

#include <cstdint>

#include "cuda/attention/gradients.cuh"
#include "cuda/attention/gradients_mma.cuh"
#include "cuda/attention/gradients_warpgroups.cuh"
#include "cuda/attention/joint_gradients.cuh"
#include "cuda/attention/key_value_stages.cuh"
#include "cuda/attention/plain_scores.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/tile_limits.cuh"
#include "cuda/device/bulk_copy.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/turns.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/tile.cuh"
#include "host/integer_math.h"

namespace pkg::cuda {

template <class Element>
using MappedJointGradients = MappedGradients<AttentionJointGradients<Element>>;

// Sums of the query's gradient that a warpgroup has in a turn: 64 queries by
// half of the columns. In memory four of a thread's after four of its
// neighbour's.
template <int kWidth>
struct QueryPiece {
  static constexpr int kColumns = kWidth / 2;
  using Sums = Tile<float, 2 * kJointRows, kColumns,
                    MmaThread<2 * kJointRows, kColumns, 16, kColumns>>;
  static constexpr int kNumbers = kJointRows * kColumns;
  static constexpr int kBytes = kNumbers * sizeof(float);

  // Calls function(four sums, where they are).
  template <class Function>
  __device__ __forceinline__ static void for_each_vector(Sums& sums,
                                                         Function&& function) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    PKG_UNROLL
    for (int i = 0; i < Sums::kThreadRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < Sums::kThreadColumns; j += 4) {
        const int vector = (i * Sums::kThreadColumns + j) / 4;
        function(&sums.values[i][j], 4 * (vector * kWarpgroup + thread));
      }
    }
  }
};

template <class Element, int kWidth>
class JointGradientsWarpgroups
    : public GradientWarpgroups<(kWidth > 64 ? 240 : 224)> {
  using Launch = GradientWarpgroups<(kWidth > 64 ? 240 : 224)>;

 public:
  static constexpr int kKeys = kJointKeys<Element>;
  using Stages = KeyValueStages<Element, AttentionJointGradients<Element>,
                                kKeys, kWidth, (kWidth > 64 ? 2 : 4)>;
  static constexpr int kQueries = Stages::kQueries;
  static_assert(kQueries == kJointRows);
  using Piece = QueryPiece<kWidth>;
  // Places for each warpgroup's piece, and for the gradients of scores: in one
  // turn after another. Who writes the latter again has seen those of the turn
  // between, which a warpgroup gives when its products of the turn before are
  // over: with two places nobody has to wait for room.
  static constexpr int kPiecePlaces = 2;
  static constexpr int kGradScores = 2;

  using Weights = typename Stages::Weights;
  using Words = typename Stages::Words;
  using Sums = Tile<float, Stages::kTileKeys, kWidth,
                    MmaThread<Stages::kTileKeys, kWidth, 16, kWidth>>;
  using QuerySums = typename Piece::Sums;
  // A line for each key.
  using GradScores = SwizzledTile<Element, kKeys, kQueries>;
  static_assert(Weights::Thread::kThreads == Launch::kConsumers &&
                GradScores::kLine == kQueries);

  // Where each begins, behind what comes in stages.
  static constexpr int kAlignment = 1024 / sizeof(Element);
  static constexpr int kGradScoresIndex =
      round_up(Stages::kElements, kAlignment);
  static constexpr int kPieceElements = Piece::kBytes / sizeof(Element);
  static constexpr int kPiecesIndex =
      kGradScoresIndex + kGradScores * GradScores::kElements;
  static constexpr int kSharedBytes =
      (kPiecesIndex + 2 * kPiecePlaces * kPieceElements) * sizeof(Element);

  static constexpr int kBarriers =
      Stages::kBarriers + 4 + kGradScores + 4 * 2 * kPiecePlaces;

  __device__ __forceinline__ JointGradientsWarpgroups(
      const MappedJointGradients<Element>& mapped, const Mbarriers& barriers)
      : call_(mapped.call),
        problem_(mapped.call.backward.problem),
        barriers_(barriers),
        stages_(mapped, barriers),
        memory_(dynamic_shared<Element>()) {}

  __device__ __forceinline__ void run() const {
    if (threadIdx.x == 0) {
      init_barriers();
    }
    __syncthreads();
    divide_warpgroups<Launch, 3>([&] { compute(); },
                                 [&](int warp) {
                                   if (warp < 2) {
                                     copy(warp);
                                   } else {
                                     add_in_turn();
                                   }
                                 });
  }

 private:
  using Attention = ScaledExponents<Element>;
  using Turn = typename Stages::Turn;
  using GradScoresTurn = TileTurn<kGradScores>;

  // What the block has to do, in shared memory, since registers are few: one is
  // written while the other is done. Beside the keys and the queries that see
  // them: before which query the block is the last in turn, and from which on
  // it is the first one.
  enum Place {
    kOwned,  // below zero: there is nothing more to do
    kColumnBegin,
    kBegin,
    kEnd,
    kLastBefore,
    kFirstFrom,
    kPlaces,
  };
  struct Work {
    int slot;

    __device__ __forceinline__ static auto places() {
      PKG_SHARED(int, joint_works, [2][kPlaces]);
      return joint_works;
    }
    __device__ __forceinline__ int at(Place place) const {
      return places()[slot][place];
    }
  };

  // Of the barriers that one waits for the parities, in one register: those of
  // two kinds for each warpgroup's pieces and, of the upper two bits, the slot
  // of what there is to do and the parity of that.
  struct Phases {
    uint32_t bits = 0;

    __device__ __forceinline__ uint32_t parity(int bit) const {
      return bits >> bit & 1;
    }
    __device__ __forceinline__ void flip(int bit) { bits ^= 1u << bit; }
    __device__ __forceinline__ int slot() const {
      return static_cast<int>(bits >> 30 & 1);
    }
    __device__ __forceinline__ uint32_t slot_parity() const {
      return bits >> 31;
    }
    __device__ __forceinline__ void next_work() { bits += 1u << 30; }
  };
  static constexpr int kKeysPhase = 0;
  __device__ __forceinline__ static int given_phase(int piece) {
    return 1 + piece;
  }
  __device__ __forceinline__ static int loaded_phase(int piece) {
    return given_phase(2 * kPiecePlaces) + piece;
  }

  // A warpgroup's piece of a turn, which has the same place as that of another
  // turn.
  __device__ __forceinline__ static int piece_of(int group, int turn) {
    return kPiecePlaces * group + turn % kPiecePlaces;
  }

  // The barriers of what there is to do that is there, and that is done.
  __device__ __forceinline__ static int work_there(int slot) {
    return Stages::kBarriers + slot;
  }
  __device__ __forceinline__ static int work_done(int slot) {
    return work_there(2) + slot;
  }
  // Of gradients of scores that are there.
  __device__ __forceinline__ static int grad_scores_full(int place) {
    return work_done(2) + place;
  }
  // Of a piece: that it is to be added, and that it has been read for that;
  // that the sums so far are there, and that they have been read.
  __device__ __forceinline__ static int piece_given(int piece) {
    return grad_scores_full(kGradScores) + piece;
  }
  __device__ __forceinline__ static int piece_taken(int piece) {
    return piece_given(2 * kPiecePlaces) + piece;
  }
  __device__ __forceinline__ static int piece_loaded(int piece) {
    return piece_taken(2 * kPiecePlaces) + piece;
  }
  __device__ __forceinline__ static int piece_read(int piece) {
    return piece_loaded(2 * kPiecePlaces) + piece;
  }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = Launch::kConsumerWarps;
    stages_.init_barriers(kWarps);
    for (int slot = 0; slot < 2; ++slot) {
      barriers_.init(work_there(slot), 1);
      barriers_.init(work_done(slot), kWarps + 3);
    }
    for (int place = 0; place < kGradScores; ++place) {
      barriers_.init(grad_scores_full(place), kWarps);
    }
    for (int piece = 0; piece < 2 * kPiecePlaces; ++piece) {
      barriers_.init(piece_given(piece), kWarps / 2);
      barriers_.init(piece_taken(piece), 1);
      barriers_.init(piece_loaded(piece), 1);
      barriers_.init(piece_read(piece), kWarps / 2);
    }
    publish_mbarriers();
  }

  __device__ __forceinline__ static int grad_scores_index(int place) {
    return kGradScoresIndex + place * GradScores::kElements;
  }
  __device__ __forceinline__ static int piece_index(int piece) {
    return kPiecesIndex + piece * kPieceElements;
  }

  // Calls function(work) for what the block has to do, by joint_work(). By
  // whole warps, of which one takes the tickets for all.
  template <class Function>
  __device__ __forceinline__ void for_work(bool takes, Phases& phases,
                                           Function&& function) const {
    while (true) {
      const Work work{phases.slot()};
      if (takes) {
        barriers_.wait(work_done(work.slot), phases.slot_parity() ^ 1);
        if (threadIdx.x % kWarp == 0) {
          write_work(work.slot, take_ticket(call_.turns));
          barriers_.arrive(work_there(work.slot));
        }
      }
      barriers_.wait(work_there(work.slot), phases.slot_parity());
      if (work.at(kOwned) < 0) {
        return;
      }
      function(work);
      release(barriers_, work_done(work.slot));
      phases.next_work();
    }
  }

  // The first in turn at a tile of queries has the first key that its first
  // query sees, or the first of all; the last in turn the last one that its
  // last query sees, or the last of all.
  __device__ __forceinline__ void write_work(int slot, int ticket) const {
    const auto work = Work::places()[slot];
    if (ticket >= call_.tile_count()) {
      work[kOwned] = -1;
      return;
    }
    const JointWork given = joint_work(call_, static_cast<uint32_t>(ticket));
    const AttentionExtent extent = problem_.extent_of_one_length(0);
    const int column_begin = static_cast<int>(given.column_tile) * kKeys;
    const int column_end = column_begin + kKeys;
    work[kOwned] = static_cast<int>(given.owned);
    work[kColumnBegin] = column_begin;
    work[kBegin] = static_cast<int>(problem_.first_row(extent, column_begin));
    work[kEnd] = static_cast<int>(problem_.row_end(extent, column_end));
    work[kFirstFrom] =
        column_begin == 0 ? 0 : near(column_begin - extent.limits.first);
    work[kLastBefore] =
        column_end >= problem_.columns
            ? static_cast<int>(kMostTiledLength)
            : near(column_end - extent.limits.last - kJointRows + 1);
  }
  // What lies further than any query is as good as no limit.
  __device__ __forceinline__ static int near(int64_t row) {
    return static_cast<int>(row < 0                  ? 0
                            : row > kMostTiledLength ? kMostTiledLength
                                                     : row);
  }

  __device__ __forceinline__ static KeyValueWork key_value_work(
      const Work& work) {
    return {static_cast<uint32_t>(work.at(kOwned)), 0, work.at(kColumnBegin),
            work.at(kBegin), work.at(kEnd)};
  }

  // Calls function(row, shared) for every 64 queries that see the keys, from
  // the last on: of each matrix of the batch that shares the keys, then the
  // queries before them.
  template <class Function>
  __device__ __forceinline__ void for_queries(const Work& work,
                                              Function&& function) const {
    PKG_UNROLL_BY(1)
    for (int row = key_value_work(work).last(); row >= work.at(kBegin);
         row -= kQueries) {
      PKG_UNROLL_BY(1)
      for (uint32_t shared = 0; shared < stages_.shared_count(); ++shared) {
        function(row, shared);
      }
    }
  }

  // A warp.
  __device__ __forceinline__ void copy(int operand) const {
    Turn turn;
    Phases phases;
    uint32_t key_parity = 1;
    for_work(operand == 0, phases, [&](const Work& work) {
      const KeyValueWork keys = key_value_work(work);
      if (keys.begin < keys.end) {
        stages_.copy_keys(operand, keys, key_parity);
      }
      for_queries(work, [&](int row, uint32_t shared) {
        const uint32_t batch = batch_of(work, shared);
        stages_.copy_queries(operand, stages_.queries_of(operand, batch), row,
                             work.at(kEnd), turn);
      });
    });
  }

  // A warp: adds what the warpgroups have made to the sums in memory, when it
  // is the block's turn, or loads the sums so far where it is the last one.
  __device__ __forceinline__ void add_in_turn() const {
    int count = 0;
    Phases phases;
    for_work(false, phases, [&](const Work& work) {
      if (threadIdx.x % kWarp != 0) {
        return;
      }
      for_queries(work, [&](int row, uint32_t shared) {
        add_in_turn(work, row, batch_of(work, shared), phases, count);
        ++count;
      });
    });
  }

  __device__ __forceinline__ uint32_t batch_of(const Work& work,
                                               uint32_t shared) const {
    return call_.partition.batch_index(static_cast<uint32_t>(work.at(kOwned)),
                                       shared);
  }

  __device__ __forceinline__ void add_in_turn(const Work& work, int row,
                                              uint32_t batch, Phases& phases,
                                              int count) const {
    const uint32_t tile = batch * static_cast<uint32_t>(call_.row_tiles()) +
                          static_cast<uint32_t>(row) / kJointRows;
    int* const counter = call_.turns + 1 + tile;
    float* const sums = call_.sums + uint64_t{tile} * kJointRows * kWidth;
    if (row >= work.at(kLastBefore)) {
      give_sums(work, row, counter, sums, phases, count);
    } else if (row < work.at(kFirstFrom)) {
      load_sums_so_far(work, row, counter, sums, phases, count);
    }
  }

  // The first of the tiles of keys that see the queries begins.
  __device__ __forceinline__ int turn_index(const Work& work, int row) const {
    const AttentionExtent extent = problem_.extent_of_one_length(0);
    return work.at(kColumnBegin) / kKeys - seen_tiles<kKeys>(extent, row).first;
  }

  __device__ __forceinline__ void wait_for_turn(int* counter, int index) const {
    TurnCounter(counter).wait(index);
    order_copies_after_turn();
  }

  __device__ __forceinline__ void give_sums(const Work& work, int row,
                                            int* counter, float* sums,
                                            Phases& phases, int count) const {
    const int index = turn_index(work, row);
    const bool is_first = row >= work.at(kFirstFrom);
    if (!is_first) {
      wait_for_turn(counter, index);
    }
    PKG_UNROLL
    for (int group = 0; group < 2; ++group) {
      const int piece = piece_of(group, count);
      barriers_.wait(piece_given(piece), phases.parity(given_phase(piece)));
      phases.flip(given_phase(piece));
      float* const to = sums + group * Piece::kNumbers;
      if (is_first) {
        store_numbers_in_turn(memory_, piece_index(piece), to, Piece::kBytes);
      } else {
        add_numbers_in_turn(memory_, piece_index(piece), to, Piece::kBytes);
      }
    }
    commit_bulk_copies();
    wait_for_bulk_reads();
    PKG_UNROLL
    for (int group = 0; group < 2; ++group) {
      barriers_.arrive(piece_taken(piece_of(group, count)));
    }
    wait_for_bulk_copies();
    TurnCounter(counter).pass_to(index + 1);
  }

  __device__ __forceinline__ void load_sums_so_far(const Work& work, int row,
                                                   int* counter,
                                                   const float* sums,
                                                   Phases& phases,
                                                   int count) const {
    wait_for_turn(counter, turn_index(work, row));
    PKG_UNROLL
    for (int group = 0; group < 2; ++group) {
      const int piece = piece_of(group, count);
      barriers_.wait(piece_read(piece), phases.parity(loaded_phase(piece)) ^ 1);
      phases.flip(loaded_phase(piece));
      barriers_.arrive_and_expect(piece_loaded(piece), Piece::kBytes);
      copy_numbers_in_turn(memory_, piece_index(piece),
                           sums + group * Piece::kNumbers, Piece::kBytes,
                           barriers_, piece_loaded(piece));
    }
  }

  // Two warpgroups.
  __device__ __forceinline__ void compute() const {
    const int group = warpgroup_of_thread();
    Turn turn;
    Phases phases;
    for_work(false, phases, [&](const Work& work) {
      Sums key_sums(0);
      Sums value_sums(0);
      if (work.at(kBegin) < work.at(kEnd)) {
        barriers_.wait(Stages::kKeysFull, phases.parity(kKeysPhase));
        phases.flip(kKeysPhase);
        add(work, group, turn, phases, key_sums, value_sums);
        release(barriers_, Stages::kKeysEmpty);
      }
      store_key_value(call_, key_value_work(work), key_sums, value_sums);
    });
    zero_unseen_queries<Tile<float, kJointRows, kWidth,
                             MmaThread<kJointRows, kWidth, 16, kWidth / 2>>>(
        call_);
  }

  // key_sums += dS^T Q, value_sums += P^T dO, and what these keys add to the
  // gradients of the queries. While the sums of a turn are given away, the
  // scores of the next are multiplied.
  __device__ __forceinline__ void add(const Work& work, int group, Turn& turn,
                                      Phases& phases, Sums& key_sums,
                                      Sums& value_sums) const {
    const Attention attention(problem_, 0, problem_.extent_of_one_length(0));
    Weights weights(0);
    begin_scores_of(turn, group, weights);
    wait_for_products<0>();
    hold_sums(weights.values);
    for_queries(work, [&](int row, uint32_t shared) {
      const int stage = turn.stage();
      Weights gradients(0);
      QuerySums query_sums(0);
      Words weight_words;
      Words gradient_words;
      stages_.begin_products_of_values(gradients, first_key_of(group), stage);
      weigh(attention, weights, row, work.at(kColumnBegin),
            stages_.log_sum_exp(stage));
      round_tile<Element>(weights, weight_words);
      stages_.begin_value_sums(value_sums, weight_words, 0, stage);
      wait_for_products<1>();
      hold_sums(gradients.values);
      differentiate(weights, gradients, stages_.delta(stage));
      round_tile<Element>(gradients, gradient_words);
      share_grad_scores(gradient_words, turn.count);
      begin_sums_of_grad_scores(key_sums, query_sums, group, stage, turn.count);
      const bool is_last =
          row == work.at(kBegin) && shared + 1 == stages_.shared_count();
      begin_scores_of(is_last ? turn : turn.next(), group, weights);
      wait_for_products<1>();
      hold_sums(value_sums.values);
      hold_sums(key_sums.values);
      hold_sums(query_sums.values);
      finish_query_sums(work, shared, group, row, turn.count, phases,
                        query_sums);
      wait_for_products<0>();
      hold_sums(weights.values);
      release(barriers_, Stages::empty(stage));
      ++turn.count;
    });
  }

  __device__ __forceinline__ void begin_scores_of(const Turn& turn, int group,
                                                  Weights& weights) const {
    barriers_.wait(Stages::full(turn.stage()), turn.parity());
    stages_.begin_products_of_keys(weights, first_key_of(group), turn.stage());
  }

  // Of the block's, which a warpgroup has. Where operands lie that follow from
  // it is computed for every product: it would take more registers than there
  // are.
  __device__ __forceinline__ static int first_key_of(int group) {
    return 64 * computed_here(group);
  }

  // Gives the gradients of scores to both warpgroups: a lane's neighbours are
  // queries, a word of a key's line.
  __device__ __forceinline__ void share_grad_scores(const Words& words,
                                                    int count) const {
    const GradScoresTurn turn{count};
    const typename Weights::Thread thread;
    // A lane's columns are those of the first vector, in each of the line.
    const int first =
        grad_scores_index(turn.stage()) +
        computed_here(GradScores::index(thread.row(0), thread.column(0)));
    PKG_UNROLL
    for (int step = 0; step < kQueries / 16; ++step) {
      PKG_UNROLL
      for (int word = 0; word < 4; ++word) {
        memory_.store(GradScores::in_vector(first, 2 * step + word / 2) +
                          word % 2 * 8 * GradScores::kLine,
                      words[step][word]);
      }
    }
    publish_shared_memory();
    release(barriers_, grad_scores_full(turn.stage()));
  }

  __device__ __forceinline__ static int piece_column(int group) {
    return Piece::kColumns * group;
  }

  // Begins the products of the gradients of scores: their rows, those of the
  // warpgroup's keys, by the queries, and their columns by the keys.
  __device__ __forceinline__ void begin_sums_of_grad_scores(
      Sums& key_sums, QuerySums& query_sums, int group, int stage,
      int count) const {
    constexpr int kStepBytes = 16 * 128;
    const GradScoresTurn turn{count};
    const int index = grad_scores_index(turn.stage());
    barriers_.wait(grad_scores_full(turn.stage()), turn.parity());
    const WarpgroupOperand rows(
        memory_, index + first_key_of(group) * GradScores::kLine);
    const WarpgroupOperand queries =
        Stages::Query::by_column(memory_, Stages::query_index(stage), 0);
    hold_sums(key_sums.values);
    hold_sums(query_sums.values);
    order_registers();
    PKG_UNROLL
    for (int step = 0; step < kQueries / 16; ++step) {
      begin_product<Element, Major::depth, Major::outer>(
          key_sums.values, rows.at(step * 32), queries.at(step * kStepBytes));
    }
    const WarpgroupOperand columns(memory_, index);
    const WarpgroupOperand keys = Stages::Key::by_column(
        memory_, Stages::kKeyIndex, piece_column(computed_here(group)));
    PKG_UNROLL
    for (int step = 0; step < kKeys / 16; ++step) {
      begin_product<Element, Major::outer, Major::outer>(
          query_sums.values, columns.at(step * kStepBytes),
          keys.at(step * kStepBytes), step > 0);
    }
    commit_products();
  }

  // After the wait for all products of a turn. Where others have added theirs,
  // makes the result; else gives the sums to those in memory.
  __device__ __forceinline__ void finish_query_sums(const Work& work,
                                                    uint32_t shared, int group,
                                                    int row, int count,
                                                    Phases& phases,
                                                    QuerySums& sums) const {
    if (row >= work.at(kLastBefore)) {
      give_piece(sums, group, count, phases);
      return;
    }
    if (row < work.at(kFirstFrom)) {
      const int piece = piece_of(group, count);
      const int phase = loaded_phase(piece_of(0, count));
      barriers_.wait(piece_loaded(piece), phases.parity(phase));
      phases.flip(phase);
      add_piece(sums, piece);
    }
    sums.scale(static_cast<float>(problem_.scale));
    store_tile(sums,
               call_.grad_query.row(problem_.batch, batch_of(work, shared), 0),
               problem_.rows, problem_.head_size, call_.grad_query.row_stride,
               row - kJointRows * group, piece_column(group));
  }

  // Those of a turn.
  __device__ __forceinline__ void give_piece(QuerySums& sums, int group,
                                             int count, Phases& phases) const {
    const int piece = piece_of(group, count);
    const int phase = given_phase(piece_of(0, count));
    barriers_.wait(piece_taken(piece), phases.parity(phase) ^ 1);
    phases.flip(phase);
    Piece::for_each_vector(sums, [&](const float* four, int index) {
      memory_.store(piece_index(piece) + index * Stages::kNumberElements,
                    FourNumbers{{four[0], four[1], four[2], four[3]}});
    });
    publish_shared_memory();
    release(barriers_, piece_given(piece));
  }

  __device__ __forceinline__ void add_piece(QuerySums& sums, int piece) const {
    Piece::for_each_vector(sums, [&](float* four, int index) {
      const auto so_far = memory_.template load<FourNumbers>(
          piece_index(piece) + index * Stages::kNumberElements);
      PKG_UNROLL
      for (int k = 0; k < 4; ++k) {
        four[k] += so_far.values[k];
      }
    });
    release(barriers_, piece_read(piece));
  }

  const AttentionJointGradients<Element>& call_;
  const AttentionProblem<Element>& problem_;
  const Mbarriers& barriers_;
  const Stages stages_;
  SharedSpan<Element> memory_;
};

template <class Element, int kWidth>
__global__ void __launch_bounds__(384, 1)
    attention_joint_gradients_warpgroups_kernel(
        const __grid_constant__ MappedJointGradients<Element> mapped) {
  // Nothing of it is compiled for devices that lack the instructions.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Block = JointGradientsWarpgroups<Element, kWidth>;
  PKG_MBARRIERS(barriers, Block::kBarriers);
  Block(mapped, barriers).run();
#else
  __trap();
#endif
}

}  // namespace pkg::cuda
