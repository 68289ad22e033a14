// Pointwise operators over one or two inputs: add_out, linear's activations
// backwards, and the elementwise operators, whose formulas are in csrc/cpu
// (host/formula.h).
//
// Two kernels run any of these functions. They see their arguments in the type
// of the computation: float32 for halves and float32, float64, or an integer of
// 32 bits or, of int64, of 64, whose arithmetic wraps (host/wrapping_integer.h)
// and which is cut to its type afterwards.
//
// `pointwise_dense` takes operands of one dtype that lie in memory in the same
// order without gaps, or that are a single element; a thread moves 16 bytes of
// each operand at a time, the widest access there is. `pointwise_strided` takes
// any strides (0 where an operand is broadcast) and any mixture of dtypes, an
// element at a time; where each element's place fits 31 bits, as it does but in
// the largest tensors, it is computed in 32 without a division.
//
// Bytes: each operand is read once and the result written once, for at most a
// few tens of operations an element. Blocks of 256 threads without shared
// memory: 2048 threads, or 1536, of a multiprocessor are whole blocks. (The
// derivative of float64's gelu takes 60 registers, so 1024 threads: held in 48,
// for 1280, it loaded and stored six spilled numbers in every turn of the loop.
// nvcc 13.0, sm_90a, by its machine code.)
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/batch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/divisor.cuh"
#include "cuda/device/element_type.cuh"
#include "cuda/device/numeric.cuh"
#include "host/wrapping_integer.h"

