// quantize_rowwise: each row divided by a scale of its own
// (csrc/quantize_rowwise_scale.h) and rounded to int8, or to int4 two to a
// byte. Rows that threads can hold are the work of quantize_held_rows.cuh. Of
// others a warp takes a row, in two passes, of which the second reads again
// what the first has just read. Elements that are neighbours, from an aligned
// address on, are read 16 bytes at a time and their values written as many at a
// time; else and at the end of the row an element at a time. Bytes: the input
// twice, and the values once.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cuda/device/batch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/warp.cuh"
#include "host/integer_math.h"
#include "quantize_rowwise_scale.h"

namespace pkg::cuda {

constexpr int kQuantizeThreads = 128;
// So many are to fit a multiprocessor: told nothing, the compiler makes do with
// 32 registers for 8.0, and spills (nvcc 13.0).
constexpr int kQuantizeBlocks = 8;
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
    return ceil_div(rows, kQuantizeRows);
  }
};

// The largest magnitudes of either sign, as integers: these are in order, NaN
// beyond all, and values of the other sign lie below zero.
template <class Number>
struct LargestMagnitudes {
  using Bits = std::conditional_t<sizeof(Number) == 4, int32_t, int64_t>;
  static constexpr Bits kSign = std::numeric_limits<Bits>::min();
  Bits positive = 0;
  Bits negative = 0;

  __device__ __forceinline__ void take(Number value) {
    Bits bits;
    memcpy(&bits, &value, sizeof(bits));
    take(bits, bits ^ kSign);
  }
  __device__ __forceinline__ void take(Bits other_positive,
                                       Bits other_negative) {
    positive = positive > other_positive ? positive : other_positive;
    negative = negative > other_negative ? negative : other_negative;
  }
  // Those of all lanes, in each.
  __device__ __forceinline__ void share() {
    PKG_UNROLL
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
      take(__shfl_xor_sync(0xffffffffu, positive, lanes),
           __shfl_xor_sync(0xffffffffu, negative, lanes));
    }
  }
  // NaN where a value is NaN.
  __device__ __forceinline__ Number scale(int bits) const {
    const Number up = number(positive);
    const Number down = number(negative);
    return up != up ? up : down != down ? down : rowwise_scale(up, down, bits);
  }

 private:
  static __device__ __forceinline__ Number number(Bits bits) {
    Number value;
    memcpy(&value, &bits, sizeof(value));
    return value;
  }
};

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
    LargestMagnitudes<Number> largest;
    for (int64_t at = lane; at < packets; at += kWarp) {
      const Packet<Element, kPacket> values = packet(at);
      PKG_UNROLL
      for (int i = 0; i < kPacket; ++i) {
        largest.take(convert<Number>(values.values[i]));
      }
    }
    for (int64_t at = packets * kPacket + lane; at < inner; at += kWarp) {
      largest.take(value(at));
    }
    largest.share();
    return largest.scale(bits);
  }
};

// The integers from `least` to `most` that are nearest to value / scale, of a
// row's values, in the low byte; zero where the scale is zero, NaN or infinite.
// A division takes a dozen instructions, a branch and one of the few units for
// reciprocals, with the scale's reciprocal (csrc/quantize_rowwise_scale.h)
// five.
template <class Number, bool kByReciprocal>
struct RowQuantizer {
  // Where a division is the exception, it is not worth the code.
  static constexpr bool kTakesPackets =
      kByReciprocal || sizeof(Number) != sizeof(float);
  Number scale;
  Number least;
  Number most;
  Number reciprocal;
  bool divides;

  __device__ __forceinline__ RowQuantizer(Number scale, int bits)
      : scale(scale),
        least(static_cast<Number>(least_quantized(bits))),
        most(static_cast<Number>(most_quantized(bits))),
        reciprocal(1 / scale),
        divides(scale != 0 && scale - scale == 0) {}

  __device__ __forceinline__ int operator()(Number value) const {
    if constexpr (kByReciprocal) {
      Number steps = value * reciprocal;
      steps = fma(fma(-steps, scale, value), reciprocal, steps);
      steps = fma(fma(-steps, scale, value), reciprocal, steps);
      return rounded(steps);
    } else {
      return divides ? rounded(value / scale) : 0;
    }
  }

