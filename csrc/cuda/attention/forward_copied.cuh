// The forward pass of scaled dot-product attention in float32 by multiply-adds,
// of 128 queries a block: the algorithm of forward_panels.cuh and its sums, in
// their order, of operands that are copied asynchronously
// (cuda/gemm/copied_panel.cuh).
//
// A block has the whole heads of its queries in shared memory. Panels of 32
// columns of the keys, and then of 32 values, pass through two stages: while
// one is multiplied the next is copied, and a barrier a panel suffices. A
// thread has 8 x 8 scores and 8 x 8 of the output, a warp whole rows of both,
// so that it waits for no other while it weighs scores and passes weights
// through shared memory, half of a tile's at a time. Any strides will do: what
// does not lie as shared memory has it is copied by elements. Heads are as wide
// as the memory has room for, and outputs wider than a tile by several blocks,
// as there.
//
// By the machine code for 9.0, about, of a thread, 64 keys and heads of 64:
//                          this one   forward_panels.cuh
//   multiply-adds              8192         8192
//   loads of 16 bytes           512          512
//   around the products         530          510
//   panels: copies, places      680         2300, through registers
//   weights and their sums     1770         1560
//   share of multiply-adds     70 %         63 %
//   barriers                      4           10
//   from L2, of 128 queries  32 KiB       64 KiB
// (Of heads of 128 the share is 76 %.) Shared memory gives 512 vectors to a
// warp in 2048 cycles, if it has to give each lane its own, of the 2048 that
// the multiply-adds of four warps take; pairs of lanes load the same, see
// PairedGridThread. No two lanes meet in a bank, which stores to the panels of
// the other kernel do. Eight warps share a multiprocessor, as there, but of two
// blocks of 66 KiB, or one of 131: more for heads of 64 would leave a thread
// 168 registers, of which the compiler spilled 74. (Expected from these counts
// was 0.9 of that kernel's time, and less by what its barriers and conflicts
// cost. An H100 took 0.78 of it: 30 TFLOP/s, of 67, where that one has 24.)
//
// Where there are too few queries for the device their keys are divided among
// blocks, and forward_parts.cuh combines what each has of its part. By count,
// of 1x8x1024x64 on 132 multiprocessors: forward_panels.cuh has 128 blocks of
// two warps, so that two of a multiprocessor's four schedulers have one warp
// and two have none (H100: 257 us, 8.3 TFLOP/s). Four parts make of 64 tiles of
// 128 queries 256 blocks of four warps, two to a multiprocessor, which is all
// it has room for. 8.7 MB of sums are written once and read once, through the
// L2 cache. Fewer rows a thread would have done the same with half or a quarter
// of the products for what is loaded. (An H100 then took 82 us in a graph.)
#pragma once

#include <cstdint>

#include "cuda/attention/forward.cuh"
#include "cuda/attention/forward_panels.cuh"
#include "cuda/attention/forward_parts.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/tile_limits.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/fast_math.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/gemm/copied_panel.cuh"
#include "cuda/gemm/large_product.cuh"
#include "cuda/gemm/stages.cuh"
#include "cuda/gemm/tile.cuh"
#include "host/integer_math.h"

namespace pkg::cuda {

// Weights between the two products, [key][query]. Vectors of four queries lie
// in another order in each of four fragments of keys: those that lanes write,
// of four fragments by two, and those that they read, of one key, are in
// different banks.
template <int kKeys, int kRows>
struct CopiedWeights {
  static constexpr int kElements = kKeys * kRows;

  __device__ __forceinline__ static constexpr int index(int key, int row) {
    const int vector = (row / kFragment) ^ (key / kFragment % 4 * 2);
    return key * kRows + vector * kFragment + row % kFragment;
  }
};

template <class Element, int kWidth>
class AttentionCopied {
 public:
  static constexpr int kRows = 128;
  static constexpr int kKeys = kWidth;
  static constexpr int kDepth = 32;
  static constexpr int kStages = 2;
  using Thread = PairedGridThread<16, kWidth / 8>;
  static constexpr int kThreads = Thread::kThreads;
  // Of a multiprocessor, as far as registers go.
  static constexpr int kBlocks = kWidth <= 64 ? 2 : 1;

