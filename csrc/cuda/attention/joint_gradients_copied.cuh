// All gradients of attention by one kernel with multiply-adds, of float32 and
// heads of up to 128: those of joint_gradients_panels.cuh, by its turns and the
// division of its work among two groups of threads, its sums in their order,
// whose operands are copied asynchronously (cuda/gemm/copied_panel.cuh).
//
// A block has its 64 keys and their values in shared memory. Panels of each
// group pass through two stages, one after the other for all tiles of queries:
// for scores 32 columns of the head, for the sums of each 64 queries 32 of
// them, twice, and then 32 keys for the gradient of the query. While one is
// multiplied the next is copied. Weights and gradients of scores lie so that
// both products that take them load vectors: by queries for the key, by keys
// for the query, for which joint_gradients_panels.cuh loads number by number.
//
// By the machine code for 9.0, about, of a thread of a group, 64 queries, 64
// keys and heads of 64:
//                               this one   joint_gradients_panels.cuh
//   multiply-adds                 10240        10240
//   loads around them               640          832
//   others around the products     1200         1300
//   panels: copies, places         1000         2900, through registers
//   weights, halves, turns         1900         1700
//   share of multiply-adds         68 %         60 %
//   barriers, without turns           8           16
//   cycles of shared memory, of
//     these loads, of four warps  10240        11264
//   and of multiply-adds          10240        10240
// Queries and gradients of the output come from L2 twice, as there, and keys
// once more, but neither keys nor values for scores: 80 KiB for what is 112
// there. Two blocks of 100 KiB share a multiprocessor, as many as registers
// leave, or of heads above 64 one of 182: so only an H100 has the memory. No
// register spills (nvcc 13.0): what belongs to a matrix is in shared memory.
// (Expected from these counts was 0.88 of that kernel's time, and less by what
// its barriers cost. An H100 took 21 ms for a delta pass and that one, 2 x 16 x
// 4096 x 64, and 12 ms with this one: 29 TFLOP/s.)
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/gradients.cuh"
#include "cuda/attention/joint_gradients.cuh"
#include "cuda/attention/joint_gradients_panels.cuh"
#include "cuda/attention/kernel_choice.h"
#include "cuda/attention/problem.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/gemm/copied_panel.cuh"
#include "cuda/gemm/large_product.cuh"
#include "cuda/gemm/stages.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// 64 queries by as many keys, [query][key], that are read by queries and by
// keys. Vectors of four keys lie in another order in each of eight fragments of
// queries, so that those of one key, of as many fragments, are in different
// banks, and those of four keys, of two fragments side by side.
struct TurnedSquare {
  static constexpr int kSize = kAttentionTile;
  static constexpr int kElements = kSize * kSize;

  __device__ __forceinline__ static constexpr int index(int query, int key) {
    const int fragment = query / kFragment;
    const int order = fragment % 2 * 4 + fragment / 2 % 4;
    const int vector = (key / kFragment) ^ order;
    return query * kSize + vector * kFragment + key % kFragment;
  }
};

// sums += A B over kDepth keys from `first` on: A lies as the square's queries
// by keys, and so a load brings four steps of a row.
template <int kDepth, class PanelB, class Sums>
__device__ __forceinline__ void multiply_turned(
    Sums& sums, const SharedSpan<float>& square, int first,
    const SharedSpan<float>& b_from) {
  using Four = Packet<float, kFragment>;
  const typename Sums::Thread thread(static_cast<int>(threadIdx.x));
  PKG_UNROLL_BY(1)
  for (int step = 0; step < kDepth; step += kFragment) {
    Four a[Sums::kThreadRows];
    PKG_UNROLL
    for (int i = 0; i < Sums::kThreadRows; ++i) {
      a[i] =
          square.load<Four>(TurnedSquare::index(thread.row(i), first + step));
    }
    PKG_UNROLL
    for (int k = 0; k < kFragment; ++k) {
      float b[Sums::kThreadColumns];
      load_fragments(b_from, b, [&](int j) {
        return PanelB::index(step + k, thread.column(j));
      });
      PKG_UNROLL
      for (int i = 0; i < Sums::kThreadRows; ++i) {
        PKG_UNROLL
        for (int j = 0; j < Sums::kThreadColumns; ++j) {
          sums.values[i][j] += a[i].values[k] * b[j];
        }
      }
    }
  }
}