namespace pkg::cuda {

constexpr int kPointwiseThreads = 256;

struct Add {
  static constexpr int kInputs = 2;
  static constexpr bool kTakesIntegers = true;
  template <class Number>
  __device__ __forceinline__ Number operator()(Number a, Number b) const {
    return static_cast<Number>(Computed<Number>(a) + Computed<Number>(b));
  }
};

// A function of the elements at one place.
template <class Function, class Number>
__device__ __forceinline__ Number apply(const Function& function,
                                        const Number (&values)[2]) {
  if constexpr (Function::kInputs == 1) {
    return function(values[0]);
  } else {
    return function(values[0], values[1]);
  }
}

// The same in a common dtype that only the kernel knows. Integers are held in
// 64 bits, but those of narrower types are computed in 32, as the dense kernel
// does.
template <class Function, class Number>
__device__ __forceinline__ Number apply_in(ElementType common,
                                           const Function& function,
                                           const Number (&values)[2]) {
  if constexpr (std::is_same_v<Number, int64_t>) {
    if (common != ElementType::int64) {
      int32_t narrow[2] = {};
      PKG_UNROLL
      for (int input = 0; input < Function::kInputs; ++input) {
        narrow[input] = static_cast<int32_t>(values[input]);
      }
      return apply(function, narrow);
    }
  }
  return apply(function, values);
}

// The type that holds elements while they are computed.
template <class Element>
using PointwiseNumber = std::conditional_t<
    std::is_integral_v<Element>,
    std::conditional_t<sizeof(Element) == sizeof(int64_t), int64_t, int32_t>,
    Accumulator<Element>>;

template <class Element>
struct DenseOperands {
  Element* output;
  const Element* inputs[2];
  bool is_single[2];  // one element stands for all
  int64_t count;
};

// All pointers are aligned to 16 bytes.
template <class Element, class Function>
__global__ void __launch_bounds__(kPointwiseThreads)
    pointwise_dense(DenseOperands<Element> operands, Function function) {
  using Number = PointwiseNumber<Element>;
  constexpr int kPacket = 16 / sizeof(Element);
  const int64_t packed = operands.count / kPacket * kPacket;
  const int64_t step = global_thread_count() * kPacket;
  for (int64_t first = global_thread_index() * kPacket; first < packed;
       first += step) {
    Packet<Element, kPacket> values[Function::kInputs];
    PKG_UNROLL
    for (int input = 0; input < Function::kInputs; ++input) {
      const Element* const data = operands.inputs[input];
      if (operands.is_single[input]) {
        PKG_UNROLL
        for (int i = 0; i < kPacket; ++i) {
          values[input].values[i] = data[0];
        }
      } else {
        values[input] =
            *reinterpret_cast<const Packet<Element, kPacket>*>(data + first);
      }
    }
    Packet<Element, kPacket> result;
    PKG_UNROLL
    for (int i = 0; i < kPacket; ++i) {
      const Number elements[2] = {
          convert<Number>(values[0].values[i]),
          convert<Number>(values[Function::kInputs - 1].values[i])};
      result.values[i] = convert<Element>(apply(function, elements));
    }
    *reinterpret_cast<Packet<Element, kPacket>*>(operands.output + first) =
        result;
  }
  // What is left is less than a packet.
  const int64_t index = packed + global_thread_index();
  if (index < operands.count) {
    Number values[2];
    PKG_UNROLL
    for (int input = 0; input < Function::kInputs; ++input) {
      values[input] = convert<Number>(
          operands.inputs[input][operands.is_single[input] ? 0 : index]);
    }
    operands.output[index] = convert<Element>(apply(function, values));
  }
}

// How an element's index and its place in each operand are computed.
struct NarrowIndices {
  using Index = uint32_t;
  using Stride = int32_t;
  using Divisor = FastDivisor;
};

struct WideIndices {
  using Index = int64_t;
  using Stride = int64_t;
  using Divisor = WideDivisor;
};

template <class Indices>
struct StridedOperands {
  void* output;
  const void* inputs[2];
  ElementType output_type;
  ElementType input_types[2];
  ElementType common_type;
  int dims;
  typename Indices::Divisor sizes[kMaxBatchDims];
  typename Indices::Stride output_strides[kMaxBatchDims];
  typename Indices::Stride input_strides[2][kMaxBatchDims];
  int64_t count;
};

// Of operands whose dimensions are in row order.
template <class Indices>
StridedOperands<Indices> strided_operands(const BatchSizes& shape,
                                          const BatchStrides& output,
                                          const BatchStrides (&inputs)[2]) {
  using Stride = typename Indices::Stride;
  StridedOperands<Indices> operands = {};
  operands.dims = shape.count;
  operands.count = 1;
  for (int dimension = 0; dimension < shape.count; ++dimension) {
    const int64_t size = shape.sizes[dimension];
    operands.sizes[dimension] = typename Indices::Divisor(size > 0 ? size : 1);
    operands.count *= size;
    operands.output_strides[dimension] =
        static_cast<Stride>(output.strides[dimension]);
    for (int input = 0; input < 2; ++input) {
      operands.input_strides[input][dimension] =
          static_cast<Stride>(inputs[input].strides[dimension]);
    }
  }
  return operands;
}

// Whether every index, and every place of an operand, fits 31 bits.
inline bool has_narrow_indices(const BatchSizes& shape,
                               const BatchStrides& strides) {
  int64_t count = 1;
  int64_t last = 0;
  for (int dimension = 0; dimension < shape.count; ++dimension) {
    const int64_t size = shape.sizes[dimension];
    const int64_t stride = strides.strides[dimension];
    if (size > INT32_MAX || stride > INT32_MAX || stride < -INT32_MAX) {
      return false;
    }
    count *= size;
    last += (size - 1) * (stride < 0 ? -stride : stride);
    if (count > INT32_MAX || last > INT32_MAX) {
      return false;
    }
  }
  return true;
}

// Number holds elements of the common dtype: int64_t every integer.
template <class Number, class Indices, class Function>
__global__ void __launch_bounds__(kPointwiseThreads)
    pointwise_strided(const __grid_constant__ StridedOperands<Indices> operands,
                      Function function) {
  using Stride = typename Indices::Stride;
  const int64_t threads = global_thread_count();
  for (int64_t index = global_thread_index(); index < operands.count;
       index += threads) {
    Stride output_offset = 0;
    Stride input_offsets[2] = {};
    auto rest = static_cast<typename Indices::Index>(index);
    for (int dimension = operands.dims - 1; dimension >= 0; --dimension) {
      const auto divided = operands.sizes[dimension].divide(rest);
      rest = divided.quotient;
      const auto coordinate = static_cast<Stride>(divided.remainder);
      output_offset += coordinate * operands.output_strides[dimension];
      PKG_UNROLL
      for (int input = 0; input < Function::kInputs; ++input) {
        input_offsets[input] +=
            coordinate * operands.input_strides[input][dimension];
      }
    }
    Number values[2];
    PKG_UNROLL
    for (int input = 0; input < Function::kInputs; ++input) {
      const Number value =
          load_as<Number>(operands.inputs[input], input_offsets[input],
                          operands.input_types[input]);
      values[input] = round_to(operands.common_type, value);
    }
    const Number result = apply_in(operands.common_type, function, values);
    store_as(operands.output, output_offset, operands.output_type,
             round_to(operands.common_type, result));
  }
}

}  // namespace pkg::cuda
