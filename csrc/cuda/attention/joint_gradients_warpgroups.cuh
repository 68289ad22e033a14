// All gradients of plain attention by one kernel with products of warpgroups,
// of half precision: those of key and value as
// cuda/attention/grad_key_value_warpgroups.cuh makes them and, from the
// gradients of the scores that are there, that of the query too. 5 products in
// place of the 7 of two kernels; for compute capability 9.0 alone.
//
// Algorithm: that of cuda/attention/joint_gradients_mma.cuh, in its turns and
// by its tickets. A block owns 128 keys, a warpgroup 64 of them, and walks the
// queries, 64 at a time. Tiles of scores are transposed, so that what is made
// of them is operand A, in registers, of the products that sum over queries.
// The product that sums over keys needs what both warpgroups make: they write
// the gradients of scores to shared memory, a line for each key, which is
// operand A by its columns. Of heads of 128 either warpgroup makes 64 columns
// of dS K; of heads of 64, which have no half for it, they take turns.
//
// What comes of it is 64 x 64 numbers of a warpgroup, a piece. It goes to
// shared memory, and from there a warp of the third warpgroup has the copy
// engine add it to the sums in global memory, when it is the block's turn: the
// first in turn stores, so that nobody has to write zeros. Then that warp waits
// until the numbers have arrived, and passes the turn on. The warpgroups go on
// meanwhile, and wait only for room for the next piece. Of the last in turn
// that warp has the sums so far loaded to where its own would be, a tile of
// queries ahead; the warpgroups add theirs in registers and store the gradient,
// scaled and rounded.
//
// A piece of heads of 128 is written while the scores of the next queries are
// multiplied. (These products themselves cannot begin a tile early: that took
// more registers than a thread has. Of heads of 64 the compiler lets no product
// go on while one warpgroup begins another and the other does not.) What a
// block is at is in shared memory, and the parities of barriers are bits of one
// register: else nine words of a thread were stored in memory in every turn.
// A ticket is taken before the last one's gradients are stored, so that keys
// and queries come meanwhile.
//
// For 128 keys, 64 queries and heads of 128 (64) a multiprocessor takes, by
// these counts:
// - tensor cores: five products of 2 x 128 x 64 x 128 operations at 4096 a
//   cycle: 2560 (1280) cycles, where two kernels take 3584 (1792);
// - shared memory, at 128 bytes a cycle: 4 KiB for each of 32 (16) products of
//   64 x 64 over 16 columns and of 16 (8) over 16 keys, and 4 (2) KiB for each
//   of 16 of 64 x 128 (64 x 64) over 16 queries; 16 KiB of gradients of scores
//   that are written; 32 (16) KiB of pieces, written and read; 32 (16) KiB that
//   are copied; and 16 loads of 8 bytes a lane of 8 warps:
//   1024 + 512 + 512 + 128 + 512 + 256 + 128 = 3072
//   (512 + 256 + 256 + 128 + 256 + 128 + 128 = 1664),
//   where two kernels take 1920 + 1280 = 3200 (1024 + 640 = 1664);
// - special functions: 8192 exponentials at 16 a cycle: 512;
// - instructions: the compiler makes 761 of a turn, where all is seen, and 638
//   or 729 of heads of 64: 8 warps of them at 4 a cycle are 1522 (1367);
// - L2: 32 (16) KiB of queries, and 32 (16) KiB that are added: 21 (20) bytes
//   a cycle, of 24 that are a multiprocessor's share. To load, to add and to
//   store would be 96 (48) KiB, 32 (29) bytes.
// Shared memory is the bound, and the tensor cores come close. So the time is
// 0.71 of that of two kernels where tensor cores bind both, 0.96 where shared
// memory does; of heads of 64 0.71 and 1. (An H100 took 2.90 ms for 4 x 16 x
// 4096 x 128, as long as with two kernels; tensor cores were busy for 48 % of
// that and instructions issued in 31 % of the cycles, so that it is neither of
// these that it waits for. Of causal ones it took 0.9 of the time.)
//
// A turn is passed on when the numbers have arrived and another block has seen
// the counter: after some 2500 cycles, as long as the work for a tile of
// queries. So of as many keys as queries the last block of a head waits for
// half as long as it works. That is once a launch, and what two products less
// save makes up for it in 5/4 rounds of blocks.
//
// Not chosen: additions by the threads, of vectors from registers. They would
// leave 64 KiB out of shared memory, but a thread that adds has to wait for the
// turn, and whoever passes it on for the numbers of all.
#pragma once

