// matmul and linear for up to 8 rows, as in decoding, where reading the weight,
// operand b, is all that takes time. A tile of 128 rows (cuda/gemm/matmul.cuh)
// would multiply mostly nothing.
//
// Algorithm: a lane copies four vectors of 16 bytes of the weight a turn to
// shared memory, past the registers and the first-level cache, and reads there
// what it has copied itself, so that no thread waits for another; while it
// multiplies a turn's vectors with what meets them of each row, in the
// accumulator's type, those of the next three are on their way. Which vectors
// those are follows from how the weight lies:
//
//   AlongDepth, as nn.Linear's does: a warp takes four columns, and its lanes
//   lie along the summed dimension, 512 bytes of each column a turn. Where
//   there are few columns, several warps of a block share the steps of the
//   same four.
//   AlongColumns, as in x @ w: four lanes take 64 neighbouring bytes of
//   columns, eight lie along the summed dimension, four steps each a turn, and
//   the eight warps of a block share the steps of the same columns.
//
// A lane's sums are then added up over the lanes, in halves that exchange what
// the other keeps, and those of the warps in shared memory, first to last: one
// order, whoever comes first, and short sums, so that the result is nearer than
// that of one sum over all steps. Of n steps a lane adds up n / 32 or fewer,
// and at most 5 + 8 additions follow. A product of few columns and many steps
// is divided among blocks too, as that of cuda/gemm/matmul.cuh is.
//
// Operations: 2 m n k. Bytes: the weight once, and the rows for each four
// columns, or each 64 bytes of columns, from the caches: a quarter to twice of
// the weight's, for one row to eight of a weight along the summed dimension.
//
// Bytes on their way: three turns of a lane are 192, of a block 48 KiB, of the
// two blocks of a multiprocessor 96, and never fewer than two thirds of it. An
// H200's memory brings a multiprocessor 18 bytes a cycle (4.8 TB/s, 132 of them
// at 1.98 GHz), an H100's 13 (3.35 TB/s), so that 64 KiB cover 3500 cycles of
// latency, or 5000. The stages take 64 KiB of a block. Of loads to registers
// there was room for half of it, and the compiler moved them behind the
// products that were to hide them (nvcc 13.0).
//
// The bound is the memory's rate as long as instructions take less time. For 2
// KiB of a weight along the summed dimension in bfloat16, which an H200 brings
// in 111 cycles, an H100 in 160 and an A100 in 153 (2.0 TB/s), a warp issues
// 133 instructions for one row, 313 for two to four and 536 for five to eight:
// 33, 78 and 134 cycles by four a cycle, on an A100 148 at the most, whose
// multiply-adds take two. So eight rows are the most that a kernel of
// multiply-adds reads a weight for at the memory's rate, and with more than
// four an H200 reads five sixths of it. float32 issues 74, 151 and 243. A
// weight along columns needs 158 for one row in bfloat16 and 355 for four, the
// most for which a lane has registers.
//
// Only vectors that are aligned, and rows that are dense: all else is the
// tiles', as many rows are. So is int8: it would be another loop, of dot
// products of four, and its sums are the same in any order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/device/batch.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/device/words.cuh"
#include "cuda/gemm/matmul.cuh"
#include "cuda/gemm/panel.cuh"
#include "cuda/gemm/tile.cuh"
#include "host/integer_math.h"

namespace pkg::cuda {

// A block's result: a row to a warp, a column to a lane.
struct FewRowsThread {
  static constexpr int kNeighbours = 1;
  static constexpr int kRows = 8;
  static constexpr int kColumns = kWarp;
  static constexpr int kThreads = kRows * kWarp;
  static constexpr int own_rows(int rows) { return rows / kRows; }
  static constexpr int own_columns(int columns) { return columns / kColumns; }

