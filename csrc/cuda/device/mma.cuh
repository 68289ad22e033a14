// The tensor cores' m16n8k16 product of half-precision operands, summed in
// float32: c (16 x 8) += a (16 x 16) b (16 x 8).
//
// Of lane t, with g = t / 4 and c = t % 4: a[0] holds (g, 2c) and (g, 2c + 1),
// a[1] the same of row g + 8, a[2] and a[3] those of columns 8 further; b[0]
// holds (2c, g) and (2c + 1, g), b[1] rows 8 further; sums[0] and [1] are (g,
// 2c) and (g, 2c + 1), [2] and [3] those of row g + 8. (PTX ISA, "Matrix
// Fragments for mma.m16n8k16".)
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"

namespace pkg::cuda {

constexpr unsigned kWholeWarp = 0xffffffffu;

// One of a word's two elements.
template <class Element>
__device__ __forceinline__ float element_of_pair(uint32_t pair, int index) {
  const auto bits = static_cast<uint16_t>(pair >> (16 * index));
  Element element;
  memcpy(&element, &bits, sizeof(element));
  return convert<float>(element);
}

template <class Element>
__device__ __forceinline__ void multiply_add_16x8x16(float (&sums)[4],
                                                     const uint32_t (&a)[4],
                                                     const uint32_t (&b)[2]) {
  static_assert(std::is_same_v<Element, float16> ||
                std::is_same_v<Element, bfloat16>);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<Element, bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#else
  // Where there is no such instruction, on the host and before Ampere: each
  // lane asks the others for its rows and columns.
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int source = 0; source < 4; ++source) {
    uint32_t rows[4];
    for (int i = 0; i < 4; ++i) {
      rows[i] = __shfl_sync(kWholeWarp, a[i], lane / 4 * 4 + source);
    }
    for (int column = 0; column < 2; ++column) {
      const int from = (lane % 4 * 2 + column) * 4 + source;
      for (int half = 0; half < 2; ++half) {
        const uint32_t values = __shfl_sync(kWholeWarp, b[half], from);
        for (int i = 0; i < 2; ++i) {
          const float value = element_of_pair<Element>(values, i);
          sums[column] += element_of_pair<Element>(rows[2 * half], i) * value;
          sums[2 + column] +=
              element_of_pair<Element>(rows[2 * half + 1], i) * value;
        }
      }
    }
  }
#endif
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
  uint32_t pair = 0;
  for (int i = 0; i < 2; ++i) {
    const auto value = convert<Element>(element_of_pair<Element>(shifted, i) -
                                        (kBfloat16 ? 136.0f : 1032.0f));
    uint16_t half;
    memcpy(&half, &value, sizeof(half));
    pair |= static_cast<uint32_t>(half) << (16 * i);
  }
  return pair;
#endif
}

}  // namespace pkg::cuda
