// rowwise_scaled_linear_s8s4 and _s4s4: rows of int8 or int4 times a matrix of
// packed int4, in int32, scaled by row and by column while the sums are in
// registers. Tensor cores, mma.m16n8k32 of int8, and any strides.
//
// Many rows take another way on some devices: rowwise_warpgroups.cuh.
//
// Algorithm: the product of cuda/gemm/mma_product.cuh, on operands that pass
// through shared memory as they are and become int8 in registers
// (cuda/int4/rowwise_slice.cuh). Values of four bits count 16 times, so that
// products reach 128 * 128 and the sums of 131071 of them, the summed
// dimension, fit in int32. A longer one is divided, as one is that leaves too
// few tiles for the device; the parts' sums go to memory
// (cuda/int4/rowwise_scale.cuh).
//
// Tiles: 128 x 128 sums of four warps, 64 x 64 each, by slices of 128 values.
// Three stages of s8s4 are 72 KiB of shared memory, four of s4s4 64 KiB, and
// what is known of the tile's rows and columns 3.5 KiB; with 243 to 254
// registers two blocks fit into a multiprocessor.
//
// 2 m n k operations. Global memory is read m n k (1 + 1/2) / 128 bytes, two
// thirds of that for s4s4, for the most part from the L2 cache.
//
// Bounds (tools/cuda_report.py; an H100 reached 458 TOP/s by CUTLASS's s8s4,
// 2048 x 4096 x 14336, and 623 of s4s4): the tensor cores, 624 TOP/s on
// an A100 and 1979 on an H200; of words of four values by DP4A they were 77 and
// 133. The report takes the shortest way round the loop, without copies. With
// them a warp's part of a slice, 128 products, is 256 cycles of the tensor
// cores of an A100 and 128 of an H200; 553 instructions (H200: 576; s4s4: 500
// and 517), up to 144 cycles; and 156 cycles of shared memory (s4s4: 104). So
// s8s4 is bound by shared memory on an H200, at 1620 TOP/s.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/batch.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/element_type.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/gemm/mma_product.cuh"
#include "cuda/gemm/stages.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/int4/rowwise_scale.cuh"
#include "cuda/int4/rowwise_slice.cuh"
#include "host/integer_math.h"

namespace pkg::cuda {

constexpr int kRowwiseTile = 128;

// Slices whose products no sum overflows by, -128 times -8 times 16 being all
// of them.
constexpr int64_t kRowwiseMostSlices = 1023;
static_assert(kRowwiseMostSlices * kRowwiseDepth * 128 * 8 * 16 <= INT32_MAX);

// kPacked: whether the left operand is int4 too.
template <bool kPacked>
struct RowwiseScaledProblem : RowwiseScaling {
  const int8_t* input;
  int64_t input_stride;  // along a row
  BatchStrides input_strides;
  const int8_t* weight;
  int64_t weight_column_stride;
  int64_t weight_stride;  // along a column's bytes
  int64_t bytes;          // of packed values in a column

  // What the launch computes.
  bool input_is_dense = false;
  bool weight_is_dense = false;
  int64_t split_slices = 0;  // of each part
  int64_t column_tiles = 0;
  int64_t tiles = 0;

  // How far sums are from those of the values, in bits.
  static constexpr int kShift = kPacked ? 8 : 4;

  __host__ __device__ int64_t row_bytes() const {
    return kPacked ? bytes : 2 * bytes;
  }
  __host__ __device__ int64_t slices() const {
    return tiles_of(2 * bytes, kRowwiseDepth);
  }

  // Once all but the parts is known. `each` are the slices of a part.
  void divide(int64_t each) {
    const auto is_whole = [](const void* data) {
      return reinterpret_cast<uintptr_t>(data) % 16 == 0;
    };
    input_is_dense = input_stride == 1 && is_whole(input);
    for (int d = 0; d < rows_of.count; ++d) {
      input_is_dense = input_is_dense && input_strides.strides[d] % 16 == 0;
    }
    weight_is_dense = weight_stride == 1 && is_whole(weight) &&
                      weight_column_stride % 16 == 0;
    split_slices = each < kRowwiseMostSlices ? each : kRowwiseMostSlices;
    splits = slices() == 0 ? 1 : ceil_div(slices(), split_slices);
    column_tiles = tiles_of(columns, kRowwiseTile);
    tiles = tiles_of(rows, kRowwiseTile) * column_tiles;
  }
  // A kernel of its own scales the sums.
  bool has_parts() const { return in_double || splits > 1; }