  __device__ __forceinline__ int row(int i) const {
    return i * kRows + static_cast<int>(threadIdx.x) / kWarp;
  }
  __device__ __forceinline__ int column(int j) const {
    return j * kColumns + static_cast<int>(threadIdx.x) % kWarp;
  }
};

constexpr int kFewRowsThreads = FewRowsThread::kThreads;
constexpr int kFewRowsShift = 3;
constexpr int kFewRowsWarps = 1 << kFewRowsShift;
static_assert(kFewRowsWarps * kWarp == kFewRowsThreads);
constexpr int kFewRowsBlocks = 2;   // in a multiprocessor
constexpr int kFewRowsVectors = 4;  // of a lane's turn
constexpr int kFewRowsStages = 4;
constexpr int kFewRowsSharedBytes =
    kFewRowsStages * kFewRowsVectors * kFewRowsThreads * 16;

struct AlongDepth {
  static constexpr int kDepthLanes = 32;
  static constexpr int kPadding = 4;
  static constexpr int lane_columns(int) { return kFewRowsVectors; }
  static constexpr int lane_steps(int vector) { return vector; }
};
struct AlongColumns {
  static constexpr int kDepthLanes = 8;
  static constexpr int kPadding = 1;
  static constexpr int lane_columns(int vector) { return vector; }
  static constexpr int lane_steps(int) { return kFewRowsVectors; }
};

// What the lanes and the warps of a block have of a product.
template <class Element, class Layout>
struct FewRowsShape {
  using Number = Accumulator<Element>;
  static constexpr bool kAlongDepth = std::is_same_v<Layout, AlongDepth>;
  static constexpr int kVector = 16 / sizeof(Element);
  static constexpr int kLaneColumns = Layout::lane_columns(kVector);
  static constexpr int kLaneSteps = Layout::lane_steps(kVector);
  static constexpr int kDepthLanes = Layout::kDepthLanes;
  static constexpr int kColumnLanes = kWarp / kDepthLanes;
  static constexpr int kWarpColumns = kLaneColumns * kColumnLanes;
  static constexpr int kTurn = kDepthLanes * kLaneSteps;  // steps of a warp
  // 128 bytes of sums: 32 registers.
  static constexpr int kMostSums = 128 / sizeof(Number);
  static constexpr int kRows = kMostSums / kLaneColumns < FewRowsThread::kRows
                                   ? kMostSums / kLaneColumns
                                   : FewRowsThread::kRows;
  static constexpr int kSums = kRows * kLaneColumns;
  // By which rows of the warps' sums lie in other banks.
  static constexpr int kPitch = kFewRowsWarps * kWarpColumns + Layout::kPadding;
  // Of how many warps share the same columns, the logarithm, at the least.
  static constexpr int kLeastShift = kAlongDepth ? 0 : kFewRowsShift;
  static_assert((kFewRowsWarps >> kLeastShift) * kWarpColumns <=
                FewRowsThread::kColumns);