template <class Element, int kWidth>
class JointGradientsCopied {
 public:
  static constexpr int kTile = kAttentionTile;
  static constexpr int kGroups = 2;
  static constexpr int kGroupThreads = kWidth;
  static constexpr int kThreads = kGroups * kGroupThreads;
  // Of a multiprocessor, as far as registers go.
  static constexpr int kBlocks = kWidth <= 64 ? 2 : 1;
  // Of the whole block.
  using QuerySums =
      Tile<float, kTile, kWidth, PairedGridThread<16, kGroupThreads / 8>>;

 private:
  static constexpr int kDepth = 32;
  static constexpr int kStages = 2;
  static constexpr int kQueries = kWidth;
  using Scores = Tile<float, kQueries, kTile,
                      PairedGridThread<kGroupThreads / 8, 8, kGroups>>;
  using Sums = Tile<float, kTile, kWidth,
                    PairedGridThread<8, kGroupThreads / 8, kGroups>>;
  using Attention = AttentionGradients<Element>;
  // Of a group: of queries for a part of the head, or of 32 queries or keys.
  using Panel = CopiedPanel<Element, kWidth, kDepth, kGroupThreads, kGroups>;
  // Of the block's keys, or of their values, for a part of the head.
  using KeyPanel = CopiedPanel<Element, kTile, kDepth, kGroupThreads, kGroups>;
  static constexpr int kKeyPanels = kWidth / kDepth;
  static constexpr int kPartRows = Scores::Thread::own_rows(kTile);
  static constexpr int kSumPanels = kTile / kDepth;
  static constexpr int kPartPanels = kSumPanels + 1;  // and one of the keys
  static_assert(kGroups * kDepth == kTile);

  static constexpr int kKeysBegin = kGroups * kStages * Panel::kElements;
  static constexpr int kWeightsBegin =
      kKeysBegin + kGroups * kKeyPanels * KeyPanel::kElements;
  // Gradients of scores, weights, and where the sums of halves of the keys pass
  // between the groups, which is where the weights were.
  static constexpr int kExchangeBegin = kWeightsBegin + TurnedSquare::kElements;
  static constexpr int kExchanged = kTile * kWidth;
  static_assert(kExchanged >= TurnedSquare::kElements);

 public:
  static constexpr int kSharedBytes =
      (kExchangeBegin + kExchanged) * static_cast<int>(sizeof(Element));
  // Where a multiprocessor has the memory for as many blocks as registers.
  static bool suits(const AttentionDevice& device) {
    constexpr int kDeclaredBytes = 2048;
    return kBlocks * (kSharedBytes + kDeclaredBytes) <=
           device.most_shared_bytes;
  }

  __device__ __forceinline__ explicit JointGradientsCopied(
      const AttentionJointGradients<Element>& call)
      : call_(call),
        problem_(call.backward.problem),
        memory_(dynamic_shared<Element>()) {}

  // The gradients of a tile of keys, and what it adds to those of queries.
  __device__ __forceinline__ void make(int64_t owned, int column_tile) const {
    const int64_t first = call_.partition.batch_index(owned, 0);
    if (int64_t{column_tile} * kTile >= problem_.extent(first).columns) {
      return;
    }
    load_keys(first, column_tile);
    Sums sums(0);
    for (int64_t shared = 0; shared < call_.partition.shared_count; ++shared) {
      add_matrix(sums, call_.partition.batch_index(owned, shared), column_tile);
    }
    store(sums, owned, column_tile);
  }

 private:
  // Which of the panels of a tile of queries: those of the head for scores, and
  // then of each 64 queries those of the sums, and of keys.
  struct Turn {
    int tile;
    int panel;
  };

  // Found out anew for each: in registers it would be too much.
  __device__ __forceinline__ Turn turn_of(int step) const {
    constexpr int kParts = kQueries / kTile;
    const int panels = head_panels() + kParts * kPartPanels;
    return {step / panels, step % panels};
  }

  __device__ __forceinline__ static int group() {
    return computed_here(static_cast<int>(threadIdx.x)) / kGroupThreads;
  }
  __device__ __forceinline__ int head_panels() const {
    const int64_t size = problem_.head_size > problem_.value_size
                             ? problem_.head_size
                             : problem_.value_size;
    return static_cast<int>(tiles_of(size, kDepth));
  }
  __device__ __forceinline__ SharedSpan<Element> stage(int index) const {
    return memory_.part((group() * kStages + index) * Panel::kElements,
                        Panel::kElements);
  }
  // Of keys, of the other group of values.
  __device__ __forceinline__ SharedSpan<Element> key_panel(int panel) const {
    return memory_.part(
        kKeysBegin + (group() * kKeyPanels + panel) * KeyPanel::kElements,
        KeyPanel::kElements);
  }
  // Of weights after dropout, or of gradients of scores, as the group adds them
  // up. (A choice of two addresses, and not of numbers, is no longer one in
  // shared memory to the compiler.)
  __device__ __forceinline__ SharedSpan<Element> square(int of_group) const {
    return memory_.part(of_group == 0 ? kExchangeBegin : kWeightsBegin,
                        TurnedSquare::kElements);
  }
  __device__ __forceinline__ SharedSpan<Element> exchanged() const {
    return memory_.part(kExchangeBegin, kExchanged);
  }

