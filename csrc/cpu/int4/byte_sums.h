// Dot products of bytes: sums, in 32 bits, of unsigned times signed bytes in
// groups of four. The unsigned ones are halves of bytes, 0 to 15. Without VNNI,
// pairs of products are added in 16 bits: 15 2^7 2 each, and eight of them at
// the most (a chunk of 64 bytes, two halves, 16 bytes at a time), so that they
// do not overflow: 30720 < 2^15.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/simd/dot_products.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu {

using simd::Vector;

namespace detail {

// kStartsAnywhere: whether start() takes what the sums begin with.
#if defined(PKG_HAS_BYTE_DOT)
struct ByteSums {
  static constexpr bool kStartsAnywhere = true;
  Vector<int32_t> sums{};

  void start(Vector<int32_t> value) { sums = value; }

  void add(Vector<uint32_t> values, const int8_t* limbs) {
    sums = simd::dot_bytes(
        values, simd::load(reinterpret_cast<const uint32_t*>(limbs)), sums);
  }
  Vector<int32_t> total() const { return sums; }
};
#elif defined(__SSSE3__)
struct ByteSums {
#if defined(__AVX512BW__)
  using Register = __m512i;
  static Register multiply(Register values, Register limbs) {
    return _mm512_maddubs_epi16(values, limbs);
  }
  static Register add_pairs(Register sums) {
    return _mm512_madd_epi16(sums, _mm512_set1_epi16(1));
  }
#elif defined(__AVX2__)
  using Register = __m256i;
  static Register multiply(Register values, Register limbs) {
    return _mm256_maddubs_epi16(values, limbs);
  }
  static Register add_pairs(Register sums) {
    return _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
  }
#else
  using Register = __m128i;
  static Register multiply(Register values, Register limbs) {
    return _mm_maddubs_epi16(values, limbs);
  }
  static Register add_pairs(Register sums) {
    return _mm_madd_epi16(sums, _mm_set1_epi16(1));
  }
#endif
  static constexpr bool kStartsAnywhere = false;
  Vector<int16_t> sums{};

  void start(Vector<int32_t>) {}

  void add(Vector<uint32_t> values, const int8_t* limbs) {
    const auto signed_bytes = std::bit_cast<Register>(
        simd::load(reinterpret_cast<const uint32_t*>(limbs)));
    sums += std::bit_cast<Vector<int16_t>>(
        multiply(std::bit_cast<Register>(values), signed_bytes));
  }
  Vector<int32_t> total() const {
    return std::bit_cast<Vector<int32_t>>(
        add_pairs(std::bit_cast<Register>(sums)));
  }
};
#else
struct ByteSums {
  static constexpr bool kStartsAnywhere = true;
  Vector<int32_t> sums{};

  void start(Vector<int32_t> value) { sums = value; }

  void add(Vector<uint32_t> values, const int8_t* limbs) {
    const auto all = std::bit_cast<Vector<uint32_t>>(
        simd::load(reinterpret_cast<const uint32_t*>(limbs)));
    for (int byte = 0; byte < 4; ++byte) {
      const auto value =
          std::bit_cast<Vector<int32_t>>(values >> (8 * byte) & 0xFFU);
      sums += value *
              (std::bit_cast<Vector<int32_t>>(all << (24 - 8 * byte)) >> 24);
    }
  }
  Vector<int32_t> total() const { return sums; }
};
#endif

}  // namespace detail

}  // namespace pkg::cpu
