// quantize_rowwise: each row divided by a scale of its own
// (csrc/quantize_rowwise_scale.h) and rounded to int8, or to int4 two to a
// byte. A warp takes a row, in two passes of which the second finds it in a
// cache; bound by reading the input.
#pragma once

#include <cstdint>

#include "cuda/device/batch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "quantize_rowwise_scale.h"

namespace pkg::cuda {

constexpr int kQuantizeThreads = 128;
constexpr int kQuantizeRows = kQuantizeThreads / 32;

template <class Element>
struct QuantizeProblem {
  const Element* input;
  int64_t stride;  // along a row
  BatchSizes rows_of;
  BatchStrides row_strides;
  int8_t* values;  // contiguous
  Element* scales;
  int64_t rows;
  int64_t inner;
  int bits;  // 8 or 4

  __host__ __device__ int64_t block_count() const {
    return (rows + kQuantizeRows - 1) / kQuantizeRows;
  }
};

template <class Number>
__device__ __forceinline__ Number larger_or_nan(Number a, Number b) {
  return a > b || a != a ? a : b;
}

// The integer from `least` to `most` that is nearest to value / scale.
template <class Number>
__device__ __forceinline__ int quantized(Number value, Number scale,
                                         Number least, Number most) {
  Number steps = value / scale;
  steps = steps > most ? most : steps;
  steps = steps < least ? least : steps;
  return static_cast<int>(rint(steps));
}

template <class Element>
__global__ void __launch_bounds__(kQuantizeThreads) quantize_rowwise_kernel(
    const __grid_constant__ QuantizeProblem<Element> problem) {
  using Number = Accumulator<Element>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const auto least = static_cast<Number>(least_quantized(problem.bits));
  const auto most = static_cast<Number>(most_quantized(problem.bits));
  for (int64_t block = blockIdx.x; block < problem.block_count();
       block += gridDim.x) {
    const int64_t row = block * kQuantizeRows + warp;
    if (row >= problem.rows) {
      continue;  // the whole warp
    }
    const Element* from =
        problem.input + batch_offset(problem.rows_of, problem.row_strides, row);
    Number positive = 0;
    Number negative = 0;
    for (int64_t i = lane; i < problem.inner; i += 32) {
      const Number value = convert<Number>(from[i * problem.stride]);
      positive = larger_or_nan(positive, value);
      negative = larger_or_nan(negative, -value);
    }
    PKG_UNROLL
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      positive = larger_or_nan(positive,
                               __shfl_xor_sync(0xffffffffu, positive, lanes));
      negative = larger_or_nan(negative,
                               __shfl_xor_sync(0xffffffffu, negative, lanes));
    }
    const Element rounded =
        convert<Element>(rowwise_scale(positive, negative, problem.bits));
    const Number scale = convert<Number>(rounded);
    if (lane == 0) {
      problem.scales[row] = rounded;
    }
    // Neither zero, nor NaN, nor infinite.
    const bool divides = scale != 0 && scale - scale == 0;
    const auto value_at = [&](int64_t i) {
      return divides ? quantized(convert<Number>(from[i * problem.stride]),
                                 scale, least, most)
                     : 0;
    };
    if (problem.bits == 8) {
      int8_t* to = problem.values + row * problem.inner;
      for (int64_t i = lane; i < problem.inner; i += 32) {
        to[i] = static_cast<int8_t>(value_at(i));
      }
    } else {
      int8_t* to = problem.values + row * (problem.inner / 2);
      for (int64_t i = lane; i < problem.inner / 2; i += 32) {
        const int both = (value_at(2 * i) & 15) | (value_at(2 * i + 1) & 15)
                                                      << 4;
        to[i] = static_cast<int8_t>(both);
      }
    }
  }
}

}  // namespace pkg::cuda
