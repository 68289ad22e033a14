// The arithmetics of matrix multiplication: what one k-group of a packed
// operand holds, kKGroupSize consecutive values of the inner dimension, and how
// two registers of k-groups are multiplied and accumulated. The kernels and the
// packing above this file are written once for all of them; what each has to
// say is in cpu/gemm/contract.h (ProductArithmetic, PacksFrom). Packing reads
//
//   load_k_groups(from)    a register of k-groups of one row of A or column of
//                          B: kLanes kKGroupSize contiguous values
//   interleave(lines)      one k-group of kLanes rows or columns that lie side
//                          by side: kKGroupSize runs of kLanes contiguous
//                          values
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/simd/dot_products.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu {

using simd::BFloat16;
using simd::Half;
using simd::Vector;

namespace detail {

template <class Source>
Vector<uint32_t> load_words(const Source* from) {
  Vector<uint32_t> words;
  std::memcpy(&words, from, sizeof(words));
  return words;
}

// kLanes contiguous values of 16 or 8 bits, each in the low bits of an element
// and, where Narrow is signed, its sign in the others.
template <class Narrow>
Vector<uint32_t> widen(const void* from) {
  if constexpr (std::is_same_v<Narrow, uint16_t>) {
    simd::detail::Bits16 values;
    std::memcpy(&values, from, sizeof(values));
    return simd::detail::widen(values);
  } else {
    [[maybe_unused]] constexpr bool kSigned = std::is_signed_v<Narrow>;
#if defined(__AVX512F__)
    const __m128i values = _mm_loadu_si128(static_cast<const __m128i*>(from));
    return std::bit_cast<Vector<uint32_t>>(
        kSigned ? _mm512_maskz_cvtepi8_epi32(0xFFFF, values)
                : _mm512_maskz_cvtepu8_epi32(0xFFFF, values));
#elif defined(__AVX2__)
    const __m128i values = _mm_loadl_epi64(static_cast<const __m128i*>(from));
    return std::bit_cast<Vector<uint32_t>>(
        kSigned ? _mm256_cvtepi8_epi32(values) : _mm256_cvtepu8_epi32(values));
#elif defined(__SSE4_1__)
    int32_t bytes;
    std::memcpy(&bytes, from, sizeof(bytes));
    const __m128i values = _mm_cvtsi32_si128(bytes);
    return std::bit_cast<Vector<uint32_t>>(kSigned ? _mm_cvtepi8_epi32(values)
                                                   : _mm_cvtepu8_epi32(values));
#elif defined(__aarch64__)
    uint32_t bytes;
    std::memcpy(&bytes, from, sizeof(bytes));
    return kSigned ? std::bit_cast<Vector<uint32_t>>(
                         vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(bytes)))))
                   : std::bit_cast<Vector<uint32_t>>(
                         vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes)))));
#else
    const Narrow* values = static_cast<const Narrow*>(from);
    Vector<uint32_t> words{};
    for (int i = 0; i < simd::kLanes<uint32_t>; ++i) {
      words[i] = static_cast<uint32_t>(values[i]);
    }
    return words;
#endif
  }
}

}  // namespace detail

// float or double, by fused multiply-add where the processor has it. Half
// precision comes here too, converted while it is packed.
template <class T>
struct Floating {
  using KGroup = T;
  using Accumulator = T;
  using Right = Floating;
  static constexpr int kKGroupSize = 1;
  static constexpr bool kCompensated = false;

  template <class Source>
  static Vector<T> load_k_groups(const Source* from) {
    return simd::load(from);
  }
  template <class Source>
  static Vector<T> interleave(const Source* const (&lines)[1]) {
    return simd::load(lines[0]);
  }

  static Vector<T> multiply_add(Vector<T> a, Vector<T> b, Vector<T> sum) {
    return a * b + sum;
  }
#if defined(__AVX512F__)
  // By a k-group in memory, which the instruction broadcasts: GCC would load a
  // register of it for all multiplications.
  static Vector<T> multiply_add_from(const T* a, Vector<T> b, Vector<T> sum)
    requires std::is_same_v<T, float>
  {
    __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(b), "m"(*a));
    return sum;
  }
#endif
#if defined(__aarch64__)
  // By one k-group of A, and by one of a register of them.
  static Vector<T> multiply_add(T a, Vector<T> b, Vector<T> sum) {
    return simd::broadcast(a) * b + sum;
  }
  template <int kLane>
  static Vector<T> multiply_add_lane(Vector<T> a, Vector<T> b, Vector<T> sum) {
    if constexpr (std::is_same_v<T, float>) {
      return std::bit_cast<Vector<T>>(vfmaq_laneq_f32(
          std::bit_cast<float32x4_t>(sum), std::bit_cast<float32x4_t>(b),
          std::bit_cast<float32x4_t>(a), kLane));
    } else {
      return std::bit_cast<Vector<T>>(vfmaq_laneq_f64(
          std::bit_cast<float64x2_t>(sum), std::bit_cast<float64x2_t>(b),
          std::bit_cast<float64x2_t>(a), kLane));
    }
  }