  __device__ __forceinline__ const int8_t* row(int64_t index) const {
    return input + batch_offset(rows_of, input_strides, index);
  }
  __device__ __forceinline__ const int8_t* column(int64_t index) const {
    return weight + index * weight_column_stride;
  }
};

// Stages of shared memory, of which two blocks fit into a multiprocessor.
template <bool kPacked>
struct RowwiseProduct {
  using Problem = RowwiseScaledProblem<kPacked>;
  using Thread = MmaThread<kRowwiseTile, kRowwiseTile, 64, 64>;
  static constexpr int kThreads = Thread::kThreads;
  using Sums = Tile<uint32_t, kRowwiseTile, kRowwiseTile, Thread>;
  using Right = PackedSlice<kRowwiseTile>;
  using Left = std::conditional_t<kPacked, Right, Int8Slice<kRowwiseTile>>;
  static constexpr int kStages = kPacked ? 4 : 3;
  static constexpr int kStageBytes = Left::kBytes + Right::kBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kThreads == kRowwiseTile);
  static_assert(Problem::kShift == Left::kShift + Right::kShift);

  const Problem& problem;
  SharedSpan<int8_t> memory = dynamic_shared<int8_t>();
  Thread thread = {};

  // sums += slices `first` to `end` of the rows and the columns whose bytes
  // begin at `rows` and `columns`. On return every thread is done with the
  // memory.
  template <class Lines>
  __device__ __forceinline__ void multiply(Sums& sums, Lines&& rows,
                                           int row_count, Lines&& columns,
                                           int column_count, int64_t first,
                                           int64_t end) const {
    const RowwiseLines left = {problem.input_stride, problem.row_bytes(),
                               row_count, problem.input_is_dense};
    const RowwiseLines right = {problem.weight_stride, problem.bytes,
                                column_count, problem.weight_is_dense};
    const int slices = static_cast<int>(end - first);
    pass_through_stages<kStages>(
        0, slices,
        [&](int slice, int stage) {
          const SharedSpan<int8_t> to = stage_of(stage);
          copy_slice<Left, kThreads>(left_part(to), rows, left,
                                     (first + slice) * Left::kWidth);
          copy_slice<Right, kThreads>(right_part(to), columns, right,
                                      (first + slice) * Right::kWidth);
        },
        [&](int, int stage) { multiply_slice(sums, stage_of(stage)); });
  }

 private:
  // A warp loads the words of a step while it multiplies those of the step
  // before; they become operands when they are multiplied.
  __device__ __forceinline__ void multiply_slice(
      Sums& sums, const SharedSpan<int8_t>& from) const {
    constexpr int kSteps = kRowwiseDepth / kRowwiseStep;
    const Left left(thread.warp_row);
    const Right right(thread.warp_column);
    uint32_t left_words[2][Left::kWords];
    uint32_t right_words[2][Right::kWords];
    left.load(left_part(from), 0, left_words[0]);
    right.load(right_part(from), 0, right_words[0]);
    PKG_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) {
        left.load(left_part(from), step + 1, left_words[(step + 1) % 2]);
        right.load(right_part(from), step + 1, right_words[(step + 1) % 2]);
      }
      uint32_t a[4][4];
      PKG_UNROLL
      for (int part = 0; part < 4; ++part) {
        Left::operand(left_words[step % 2], part, a[part]);
      }
      PKG_UNROLL
      for (int part = 0; part < 4; ++part) {
        uint32_t b[4];
        Right::operand_b(right_words[step % 2], part, b);
        multiply_columns<int8_t>(sums, a, b, part);
      }
    }
  }

  __device__ __forceinline__ SharedSpan<int8_t> stage_of(int stage) const {
    return memory.part(stage * kStageBytes, kStageBytes);
  }
  __device__ __forceinline__ static SharedSpan<int8_t> left_part(
      const SharedSpan<int8_t>& stage) {
    return stage.part(0, Left::kBytes);
  }
  __device__ __forceinline__ static SharedSpan<int8_t> right_part(
      const SharedSpan<int8_t>& stage) {
    return stage.part(Left::kBytes, Right::kBytes);
  }
};