  // With the first panel of queries they are a group of copies.
  __device__ __forceinline__ void load_keys(int64_t batch,
                                            int column_tile) const {
    const AttentionExtent extent = problem_.extent(batch);
    const bool has_scores = group() == 0;
    const MatrixBatch<Element>& matrix =
        has_scores ? problem_.key : problem_.value;
    const KeyPanel panel(
        matrix.by_row(problem_.batch, batch, extent.first_column,
                      extent.columns,
                      has_scores ? problem_.head_size : problem_.value_size),
        int64_t{column_tile} * kTile);
    PKG_UNROLL_BY(1)
    for (int part = 0; part < head_panels(); ++part) {
      panel.load(key_panel(part), int64_t{part} * kDepth);
    }
  }

  __device__ __forceinline__ void add_matrix(Sums& sums, int64_t batch,
                                             int column_tile) const {
    const int steps = begin_matrix(batch, column_tile);
    Scores scores(0);
    pass_through_stages<kStages>(
        0, steps, [&](int step, int to) { load(turn_of(step), stage(to)); },
        [&](int step, int from) {
          const Turn turn = turn_of(step);
          if (turn.panel < head_panels()) {
            multiply_scores(scores, turn.panel, from);
          } else {
            add_part(sums, scores, turn, from);
          }
        });
  }

  // What a group copies panels of.
  enum Copied { kForScores, kForSums, kKeys, kCopied };

  // What belongs to the matrix is in shared memory: to find where its operands
  // begin takes divisions, and registers lack to keep it.
  __device__ __forceinline__ static auto sources() {
    PKG_SHARED(const Element*, copied_sources, [kGroups][kCopied]);
    return copied_sources;
  }
  enum Number { kBatch, kColumnTile, kRows, kColumns, kFirstRow, kNumbers };
  __device__ __forceinline__ static auto numbers() {
    PKG_SHARED(int64_t, copied_numbers, [kNumbers]);
    return copied_numbers;
  }

  // Queries for scores, and the gradient of the output for sums; of the other
  // group the other way round.
  __device__ __forceinline__ bool copies_queries(bool for_scores) const {
    return (group() == 0) == for_scores;
  }

  // Of a matrix of the batch the panels of all tiles of queries that see the
  // keys.
  __device__ __forceinline__ int begin_matrix(int64_t batch,
                                              int column_tile) const {
    const AttentionExtent extent = problem_.extent(batch);
    const int64_t column_begin = int64_t{column_tile} * kTile;
    const int64_t first = problem_.first_row(extent, column_begin);
    if (static_cast<int>(threadIdx.x) % kGroupThreads == 0) {
      const Element* const query =
          problem_.query.row(problem_.batch, batch, extent.first_row);
      const Element* const grad_output = call_.backward.grad_output.row(
          problem_.batch, batch, extent.first_row);
      const bool is_first = copies_queries(true);
      sources()[group()][kForScores] = is_first ? query : grad_output;
      sources()[group()][kForSums] = is_first ? grad_output : query;
      sources()[group()][kKeys] =
          problem_.key.row(problem_.batch, batch, extent.first_column);
    }
    if (threadIdx.x == 0) {
      numbers()[kBatch] = batch;
      numbers()[kColumnTile] = column_tile;
      numbers()[kRows] = extent.rows;
      numbers()[kColumns] = extent.columns;
      numbers()[kFirstRow] = first;
    }
    __syncthreads();
    const int64_t seen = problem_.row_end(extent, column_begin + kTile) - first;
    const int64_t parts = seen > 0 ? tiles_of(seen, kTile) : 0;
    return static_cast<int>(tiles_of(parts, kQueries / kTile) * head_panels() +
                            parts * kPartPanels);
  }