#endif
};

#if defined(PKG_HAS_BFLOAT16_DOT)
// Pairs of bfloat16: two products and two additions an element.
struct Bfloat16Dot {
  using KGroup = uint32_t;
  using Accumulator = float;
  using Right = Bfloat16Dot;
  static constexpr int kKGroupSize = 2;
  static constexpr bool kCompensated = false;

  static Vector<uint32_t> load_k_groups(const BFloat16* from) {
    return detail::load_words(from);
  }
  static Vector<uint32_t> interleave(const BFloat16* const (&lines)[2]) {
    return detail::widen<uint16_t>(lines[0]) |
           (detail::widen<uint16_t>(lines[1]) << 16);
  }

  static Vector<float> multiply_add(Vector<uint32_t> a, Vector<uint32_t> b,
                                    Vector<float> sum) {
    return simd::dot_bfloat16(a, b, sum);
  }
#if defined(__aarch64__)
  static Vector<float> multiply_add(uint32_t a, Vector<uint32_t> b,
                                    Vector<float> sum) {
    return std::bit_cast<Vector<float>>(vbfdotq_lane_f32(
        std::bit_cast<float32x4_t>(sum), std::bit_cast<bfloat16x8_t>(b),
        vreinterpret_bf16_u64(vcreate_u64(a)), 0));
  }
  template <int kLane>
  static Vector<float> multiply_add_lane(Vector<uint32_t> a, Vector<uint32_t> b,
                                         Vector<float> sum) {
    return std::bit_cast<Vector<float>>(vbfdotq_laneq_f32(
        std::bit_cast<float32x4_t>(sum), std::bit_cast<bfloat16x8_t>(b),
        std::bit_cast<bfloat16x8_t>(a), kLane));
  }
#endif
};
#endif

// int8 widened to pairs of int16: the sum of two products of int8 fits in 32
// bits, also (-128)(-128) + (-128)(-128), so this is exact modulo 2^32.
struct Int8Pairs {
  using KGroup = uint32_t;
  using Accumulator = int32_t;
  using Right = Int8Pairs;
  static constexpr int kKGroupSize = 2;

  static constexpr bool kCompensated = false;

  static Vector<uint32_t> load_k_groups(const int8_t* from) {
#if defined(__aarch64__)
    return std::bit_cast<Vector<uint32_t>>(vmovl_s8(vld1_s8(from)));
#else
    using Bytes = typename simd::VectorOf<int8_t, simd::kVectorBytes / 2>::type;
    Bytes values;
    std::memcpy(&values, from, sizeof(values));
    return std::bit_cast<Vector<uint32_t>>(
        __builtin_convertvector(values, Vector<int16_t>));
#endif
  }
  static Vector<uint32_t> interleave(const int8_t* const (&lines)[2]) {
    return (detail::widen<int8_t>(lines[0]) & 0xFFFFU) |
           (detail::widen<int8_t>(lines[1]) << 16);
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

#if defined(PKG_HAS_VPDPBUSD)
// Four int8 a k-group. VPDPBUSD multiplies unsigned by signed bytes and adds
// without saturation: the right operand, which is packed in any case, is packed
// with 128 added to each value, and a row's compensation, which its sums start
// from, is -128 times the sum of its values. Exact modulo 2^32, also for -128.
struct OffsetInt8Quads;
struct Int8Quads {
  using KGroup = uint32_t;
  using Accumulator = int32_t;
  using Right = OffsetInt8Quads;
  static constexpr int kKGroupSize = 4;
  static constexpr bool kCompensated = true;
  static constexpr uint32_t kOffset = 0x80808080U;

  static Vector<uint32_t> load_k_groups(const int8_t* from) {
    return detail::load_words(from);
  }
  static Vector<uint32_t> interleave(const int8_t* const (&lines)[4]) {
#if defined(__AVX512VNNI__)
    // Each line in a quarter of a register; then the words of four columns into
    // each quarter, and their bytes in the columns' order.
    const auto line = [&](int i) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(lines[i]));
    };
    __m512i all = _mm512_zextsi128_si512(line(0));
    all = _mm512_mask_broadcast_i32x4(all, 0x00F0, line(1));
    all = _mm512_mask_broadcast_i32x4(all, 0x0F00, line(2));
    all = _mm512_mask_broadcast_i32x4(all, 0xF000, line(3));
    const __m512i words = _mm512_maskz_permutexvar_epi32(
        0xFFFF,
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
        all);
    return std::bit_cast<Vector<uint32_t>>(_mm512_shuffle_epi8(
        words,
        _mm512_set4_epi32(0x0F0B0703, 0x0E0A0602, 0x0D090501, 0x0C080400)));
#else
    // The lines' bytes and then their pairs in turns.
    const auto line = [&](int i) {
      return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(lines[i]));
    };
    const __m128i first = _mm_unpacklo_epi8(line(0), line(1));
    const __m128i second = _mm_unpacklo_epi8(line(2), line(3));
    return std::bit_cast<Vector<uint32_t>>(_mm256_set_m128i(
        _mm_unpackhi_epi16(first, second), _mm_unpacklo_epi16(first, second)));
#endif
  }
  static Vector<int32_t> multiply_add(Vector<uint32_t> a, Vector<uint32_t> b,
                                      Vector<int32_t> sum) {
    return simd::dot_bytes(b, a, sum);
  }
  static Vector<int32_t> compensate(Vector<int32_t> sum,
                                    Vector<uint32_t> k_groups) {
    return sum - multiply_add(k_groups, Vector<uint32_t>{} + kOffset,
                              Vector<int32_t>{});
  }
};