#include <cstdint>
#include <limits>

#include "cuda/attention/gradients.cuh"
#include "cuda/attention/gradients_mma.cuh"
#include "cuda/attention/gradients_warpgroups.cuh"
#include "cuda/attention/joint_gradients.cuh"
#include "cuda/attention/key_value_stages.cuh"
#include "cuda/device/bulk_copy.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/turns.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

template <class Element>
using MappedJointGradients = MappedGradients<AttentionJointGradients<Element>>;

// Sums of the query's gradient that a warpgroup has in a turn: 64 queries by 64
// columns. In memory four of a thread's after four of its neighbour's.
struct QueryPiece {
  static constexpr int kColumns = 64;
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
                                kKeys, kWidth, (kWidth > 64 ? 3 : 4)>;
  static constexpr int kQueries = Stages::kQueries;
  static_assert(kQueries == kJointRows);
  // Of the query's gradient in a turn. Of one the warpgroups take turns.
  static constexpr int kPieces = kWidth / QueryPiece::kColumns;
  // Places for the gradients of scores: where the warpgroups take turns, one
  // each.
  static constexpr int kGradScores = kPieces == 1 ? 2 : 1;

  using Weights = typename Stages::Weights;
  using Words = typename Stages::Words;
  using Sums = Tile<float, Stages::kTileKeys, kWidth,
                    MmaThread<Stages::kTileKeys, kWidth, 16, kWidth>>;
  using QuerySums = typename QueryPiece::Sums;
  // A line for each key.
  using GradScores = SwizzledTile<Element, kKeys, kQueries>;
  static_assert(Weights::Thread::kThreads == Launch::kConsumers &&
                GradScores::kLine == kQueries);

  // Where each begins, behind what comes in stages.
  static constexpr int kAlignment = 1024 / sizeof(Element);
  static constexpr int kGradScoresIndex =
      (Stages::kElements + kAlignment - 1) / kAlignment * kAlignment;
  static constexpr int kPieceElements = QueryPiece::kBytes / sizeof(Element);
  static constexpr int kPiecesIndex =
      kGradScoresIndex + kGradScores * GradScores::kElements;
  static constexpr int kSharedBytes =
      (kPiecesIndex + 2 * kPieceElements) * sizeof(Element);

  static constexpr int kBarriers = Stages::kBarriers + 4 + 2 * kGradScores + 8;

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
  // them: from which query on the block is the last in turn, and before which
  // it is not the first one.
  enum Place {
    kOwned,  // below zero: there is nothing more to do
    kColumnBegin,
    kBegin,
    kEnd,
    kLastFrom,
    kFirstBefore,
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
  __device__ __forceinline__ static int given_phase(int group) {
    return 1 + group;
  }
  __device__ __forceinline__ static int loaded_phase(int group) {
    return 3 + group;
  }

  // The barriers of what there is to do that is there, and that is done.
  __device__ __forceinline__ static int work_there(int slot) {
    return Stages::kBarriers + slot;
  }
  __device__ __forceinline__ static int work_done(int slot) {
    return work_there(2) + slot;
  }
  // Of gradients of scores that are there, and that have been multiplied.
  __device__ __forceinline__ static int grad_scores_full(int place) {
    return work_done(2) + place;
  }
  __device__ __forceinline__ static int grad_scores_empty(int place) {
    return grad_scores_full(kGradScores + place);
  }
  // Of a warpgroup's sums: that they are to be added, and that they have been
  // read for that; that those so far are there, and that they have been read.
  __device__ __forceinline__ static int piece_given(int group) {
    return grad_scores_full(2 * kGradScores) + group;
  }
  __device__ __forceinline__ static int piece_taken(int group) {
    return piece_given(2) + group;
  }
  __device__ __forceinline__ static int piece_loaded(int group) {
    return piece_given(4) + group;
  }
  __device__ __forceinline__ static int piece_read(int group) {
    return piece_given(6) + group;
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
      barriers_.init(grad_scores_empty(place), kWarps / 2 * kPieces);
    }
    for (int group = 0; group < 2; ++group) {
      barriers_.init(piece_given(group), kWarps / 2);
      barriers_.init(piece_taken(group), 1);
      barriers_.init(piece_loaded(group), 1);
      barriers_.init(piece_read(group), kWarps / 2);
    }
    publish_mbarriers();
  }