  __host__ __device__ static constexpr int block_columns(int share_shift) {
    return (kFewRowsWarps >> share_shift) * kWarpColumns;
  }
};

template <class Input, class Output>
struct FewRowsProblem {
  MatmulProblem<Input, Output> product;
  int share_shift;      // 1 << it warps share the steps of their columns
  WideDivisor batches;  // of which the index is the faster one
  int64_t pieces;
};

// Whether vectors of a matrix begin where 16 bytes do, in every line and every
// matrix of the batch.
template <class Element>
bool has_vectors(const Element* data, int64_t lines, int64_t line_stride,
                 const BatchSizes& batch, const BatchStrides& strides) {
  constexpr int kVector = 16 / sizeof(Element);
  for (int dimension = 0; dimension < batch.count; ++dimension) {
    if (batch.sizes[dimension] > 1 &&
        strides.strides[dimension] % kVector != 0) {
      return false;
    }
  }
  return is_aligned(data, kVector) &&
         (lines <= 1 || line_stride % kVector == 0);
}

enum class FewRowsLayout { none, along_depth, along_columns };

// How the weight of a problem of few rows lies; none where the kernel does not
// take it. Halves have to have a turn of a warp, or of the warps that share
// columns: with fewer steps a block ends before its copies have paid, and tiles
// are made by tensor cores. Of a batch each matrix of the weight is read once,
// as in attention to one query; one that all share is read by each, as by
// tiles, of which a matrix of few rows has as many as one of 128.
template <class Input, class Output>
FewRowsLayout few_rows_layout(const MatmulProblem<Input, Output>& problem) {
  constexpr int64_t kMostSteps = int64_t{1} << 30;
  constexpr int64_t kLeastSteps = sizeof(Input) == 2 ? 256 : 0;
  using ByDepth = FewRowsShape<Input, AlongDepth>;
  using ByColumns = FewRowsShape<Input, AlongColumns>;
  static_assert(sizeof(Input) != 2 ||
                (kLeastSteps == ByDepth::kTurn &&
                 kLeastSteps == ByColumns::kTurn * kFewRowsWarps));
  const int64_t depth = problem.depth;
  if (problem.rows < 1 || problem.columns < 1 || problem.batch_count < 1 ||
      depth < kLeastSteps || depth > kMostSteps ||
      (problem.a_depth_stride != 1 && depth > 1)) {
    return FewRowsLayout::none;
  }
  if (problem.b_depth_stride == 1 && problem.rows <= ByDepth::kRows &&
      depth % ByDepth::kVector == 0 &&
      has_vectors(problem.a, problem.rows, problem.a_row_stride, problem.batch,
                  problem.a_batch_strides) &&
      has_vectors(problem.b, problem.columns, problem.b_column_stride,
                  problem.batch, problem.b_batch_strides)) {
    return FewRowsLayout::along_depth;
  }
  if (problem.b_column_stride == 1 && problem.rows <= ByColumns::kRows &&
      has_vectors(problem.b, depth, problem.b_depth_stride, problem.batch,
                  problem.b_batch_strides)) {
    return FewRowsLayout::along_columns;
  }
  return FewRowsLayout::none;
}

// How a product is shared out: among the warps of a block, and among blocks, in
// parts of so many steps; 0: not divided.
struct FewRowsPlan {
  int share_shift;
  int64_t split_depth;
};

// The plan that takes the fewest turns one after the other on so many blocks
// that run at a time, where the first copies and the last sums of a block are
// taken to be as long as two. Among blocks it is divided where three quarters
// of them would have nothing: half of the multiprocessors, or more. Parts need
// another kernel, and one block of a multiprocessor has 48 KiB on their way.
// They are at most 32, since that kernel reads those of a sum one after the
// other.
template <class Shape>
FewRowsPlan plan_few_rows(int64_t batches, int64_t columns, int64_t depth,
                          int64_t blocks) {
  constexpr int64_t kEnds = 2;
  constexpr int64_t kLeastTurns = 4;
  constexpr int64_t kMostParts = 32;
  constexpr int kAll = Shape::kTurn << kFewRowsShift;
  FewRowsPlan plan = {Shape::kLeastShift, 0};
  int64_t least = 0;
  int64_t pieces = 0;
  for (int shift = Shape::kLeastShift; shift <= kFewRowsShift; ++shift) {
    pieces = batches * tiles_of(columns, Shape::block_columns(shift));
    const int64_t turns = tiles_of(depth, Shape::kTurn << shift);
    const int64_t time = ceil_div(pieces, blocks) * (turns + kEnds);
    if (shift == Shape::kLeastShift || time < least) {
      least = time;
      plan.share_shift = shift;
    }
  }
  const int64_t turns = tiles_of(depth, kAll);
  if (4 * pieces <= blocks) {
    const int64_t each = panels_of_split(
        pieces, turns, std::min(blocks, kMostParts * pieces), kLeastTurns);
    if (each < turns) {
      return {kFewRowsShift, each * kAll};
    }
  }
  return plan;
}

// The work of a product whose tiles have been counted. Blocks of the same
// columns follow one another through the batch: a weight that it shares comes
// from the L2 cache then.
template <class Layout, class Input, class Output>
FewRowsProblem<Input, Output> few_rows_problem(
    const MatmulProblem<Input, Output>& product, int share_shift) {
  using Shape = FewRowsShape<Input, Layout>;
  const int64_t batches = product.batch_count;
  FewRowsProblem<Input, Output> problem = {
      product, share_shift, WideDivisor(batches),
      batches * tiles_of(product.columns, Shape::block_columns(share_shift))};
  // To a line that does not exist there is no step: it could lead to where no
  // vector begins.
  if (product.columns <= 1) {
    problem.product.b_column_stride = 0;
  }
  if (product.depth <= 1) {
    problem.product.b_depth_stride = 0;
  }
  return problem;
}

// Sixteen bytes as words, which need fewer instructions than halves do.
using FewRowsVector = Packet<uint32_t, 4>;

template <class Element, class Number, int kCount>
__device__ __forceinline__ void unpack(const FewRowsVector& vector,
                                       Number (&numbers)[kCount]) {
  if constexpr (sizeof(Element) == 2) {
    PKG_UNROLL
    for (int i = 0; i < kCount; ++i) {
      numbers[i] = element_of_pair<Element>(vector.values[i / 2], i % 2);
    }
  } else {
    static_assert(sizeof(numbers) == sizeof(vector));
    memcpy(&numbers, &vector, sizeof(vector));
  }
}

// What a lane copies of a weight, and where it lies in shared memory: beside
// the other lanes' vectors of the same instruction.
template <class Element, class Layout>
class FewRowsStream {
  using Shape = FewRowsShape<Element, Layout>;

