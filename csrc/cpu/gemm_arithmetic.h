// The arithmetics of matrix multiplication: what one lane of a packed operand
// holds and how two vectors of lanes are multiplied and accumulated. A lane may
// hold several consecutive values of the inner dimension (kDepth of them), as
// the dot-product instructions want. The kernels and the packing above this
// file are written once for all of them.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace pkg::cpu {

using simd::BFloat16;
using simd::Half;
using simd::Vector;

// float or double, by fused multiply-add where the processor has it. Half
// precision comes here too, converted while it is packed.
template <class T>
struct Floating {
  using Lane = T;
  using Accumulator = T;
  static constexpr int kDepth = 1;

  template <class Source>
  static T value(Source source) {
    return static_cast<T>(source);
  }
  static T lane(const T (&values)[1]) { return values[0]; }

  static Vector<T> multiply_add(Vector<T> a, Vector<T> b, Vector<T> sum) {
    return a * b + sum;
  }
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16: two products and two additions a lane and instruction.
// VDPBF16PS takes denormal inputs as zero and flushes denormal results.
struct Bfloat16Dot {
  using Lane = uint32_t;
  using Accumulator = float;
  static constexpr int kDepth = 2;

  template <class Source>
  static uint16_t value(Source source) {
    if constexpr (std::is_same_v<Source, BFloat16>) {
      return source.x;
    } else {
      return BFloat16(static_cast<float>(source)).x;
    }
  }
  static uint32_t lane(const uint16_t (&values)[2]) {
    return values[0] | (static_cast<uint32_t>(values[1]) << 16);
  }

  static Vector<float> multiply_add(Vector<uint32_t> a, Vector<uint32_t> b,
                                    Vector<float> sum) {
    return std::bit_cast<Vector<float>>(
        _mm512_dpbf16_ps(std::bit_cast<__m512>(sum), std::bit_cast<__m512bh>(a),
                         std::bit_cast<__m512bh>(b)));
  }
};
#endif

// int8 widened to pairs of int16: the sum of two products of int8 fits in 32
// bits, also (-128)(-128) + (-128)(-128), so this is exact modulo 2^32.
struct Int8Pairs {
  using Lane = uint32_t;
  using Accumulator = int32_t;
  static constexpr int kDepth = 2;

  static uint16_t value(int8_t source) {
    return static_cast<uint16_t>(static_cast<int16_t>(source));
  }
  static uint32_t lane(const uint16_t (&values)[2]) {
    return values[0] | (static_cast<uint32_t>(values[1]) << 16);
  }

  static Vector<int32_t> multiply_add(Vector<uint32_t> a, Vector<uint32_t> b,
                                      Vector<int32_t> sum) {
#if defined(__AVX512BW__)
    return sum + std::bit_cast<Vector<int32_t>>(_mm512_madd_epi16(
                     std::bit_cast<__m512i>(a), std::bit_cast<__m512i>(b)));
#elif defined(__AVX2__)
    return sum + std::bit_cast<Vector<int32_t>>(_mm256_madd_epi16(
                     std::bit_cast<__m256i>(a), std::bit_cast<__m256i>(b)));
#elif defined(__SSE2__)
    return sum + std::bit_cast<Vector<int32_t>>(_mm_madd_epi16(
                     std::bit_cast<__m128i>(a), std::bit_cast<__m128i>(b)));
#else
    const auto low = [](Vector<uint32_t> v) {
      return std::bit_cast<Vector<int32_t>>(v << 16) >> 16;
    };
    const auto high = [](Vector<uint32_t> v) {
      return std::bit_cast<Vector<int32_t>>(v) >> 16;
    };
    return sum + low(a) * low(b) + high(a) * high(b);
#endif
  }
};

// The arithmetic that a product of `Input` matrices is done in.
template <class Input>
struct ArithmeticOf {
  using type = Floating<simd::Compute<Input>>;
};
template <>
struct ArithmeticOf<int8_t> {
  using type = Int8Pairs;
};
#if defined(__AVX512BF16__)
template <>
struct ArithmeticOf<BFloat16> {
  using type = Bfloat16Dot;
};
#endif

}  // namespace pkg::cpu