  __device__ __forceinline__ static int grad_scores_index(int place) {
    return kGradScoresIndex + place * GradScores::kElements;
  }
  __device__ __forceinline__ static int piece_index(int group) {
    return kPiecesIndex + group * kPieceElements;
  }
  // Which warpgroup has a piece of a turn.
  __device__ __forceinline__ static int group_of_piece(int piece, int turn) {
    return kPieces == 1 ? turn % 2 : piece;
  }

  // Calls function(work) for what the block has to do, as for_joint_tiles()
  // has it. By whole warps, of which one takes the tickets for all.
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

  // The last in turn at a tile of queries has the first key that its first
  // query sees, or the first of all; the first in turn the last one that its
  // last query sees, or the last of all.
  __device__ __forceinline__ void write_work(int slot, int ticket) const {
    const auto column_tiles = static_cast<int>(call_.column_tiles());
    const AttentionExtent extent = problem_.extent_of_one_length(0);
    const int tile = column_tiles - 1 - ticket % column_tiles;
    const int column_begin = tile * kKeys;
    const int column_end = column_begin + kKeys;
    constexpr int kAll = std::numeric_limits<int>::max();
    const auto work = Work::places()[slot];
    work[kOwned] = ticket < call_.tile_count() ? ticket / column_tiles : -1;
    work[kColumnBegin] = column_begin;
    work[kBegin] = static_cast<int>(problem_.first_row(extent, column_begin));
    work[kEnd] = static_cast<int>(problem_.row_end(extent, column_end));
    work[kLastFrom] =
        column_begin == 0 ? 0 : near(column_begin - extent.limits.first);
    work[kFirstBefore] =
        column_end >= problem_.columns
            ? kAll
            : near(column_end - extent.limits.last - kJointRows + 1);
  }
  // What lies further than any query is as good as no limit.
  __device__ __forceinline__ static int near(int64_t row) {
    return static_cast<int>(row < 0                  ? 0
                            : row > kMostTiledLength ? kMostTiledLength
                                                     : row);
  }

  // A warp.
  __device__ __forceinline__ void copy(int operand) const {
    Turn turn;
    Phases phases;
    uint32_t key_parity = 1;
    for_work(operand == 0, phases, [&](const Work& work) {
      const KeyValueWork of_stages = {static_cast<uint32_t>(work.at(kOwned)), 0,
                                      work.at(kColumnBegin), work.at(kBegin),
                                      work.at(kEnd)};
      stages_.copy(operand, of_stages, turn, key_parity);
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
      PKG_UNROLL_BY(1)
      for (uint32_t shared = 0; shared < stages_.shared_count(); ++shared) {
        add_in_turn(work, batch_of(work, shared), phases, count);
      }
    });
  }

  __device__ __forceinline__ uint32_t batch_of(const Work& work,
                                               uint32_t shared) const {
    return call_.partition.batch_index(static_cast<uint32_t>(work.at(kOwned)),
                                       shared);
  }

  __device__ __forceinline__ void add_in_turn(const Work& work, uint32_t batch,
                                              Phases& phases,
                                              int& count) const {
    const uint32_t tile = batch * static_cast<uint32_t>(call_.row_tiles()) +
                          static_cast<uint32_t>(work.at(kBegin)) / kJointRows;
    int* counter = call_.turns + 1 + tile;
    float* sums = call_.sums + uint64_t{tile} * kJointRows * kWidth;
    PKG_UNROLL_BY(1)
    for (int row = work.at(kBegin); row < work.at(kEnd); row += kJointRows) {
      if (row < work.at(kLastFrom)) {
        give_sums(work, row, counter, sums, phases, count);
      } else if (row >= work.at(kFirstBefore)) {
        load_sums_so_far(work, row, counter, sums, phases, count);
      }
      ++counter;
      sums += kJointRows * kWidth;
      ++count;
    }
  }

  __device__ __forceinline__ int turn_index(const Work& work, int row) const {
    const AttentionExtent extent = problem_.extent_of_one_length(0);
    return joint_turn<kKeys>(extent, row, work.at(kColumnBegin) / kKeys).index;
  }

  __device__ __forceinline__ void wait_for_turn(int* counter, int index) const {
    TurnCounter(counter).wait(index);
    order_copies_after_turn();
  }