struct OffsetInt8Quads : Int8Quads {
  static Vector<uint32_t> load_k_groups(const int8_t* from) {
    return Int8Quads::load_k_groups(from) ^ kOffset;
  }
  static Vector<uint32_t> interleave(const int8_t* const (&lines)[4]) {
    return Int8Quads::interleave(lines) ^ kOffset;
  }
};
#endif

#if defined(__ARM_FEATURE_DOTPROD)
// Four int8 a k-group, by SDOT, which takes both as signed. Exact modulo 2^32.
struct Int8Quads {
  using KGroup = uint32_t;
  using Accumulator = int32_t;
  using Right = Int8Quads;
  static constexpr int kKGroupSize = 4;
  static constexpr bool kCompensated = false;

  static Vector<uint32_t> load_k_groups(const int8_t* from) {
    return detail::load_words(from);
  }
  // The lines' bytes and then their pairs in turns.
  static Vector<uint32_t> interleave(const int8_t* const (&lines)[4]) {
    const auto line = [&](int i) {
      uint32_t bytes;
      std::memcpy(&bytes, lines[i], sizeof(bytes));
      return vcreate_s8(bytes);
    };
    const auto pairs = [&](int i) {
      return vreinterpret_s16_s8(vzip1_s8(line(i), line(i + 1)));
    };
    const int16x4x2_t quads = vzip_s16(pairs(0), pairs(2));
    return std::bit_cast<Vector<uint32_t>>(
        vcombine_s16(quads.val[0], quads.val[1]));
  }
  static Vector<int32_t> multiply_add(Vector<uint32_t> a, Vector<uint32_t> b,
                                      Vector<int32_t> sum) {
    return simd::dot_bytes(a, b, sum);
  }
  static Vector<int32_t> multiply_add(uint32_t a, Vector<uint32_t> b,
                                      Vector<int32_t> sum) {
    return std::bit_cast<Vector<int32_t>>(
        vdotq_lane_s32(std::bit_cast<int32x4_t>(sum),
                       std::bit_cast<int8x16_t>(b), vcreate_s8(a), 0));
  }
  template <int kLane>
  static Vector<int32_t> multiply_add_lane(Vector<uint32_t> a,
                                           Vector<uint32_t> b,
                                           Vector<int32_t> sum) {
    return std::bit_cast<Vector<int32_t>>(vdotq_laneq_s32(
        std::bit_cast<int32x4_t>(sum), std::bit_cast<int8x16_t>(b),
        std::bit_cast<int8x16_t>(a), kLane));
  }
};
#endif

#if defined(PKG_HAS_BYTE_DOT)
using Int8Dot = Int8Quads;
#else
using Int8Dot = Int8Pairs;
#endif

// The arithmetic that a product of `Input` matrices is done in.
template <class Input>
struct ArithmeticOf {
  using type = Floating<simd::Compute<Input>>;
};
template <>
struct ArithmeticOf<int8_t> {
  using type = Int8Dot;
};
#if defined(PKG_HAS_BFLOAT16_DOT)
template <>
struct ArithmeticOf<BFloat16> {
  using type = Bfloat16Dot;
};
#endif

}  // namespace pkg::cpu
