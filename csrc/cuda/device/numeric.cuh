// Element types, the types in which they are computed, and conversions.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/device.cuh"

namespace pkg::cuda {

using float16 = __half;
using bfloat16 = __nv_bfloat16;

// The type that holds sums of products of elements. int8 products are summed
// modulo 2^32: unsigned, since the overflow of a signed sum is undefined.
template <class Element>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <>
struct AccumulatorOf<int8_t> {
  using type = uint32_t;
};
template <class Element>
using Accumulator = typename AccumulatorOf<Element>::type;

// Conversion between any two element types. Halves convert by way of float32,
// as PyTorch's do, also from and to float64.
template <class To, class From>
__device__ __forceinline__ To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (std::is_same_v<From, float16>) {
    return convert<To>(__half2float(value));
  } else if constexpr (std::is_same_v<From, bfloat16>) {
    return convert<To>(__bfloat162float(value));
  } else if constexpr (std::is_same_v<To, float16>) {
    return __float2half_rn(static_cast<float>(value));
  } else if constexpr (std::is_same_v<To, bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(value));
  } else if constexpr (std::is_same_v<To, bool>) {
    return value != From(0);
  } else {
    return static_cast<To>(value);
  }
}

// What rounding to an element takes off a number. Where either is not finite
// that is nothing: infinity less itself would be NaN.
template <class Element, class Number>
__device__ __forceinline__ Number rounded_off(Number value) {
  const Number rest = value - convert<Number>(convert<Element>(value));
  return rest - rest == Number(0) ? rest : Number(0);
}

// Neighbouring elements that one instruction moves. The address must be a
// multiple of the packet's size.
template <class Element, int kCount>
struct alignas(sizeof(Element) * kCount) Packet {
  static_assert(sizeof(Element) * kCount <= 16, "wider than a load");
  Element values[kCount];
};

template <class Element>
__host__ __device__ __forceinline__ bool is_aligned(const Element* address,
                                                    int count) {
  return reinterpret_cast<uintptr_t>(address) % (sizeof(Element) * count) == 0;
}

}  // namespace pkg::cuda