// The sums themselves, as a part of the divided product.
template <class Problem, class Sums>
__device__ __forceinline__ void store_part(const Problem& problem, Sums& sums,
                                           int64_t split, int64_t row_begin,
                                           int64_t column_begin) {
  sums.transform([](int, int, uint32_t sum) {
    return static_cast<uint32_t>(static_cast<int32_t>(sum) >> Problem::kShift);
  });
  store_tile(sums, problem.parts + split * problem.rows * problem.columns,
             problem.rows, problem.columns, problem.columns, row_begin,
             column_begin);
}

// The sums, scaled by what the block has in shared memory, as the output.
template <class Problem, class Sums, class Values>
__device__ __forceinline__ void store_scaled(const Problem& problem,
                                             const Sums& sums,
                                             Values&& row_scales,
                                             Values&& column_scales,
                                             Values&& biases, int64_t row_begin,
                                             int64_t column_begin) {
  using Thread = typename Sums::Thread;
  const Thread thread;
  Tile<float, Sums::kTileRows, Sums::kTileColumns, Thread> scaled(0);
  PKG_UNROLL
  for (int j = 0; j < Sums::kThreadColumns; ++j) {
    const float scale = column_scales[thread.column(j)];
    const float bias = biases[thread.column(j)];
    PKG_UNROLL
    for (int i = 0; i < Sums::kThreadRows; ++i) {
      const auto sum =
          static_cast<int32_t>(sums.values[i][j]) >> Problem::kShift;
      const float row_scale = row_scales[thread.row(i)];
      scaled.values[i][j] = scaled_sum(sum, row_scale, scale, bias);
    }
  }
  const auto store = [&](auto* output) {
    store_tile(scaled, output, problem.rows, problem.columns, problem.columns,
               row_begin, column_begin);
  };
  switch (problem.output_type) {
    case ElementType::float16:
      return store(static_cast<float16*>(problem.output));
    case ElementType::bfloat16:
      return store(static_cast<bfloat16*>(problem.output));
    default:
      return store(static_cast<float*>(problem.output));
  }
}

template <bool kPacked>
__global__ void __launch_bounds__(RowwiseProduct<kPacked>::kThreads, 2)
    rowwise_scaled_linear_kernel(
        const __grid_constant__ RowwiseScaledProblem<kPacked> problem) {
  let_next_kernel_begin();
  using Product = RowwiseProduct<kPacked>;
  PKG_SHARED(const int8_t*, rows, [kRowwiseTile]);
  PKG_SHARED(const int8_t*, columns, [kRowwiseTile]);
  PKG_SHARED(float, row_scales, [kRowwiseTile]);
  PKG_SHARED(float, column_scales, [kRowwiseTile]);
  PKG_SHARED(float, biases, [kRowwiseTile]);
  const int line = static_cast<int>(threadIdx.x);
  const bool has_parts = problem.parts != nullptr;
  const Product product{problem};
  for (int64_t index = blockIdx.x; index < problem.tiles * problem.splits;
       index += gridDim.x) {
    const int64_t split = index / problem.tiles;
    const int64_t tile = index % problem.tiles;
    const int64_t row_begin = tile / problem.column_tiles * kRowwiseTile;
    const int64_t column_begin = tile % problem.column_tiles * kRowwiseTile;
    const int row_count = at_most<kRowwiseTile>(problem.rows - row_begin);
    const int column_count =
        at_most<kRowwiseTile>(problem.columns - column_begin);
    // A thread finds a row and a column. What is beyond the operands is not
    // read.
    const bool has_row = line < row_count;
    const bool has_column = line < column_count;
    const int64_t row = row_begin + line;
    const int64_t column = column_begin + line;
    rows[line] = has_row ? problem.row(row) : problem.input;
    columns[line] = has_column ? problem.column(column) : problem.weight;
    if (!has_parts) {
      row_scales[line] =
          has_row ? problem.template row_scale<float>(row) : 0.0f;
      column_scales[line] =
          has_column ? problem.template column_scale<float>(column) : 0.0f;
      biases[line] =
          has_column ? problem.template bias_of<float>(column) : 0.0f;
    }
    __syncthreads();
    typename Product::Sums sums(0);
    const int64_t first = split * problem.split_slices;
    const int64_t left = problem.slices() - first;
    product.multiply(
        sums, rows, row_count, columns, column_count, first,
        first + (left < problem.split_slices ? left : problem.split_slices));
    if (has_parts) {
      store_part(problem, sums, split, row_begin, column_begin);
    } else {
      store_scaled(problem, sums, row_scales, column_scales, biases, row_begin,
                   column_begin);
    }
    __syncthreads();  // all are done with the scales
  }
}

}  // namespace pkg::cuda
