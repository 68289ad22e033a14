// int4_linear in half precision, by tensor cores, in the way of Marlin (Frantar
// and others, "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on
// Large Language Models", 2024): the weight is read once, by asynchronous
// copies that are several stages ahead, and becomes an operand in registers.
//
// The layout is that of mma.m16n8k16's operand B, so a word gives its lane's
// parts of two products by shifts. The operand holds the whole numbers q - 8,
// exactly; when a group is done, or a slice of 128 steps of it, its sums are
// scaled in float32, and the zero times the sum of the activations is added, so
// nothing of the weight is rounded. The sums of the activations are those of
// products with ones.
//
// A block computes 8, 16, 32 or 64 rows by 128 columns, a warp all rows by 32
// columns, so that what it loads of the activations is multiplied by four
// tiles; up to 16 rows are turned around (int4_products.cuh). Of so few a block
// has two teams of four warps, which take turns with the slices of the summed
// dimension, and whose sums are added at the end.
// Groups of 32, of 64 and of more columns are kernels of their own: where a
// group ends is known to the compiler, and its sums begin with zeros that need
// no instructions.
//
// Operations: 2 M N K. Bytes: K N / 2 of the weight for 64 rows, K N / 32 of
// scales and zeros where groups have 128 columns, M K N / 64 of activations,
// from the L2 cache for the most part. What the machine code cannot surpass on
// an H200 (bounds by tools/cuda_model.py): for a slice, of which a warp has 2
// KiB of the weight, up to 8 rows of bfloat16 take 312 instructions, so 78
// cycles of a multiprocessor, 6.4 TB/s of the weight, and 16 rows 359, 5.5
// TB/s; of groups of 64 columns 322 and 394, of 32 columns 390 and 487. The
// memory gives 4.8. 64 rows take 185 cycles of shared memory and 160 of the
// tensor cores, 2.7 TB/s. (Before products of few rows were turned around, 16
// rows took 433: an H200 read 31 MB of weight and scales in 18.8 us for one
// row, with instructions issued in half of the cycles. It has not run these.)
#pragma once

#include <cstdint>

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/gemm/operand_tile.cuh"
#include "cuda/gemm/stages.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/int4/int4_linear.cuh"
#include "cuda/int4/int4_products.cuh"
#include "host/integer_math.h"

namespace pkg::cuda {

// Up to so many rows are one tile; more are taken 64 at a time.
constexpr int64_t kInt4FewRows = 16;
constexpr int64_t kInt4SomeRows = 32;

// `kGroup`: the steps of the summed dimension that have one scale, of a slice
// at the most; a longer group is gone on with as another.
template <class Element, class Product, int kGroup>
class Int4Block {
 public:
  static constexpr int kRows = Product::kRows;
  static constexpr int kColumns = kInt4BlockColumns;
  static constexpr int kWarpColumns = kInt4WarpColumns;
  using Sums = typename Product::Sums;
  static constexpr int kTeam = Product::kTeam;
  static constexpr int kTeams = kRows <= kInt4FewRows ? 2 : 1;
  static constexpr int kThreads = kTeams * kTeam;
  // In a multiprocessor.
  static constexpr int kBlocks = kRows == kInt4SomeRows ? 3 : 2;
  // Of the summed dimension: what a team multiplies between two barriers.
  static constexpr int kSlice = 128;
  static constexpr int kTurn = kTeams * kSlice;
  // Turns of a part of a divided product: a column's sums are written and read
  // by four bytes a row, the weight by 64 bytes a slice.
  static constexpr int64_t kLeastTurns = kTeams > 1 ? 2 : 8;

  // Tells the problem what it is for these blocks, and returns their launch.
  static LaunchShape prepare(Int4LinearProblem<Element>& problem) {
    problem.template count_pieces<Int4Block>();
    return {kThreads, kStages * kStage * static_cast<int>(sizeof(Element))};
  }