 private:
  using Scores = Tile<float, kRows, kKeys, Thread>;
  using Output = Tile<float, kRows, kWidth, Thread>;
  using Softmax = OnlineSoftmax<Scores, Exponential>;
  using Statistics = SharedSoftmax<Softmax, Scores>;
  using QueryPanel = CopiedPanel<Element, kRows, kDepth, kThreads>;
  // Of keys for a part of the head, or of values for some of the keys.
  using Panel = CopiedPanel<Element, kWidth, kDepth, kThreads>;
  // The keys whose weights are in shared memory at a time: a fragment of each
  // thread.
  static constexpr int kPart = kWidth / 2;
  static_assert(Scores::kThreadColumns == 2 * kFragment);
  static constexpr int kPanelsOfPart = kPart / kDepth;
  static constexpr int kValuePanels = kKeys / kDepth;
  using Weights = CopiedWeights<kPart, kRows>;
  static constexpr int kWeightsBegin = kStages * Panel::kElements;
  static constexpr int kQueryBegin = kWeightsBegin + Weights::kElements;
  static constexpr int64_t kDeclaredBytes = 2 * kRows * sizeof(float);
  static int64_t shared_bytes(int64_t head_size) {
    return (kQueryBegin + tiles_of(head_size, kDepth) * QueryPanel::kElements) *
           static_cast<int64_t>(sizeof(Element));
  }

 public:
  static LaunchShape launch_shape(int64_t head_size) {
    return {kThreads, static_cast<int>(shared_bytes(head_size))};
  }
  // The scores of no head at all are never made.
  static bool suits(const AttentionProblem<Element>& problem,
                    int64_t most_shared_bytes) {
    return problem.head_size > 0 && problem.rows < kMostTiledLength &&
           problem.columns < kMostTiledLength &&
           shared_bytes(problem.head_size) + kDeclaredBytes <=
               most_shared_bytes;
  }

  __device__ __forceinline__ explicit AttentionCopied(
      const AttentionForward<Element>& call)
      : call_(call), memory_(dynamic_shared<Element>()) {}

  // Of 128 queries up to kWidth columns of the output, or of the sums of one
  // part of their keys.
  __device__ __forceinline__ void make(int64_t part, int64_t index) const {
    const AttentionProblem<Element>& problem = call_.problem;
    const int64_t row_tiles = tiles_of(problem.rows, kRows);
    const int64_t output_tiles = call_.template output_tiles<kWidth>();
    const int64_t batch = index / output_tiles / row_tiles;
    const int64_t row_begin = index / output_tiles % row_tiles * kRows;
    const int64_t output_begin = index % output_tiles * kWidth;
    const AttentionExtent extent = problem.extent(batch);
    if (row_begin >= extent.rows) {
      return;
    }
    load_queries(batch, extent, row_begin);
    Statistics::begin();
    Output output(0);
    attend(output, part, batch, extent, row_begin, output_begin);
    const int64_t stored = computed_here(batch);
    if (call_.parts.count > 1) {
      store_attention_part(call_, computed_here(part), stored, row_begin,
                           output_begin, output, Statistics::end());
      return;
    }
    store_attention(call_, problem.extent(stored), stored, row_begin,
                    output_begin, output, Statistics::end());
  }

 private:
  // Which of the panels of a tile of keys: those of the keys, then those of the
  // values.
  struct Turn {
    int64_t column_begin;
    int panel = 0;

    __device__ __forceinline__ void advance(int panels) {
      ++panel;
      if (panel == panels) {
        panel = 0;
        column_begin += kKeys;
      }
    }
  };

  __device__ __forceinline__ int head_panels() const {
    return static_cast<int>(tiles_of(call_.problem.head_size, kDepth));
  }
  __device__ __forceinline__ SharedSpan<Element> query_panel(int panel) const {
    return memory_.part(kQueryBegin + panel * QueryPanel::kElements,
                        QueryPanel::kElements);
  }
  __device__ __forceinline__ SharedSpan<Element> stage(int index) const {
    return memory_.part(index * Panel::kElements, Panel::kElements);
  }

  // With the first panel of keys they are a group of copies.
  __device__ __forceinline__ void load_queries(int64_t batch,
                                               const AttentionExtent& extent,
                                               int64_t row_begin) const {
    const AttentionProblem<Element>& problem = call_.problem;
    const QueryPanel query(
        problem.query.by_row(problem.batch, batch, extent.first_row,
                             extent.rows, problem.head_size),
        row_begin);
    PKG_UNROLL_BY(1)
    for (int panel = 0; panel < head_panels(); ++panel) {
      query.load(query_panel(panel), int64_t{panel} * kDepth);
    }
  }

  // Tiles of keys, of those that the queries see.
  struct Keys {
    int64_t begin;
    int tiles;
  };