 public:
  // Columns from `column` on; steps from `first` on, by turns of `turn`. What
  // is beyond the columns and the depth is zero, and not read.
  template <class Problem>
  __device__ __forceinline__ FewRowsStream(const Problem& product,
                                           int64_t batch, int64_t column,
                                           int first, int turn, int depth)
      : left_(depth - first), turn_(turn), memory_(dynamic_shared<Element>()) {
    const int64_t left = product.columns - column;
    columns_ = left > 0 ? at_most<Shape::kLaneColumns>(left) : 0;
    from_ =
        product.b + batch_offset(product.batch, product.b_batch_strides, batch);
    if (columns_ > 0) {
      from_ +=
          column * product.b_column_stride + first * product.b_depth_stride;
    }
    pitch_ = turn * product.b_depth_stride;
    next_ =
        Shape::kAlongDepth ? product.b_column_stride : product.b_depth_stride;
  }

  // Begins to copy the next turn to a stage.
  __device__ __forceinline__ void copy(int stage) {
    const Element* from = from_;
    PKG_UNROLL
    for (int i = 0; i < kFewRowsVectors; ++i) {
      const bool exists =
          Shape::kAlongDepth ? left_ > 0 && i < columns_ : left_ > i;
      const int most = Shape::kAlongDepth ? Shape::kVector : columns_;
      memory_.copy_async(place(stage, i), from, exists ? most : 0);
      from += next_;
    }
    commit_copies();
    from_ += pitch_;
    left_ -= turn_;
  }

  __device__ __forceinline__ FewRowsVector vector(int stage, int i) const {
    return memory_.template load<FewRowsVector>(place(stage, i));
  }

 private:
  __device__ __forceinline__ static int place(int stage, int i) {
    return ((stage * kFewRowsVectors + i) * kFewRowsThreads +
            static_cast<int>(threadIdx.x)) *
           Shape::kVector;
  }

  const Element* from_;
  int64_t pitch_;  // from a turn to the next
  int64_t next_;   // from a vector to the next
  int left_;
  int turn_;
  int columns_;
  SharedSpan<Element> memory_;
};

// The numbers of one row that meet a lane's vectors, zeros beyond the end.
template <class Element, class Layout>
struct FewRowsSteps {
  using Shape = FewRowsShape<Element, Layout>;
  using Number = Accumulator<Element>;
  Number values[Shape::kLaneSteps];

  __device__ __forceinline__ FewRowsSteps(const Element* from, int left) {
    if constexpr (Shape::kAlongDepth) {
      FewRowsVector vector = {};
      if (left > 0) {
        vector = *reinterpret_cast<const FewRowsVector*>(from);
      }
      unpack<Element>(vector, values);
    } else {
      PKG_UNROLL
      for (int i = 0; i < Shape::kLaneSteps; ++i) {
        values[i] = left > i ? convert<Number>(from[i]) : Number(0);
      }
    }
  }
};

// A lane's sums, those of a row neighbours.
template <class Element, class Layout>
struct FewRowsLaneSums {
  using Shape = FewRowsShape<Element, Layout>;
  using Number = Accumulator<Element>;
  Number values[Shape::kSums] = {};

