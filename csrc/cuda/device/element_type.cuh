// Elements whose type is known only when the kernel runs.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"

namespace pkg::cuda {

enum class ElementType : int32_t {
  boolean,
  uint8,
  int8,
  int16,
  int32,
  int64,
  float16,
  bfloat16,
  float32,
  float64,
};

// Loads any type as the type of the computation. A bool is read as a byte: a
// tensor may hold others than 0 and 1, which a C++ bool may not.
template <class Number>
__device__ __forceinline__ Number load_as(const void* data, int64_t index,
                                          ElementType type) {
  switch (type) {
    case ElementType::boolean:
      return Number(static_cast<const uint8_t*>(data)[index] != 0);
    case ElementType::uint8:
      return convert<Number>(static_cast<const uint8_t*>(data)[index]);
    case ElementType::int8:
      return convert<Number>(static_cast<const int8_t*>(data)[index]);
    case ElementType::int16:
      return convert<Number>(static_cast<const int16_t*>(data)[index]);
    case ElementType::int32:
      return convert<Number>(static_cast<const int32_t*>(data)[index]);
    case ElementType::int64:
      return convert<Number>(static_cast<const int64_t*>(data)[index]);
    case ElementType::float16:
      return convert<Number>(static_cast<const float16*>(data)[index]);
    case ElementType::bfloat16:
      return convert<Number>(static_cast<const bfloat16*>(data)[index]);
    case ElementType::float32:
      return convert<Number>(static_cast<const float*>(data)[index]);
    case ElementType::float64:
      return convert<Number>(static_cast<const double*>(data)[index]);
  }
  return Number(0);
}

template <class Number>
__device__ __forceinline__ void store_as(void* data, int64_t index,
                                         ElementType type, Number value) {
  switch (type) {
    case ElementType::boolean:
      static_cast<uint8_t*>(data)[index] = value != Number(0);
      return;
    case ElementType::uint8:
      static_cast<uint8_t*>(data)[index] = convert<uint8_t>(value);
      return;
    case ElementType::int8:
      static_cast<int8_t*>(data)[index] = convert<int8_t>(value);
      return;
    case ElementType::int16:
      static_cast<int16_t*>(data)[index] = convert<int16_t>(value);
      return;
    case ElementType::int32:
      static_cast<int32_t*>(data)[index] = convert<int32_t>(value);
      return;
    case ElementType::int64:
      static_cast<int64_t*>(data)[index] = convert<int64_t>(value);
      return;
    case ElementType::float16:
      static_cast<float16*>(data)[index] = convert<float16>(value);
      return;
    case ElementType::bfloat16:
      static_cast<bfloat16*>(data)[index] = convert<bfloat16>(value);
      return;
    case ElementType::float32:
      static_cast<float*>(data)[index] = convert<float>(value);
      return;
    case ElementType::float64:
      static_cast<double*>(data)[index] = convert<double>(value);
      return;
  }
}

// The value that `type` holds after a store of `value`: inputs are promoted to
// the common dtype, and the result is rounded to it, before anything else sees
// them. Every integer is held in 64 bits.
template <class Number>
__device__ __forceinline__ Number round_to(ElementType type, Number value) {
  if constexpr (std::is_same_v<Number, int64_t>) {
    switch (type) {
      case ElementType::boolean:
        return int64_t{value != 0};
      case ElementType::uint8:
        return int64_t{static_cast<uint8_t>(value)};
      case ElementType::int8:
        return int64_t{static_cast<int8_t>(value)};
      case ElementType::int16:
        return int64_t{static_cast<int16_t>(value)};
      case ElementType::int32:
        return int64_t{static_cast<int32_t>(value)};
      default:
        return value;
    }
  } else if constexpr (std::is_same_v<Number, float>) {
    switch (type) {
      case ElementType::float16:
        return convert<float>(convert<float16>(value));
      case ElementType::bfloat16:
        return convert<float>(convert<bfloat16>(value));
      default:
        return value;
    }
  } else {
    return value;
  }
}

}  // namespace pkg::cuda
