// quantize_rowwise: each row divided by a scale of its own
// (csrc/quantize_rowwise_scale.h) and rounded to int8, or to int4 two to a
// byte. A warp takes a row, in two passes, of which the second reads again what
// the first has just read. Elements that are neighbours, from an aligned
// address on, are read 16 bytes at a time and their values written as many at a
// time; else and at the end of the row an element at a time. Bytes: the input
// twice, and the values once.
#pragma once

#include <cstdint>

#include "cuda/device/batch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/warp.cuh"
#include "quantize_rowwise_scale.h"

namespace pkg::cuda {

constexpr int kQuantizeThreads = 128;
constexpr int kQuantizeRows = kQuantizeThreads / kWarp;

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

// One row, as the lanes of a warp read it.
template <class Element>
struct QuantizeRow {
  static constexpr int kPacket = 16 / sizeof(Element);
  using Number = Accumulator<Element>;
  const Element* data;
  int64_t stride;
  int64_t inner;
  int64_t packets;  // at its beginning, that 16 bytes hold

  __device__ __forceinline__
  QuantizeRow(const QuantizeProblem<Element>& problem, int64_t row)
      : data(problem.input +
             batch_offset(problem.rows_of, problem.row_strides, row)),
        stride(problem.stride),
        inner(problem.inner),
        packets(stride == 1 && is_aligned(data, kPacket) ? inner / kPacket
                                                         : 0) {}

  __device__ __forceinline__ Packet<Element, kPacket> packet(int64_t at) const {
    return reinterpret_cast<const Packet<Element, kPacket>*>(data)[at];
  }
  __device__ __forceinline__ Number value(int64_t at) const {
    return convert<Number>(data[at * stride]);
  }

  // The same in every lane.
  __device__ __forceinline__ Number scale(int lane, int bits) const {
    Number positive = 0;
    Number negative = 0;
    const auto take = [&](Number value) {
      positive = larger_or_nan(positive, value);
      negative = larger_or_nan(negative, -value);
    };
    for (int64_t at = lane; at < packets; at += kWarp) {
      const Packet<Element, kPacket> values = packet(at);
      PKG_UNROLL
      for (int i = 0; i < kPacket; ++i) {
        take(convert<Number>(values.values[i]));
      }
    }
    for (int64_t at = packets * kPacket + lane; at < inner; at += kWarp) {
      take(value(at));
    }
    PKG_UNROLL
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
      positive = larger_or_nan(positive,
                               __shfl_xor_sync(0xffffffffu, positive, lanes));
      negative = larger_or_nan(negative,
                               __shfl_xor_sync(0xffffffffu, negative, lanes));
    }
    return rowwise_scale(positive, negative, bits);
  }
};

// The integers of a row's values.
template <class Number>
struct RowQuantizer {
  Number scale;
  Number least;
  Number most;
  bool divides;  // the scale is neither zero, nor NaN, nor infinite

  __device__ __forceinline__ RowQuantizer(Number scale, int bits)
      : scale(scale),
        least(static_cast<Number>(least_quantized(bits))),
        most(static_cast<Number>(most_quantized(bits))),
        divides(scale != 0 && scale - scale == 0) {}

  __device__ __forceinline__ int operator()(Number value) const {
    return divides ? quantized(value, scale, least, most) : 0;
  }
};

template <int kCount>
__device__ __forceinline__ void store_bytes(int8_t* to,
                                            const Packet<int8_t, kCount>& bytes,
                                            bool is_aligned) {
  if (is_aligned) {
    *reinterpret_cast<Packet<int8_t, kCount>*>(to) = bytes;
    return;
  }
  PKG_UNROLL
  for (int i = 0; i < kCount; ++i) {
    to[i] = bytes.values[i];
  }
}

// kPerByte: 2 where values are int4, the even column in the low half.
template <int kPerByte, class Element, class Number>
__device__ __forceinline__ void store_quantized(
    const QuantizeRow<Element>& row, const RowQuantizer<Number>& quantize,
    int8_t* to, int lane) {
  constexpr int kPacket = QuantizeRow<Element>::kPacket;
  constexpr int kBytes = kPacket / kPerByte;
  const auto byte_of = [&](Number first, Number second) {
    const int low = quantize(first);
    return static_cast<int8_t>(
        kPerByte == 1 ? low : (low & 15) | (quantize(second) & 15) << 4);
  };
  const bool are_aligned = is_aligned(to, kBytes);
  for (int64_t at = lane; at < row.packets; at += kWarp) {
    const Packet<Element, kPacket> values = row.packet(at);
    Packet<int8_t, kBytes> bytes;
    PKG_UNROLL
    for (int i = 0; i < kBytes; ++i) {
      bytes.values[i] =
          byte_of(convert<Number>(values.values[i * kPerByte]),
                  convert<Number>(values.values[(i + 1) * kPerByte - 1]));
    }
    store_bytes(to + at * kBytes, bytes, are_aligned);
  }
  for (int64_t at = row.packets * kBytes + lane; at < row.inner / kPerByte;
       at += kWarp) {
    to[at] =
        byte_of(row.value(at * kPerByte), row.value((at + 1) * kPerByte - 1));
  }
}

template <class Element>
__global__ void __launch_bounds__(kQuantizeThreads) quantize_rowwise_kernel(
    const __grid_constant__ QuantizeProblem<Element> problem) {
  using Number = Accumulator<Element>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t rows_of_grid = int64_t{gridDim.x} * kQuantizeRows;
  for (int64_t index = int64_t{blockIdx.x} * kQuantizeRows + warp;
       index < problem.rows; index += rows_of_grid) {
    const QuantizeRow<Element> row(problem, index);
    const Element rounded = convert<Element>(row.scale(lane, problem.bits));
    if (lane == 0) {
      problem.scales[index] = rounded;
    }
    const RowQuantizer<Number> quantize(convert<Number>(rounded), problem.bits);
    if (problem.bits == 8) {
      store_quantized<1>(row, quantize, problem.values + index * problem.inner,
                         lane);
    } else {
      store_quantized<2>(row, quantize,
                         problem.values + index * (problem.inner / 2), lane);
    }
  }
}

}  // namespace pkg::cuda