  // Begins to copy the group's panel for a turn.
  __device__ __forceinline__ void load(const Turn& turn,
                                       const SharedSpan<Element>& to) const {
    const int panel = turn.panel - head_panels();
    const bool for_scores = panel < 0;
    const bool of_keys = !for_scores && panel % kPartPanels == kSumPanels;
    const bool of_queries = copies_queries(for_scores);
    const MatrixBatch<Element>& matrix = of_keys ? problem_.key
                                         : of_queries
                                             ? problem_.query
                                             : call_.backward.grad_output;
    const int64_t size =
        of_keys || of_queries ? problem_.head_size : problem_.value_size;
    const int64_t count = numbers()[of_keys ? kColumns : kRows];
    const Copied copied = of_keys ? kKeys : for_scores ? kForScores : kForSums;
    const Element* const data = sources()[group()][copied];
    const PanelSource<Element> source = {
        data, for_scores ? count : size, for_scores ? size : count,
        for_scores ? matrix.row_stride : matrix.column_stride,
        for_scores ? matrix.column_stride : matrix.row_stride};
    const int64_t row_begin = row_of(turn.tile);
    const int64_t step = for_scores ? int64_t{turn.panel} * kDepth
                         : of_keys  ? column_of_keys() + group() * kDepth
                                    : row_begin + panel / kPartPanels * kTile +
                                          panel % kPartPanels * kDepth;
    Panel(source, for_scores ? row_begin : 0).load(to, step);
  }

  __device__ __forceinline__ static int64_t column_of_keys() {
    const int64_t tile = numbers()[kColumnTile];
    return tile * kTile;
  }
  __device__ __forceinline__ static int64_t row_of(int tile) {
    const int64_t first = numbers()[kFirstRow];
    return first + int64_t{tile} * kQueries;
  }

  // Scores before their scale, of the other group the gradients of weights.
  __device__ __forceinline__ void multiply_scores(Scores& scores, int panel,
                                                  int from) const {
    multiply_copied<kDepth, Panel, KeyPanel>(scores, stage(from),
                                             key_panel(panel));
  }

  // What a part of a tile's queries gives, by one of its panels.
  __device__ __forceinline__ void add_part(Sums& sums, Scores& scores,
                                           const Turn& turn, int from) const {
    const int panel = turn.panel - head_panels();
    const int of_part = panel % kPartPanels;
    const int64_t row_begin = row_of(turn.tile);
    const int64_t part_begin = row_begin + panel / kPartPanels * kTile;
    if (of_part == kSumPanels) {
      add_query(part_begin, from);
      take_next_part(scores);
      return;
    }
    if (of_part == 0) {
      weigh(scores, row_begin, part_begin);
    }
    multiply_copied<kDepth, TurnedSquare, Panel>(
        sums, square(group()).part(of_part * kDepth * kTile, kDepth * kTile),
        stage(from));
  }