  // Adds the products of a turn with the rows that there are: with the first
  // one, with the three after it and with the last four, where there are some,
  // which is the same for all threads. Three branches and not eight, in each of
  // which the compiler converts the weight again. Rows of a group that are not
  // there are the last one, and their sums are dropped.
  __device__ __forceinline__ void multiply(
      const FewRowsStream<Element, Layout>& weight, int stage,
      const Element* row, int rows, int64_t row_stride, int left) {
    Number weights[kFewRowsVectors][Shape::kVector];
    PKG_UNROLL
    for (int i = 0; i < kFewRowsVectors; ++i) {
      unpack<Element>(weight.vector(stage, i), weights[i]);
    }
    PKG_UNROLL
    for (int group = 0; group < 3; ++group) {
      const int first = group == 0 ? 0 : group == 1 ? 1 : 4;
      const int end = group == 0 ? 1 : group == 1 ? 4 : 8;
      if (first < Shape::kRows && first < rows) {
        PKG_UNROLL
        for (int r = first; r < end; ++r) {
          multiply_row(r, weights, {row, left});
          row += r + 1 < rows ? row_stride : 0;
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void multiply_row(
      int row, const Number (&weights)[kFewRowsVectors][Shape::kVector],
      const FewRowsSteps<Element, Layout>& steps) {
    PKG_UNROLL
    for (int i = 0; i < kFewRowsVectors; ++i) {
      PKG_UNROLL
      for (int j = 0; j < Shape::kVector; ++j) {
        const int column = Shape::kAlongDepth ? i : j;
        const int step = Shape::kAlongDepth ? j : i;
        values[row * Shape::kLaneColumns + column] +=
            weights[i][j] * steps.values[step];
      }
    }
  }
};

// Adds up each of the first kCount values over the lanes that differ in the
// bits of their index from kDistance down to kLast. As long as there are
// several, one half of the lanes keeps one half of them and gives the other.
template <int kCount, int kDistance, int kLast, class Number, int kValues>
__device__ __forceinline__ void sum_over_lanes(Number (&values)[kValues]) {
  constexpr int kHalf = kCount / 2;
  if constexpr (kCount == 1) {
    values[0] += __shfl_xor_sync(0xffffffffu, values[0], kDistance);
  } else {
    const bool is_upper = (threadIdx.x & kDistance) != 0;
    PKG_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      const Number lower = values[i];
      const Number upper = values[i + kHalf];
      values[i] = chosen(is_upper, upper, lower) +
                  __shfl_xor_sync(0xffffffffu, chosen(is_upper, lower, upper),
                                  kDistance);
    }
  }
  if constexpr (kDistance > kLast) {
    sum_over_lanes<kCount == 1 ? 1 : kHalf, kDistance / 2, kLast>(values);
  }
}

// The sums of the warp, to panel[row][the warp's columns].
template <class Element, class Layout, class Panel>
__device__ __forceinline__ void store_warp_sums(
    FewRowsLaneSums<Element, Layout>& sums, Panel&& panel) {
  using Shape = FewRowsShape<Element, Layout>;
  sum_over_lanes<Shape::kSums, kWarp / 2, Shape::kColumnLanes>(sums.values);
  constexpr int kOfAll = Shape::kSums / Shape::kDepthLanes;
  constexpr int kLeft = kOfAll > 0 ? kOfAll : 1;
  constexpr int kLanes = kWarp * kLeft / Shape::kSums;  // that have the same
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int column = warp * Shape::kWarpColumns +
                     lane % Shape::kColumnLanes * Shape::kLaneColumns;
  if (lane % kLanes < Shape::kColumnLanes) {
    PKG_UNROLL
    for (int i = 0; i < kLeft; ++i) {
      const int index = lane / kLanes * kLeft + i;
      panel[index / Shape::kLaneColumns][column + index % Shape::kLaneColumns] =
          sums.values[i];
    }
  }
}

// The sums of a warp's turns, from `column_begin` of the block on, to the
// panel.
template <class Layout, class Input, class Output, class Panel>
__device__ __forceinline__ void multiply_few_rows(
    const FewRowsProblem<Input, Output>& problem, int64_t batch,
    int64_t column_begin, Panel&& panel) {
  using Shape = FewRowsShape<Input, Layout>;
  const MatmulProblem<Input, Output>& product = problem.product;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int shares = 1 << problem.share_shift;
  const int64_t column = column_begin +
                         (warp >> problem.share_shift) * Shape::kWarpColumns +
                         lane % Shape::kColumnLanes * Shape::kLaneColumns;
  const int first = ((warp & (shares - 1)) * Shape::kDepthLanes +
                     lane / Shape::kColumnLanes) *
                    Shape::kLaneSteps;
  const int depth = static_cast<int>(product.depth_of(batch));
  const int turn = Shape::kTurn << problem.share_shift;
  FewRowsStream<Input, Layout> weight(product, batch, column, first, turn,
                                      depth);
  PKG_UNROLL
  for (int stage = 0; stage < kFewRowsStages - 1; ++stage) {
    weight.copy(stage);
  }
  const Input* row =
      product.a + first +
      batch_offset(product.batch, product.a_batch_strides, batch);
  FewRowsLaneSums<Input, Layout> sums;
  int stage = 0;
  PKG_UNROLL_BY(1)
  for (int begin = 0; begin < depth; begin += turn) {
    wait_for_copies<kFewRowsStages - 2>();
    // To the stage that this lane has multiplied last.
    weight.copy(stage == 0 ? kFewRowsStages - 1 : stage - 1);
    sums.multiply(weight, stage, row, static_cast<int>(product.rows),
                  product.a_row_stride, depth - first - begin);
    row += turn;
    stage = stage + 1 < kFewRowsStages ? stage + 1 : 0;
  }
  wait_for_copies<0>();
  store_warp_sums(sums, panel);
}

template <class Input, class Output, class Layout, class Epilogue = KeepSums>
__global__ void __launch_bounds__(kFewRowsThreads, kFewRowsBlocks)
    matmul_few_rows_kernel(
        const __grid_constant__ FewRowsProblem<Input, Output> problem,
        const __grid_constant__ Epilogue epilogue) {
  let_next_kernel_begin();
  using Shape = FewRowsShape<Input, Layout>;
  using Number = Accumulator<Input>;
  PKG_SHARED(Number, warp_sums, [Shape::kRows][Shape::kPitch]);
  const MatmulProblem<Input, Output>& product = problem.product;
  const int shares = 1 << problem.share_shift;
  const int columns = Shape::block_columns(problem.share_shift);
  for (int64_t index = blockIdx.x; index < problem.pieces; index += gridDim.x) {
    const auto [block, batch] = problem.batches.divide(index);
    const int64_t column_begin = block * columns;
    multiply_few_rows<Layout>(problem, batch, column_begin, warp_sums);
    __syncthreads();
    const FewRowsThread thread;
    const int row = thread.row(0);
    const int column = thread.column(0);
    if (row < product.rows && column < columns) {
      const int place =
          column / Shape::kWarpColumns * shares * Shape::kWarpColumns +
          column % Shape::kWarpColumns;
      Number sum(0);
      PKG_UNROLL_BY(1)
      for (int share = 0; share < shares; ++share) {
        sum += warp_sums[row][place + share * Shape::kWarpColumns];
      }
      Tile<Number, FewRowsThread::kRows, FewRowsThread::kColumns, FewRowsThread>
          tile(sum);
      epilogue(tile, product, batch, 0, column_begin);
      store_tile(tile, product.c + batch * product.rows * product.columns,
                 product.rows, product.columns, product.columns, 0,
                 column_begin);
    }
    __syncthreads();  // all are done with the sums
  }
}

}  // namespace pkg::cuda
