// Products of int8 with int4, four values an element.
//
// The instructions multiply unsigned by signed bytes, so an int4 value q counts
// as q + 8, which is its bits with the highest one flipped and lies in 0 ...
// 15; what a row has too much, 8 times the sum of its values, is taken off at
// the end. Without VNNI, VPMADDUBSW adds two such products in int16, where int8
// by int8 would saturate: here they reach 2 x 15 x 128 = 3840. Exact modulo
// 2^32.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/simd/dot_products.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu {

using simd::Vector;

struct Int4Quads {
  // An arithmetic of cpu/gemm/contract.h, for operands that are packed here.
  using KGroup = uint32_t;
  using Accumulator = int32_t;
  using Right = Int4Quads;
  static constexpr int kKGroupSize = 4;
  static constexpr bool kCompensated = false;

  static constexpr uint32_t kOffset = 8;
  static constexpr uint32_t kFlip = 0x88888888U;
  static constexpr uint32_t kLow = 0x0F0F0F0FU;

  // The values in the low and in the high halves of packed bytes, plus 8.
  static Vector<uint32_t> low(Vector<uint32_t> bytes) {
    return (bytes ^ kFlip) & kLow;
  }
  static Vector<uint32_t> high(Vector<uint32_t> bytes) {
    return ((bytes ^ kFlip) >> 4) & kLow;
  }

  // a holds signed values, b those of low() or high().
  static Vector<int32_t> multiply_add(Vector<uint32_t> a, Vector<uint32_t> b,
                                      Vector<int32_t> sum) {
#if defined(PKG_HAS_BYTE_DOT)
    return simd::dot_bytes(b, a, sum);
#elif defined(__SSSE3__)
    return add_pairs(multiply_pairs(a, b), sum);
#else
    const auto value = [](Vector<uint32_t> v, int byte) {
      return std::bit_cast<Vector<int32_t>>(v << (24 - 8 * byte)) >> 24;
    };
    for (int byte = 0; byte < 4; ++byte) {
      sum += value(a, byte) * value(b, byte);
    }
    return sum;
#endif
  }

  // Both products, for an instruction less where it adds in int16.
  static Vector<int32_t> multiply_add(Vector<uint32_t> a, Vector<uint32_t> b,
                                      Vector<uint32_t> c, Vector<uint32_t> d,
                                      Vector<int32_t> sum) {
#if defined(__SSSE3__) && !defined(PKG_HAS_BYTE_DOT)
    return add_pairs(multiply_pairs(a, b) + multiply_pairs(c, d), sum);
#else
    return multiply_add(c, d, multiply_add(a, b, sum));
#endif
  }

 private:
#if defined(__SSSE3__) && !defined(PKG_HAS_BYTE_DOT)
  static Vector<int16_t> multiply_pairs(Vector<uint32_t> a,
                                        Vector<uint32_t> b) {
#if defined(__AVX512BW__)
    return std::bit_cast<Vector<int16_t>>(_mm512_maddubs_epi16(
        std::bit_cast<__m512i>(b), std::bit_cast<__m512i>(a)));
#elif defined(__AVX2__)
    return std::bit_cast<Vector<int16_t>>(_mm256_maddubs_epi16(
        std::bit_cast<__m256i>(b), std::bit_cast<__m256i>(a)));
#else
    return std::bit_cast<Vector<int16_t>>(_mm_maddubs_epi16(
        std::bit_cast<__m128i>(b), std::bit_cast<__m128i>(a)));
#endif
  }

  static Vector<int32_t> add_pairs(Vector<int16_t> pairs, Vector<int32_t> sum) {
#if defined(__AVX512BW__)
    return sum + std::bit_cast<Vector<int32_t>>(_mm512_madd_epi16(
                     std::bit_cast<__m512i>(pairs), _mm512_set1_epi16(1)));
#elif defined(__AVX2__)
    return sum + std::bit_cast<Vector<int32_t>>(_mm256_madd_epi16(
                     std::bit_cast<__m256i>(pairs), _mm256_set1_epi16(1)));
#else
    return sum + std::bit_cast<Vector<int32_t>>(_mm_madd_epi16(
                     std::bit_cast<__m128i>(pairs), _mm_set1_epi16(1)));
#endif
  }
#endif
};

}  // namespace pkg::cpu
