// Results of products by residues: the remainders of sums of bytes, and the
// numbers that they are the remainders of.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "cpu/residues/remainders.h"
#include "cpu/residues/scheme.h"
#include "cpu/simd/simd.h"

#if defined(PKG_HAS_TILES)

#include <immintrin.h>

namespace pkg::cpu::residues {

// A micro-tile's elements, 32 rows of 32, and how far those of the next modulus
// are.
inline constexpr int64_t kTileElements = int64_t{kStrip} * kStrip;

// Pieces that they are made in, each of two rows.
inline constexpr int64_t kPieces = kStrip / 2;

// Makes bytes of a piece of a micro-tile's sums: the remainders of these, or of
// these and those before.
[[gnu::always_inline]] inline void store_remainders(const int32_t* sums,
                                                    int which, bool adds,
                                                    int64_t piece,
                                                    int8_t* bytes) {
  constexpr int kTogether = 4;
  constexpr int kWords = 16;
  constexpr __mmask16 kAll = ~__mmask16{0};
  // Packing two and two words leaves those of a register 16 bytes apart.
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13,  //
                                             2, 6, 10, 14, 3, 7, 11, 15);
  sums += piece * kTogether * kWords;
  bytes += piece * kTogether * kWords;
  __m512i rest[kTogether];
#pragma GCC unroll 4
  for (int i = 0; i < kTogether; ++i) {
    __m512i words = _mm512_load_si512(sums + i * kWords);
    if (adds) {
      words = _mm512_add_epi32(
          words, _mm512_maskz_cvtepi8_epi32(
                     kAll, _mm_loadu_si128(reinterpret_cast<const __m128i*>(
                               bytes + i * kWords))));
    }
    rest[i] = remainders(words, which);
  }
  _mm512_store_si512(
      bytes, _mm512_maskz_permutexvar_epi32(kAll, in_order, bytes_of(rest)));
}

inline constexpr auto kWeights = [] {
  std::array<TwoParts, kModuli> weights{};
  for (int i = 0; i < kModuli; ++i) {
    weights[i] = weight_of(i);
  }
  return weights;
}();

// The numbers of a row of kCount registers of a micro-tile, whose bytes of the
// first modulus are at `bytes`, those of the next one `plane` behind. The sum
// of remainders and weights is less than 946 times the range from its number;
// its first part is exact, and so are the multiple of the range and the
// difference.
template <int kCount>
[[gnu::always_inline]] inline void numbers_of(
    const int8_t* bytes, int64_t plane,
    simd::Vector<double> (&numbers)[kCount]) {
  using Doubles = simd::Vector<double>;
  constexpr int kLanes = simd::kLanes<double>;
  Doubles first[kCount]{};
  Doubles second[kCount]{};
  for (int which = 0; which < kModuli; ++which, bytes += plane) {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      const __m512i words = _mm512_maskz_cvtepi8_epi64(
          0xFF, _mm_loadl_epi64(
                    reinterpret_cast<const __m128i*>(bytes + i * kLanes)));
      const auto rest =
          std::bit_cast<Doubles>(_mm512_maskz_cvtepi64_pd(0xFF, words));
      first[i] += rest * kWeights[which].first;
      second[i] += rest * kWeights[which].second;
    }
  }
  // Adding it rounds to an integer.
  constexpr double kMagic = 0x1.8p52;
  constexpr double kInverse = 1 / static_cast<double>(kRange);
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) {
    const Doubles times = (first[i] * kInverse + kMagic) - kMagic;
    numbers[i] = (first[i] - times * kRangeParts.first) +
                 (second[i] - times * kRangeParts.second);
  }
}

}  // namespace pkg::cpu::residues

#endif