  __device__ __forceinline__ Int4Block(
      const Int4LinearProblem<Element>& problem, const Int4Place<Int4Block>& at)
      : problem_(problem),
        at_(at),
        memory_(dynamic_shared<Element>()),
        input_(problem.matrix(at.batch) + at.row() * problem.row_stride),
        team_(static_cast<int>(threadIdx.x) / kTeam),
        rows_(at_most<kRows>(problem.rows - at.row())),
        columns_(at_most<kColumns>(problem.columns - at.column())),
        begin_(at.split * static_cast<int>(problem.split_depth / kWordSteps)),
        end_(static_cast<int>((at.split + 1 < problem.splits
                                   ? (at.split + 1) * problem.split_depth
                                   : problem.depth) /
                              kWordSteps)),
        activations_(activations(input_, 0), 0, 0, true),
        is_dense_(activations_.is_dense() && is_aligned(problem.words, 4) &&
                  is_aligned(problem.scales_and_zeros, kVector)) {}

  // totals += the product over the block's part of the summed dimension, those
  // of the first team. On return every thread is done with the memory.
  __device__ __forceinline__ void multiply(Sums& totals) const {
    constexpr int kTurnWords = kTurn / kWordSteps;
    const int turns = ceil_div(end_ - begin_, kTurnWords);
    Slice next = first_slice();
    pass_through_stages<kStages>(
        0, turns, [&](int, int stage) { load(slice_memory(stage), next); },
        [&](int turn, int stage) {
          const int done = (turn * kTeams + team_) * kSliceWords;
          multiply_slice(totals, slice_memory(stage), end_ - begin_ - done);
        });
    if constexpr (kTeams > 1) {
      add_teams(totals);
    }
  }

  __device__ __forceinline__ void store(Sums& totals) const {
    const int64_t matrix = problem_.rows * problem_.columns;
    if (team_ != 0) {
      return;
    }
    if (problem_.splits > 1) {
      Product::store(
          totals,
          problem_.parts + (at_.batch * problem_.splits + at_.split) * matrix,
          problem_.rows, problem_.columns, at_.row(), at_.column());
      return;
    }
    if (problem_.bias != nullptr) {
      Product::add_bias(totals, [&](int place) {
        // Unsigned, so that no register holds its sign through the kernel.
        return problem_.bias_of(at_.column() + static_cast<uint32_t>(place));
      });
    }
    Product::store(totals, problem_.output + at_.batch * matrix, problem_.rows,
                   problem_.columns, at_.row(), at_.column());
  }

 private:
  static constexpr int kStages = 3;
  static constexpr int kTiles = kWarpColumns / 8;
  // Of the summed dimension, those of a lane's word and its neighbours'.
  static constexpr int kWordShift = 5;
  static constexpr int kWordSteps = 1 << kWordShift;
  static constexpr int kSliceWords = kSlice / kWordSteps;
  // In shared memory all is counted in elements of two bytes: a word is two, a
  // scale and a zero are two. Of a slice a tile of 8 columns has 512 bytes that
  // lie side by side in every layout.
  static_assert(sizeof(Element) == 2);
  static constexpr int kVector = 8;
  static constexpr int kTileElements = 2 * kSlice;
  static constexpr int kWordElements = kColumns / 8 * kTileElements;
  static constexpr int kPairElements = 2 * kColumns;  // of a group
  using Activations = typename Product::Activations;
  static constexpr int kActivationTiles = kSlice / Activations::kDepth;
  static constexpr int kActivationElements =
      kActivationTiles * Activations::kElements;
  static constexpr int kSliceElements =
      kActivationElements + kWordElements + kSlice / kGroup * kPairElements;
  static constexpr int kStage = kTeams * kSliceElements;
  static_assert(kSlice % kGroup == 0 && kGroup % kWordSteps == 0);

  __device__ __forceinline__ static int lane() {
    return static_cast<int>(threadIdx.x) % kWarp;
  }
  __device__ __forceinline__ static int warp() {  // of the team
    return static_cast<int>(threadIdx.x) % kTeam / kWarp;
  }

