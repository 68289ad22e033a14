// Dot products of four bytes and of pairs of bfloat16, a lane each, for the
// instruction sets that have them. PKG_HAS_BYTE_DOT: AVX-512 or AVX2 with VNNI,
// whose instruction takes unsigned bytes by signed ones (PKG_HAS_VPDPBUSD), or
// NEON with DotProd. PKG_HAS_BFLOAT16_DOT: AVX-512 with BF16, or NEON with it.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/simd/simd.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define PKG_HAS_VPDPBUSD 1
#endif
#if defined(PKG_HAS_VPDPBUSD) || defined(__ARM_FEATURE_DOTPROD)
#define PKG_HAS_BYTE_DOT 1
#endif
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PKG_HAS_BFLOAT16_DOT 1
#endif

namespace pkg::simd {

#if defined(PKG_HAS_BYTE_DOT)
// Adds the products of bytes with signed bytes. The first ones VPDPBUSD takes
// for unsigned and SDOT for signed: of 0 to 127 that is the same. Exact modulo
// 2^32.
inline Vector<int32_t> dot_bytes(Vector<uint32_t> a, Vector<uint32_t> b,
                                 Vector<int32_t> sum) {
#if defined(__aarch64__)
  return std::bit_cast<Vector<int32_t>>(vdotq_s32(std::bit_cast<int32x4_t>(sum),
                                                  std::bit_cast<int8x16_t>(a),
                                                  std::bit_cast<int8x16_t>(b)));
#elif defined(__AVX512VNNI__)
  return std::bit_cast<Vector<int32_t>>(_mm512_dpbusd_epi32(
      std::bit_cast<__m512i>(sum), std::bit_cast<__m512i>(a),
      std::bit_cast<__m512i>(b)));
#else
  return std::bit_cast<Vector<int32_t>>(_mm256_dpbusd_avx_epi32(
      std::bit_cast<__m256i>(sum), std::bit_cast<__m256i>(a),
      std::bit_cast<__m256i>(b)));
#endif
}
#endif

#if defined(PKG_HAS_BFLOAT16_DOT)
// Adds two products. Denormal operands count as zero and denormal results
// become zero; BFDOT rounds every step to odd, which VDPBF16PS does not.
inline Vector<float> dot_bfloat16(Vector<uint32_t> a, Vector<uint32_t> b,
                                  Vector<float> sum) {
#if defined(__aarch64__)
  // GCC 12 makes constants of bfloat16 by FMOV, which makes them of float16:
  // it must not see that an operand is one. (Of others this would be a copy.)
  if (__builtin_constant_p(a[0])) {
    __asm__("" : "+w"(a));
  }
  if (__builtin_constant_p(b[0])) {
    __asm__("" : "+w"(b));
  }
  return std::bit_cast<Vector<float>>(vbfdotq_f32(
      std::bit_cast<float32x4_t>(sum), std::bit_cast<bfloat16x8_t>(a),
      std::bit_cast<bfloat16x8_t>(b)));
#elif defined(__clang__)
  // Clang 16 crashes where registers of bfloat16 are made of broadcast words.
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
#else
  return std::bit_cast<Vector<float>>(
      _mm512_dpbf16_ps(std::bit_cast<__m512>(sum), std::bit_cast<__m512bh>(a),
                       std::bit_cast<__m512bh>(b)));
#endif
}
#endif

}  // namespace pkg::simd