 private:
  __device__ __forceinline__ int rounded(Number steps) const {
    // Adding it leaves no bits for fractions, and the integer in the low ones.
    constexpr Number kIntegers = sizeof(Number) == 4 ? 0x1.8p23 : 0x1.8p52;
    if constexpr (sizeof(Number) == sizeof(float)) {
      steps = fmin(fmax(steps, least), most);
    } else {  // where those are functions
      steps = steps > most ? most : steps;
      steps = steps < least ? least : steps;
    }
    steps += kIntegers;
    int low;
    memcpy(&low, &steps, sizeof(low));
    return low;
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
template <int kPerByte, class Quantizer, class Number>
__device__ __forceinline__ int8_t quantized_byte(const Quantizer& quantize,
                                                 Number first, Number second) {
  const int low = quantize(first);
  return static_cast<int8_t>(
      kPerByte == 1 ? low : (low & 15) | (quantize(second) & 15) << 4);
}

template <int kPerByte, class Quantizer, class Element, int kPacket>
__device__ __forceinline__ Packet<int8_t, kPacket / kPerByte> quantized_packet(
    const Quantizer& quantize, const Packet<Element, kPacket>& elements) {
  using Number = Accumulator<Element>;
  Packet<int8_t, kPacket / kPerByte> bytes;
  PKG_UNROLL
  for (int i = 0; i < kPacket / kPerByte; ++i) {
    bytes.values[i] = quantized_byte<kPerByte>(
        quantize, convert<Number>(elements.values[i * kPerByte]),
        convert<Number>(elements.values[(i + 1) * kPerByte - 1]));
  }
  return bytes;
}

// What is left of a row from byte `first` on, an element at a time, by so many
// threads.
template <int kPerByte, int kThreads, class Element, class Quantizer>
__device__ __forceinline__ void store_elements(const QuantizeRow<Element>& row,
                                               const Quantizer& quantize,
                                               int8_t* to, int64_t first,
                                               int thread) {
  PKG_UNROLL_BY(1)
  for (int64_t at = first + thread; at < row.inner / kPerByte; at += kThreads) {
    to[at] = quantized_byte<kPerByte>(quantize, row.value(at * kPerByte),
                                      row.value((at + 1) * kPerByte - 1));
  }
}

template <int kPerByte, class Element, class Quantizer>
__device__ __forceinline__ void store_quantized(const QuantizeRow<Element>& row,
                                                const Quantizer& quantize,
                                                int8_t* to, int lane) {
  constexpr int kBytes = QuantizeRow<Element>::kPacket / kPerByte;
  const bool are_aligned = is_aligned(to, kBytes);
  const int64_t packets = Quantizer::kTakesPackets ? row.packets : 0;
  for (int64_t at = lane; at < packets; at += kWarp) {
    store_bytes(to + at * kBytes,
                quantized_packet<kPerByte>(quantize, row.packet(at)),
                are_aligned);
  }
  store_elements<kPerByte, kWarp>(row, quantize, to, packets * kBytes, lane);
}

template <bool kByReciprocal, class Element>
__device__ __forceinline__ void store_row(
    const QuantizeProblem<Element>& problem, const QuantizeRow<Element>& row,
    Accumulator<Element> scale, int64_t index, int lane) {
  const RowQuantizer<Accumulator<Element>, kByReciprocal> quantize(
      scale, problem.bits);
  if (problem.bits == 8) {
    store_quantized<1>(row, quantize, problem.values + index * problem.inner,
                       lane);
  } else {
    store_quantized<2>(row, quantize,
                       problem.values + index * (problem.inner / 2), lane);
  }
}

template <class Element>
__global__ void __launch_bounds__(kQuantizeThreads, kQuantizeBlocks)
    quantize_rowwise_kernel(
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
    const Number scale = convert<Number>(rounded);
    if (divides_by_reciprocal(scale)) {
      store_row<true>(problem, row, scale, index, lane);
    } else {
      store_row<false>(problem, row, scale, index, lane);
    }
  }
}

}  // namespace pkg::cuda