  // The team's slice of a stage: its activations, words, and pairs.
  __device__ __forceinline__ SharedSpan<Element> slice_memory(int stage) const {
    return memory_.part(stage * kStage + team_ * kSliceElements,
                        kSliceElements);
  }
  __device__ __forceinline__ static SharedSpan<Element> activation_part(
      const SharedSpan<Element>& stage, int tile) {
    return stage.part(tile * Activations::kElements, Activations::kElements);
  }
  __device__ __forceinline__ static SharedSpan<Element> word_part(
      const SharedSpan<Element>& stage) {
    return stage.part(kActivationElements, kWordElements);
  }
  __device__ __forceinline__ static SharedSpan<Element> pair_part(
      const SharedSpan<Element>& stage) {
    return stage.part(kActivationElements + kWordElements,
                      kSlice / kGroup * kPairElements);
  }

  // Of the vectors of the activations that a thread copies.
  static constexpr int kInLine = Activations::kDepth / kVector;
  __device__ __forceinline__ static int first_line() {
    return static_cast<int>(threadIdx.x) % kTeam / kInLine;
  }
  __device__ __forceinline__ static int first_place() {
    return static_cast<int>(threadIdx.x) % kInLine * kVector;
  }

  // What the team is to copy next.
  struct Slice {
    const Element* activations;  // dense ones: the first vector of the thread
    const uint32_t* words;       // the lane's of the warp's first tile
    int begin;                   // of the summed dimension, in words
  };

  __device__ __forceinline__ Slice first_slice() const {
    const int begin = begin_ + team_ * kSliceWords;
    const int64_t depth = int64_t{begin} * kWordSteps;
    const int64_t tile = at_.column() / 8 + warp() * kTiles;
    const int64_t vector = first_line() * problem_.row_stride + first_place();
    return {input_ + depth * problem_.depth_stride + (is_dense_ ? vector : 0),
            problem_.words + tile * problem_.depth + depth + lane() * 4, begin};
  }

  // Begins to copy the slice, and makes it the next one; what is beyond the
  // block's part of the summed dimension, or beyond the columns, is zero.
  __device__ __forceinline__ void load(const SharedSpan<Element>& to,
                                       Slice& slice) const {
    const int left = end_ - slice.begin;
    const int steps = (left < kSliceWords ? left : kSliceWords) * kWordSteps;
    if (is_dense_) {
      copy_activations(to, slice, steps);
      copy_weight<true>(to, slice, steps);
    } else {
      const Activations operand(activations(slice.activations, steps), 0, 0,
                                true);
      PKG_UNROLL_BY(1)
      for (int tile = 0; tile < kActivationTiles; ++tile) {
        operand.load(activation_part(to, tile), tile * Activations::kDepth);
      }
      copy_weight<false>(to, slice, steps);
    }
    slice.activations += kTurn * problem_.depth_stride;
    slice.words += kTurn;
    slice.begin += kTurn / kWordSteps;
  }

  __device__ __forceinline__ PanelSource<Element> activations(
      const Element* from, int steps) const {
    return {from, rows_, steps, problem_.row_stride, problem_.depth_stride};
  }

  // Dense ones, as OperandTile copies them, but for what all slices share.
  __device__ __forceinline__ void copy_activations(
      const SharedSpan<Element>& to, const Slice& slice, int steps) const {
    constexpr int kAtATime = kTeam / kInLine;
    const int index = Activations::index(first_line(), first_place());
    const Element* from = slice.activations;
    PKG_UNROLL
    for (int line = 0; line < kRows; line += kAtATime) {
      PKG_UNROLL
      for (int tile = 0; tile < kActivationTiles; ++tile) {
        const int step = tile * Activations::kDepth;
        const bool is_valid =
            first_line() + line < rows_ && first_place() + step < steps;
        to.copy_async(
            index + tile * Activations::kElements + line * Activations::kDepth,
            from + step, is_valid ? kVector : 0);
      }
      from += kAtATime * problem_.row_stride;
    }
  }