  __device__ __forceinline__ void give_sums(const Work& work, int row,
                                            int* counter, float* sums,
                                            Phases& phases, int count) const {
    const int index = turn_index(work, row);
    const bool is_first = row < work.at(kFirstBefore);
    if (!is_first) {
      wait_for_turn(counter, index);
    }
    PKG_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      const int group = group_of_piece(piece, count);
      barriers_.wait(piece_given(group), phases.parity(given_phase(group)));
      phases.flip(given_phase(group));
      float* const to = sums + piece * QueryPiece::kNumbers;
      if (is_first) {
        store_numbers_in_turn(memory_, piece_index(group), to,
                              QueryPiece::kBytes);
      } else {
        add_numbers_in_turn(memory_, piece_index(group), to,
                            QueryPiece::kBytes);
      }
    }
    commit_bulk_copies();
    wait_for_bulk_reads();
    PKG_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      barriers_.arrive(piece_taken(group_of_piece(piece, count)));
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
    for (int piece = 0; piece < kPieces; ++piece) {
      const int group = group_of_piece(piece, count);
      barriers_.wait(piece_read(group), phases.parity(loaded_phase(group)) ^ 1);
      phases.flip(loaded_phase(group));
      barriers_.arrive_and_expect(piece_loaded(group), QueryPiece::kBytes);
      copy_numbers_in_turn(memory_, piece_index(group),
                           sums + piece * QueryPiece::kNumbers,
                           QueryPiece::kBytes, barriers_, piece_loaded(group));
    }
  }

  // Two warpgroups.
  __device__ __forceinline__ void compute() const {
    Turn turn;
    Phases phases;
    for_work(false, phases, [&](const Work& work) {
      Sums key_sums(0);
      Sums value_sums(0);
      if (work.at(kBegin) < work.at(kEnd)) {
        barriers_.wait(Stages::kKeysFull, phases.parity(kKeysPhase));
        phases.flip(kKeysPhase);
        PKG_UNROLL_BY(1)
        for (uint32_t shared = 0; shared < stages_.shared_count(); ++shared) {
          add(work, shared, turn, phases, key_sums, value_sums);
        }
        release(barriers_, Stages::kKeysEmpty);
      }
      const KeyValueWork keys = {static_cast<uint32_t>(work.at(kOwned)), 0,
                                 work.at(kColumnBegin), 0, 0};
      store_key_value(call_, keys, key_sums, value_sums);
    });
    zero_unseen_queries<Tile<float, kJointRows, kWidth,
                             MmaThread<kJointRows, kWidth, 16, kWidth / 2>>>(
        call_);
  }

  // key_sums += dS^T Q, value_sums += P^T dO of one matrix of the batch, and
  // what these keys add to the gradients of its queries.
  __device__ __forceinline__ void add(const Work& work, uint32_t shared,
                                      Turn& turn, Phases& phases,
                                      Sums& key_sums, Sums& value_sums) const {
    const Attention attention(problem_, 0, problem_.extent_of_one_length(0));
    const int key_line = 64 * warpgroup_of_thread();
    Weights weights(0);
    Weights gradients(0);
    QuerySums query_sums(0);
    bool gives = false;  // sums of the turn before
    PKG_UNROLL_BY(1)
    for (int begin = work.at(kBegin); begin < work.at(kEnd);
         begin += kQueries) {
      const int stage = turn.stage();
      Words weight_words;
      Words gradient_words;
      barriers_.wait(Stages::full(stage), turn.parity());
      stages_.begin_products_of_keys(weights, key_line, stage);
      if (gives) {
        give_piece(query_sums, phases);
      }
      stages_.begin_products_of_values(gradients, key_line, stage);
      wait_for_products<1>();
      hold_sums(weights.values);
      weigh(attention, weights, begin, work.at(kColumnBegin),
            stages_.log_sum_exp(stage));
      round_tile<Element>(weights, weight_words);
      stages_.begin_value_sums(value_sums, weight_words, 0, stage);
      wait_for_products<1>();
      hold_sums(gradients.values);
      differentiate(weights, gradients, stages_.delta(stage));
      round_tile<Element>(gradients, gradient_words);
      share_grad_scores(gradient_words, turn.count);
      stages_.begin_key_sums(key_sums, gradient_words, 0, stage);
      if constexpr (kPieces == 2) {
        begin_query_sums(query_sums, turn.count);
      }
      wait_for_products<0>();
      hold_sums(value_sums.values);
      hold_sums(key_sums.values);
      release(barriers_, Stages::empty(stage));
      if constexpr (kPieces == 2) {
        gives = finish_query_sums(work, shared, begin, turn.count, phases,
                                  query_sums);
      } else {
        make_in_turn(work, shared, begin, turn.count, phases);
      }
      ++turn.count;
    }
    if (gives) {
      give_piece(query_sums, phases);
    }
  }

  // Where the warpgroups take turns: no product of one is on its way while the
  // other does something else, or the compiler would have all of them wait.
  __device__ __forceinline__ void make_in_turn(const Work& work,
                                               uint32_t shared, int row,
                                               int count,
                                               Phases& phases) const {
    if (count % 2 != warpgroup_of_thread()) {
      return;
    }
    QuerySums sums(0);
    begin_query_sums(sums, count);
    wait_for_products<0>();
    if (finish_query_sums(work, shared, row, count, phases, sums)) {
      give_piece(sums, phases);
    }
  }

  // Gives the gradients of scores to both warpgroups: a lane's neighbours are
  // queries, a word of a key's line.
  __device__ __forceinline__ void share_grad_scores(const Words& words,
                                                    int count) const {
    const GradScoresTurn turn{count};
    const typename Weights::Thread thread;
    const int index = grad_scores_index(turn.stage());
    barriers_.wait(grad_scores_empty(turn.stage()), turn.parity() ^ 1);
    PKG_UNROLL
    for (int step = 0; step < kQueries / 16; ++step) {
      PKG_UNROLL
      for (int word = 0; word < 4; ++word) {
        const int place = GradScores::index(
            thread.row(word % 2), thread.column(4 * step + word / 2 * 2));
        memory_.store(index + place, words[step][word]);
      }
    }
    publish_shared_memory();
    release(barriers_, grad_scores_full(turn.stage()));
  }

  __device__ __forceinline__ static int piece_column() {
    return kPieces == 2 ? QueryPiece::kColumns * warpgroup_of_thread() : 0;
  }

  // Begins the product of the gradients of scores and the keys.
  __device__ __forceinline__ void begin_query_sums(QuerySums& sums,
                                                   int count) const {
    constexpr int kStepBytes = 16 * 128;
    const GradScoresTurn turn{count};
    barriers_.wait(grad_scores_full(turn.stage()), turn.parity());
    const WarpgroupOperand scores(memory_, grad_scores_index(turn.stage()));
    const WarpgroupOperand keys =
        Stages::Key::by_column(memory_, Stages::kKeyIndex, piece_column());
    hold_sums(sums.values);
    order_registers();
    PKG_UNROLL
    for (int step = 0; step < kKeys / 16; ++step) {
      begin_product<Element, Major::outer, Major::outer>(
          sums.values, scores.at(step * kStepBytes), keys.at(step * kStepBytes),
          step > 0);
    }
    commit_products();
  }

  // After the wait for it. Where others have added theirs, makes the result;
  // else says that the sums are to be given to those in memory.
  __device__ __forceinline__ bool finish_query_sums(const Work& work,
                                                    uint32_t shared, int row,
                                                    int count, Phases& phases,
                                                    QuerySums& sums) const {
    hold_sums(sums.values);
    release(barriers_, grad_scores_empty(GradScoresTurn{count}.stage()));
    if (row < work.at(kLastFrom)) {
      return true;
    }
    const int group = warpgroup_of_thread();
    if (row >= work.at(kFirstBefore)) {
      barriers_.wait(piece_loaded(group), phases.parity(loaded_phase(0)));
      phases.flip(loaded_phase(0));
      add_piece(sums, group);
    }
    sums.scale(static_cast<float>(problem_.scale));
    store_tile(sums,
               call_.grad_query.row(problem_.batch, batch_of(work, shared), 0),
               problem_.rows, problem_.head_size, call_.grad_query.row_stride,
               row - kJointRows * group, piece_column());
    return false;
  }

  __device__ __forceinline__ void give_piece(QuerySums& sums,
                                             Phases& phases) const {
    const int group = warpgroup_of_thread();
    barriers_.wait(piece_taken(group), phases.parity(given_phase(0)) ^ 1);
    phases.flip(given_phase(0));
    QueryPiece::for_each_vector(sums, [&](const float* four, int index) {
      memory_.store(piece_index(group) + index * Stages::kNumberElements,
                    FourNumbers{{four[0], four[1], four[2], four[3]}});
    });
    publish_shared_memory();
    release(barriers_, piece_given(group));
  }

  __device__ __forceinline__ void add_piece(QuerySums& sums, int group) const {
    QueryPiece::for_each_vector(sums, [&](float* four, int index) {
      const auto so_far = memory_.template load<FourNumbers>(
          piece_index(group) + index * Stages::kNumberElements);
      PKG_UNROLL
      for (int k = 0; k < 4; ++k) {
        four[k] += so_far.values[k];
      }
    });
    release(barriers_, piece_read(group));
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