  // Those of one part: all parts have as many, but for the last ones.
  __device__ __forceinline__ Keys keys_of_part(int64_t part,
                                               const AttentionExtent& extent,
                                               int64_t row_begin) const {
    const AttentionProblem<Element>& problem = call_.problem;
    const int64_t first = problem.first_column(extent, row_begin);
    const int64_t seen = problem.column_end(extent, row_begin + kRows) - first;
    const int tiles = seen > 0 ? static_cast<int>(tiles_of(seen, kKeys)) : 0;
    if (call_.parts.count == 1) {
      return {first, tiles};
    }
    const int parts = static_cast<int>(call_.parts.count);
    const int each = ceil_div(tiles, parts);
    const int before = each * static_cast<int>(part);
    const int left = tiles > before ? tiles - before : 0;
    return {first + int64_t{before} * kKeys, left < each ? left : each};
  }

  __device__ __forceinline__ void attend(Output& output, int64_t part,
                                         int64_t batch,
                                         const AttentionExtent& extent,
                                         int64_t row_begin,
                                         int64_t output_begin) const {
    const AttentionProblem<Element>& problem = call_.problem;
    const AttentionScores<Element> attention(problem, batch, extent);
    const auto key =
        problem.key.by_row(problem.batch, batch, extent.first_column,
                           extent.columns, problem.head_size);
    const auto value =
        problem.value.by_column(problem.batch, batch, extent.first_column,
                                extent.columns, problem.value_size);
    const int panels = head_panels() + kValuePanels;
    const Keys keys = keys_of_part(part, extent, row_begin);
    const int steps = keys.tiles * panels;
    Turn loaded = {keys.begin};
    Turn multiplied = {keys.begin};
    Scores scores(0);
    pass_through_stages<kStages>(
        0, steps,
        [&](int, int to) {
          const int of_values = loaded.panel - head_panels();
          const bool has_keys = of_values < 0;
          Panel(has_keys ? key : value,
                has_keys ? loaded.column_begin : output_begin)
              .load(stage(to), has_keys
                                   ? int64_t{loaded.panel} * kDepth
                                   : loaded.column_begin + of_values * kDepth);
          loaded.advance(panels);
        },
        [&](int, int from) {
          if (multiplied.panel < head_panels()) {
            multiply_keys(scores, multiplied.panel, from);
          } else {
            const int of_values = multiplied.panel - head_panels();
            if (of_values == 0) {
              weigh_tile<Softmax>(attention, scores, output, row_begin,
                                  multiplied.column_begin);
            }
            multiply_values(output, scores, of_values, from);
          }
          multiplied.advance(panels);
        });
  }

  __device__ __forceinline__ void multiply_keys(Scores& scores, int panel,
                                                int from) const {
    if (panel == 0) {
      scores = Scores(0);
    }
    multiply_copied<kDepth, QueryPanel, Panel>(scores, query_panel(panel),
                                               stage(from));
  }

  __device__ __forceinline__ void multiply_values(Output& output,
                                                  const Scores& scores,
                                                  int panel, int from) const {
    const SharedSpan<Element> weights =
        memory_.part(kWeightsBegin, Weights::kElements);
    const int of_part = panel % kPanelsOfPart;
    if (of_part == 0) {
      put_weights(scores, panel == 0, weights);
    }
    multiply_copied<kDepth, Weights, Panel>(
        output, weights.part(of_part * kDepth * kRows, kDepth * kRows),
        stage(from));
  }

  // Of one part of the keys, where all are done with those before. Rows are of
  // one warp, and so none waits for another.
  __device__ __forceinline__ void put_weights(
      const Scores& scores, bool is_first,
      const SharedSpan<Element>& weights) const {
    const Thread thread;
    PKG_UNROLL
    for (int j = 0; j < kFragment; ++j) {
      PKG_UNROLL
      for (int i = 0; i < Scores::kThreadRows; i += kFragment) {
        Packet<Element, kFragment> four;
        PKG_UNROLL
        for (int k = 0; k < kFragment; ++k) {
          const auto& row = scores.values[i + k];
          four.values[k] = chosen(is_first, row[j], row[j + kFragment]);
        }
        weights.store(Weights::index(thread.column(j), thread.row(i)), four);
      }
    }
    __syncwarp();
  }

  const AttentionForward<Element>& call_;
  SharedSpan<Element> memory_;
};

template <class Element, int kWidth>
__global__ void __launch_bounds__(AttentionCopied<Element, kWidth>::kThreads,
                                  AttentionCopied<Element, kWidth>::kBlocks)
    attention_forward_copied_kernel(
        const __grid_constant__ AttentionForward<Element> call) {
  let_next_kernel_begin();
  using Block = AttentionCopied<Element, kWidth>;
  const int64_t tiles = call.template tile_count<Block::kRows, kWidth>();
  for (int64_t index = blockIdx.x; index < tiles * call.parts.count;
       index += gridDim.x) {
    Block(call).make(index / tiles, index % tiles);
  }
}

}  // namespace pkg::cuda