  // The words of a warp; and, of as many warps as the slice has groups, the
  // scales and zeros of one, a lane those of four columns.
  template <bool kDense>
  __device__ __forceinline__ void copy_weight(const SharedSpan<Element>& to,
                                              const Slice& slice,
                                              int steps) const {
    const SharedSpan<Element> words = word_part(to);
    const int left = lane() * 4 < steps ? columns_ - warp() * kWarpColumns : 0;
    PKG_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      copy<kDense>(words,
                   (warp() * kTiles + tile) * kTileElements + lane() * kVector,
                   slice.words + tile * problem_.depth, tile * 8 < left);
    }
    const int step = warp() * kGroup;
    if (step < kSlice) {
      const int column = lane() * 4;
      const int group = (slice.begin + step / kWordSteps) >>
                        (problem_.group_shift - kWordShift);
      const int64_t pair = group * problem_.columns + at_.column() + column;
      copy<kDense>(pair_part(to), warp() * kPairElements + lane() * kVector,
                   problem_.scales_and_zeros + pair * 2,
                   step < steps && column < columns_);
    }
  }

  // Sixteen bytes, all or none.
  template <bool kDense>
  __device__ __forceinline__ static void copy(const SharedSpan<Element>& to,
                                              int index, const void* from,
                                              bool is_valid) {
    const auto* elements = static_cast<const Element*>(from);
    if constexpr (kDense) {
      to.copy_async(index, elements, is_valid ? kVector : 0);
    } else {
      Packet<Element, kVector> vector;
      PKG_UNROLL
      for (int i = 0; i < kVector; ++i) {
        vector.values[i] = is_valid ? elements[i] : convert<Element>(0.0f);
      }
      to.store(index, vector);
    }
  }

  // The lane's words of the warp's tiles, one for each 32 steps of the slice.
  template <int kWords>
  __device__ __forceinline__ static void read_words(
      const SharedSpan<Element>& from, uint32_t (&words)[kTiles][kSliceWords]) {
    using Words = Packet<uint32_t, kWords>;
    PKG_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      PKG_UNROLL
      for (int first = 0; first < kSliceWords; first += kWords) {
        const auto some =
            from.template load<Words>((warp() * kTiles + tile) * kTileElements +
                                      (first * kWarp + lane() * kWords) * 2);
        PKG_UNROLL
        for (int i = 0; i < kWords; ++i) {
          words[tile][first + i] = some.values[i];
        }
      }
    }
  }
  __device__ __forceinline__ void read_words(
      const SharedSpan<Element>& from,
      uint32_t (&words)[kTiles][kSliceWords]) const {
    switch (problem_.word_shift) {
      case 0:
        return read_words<1>(from, words);
      case 1:
        return read_words<2>(from, words);
      default:
        return read_words<4>(from, words);
    }
  }

  // Of a slice of which `left` words are there. Where those end is looked at
  // after each group, for the sake of the registers too: what lies between two
  // branches nvcc does not mix with what follows.
  __device__ __forceinline__ void multiply_slice(
      Sums& totals, const SharedSpan<Element>& stage, int left) const {
    constexpr int kSteps = kSlice / Activations::kStep;
    constexpr int kTileSteps = kSteps / kActivationTiles;
    constexpr int kLook = kGroup == kSlice ? kWordSteps : kGroup;
    uint32_t words[kTiles][kSliceWords];
    read_words(word_part(stage), words);
    const Product product(activations_);
    constexpr int kTogether = Product::kStepsOfWords;
    typename Product::Words a[2];
    const auto load = [&](int step) {
      product.load(activation_part(stage, step / kTileSteps),
                   step % kTileSteps / kTogether, a[step / kTogether % 2]);
    };
    typename Product::GroupSums sums;
    load(0);
    PKG_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      if (step % kTogether == 0 && step + kTogether < kSteps) {
        load(step + kTogether);
      }
      uint32_t weight[kTiles];
      PKG_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        weight[tile] = words[tile][step / 2];
      }
      Product::add(sums, a[step / kTogether % 2], step % kTogether, weight,
                   8 * (step % 2));
      const int done = (step + 1) * Activations::kStep;
      if (kGroup < kSlice && done % kGroup == 0) {
        add_group(totals, sums, stage, done / kGroup - 1);
      }
      if (done % kLook == 0 && done < kSlice && left <= done / kWordSteps) {
        break;
      }
    }
    if constexpr (kGroup == kSlice) {
      add_group(totals, sums, stage, 0);
    }
  }

  // Adds the sums of a group, scaled, and the zeros, and empties the sums.
  __device__ __forceinline__ static void add_group(
      Sums& totals, typename Product::GroupSums& sums,
      const SharedSpan<Element>& stage, int group) {
    Product::add_group(
        totals, sums,
        pair_part(stage).part(group * kPairElements, kPairElements));
    sums = {};
  }

  // The first team's totals += those of the others, in their order, through
  // shared memory; threads write and read neighbouring vectors.
  __device__ __forceinline__ void add_teams(Sums& totals) const {
    using Four = Packet<float, 4>;
    constexpr int kRow = Sums::kThreadColumns;
    constexpr int kFours = Sums::kThreadRows * kRow / 4;
    const auto place = [&](int team, int i) {
      const int thread = static_cast<int>(threadIdx.x) % kTeam;
      return (((team - 1) * kFours + i) * kTeam + thread) * kVector;
    };
    const auto value = [&](int i, int j) -> float& {
      const int index = 4 * i + j;
      return totals.values[index / kRow][index % kRow];
    };
    for (int team = 1; team < kTeams; ++team) {
      PKG_UNROLL
      for (int i = 0; i < kFours; ++i) {
        if (team_ == team) {
          memory_.store(place(team, i), Four{value(i, 0), value(i, 1),
                                             value(i, 2), value(i, 3)});
        }
      }
    }
    __syncthreads();
    for (int team = 1; team < kTeams && team_ == 0; ++team) {
      PKG_UNROLL
      for (int i = 0; i < kFours; ++i) {
        const auto more = memory_.template load<Four>(place(team, i));
        PKG_UNROLL
        for (int j = 0; j < 4; ++j) {
          value(i, j) += more.values[j];
        }
      }
    }
    __syncthreads();
  }

  const Int4LinearProblem<Element>& problem_;
  Int4Place<Int4Block> at_;
  SharedSpan<Element> memory_;
  const Element* input_;  // the block's first row
  int team_;
  int rows_;  // that there are
  int columns_;
  int begin_;  // of the summed dimension, in words
  int end_;
  Activations activations_;
  bool is_dense_;
};