  // Scores of the next 64 queries in the place of the first, and zeros behind
  // them for the next tile. Where they are zeros only when that begins, the
  // compiler keeps what they were in registers during the query's product, and
  // spills.
  __device__ __forceinline__ static void take_next_part(Scores& scores) {
    PKG_UNROLL
    for (int i = 0; i < Scores::kThreadRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < Scores::kThreadColumns; ++j) {
        scores.values[i][j] = i + kPartRows < Scores::kThreadRows
                                  ? scores.values[i + kPartRows][j]
                                  : 0.0f;
      }
    }
  }

  // Weights and gradients of scores of 64 queries, as grad_key_value_panels.cuh
  // makes them: either group of 32 keys, for which it gets from the other what
  // that has of them, in the places where that was.
  __device__ __forceinline__ void weigh(const Scores& scores, int64_t row_begin,
                                        int64_t part_begin) const {
    constexpr int kHalf = kTile / 2;
    using Four = Packet<float, kFragment>;
    const typename Scores::Thread thread;
    const bool has_scores = group() == 0;
    const SharedSpan<Element> given = square(has_scores ? 0 : 1);
    const int given_first = (has_scores ? kHalf : 0) + thread.column(0);
    PKG_UNROLL
    for (int i = 0; i < kPartRows; ++i) {
      Four four;
      PKG_UNROLL
      for (int j = 0; j < kFragment; ++j) {
        four.values[j] = chosen(has_scores, scores.values[i][j + kFragment],
                                scores.values[i][j]);
      }
      given.store(TurnedSquare::index(thread.row(i), given_first), four);
    }
    __syncthreads();  // what the other group has given is there
    const int64_t scored = numbers()[kBatch];
    const int64_t column_begin = column_of_keys();
    const Attention attention(call_.backward, scored, problem_.extent(scored));
    const bool are_products =
        attention.template are_products<Scores>(row_begin, column_begin);
    const SharedSpan<Element> taken = square(has_scores ? 1 : 0);
    const int first = (has_scores ? 0 : kHalf) + thread.column(0);
    PKG_UNROLL
    for (int i = 0; i < kPartRows; ++i) {
      const int at = TurnedSquare::index(thread.row(i), first);
      const Four others = taken.template load<Four>(at);
      Four products;
      Four gradients;
      PKG_UNROLL
      for (int j = 0; j < kFragment; ++j) {
        const auto& own = scores.values[i];
        const float mine = chosen(has_scores, own[j], own[j + kFragment]);
        products.values[j] = has_scores ? mine : others.values[j];
        gradients.values[j] = has_scores ? others.values[j] : mine;
      }
      GradKeyValuePanels<Element, kWidth>::weigh_four(
          attention, are_products, part_begin + thread.row(i),
          column_begin + first, products.values, gradients.values);
      square(0).store(at, products);
      square(1).store(at, gradients);
    }
    __syncthreads();  // the weights are there
  }

  // The part of the query's gradient of 64 queries. Either group has the sums
  // over 32 keys, of which it gives those of 32 queries to the other.
  __device__ __forceinline__ void add_query(int64_t row_begin, int from) const {
    Sums half(0);
    multiply_turned<kDepth, Panel>(half, square(1), group() * kDepth,
                                   stage(from));
    QuerySums sums = add_halves(half);
    const int64_t batch = numbers()[kBatch];
    const int64_t tile = numbers()[kColumnTile];
    add_in_turn(call_, batch, row_begin, static_cast<int>(tile), sums);
  }

  // By the thread of the other group that has the same places.
  __device__ __forceinline__ QuerySums add_halves(const Sums& half) const {
    using Four = Packet<float, kFragment>;
    constexpr int kRows = QuerySums::kThreadRows;
    constexpr int kColumns = QuerySums::kThreadColumns;
    static_assert(2 * kRows == Sums::kThreadRows &&
                  kColumns == Sums::kThreadColumns);
    if constexpr (kExchanged > TurnedSquare::kElements) {
      static_assert(kRows * kColumns * kThreads <= kExchanged);
    }
    const SharedSpan<Element> memory = exchanged();
    const int thread = computed_here(static_cast<int>(threadIdx.x));
    const bool is_first = thread < kGroupThreads;
    const auto place = [](int i, int j, int of_thread) {
      return (i * kColumns + j) * kThreads + of_thread * kFragment;
    };
    const int other =
        is_first ? thread + kGroupThreads : thread - kGroupThreads;
    PKG_UNROLL
    for (int i = 0; i < kRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < kColumns; j += kFragment) {
        Four four;
        PKG_UNROLL
        for (int k = 0; k < kFragment; ++k) {
          four.values[k] = chosen(is_first, half.values[i + kRows][j + k],
                                  half.values[i][j + k]);
        }
        memory.store(place(i, j, other), four);
      }
    }
    __syncthreads();
    QuerySums sums(0);
    PKG_UNROLL
    for (int i = 0; i < kRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < kColumns; j += kFragment) {
        const Four four = memory.template load<Four>(place(i, j, thread));
        PKG_UNROLL
        for (int k = 0; k < kFragment; ++k) {
          sums.values[i][j + k] = chosen(is_first, half.values[i][j + k],
                                         half.values[i + kRows][j + k]) +
                                  four.values[k];
        }
      }
    }
    return sums;
  }

  __device__ __forceinline__ void store(Sums& sums, int64_t owned,
                                        int column_tile) const {
    const bool has_values = group() == 0;
    const ResultBatch<Element>& gradient =
        has_values ? call_.grad_value : call_.grad_key;
    const int64_t batch = call_.partition.batch_index(computed_here(owned), 0);
    const AttentionExtent extent = problem_.extent(batch);
    sums.scale(has_values ? 1.0f : static_cast<float>(problem_.scale));
    store_tile(sums, gradient.row(problem_.batch, batch, extent.first_column),
               extent.columns,
               has_values ? problem_.value_size : problem_.head_size,
               gradient.row_stride, int64_t{column_tile} * kTile, 0);
  }

  const AttentionJointGradients<Element>& call_;
  const AttentionProblem<Element>& problem_;
  SharedSpan<Element> memory_;
};

template <class Element, int kWidth>
__global__ void __launch_bounds__(
    JointGradientsCopied<Element, kWidth>::kThreads,
    JointGradientsCopied<Element, kWidth>::kBlocks)
    attention_joint_gradients_copied_kernel(
        const __grid_constant__ AttentionJointGradients<Element> call) {
  using Block = JointGradientsCopied<Element, kWidth>;
  for_joint_tiles(call, [&](int64_t owned, int column_tile) {
    Block(call).make(owned, column_tile);
  });
  zero_unseen_queries<typename Block::QuerySums>(call);
}

}  // namespace pkg::cuda
