// int4_linear in float32 and float64: a warp takes 8 rows by 8 columns of the
// result; a lane multiplies the values of its words, scaled, with each row, and
// four lanes add up their sums.
//
// A lane sums the products of four words apart, 32 of them, and adds these sums
// up. Added one after another, each would be rounded at the scale of all before
// it: of 4096 steps the largest error was 2.4 to 2.9 times that of PyTorch's
// product by the dequantized weight on a CPU, and is 0.6 to 0.7 times it so.
//
// Operations: 2 M N K. Bytes: K N / 2 of the weight for 8 rows of activations.
// 4096 columns of the result are 128 blocks, about one for each multiprocessor
// of a large GPU.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/gemm/panel.cuh"
#include "cuda/int4/int4_linear.cuh"
#include "cuda/int4/tiled_layout.cuh"

namespace pkg::cuda {

struct Int4Wide {
  static constexpr int kThreads = 128;
  static constexpr int kRows = 8;
  static constexpr int kWarpColumns = 8;
  static constexpr int kColumns = kThreads / kWarp * kWarpColumns;
  // Words of a lane whose products are summed apart.
  static constexpr int kSomeWords = 4;
};

// A word of eight values of a column, and what scales them.
template <class Number>
__device__ __forceinline__ void scaled_values(
    const Int4LinearProblem<Number>& problem, int64_t column, int64_t block,
    Number (&values)[8]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int shift = problem.word_shift;
  const int64_t words_before = ((block >> shift) * kWarp + lane) << shift;
  const uint32_t word =
      problem.words[column / 8 * problem.depth + words_before +
                    (block & ((1 << shift) - 1))];
  const bfloat16* pair =
      problem.scales_and_zeros +
      ((block * 32 >> problem.group_shift) * problem.columns + column) * 2;
  const auto scale = convert<Number>(pair[0]);
  const auto zero = convert<Number>(pair[1]);
  PKG_UNROLL
  for (int place = 0; place < 8; ++place) {
    const int q = static_cast<int>(word >> word_shift(place) & 15U);
    values[place] = static_cast<Number>(q - 8) * scale + zero;
  }
}

// The products of a word's values with those of the rows that there are.
// `Stride`, of the steps of the summed dimension, is a number, or the constant
// one, by which a row needs one address.
template <class Number, class Stride>
__device__ __forceinline__ void add_products(Number (&sums)[Int4Wide::kRows],
                                             const Number* from, int rows,
                                             int64_t row_stride, Stride stride,
                                             const Number (&values)[8]) {
  PKG_UNROLL
  for (int i = 0; i < Int4Wide::kRows; ++i) {
    if (i < rows) {
      PKG_UNROLL
      for (int place = 0; place < 8; ++place) {
        sums[i] += from[word_column(place) * stride] * values[place];
      }
    }
    from += row_stride;
  }
}

// sums += the products of the words [begin, end) of each lane with the rows,
// whose values at the first of these are at `from`. Returns where those at
// `end` are.
template <class Number>
__device__ __forceinline__ const Number* add_words(
    Number (&sums)[Int4Wide::kRows], const Int4LinearProblem<Number>& problem,
    const Number* from, int rows, int64_t column, int64_t begin, int64_t end) {
  PKG_UNROLL_BY(1)  // what is in flight is in registers
  for (int64_t block = begin; block < end; ++block) {
    Number values[8];
    scaled_values(problem, column, block, values);
    if (problem.depth_stride == 1) {
      add_products(sums, from, rows, problem.row_stride,
                   std::integral_constant<int, 1>(), values);
    } else {
      add_products(sums, from, rows, problem.row_stride, problem.depth_stride,
                   values);
    }
    from += 32 * problem.depth_stride;
  }
  return from;
}

// `Number` is float or double.
template <class Number>
__global__ void __launch_bounds__(Int4Wide::kThreads) int4_linear_wide_kernel(
    const __grid_constant__ Int4LinearProblem<Number> problem) {
  constexpr int kRows = Int4Wide::kRows;
  constexpr int kSome = Int4Wide::kSomeWords;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t index = blockIdx.x; index < problem.pieces; index += gridDim.x) {
    const Int4Place<Int4Wide> at = problem.template place<Int4Wide>(index);
    const int64_t tile = at.column() + static_cast<int64_t>(threadIdx.x) /
                                           kWarp * Int4Wide::kWarpColumns;
    if (tile >= problem.columns) {
      continue;  // the whole warp
    }
    const Number* from = problem.matrix(at.batch) +
                         at.row() * problem.row_stride +
                         lane % 4 * 2 * problem.depth_stride;
    const int rows = at_most<kRows>(problem.rows - at.row());
    const int64_t column = tile + lane / 4;
    const int64_t words = problem.depth / 32;
    Number sums[kRows] = {};
    PKG_UNROLL_BY(1)
    for (int64_t begin = 0; begin < words; begin += kSome) {
      Number some[kRows] = {};
      from = add_words(some, problem, from, rows, column, begin,
                       begin + at_most<kSome>(words - begin));
      PKG_UNROLL
      for (int i = 0; i < kRows; ++i) {
        sums[i] += some[i];
      }
    }
    PKG_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const Number sum = lanes_sum<4>(sums[i]);
      if (lane % 4 == 0 && i < rows) {
        problem
            .output[(at.batch * problem.rows + at.row() + i) * problem.columns +
                    column] = sum + problem.bias_of(column);
      }
    }
  }
}

}  // namespace pkg::cuda
