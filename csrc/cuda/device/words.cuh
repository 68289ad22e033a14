// Words of 32 bits that hold several narrow elements, as the tensor cores take
// their operands.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"

namespace pkg::cuda {

__device__ __forceinline__ float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
__device__ __forceinline__ uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

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
  if constexpr (std::is_same_v<Element, bfloat16>) {
    // The upper half of a float, by one instruction.
    return float_of_bits(index == 0 ? pair << 16 : pair & 0xFFFF0000U);
  } else {
    return convert<float>(element_of_word<Element>(pair, index));
  }
}

// Writes four words to global memory by one instruction, at a multiple of 16
// bytes. The compiler makes four of the same as a Packet where the words come
// from a shuffle (nvcc 13.0).
__device__ __forceinline__ void store_words(void* to,
                                            const uint32_t (&words)[4]) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(to)), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
#else
  using Words = Packet<uint32_t, 4>;
  const Words packed = {{words[0], words[1], words[2], words[3]}};
  *static_cast<Words*>(to) = packed;
#endif
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

// (a & b) | c by one instruction, where the compiler takes two for constants.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
#else
  return (a & b) | c;
#endif
}

// a b + c for both elements of each word, rounded once.
template <class Element>
__device__ __forceinline__ uint32_t multiply_add_pair(uint32_t a, uint32_t b,
                                                      uint32_t c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t result;
  if constexpr (std::is_same_v<Element, bfloat16>) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(result)
        : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  }
  return result;
#else
  float sums[2];
  for (int i = 0; i < 2; ++i) {
    sums[i] = element_of_pair<Element>(a, i) * element_of_pair<Element>(b, i) +
              element_of_pair<Element>(c, i);
  }
  return pair_of<Element>(sums[0], sums[1]);
#endif
}

// The pair of ones.
template <class Element>
constexpr uint32_t kOnes =
    std::is_same_v<Element, bfloat16> ? 0x3F803F80U : 0x3C003C00U;

// Two pairs of whole numbers q - 8, for the values of four bits that lie in
// bits 0 to 3 and in bits 4 to 7 of either half of `bits`.
//
// With the bits of a power of two whose last significant bit counts 1 they are
// 128 + q (bfloat16) or 1024 + q (float16), and taking off that and 8 is exact.
// Of the ten bits of float16's fraction the second value may stay where it is,
// as 1024 + 16 q; bfloat16's has seven, and needs a shift.
template <class Element>
__device__ __forceinline__ void whole_pairs(uint32_t bits, uint32_t* pairs) {
  constexpr uint32_t kLow = 0x000F000FU;
  if constexpr (std::is_same_v<Element, bfloat16>) {
    constexpr uint32_t kMinus136 = 0xC308C308U;
    PKG_UNROLL
    for (int i = 0; i < 2; ++i) {
      pairs[i] =
          multiply_add_pair<Element>(and_or(bits >> (4 * i), kLow, 0x43004300U),
                                     kOnes<Element>, kMinus136);
    }
  } else {
    constexpr uint32_t kPower = 0x64006400U;
    constexpr uint32_t kMinus1032 = 0xE408E408U;
    constexpr uint32_t kSixteenth = 0x2C002C00U;
    constexpr uint32_t kMinus72 = 0xD480D480U;
    pairs[0] = multiply_add_pair<Element>(and_or(bits, kLow, kPower),
                                          kOnes<Element>, kMinus1032);
    pairs[1] = multiply_add_pair<Element>(and_or(bits, kLow << 4, kPower),
                                          kSixteenth, kMinus72);
  }
}

}  // namespace pkg::cuda