// Calls function.operator()<Block>() for the blocks that suit the problem.
template <class Element, class Function>
void with_int4_block(const Int4LinearProblem<Element>& problem,
                     const Function& function) {
  const auto of_rows = [&]<int kGroup>() {
    if (problem.rows <= kInt4FewRows / 2) {
      function.template
      operator()<Int4Block<Element, Int4TurnedProduct<Element, 1>, kGroup>>();
    } else if (problem.rows <= kInt4FewRows) {
      function.template
      operator()<Int4Block<Element, Int4TurnedProduct<Element, 2>, kGroup>>();
    } else if (problem.rows <= kInt4SomeRows) {
      function.template
      operator()<Int4Block<Element, Int4Product<Element, 2>, kGroup>>();
    } else {
      function.template
      operator()<Int4Block<Element, Int4Product<Element, 4>, kGroup>>();
    }
  };
  switch (problem.group_shift) {
    case 5:
      return of_rows.template operator()<32>();
    case 6:
      return of_rows.template operator()<64>();
    default:
      return of_rows.template operator()<128>();
  }
}

template <class Block, class Element>
__global__ void __launch_bounds__(Block::kThreads, Block::kBlocks)
    int4_linear_half_kernel(
        const __grid_constant__ Int4LinearProblem<Element> problem) {
  let_next_kernel_begin();
  for (int64_t index = blockIdx.x; index < problem.pieces; index += gridDim.x) {
    const Block block(problem, problem.template place<Block>(index));
    typename Block::Sums totals(0);
    block.multiply(totals);
    block.store(totals);
  }
}

}  // namespace pkg::cuda
