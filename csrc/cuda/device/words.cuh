// Words of 32 bits that hold several narrow elements, as the tensor cores take
// their operands.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"

namespace pkg::cuda {

// One of the elements of a word.
template <class Element>
__device__ __forceinline__ Element element_of_word(uint32_t word, int index) {
  using Bits = std::conditional_t<sizeof(Element) == 1, uint8_t, uint16_t>;
  const auto bits = static_cast<Bits>(
      word >> (8 * static_cast<int>(sizeof(Element)) * index));
  Element element;
  memcpy(&element, &bits, sizeof(element));
  return element;
}

template <class Element>
__device__ __forceinline__ float element_of_pair(uint32_t pair, int index) {
  return convert<float>(element_of_word<Element>(pair, index));
}

// Two values, rounded, as a word.
template <class Element>
__device__ __forceinline__ uint32_t pair_of(float first, float second) {
  uint32_t pair;
#ifdef __CUDACC__
  if constexpr (std::is_same_v<Element, bfloat16>) {
    const __nv_bfloat162 elements = __floats2bfloat162_rn(first, second);
    memcpy(&pair, &elements, sizeof(pair));
  } else {
    const __half2 elements = __floats2half2_rn(first, second);
    memcpy(&pair, &elements, sizeof(pair));
  }
#else
  const Element elements[2] = {convert<Element>(first),
                               convert<Element>(second)};
  memcpy(&pair, elements, sizeof(pair));
#endif
  return pair;
}

// Whether one of the two is infinite or NaN.
template <class Element>
__device__ __forceinline__ bool has_infinity(uint32_t pair) {
  constexpr uint32_t kExponent =
      std::is_same_v<Element, bfloat16> ? 0x7F80U : 0x7C00U;
  return (pair & kExponent) == kExponent ||
         (pair >> 16 & kExponent) == kExponent;
}

// The pair of whole numbers q - 8 for the two values of four bits that lie in
// the lowest bits of either half of `bits`.
template <class Element>
__device__ __forceinline__ uint32_t whole_pair(uint32_t bits) {
  constexpr bool kBfloat16 = std::is_same_v<Element, bfloat16>;
  // The power of two whose last significant bit counts 1, with q in it: 128 + q
  // or 1024 + q. Subtracting it and 8 is exact.
  const uint32_t shifted =
      (bits & 0x000F000FU) | (kBfloat16 ? 0x43004300U : 0x64006400U);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t pair;
  if constexpr (kBfloat16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(pair)
        : "r"(shifted), "r"(0x3F803F80U), "r"(0xC308C308U));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;"
        : "=r"(pair)
        : "r"(shifted), "r"(0x3C003C00U), "r"(0xE408E408U));
  }
  return pair;
#else
  constexpr float kOffset = kBfloat16 ? 136.0f : 1032.0f;
  return pair_of<Element>(element_of_pair<Element>(shifted, 0) - kOffset,
                          element_of_pair<Element>(shifted, 1) - kOffset);
#endif
}

}  // namespace pkg::cuda
