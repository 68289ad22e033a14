// Remainders for the moduli, in vectors of words.
#pragma once

#include <array>
#include <cstdint>

#include "cpu/residues/scheme.h"

#if defined(PKG_HAS_TILES)

#include <immintrin.h>

namespace pkg::cpu::residues {

// Of a modulus, in every lane when loaded.
struct ModulusConstants {
  // The remainders of 1 and 2^16, of 2^32 and 2^48, as pairs of 16 bits.
  int32_t low_weights;
  int32_t high_weights;
  float modulus;
  float inverse;
};

constexpr ModulusConstants constants_of(int modulus) {
  const auto pair = [modulus](int bits) {
    const auto lower =
        static_cast<uint16_t>(remainder_of(Int128{1} << bits, modulus));
    const auto upper =
        static_cast<uint16_t>(remainder_of(Int128{1} << (bits + 16), modulus));
    return static_cast<int32_t>(lower | uint32_t{upper} << 16);
  };
  return {pair(0), pair(32), static_cast<float>(modulus),
          1 / static_cast<float>(modulus)};
}
inline constexpr auto kModulusConstants = [] {
  std::array<ModulusConstants, kModuli> constants{};
  for (int i = 0; i < kModuli; ++i) {
    constants[i] = constants_of(kModulus[i]);
  }
  return constants;
}();

// Of integers up to 2^24. The quotient may be off by one where it is nearly
// half way between two: the remainder is 127 at most even so.
[[gnu::always_inline]] inline __m512i remainders(__m512i integers, int which) {
  const ModulusConstants& constants = kModulusConstants[which];
  // Adding it rounds to an integer.
  const __m512 magic = _mm512_set1_ps(0x1.8p23F);
  const __m512 values = _mm512_maskz_cvtepi32_ps(~__mmask16{0}, integers);
  const __m512 quotient = _mm512_sub_ps(
      _mm512_fmadd_ps(values, _mm512_set1_ps(constants.inverse), magic), magic);
  return _mm512_maskz_cvtps_epi32(
      ~__mmask16{0},
      _mm512_fnmadd_ps(quotient, _mm512_set1_ps(constants.modulus), values));
}

// Of integers of four digits of 16 bits.
[[gnu::always_inline]] inline __m512i remainders(__m512i low, __m512i high,
                                                 int which) {
  const ModulusConstants& constants = kModulusConstants[which];
  const __m512i sums = _mm512_dpwssd_epi32(
      _mm512_dpwssd_epi32(_mm512_setzero_si512(), low,
                          _mm512_set1_epi32(constants.low_weights)),
      high, _mm512_set1_epi32(constants.high_weights));
  return remainders(sums, which);
}

// Bytes of four registers of words: of each 128 bits four of the first, of the
// second and so on.
[[gnu::always_inline]] inline __m512i bytes_of(const __m512i (&words)[4]) {
  const auto pack = [](__m512i a, __m512i b) {
    return _mm512_maskz_packs_epi32(~__mmask32{0}, a, b);
  };
  return _mm512_maskz_packs_epi16(~__mmask64{0}, pack(words[0], words[1]),
                                  pack(words[2], words[3]));
}

}  // namespace pkg::cpu::residues

#endif
