// Elementary functions on vectors of float or double. An ulp is that of the
// result; tests/test_simd.py, ops/test_linear.py and ops/test_d_sigmoid.py hold
// them to it.
//
// exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln(2)/2, with r by Cody and
// Waite's two-part ln 2 and exp(r) by its Taylor polynomial, whose remainder at
// |r| = 0.347 is under 2^-27 (float, degree 7) and 2^-57 (double, degree 13).
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/simd/simd.h"

namespace pkg::simd {

namespace detail {

template <class T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  using Bits = int32_t;
  static constexpr int kMantissaBits = 23;
  static constexpr int kExponentBias = 127;
  static constexpr float kRound = 0x1.8p23F;
  static constexpr float kLn2High = 0x1.62e400p-1F;
  static constexpr float kLn2Low = 0x1.7f7d1cp-20F;
  // Beyond these exp is infinity, or rounds to zero.
  static constexpr float kLargest = 89.0F;
  static constexpr float kSmallest = -104.0F;
  // Below this exp is negligible beside 1: 2^-99.
  static constexpr float kNegligible = -69.0F;
  static constexpr int kDegree = 7;
};

template <>
struct ExpConstants<double> {
  using Bits = int64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr int kExponentBias = 1023;
  static constexpr double kRound = 0x1.8p52;
  static constexpr double kLn2High = 0x1.62e42fee00000p-1;
  static constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr double kLargest = 710.0;
  static constexpr double kSmallest = -746.0;
  static constexpr double kNegligible = -600.0;
  static constexpr int kDegree = 13;
};

// Horner's scheme, from the last coefficient down. They are a template's
// argument and not a function's, so that GCC has them in memory as registers
// and makes each step one instruction.
template <const auto& kCoefficients, class V, size_t kCount>
[[gnu::always_inline]] inline void polynomials(const V (&x)[kCount],
                                               V (&sums)[kCount]) {
  constexpr size_t kLast = kCoefficients.size() - 1;
  each<kCount>([&](size_t i) {
    sums[i] = x[i] * kCoefficients[kLast] + kCoefficients[kLast - 1];
  });
#pragma GCC unroll 32
  for (size_t c = 2; c <= kLast; ++c) {
    each<kCount>(
        [&](size_t i) { sums[i] = sums[i] * x[i] + kCoefficients[kLast - c]; });
  }
}
template <const auto& kCoefficients, class V>
[[gnu::always_inline]] inline V polynomial(V x) {
  const V one[1] = {x};
  V sum[1];
  polynomials<kCoefficients>(one, sum);
  return sum[0];
}

// The least, or the most, that x may be; NaN stays: one instruction, where GCC
// makes two of a comparison with a constant and a selection.
template <class T>
inline Vector<T> at_least(T bound, Vector<T> x) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<Vector<T>>(_mm512_maskz_max_ps(
        0xFFFF, _mm512_set1_ps(bound), std::bit_cast<__m512>(x)));
  }
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<Vector<T>>(
        _mm256_max_ps(_mm256_set1_ps(bound), std::bit_cast<__m256>(x)));
  }
#endif
  return x < bound ? Vector<T>{} + bound : x;
}
template <class T>
inline Vector<T> at_most(T bound, Vector<T> x) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<Vector<T>>(_mm512_maskz_min_ps(
        0xFFFF, _mm512_set1_ps(bound), std::bit_cast<__m512>(x)));
  }
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<Vector<T>>(
        _mm256_min_ps(_mm256_set1_ps(bound), std::bit_cast<__m256>(x)));
  }
#endif
  return x > bound ? Vector<T>{} + bound : x;
}

template <class T>
struct ReducedExp {
  Vector<T> tail;  // exp(r) - 1
  Vector<T> n;
};

// value * 2^n for an n that exp() has: from below the exponents of the least
// denormal numbers to above that of infinity.
template <class T>
inline Vector<T> times_power_of_two(Vector<T> value, Vector<T> n) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<Vector<T>>(_mm512_maskz_scalef_ps(
        0xFFFF, std::bit_cast<__m512>(value), std::bit_cast<__m512>(n)));
  } else {
    return std::bit_cast<Vector<T>>(_mm512_maskz_scalef_pd(
        0xFF, std::bit_cast<__m512d>(value), std::bit_cast<__m512d>(n)));
  }
#else
  using C = ExpConstants<T>;
  using Bits = Vector<typename C::Bits>;
  // In two steps, so that each factor is a normal number.
  const Bits n_bits = std::bit_cast<Bits>(n + C::kRound) -
                      std::bit_cast<typename C::Bits>(C::kRound);
  const Bits half_n = n_bits >> 1;
  const auto power_of_two = [](Bits exponent) {
    return std::bit_cast<Vector<T>>((exponent + C::kExponentBias)
                                    << C::kMantissaBits);
  };
  return value * power_of_two(half_n) * power_of_two(n_bits - half_n);
#endif
}

// value * 2^n for n from -127 (-1023 of double), which makes 0, to the exponent
// of infinity: a factor is made of n's lowest bits.
template <class T>
inline Vector<T> times_normal_power_of_two(Vector<T> value, Vector<T> n) {
  using C = ExpConstants<T>;
  using Bits = Vector<typename C::Bits>;
  const Bits exponent =
      std::bit_cast<Bits>(n + (C::kRound + T(C::kExponentBias)));
  return value * std::bit_cast<Vector<T>>(exponent << C::kMantissaBits);
}

// Of exp(x + low), where low is what x lacks of an argument with more digits
// than T has, at most 2^-5 in magnitude.
template <class T, class... Low>
inline ReducedExp<T> reduce_exp(Vector<T> x, Low... low) {
  using C = ExpConstants<T>;
  x = at_least(C::kSmallest, at_most(C::kLargest, x));
  const Vector<T> shifted = x * T(1.442695040888963407) + C::kRound;
  const Vector<T> n = shifted - C::kRound;
  Vector<T> r = (x - n * C::kLn2High) - n * C::kLn2Low;
  ((r += low), ...);

  // Horner from the highest coefficient 1/degree! down to 1/2!.
  T factorial = 1;
  for (int i = 2; i <= C::kDegree; ++i) {
    factorial *= T(i);
  }
  Vector<T> p = Vector<T>{} + T(1) / factorial;
  for (int i = C::kDegree; i > 2; --i) {
    factorial /= T(i);
    p = p * r + T(1) / factorial;
  }
  return {p * r * r + r, n};
}

template <class V>
using ElementOf = std::remove_cvref_t<decltype(V{}[0])>;

}  // namespace detail

// Error under 1.5 ulp; infinity above the range, denormal numbers and zero
// below it, NaN for NaN.
template <class V>
inline V exp(V x) {
  using T = detail::ElementOf<V>;
  const auto [tail, n] = detail::reduce_exp<T>(x);
  return detail::times_power_of_two<T>(tail + 1, n);
}

// exp(x) - 1 for x <= 0, without cancellation near zero.
template <class V>
inline V expm1_of_nonpositive(V x) {
  using T = detail::ElementOf<V>;
  const auto [tail, n] = detail::reduce_exp<T>(x);
  const V scale = detail::times_power_of_two<T>(V{} + 1, n);
  return tail * scale + (scale - T(1));
}

// Which x exp_of_nonpositive is called with. NaN stays NaN in each.
enum class ExpRange {
  kNonpositive,  // -inf too
  kNormal,       // the same; results are 0 only where they are no normal number
  kFinite,       // infinities become NaN; what is far beyond the range of
                 // results may become NaN or infinity in place of 0 or infinity
  kAny,          // -inf becomes 0; what is too large is not finite
};

namespace detail {

// Where exp's result is 2^-127 (2^-1023 of double) and so 0.
template <class T>
inline constexpr T kExpIsZero =
    -T(0.693147180559945309) * ExpConstants<T>::kExponentBias;

// The least x whose exp is not 0.
template <class T, ExpRange kRange>
inline constexpr T kLeastOf =
    kRange == ExpRange::kNormal ? kExpIsZero<T> : ExpConstants<T>::kNegligible;

// Minimax coefficients of exp(r) for |r| <= ln(2)/2 from the highest degree
// down to 2; those of degree 1 and 0 are 1. Relative error 2^-28.3 and 2^-57.9,
// or 2^-17.5 where the result is to be rounded to half precision.
template <class T, bool kPrecise>
inline constexpr std::array<T, 0> kExp{};
template <>
inline constexpr std::array kExp<float, true>{0x1.6a2438p-10F, 0x1.1239e2p-7F,
                                              0x1.5558f2p-5F, 0x1.555492p-3F,
                                              0x1.fffffcp-2F};
template <>
inline constexpr std::array kExp<float, false>{0x1.52258ep-5F, 0x1.571cc2p-3F,
                                               0x1.0006b6p-1F};
template <>
inline constexpr std::array kExp<double, true>{
    0x1.ad7f7173666c9p-26, 0x1.28ad72907bd71p-22, 0x1.71df2550ac4c6p-19,
    0x1.a0199a0ca9cc3p-16, 0x1.a01a012a586d8p-13, 0x1.6c16c18429f90p-10,
    0x1.1111111127be3p-7,  0x1.555555555087dp-5,  0x1.55555555554fap-3,
    0x1.000000000000ap-1};

#if defined(__AVX512F__)
// The same with n in sixteenths, whose powers of two come from a table in a
// register, so that |r| <= ln(2)/32 and its polynomial is short: two multiply-
// adds fewer. Taylor's next term is spread over the interval: relative error
// 2^-28 of degree 3, and 2^-21 of degree 2 where not kPrecise.
alignas(64) inline constexpr std::array kPowersOfTwo{
    0x1.000000p+0F, 0x1.0b5586p+0F, 0x1.172b84p+0F, 0x1.2387a6p+0F,
    0x1.306fe0p+0F, 0x1.3dea64p+0F, 0x1.4bfdaep+0F, 0x1.5ab07ep+0F,
    0x1.6a09e6p+0F, 0x1.7a1148p+0F, 0x1.8ace54p+0F, 0x1.9c4918p+0F,
    0x1.ae89fap+0F, 0x1.c199bep+0F, 0x1.d5818ep+0F, 0x1.ea4afap+0F};

template <bool kPrecise, ExpRange kRange, size_t kCount>
[[gnu::always_inline]] inline void exp_by_table(Vector<float> (&x)[kCount]) {
  using V = Vector<float>;
  using C = ExpConstants<float>;
  constexpr float kSquare = 0.0216608494F * 0.0216608494F;  // (ln(2)/32)^2
  constexpr float kRoundToSixteenths = C::kRound / 16;
  V n[kCount];
  V power[kCount];
  V p[kCount];
  // True for NaN, which stays.
  __mmask16 counts[kCount];
  each<kCount>([&](size_t i) {
    counts[i] = kRange == ExpRange::kFinite
                    ? __mmask16{0xFFFF}
                    : _mm512_cmp_ps_mask(
                          std::bit_cast<__m512>(x[i]),
                          _mm512_set1_ps(kLeastOf<float, kRange>), _CMP_NLT_UQ);
  });
  each<kCount>(
      [&](size_t i) { n[i] = x[i] * 1.44269504F + kRoundToSixteenths; });
  each<kCount>([&](size_t i) {
    // By the lowest four bits of each lane.
    power[i] = std::bit_cast<V>(
        _mm512_maskz_permutexvar_ps(0xFFFF, std::bit_cast<__m512i>(n[i]),
                                    _mm512_load_ps(kPowersOfTwo.data())));
  });
  each<kCount>([&](size_t i) { n[i] = n[i] - kRoundToSixteenths; });
  if constexpr (kPrecise) {
    each<kCount>([&](size_t i) { x[i] = x[i] - n[i] * C::kLn2High; });
    each<kCount>([&](size_t i) { x[i] = x[i] - n[i] * C::kLn2Low; });
    each<kCount>(
        [&](size_t i) { p[i] = x[i] * (1.0F / 6) + (0.5F + kSquare / 24); });
    each<kCount>([&](size_t i) { p[i] = p[i] * x[i] + 1.0F; });
  } else {
    each<kCount>([&](size_t i) { x[i] = x[i] - n[i] * 0.693147181F; });
    each<kCount>([&](size_t i) { p[i] = x[i] * 0.5F + (1.0F + kSquare / 8); });
  }
  each<kCount>([&](size_t i) { x[i] = x[i] * power[i]; });
  each<kCount>([&](size_t i) { x[i] = p[i] * x[i] + power[i]; });
  // Powers of two are rounded down to whole ones.
  each<kCount>([&](size_t i) {
    x[i] = std::bit_cast<V>(_mm512_maskz_scalef_ps(
        counts[i], std::bit_cast<__m512>(x[i]), std::bit_cast<__m512>(n[i])));
  });
}
#endif
#if defined(__AMX_TILE__)
// Two to the power of x, with what Intel's processors do in one step each: the
// fraction of x, and a factor of two to the power of its floor. Two to the
// power of the fraction is a minimax polynomial which is 1 at 0, as exp is
// where scores are the same: relative error 2^-18.3. With their loads, rounding
// to bfloat16 and stores 3.96 cycles a register where the table takes 4.95.
template <ExpRange kRange, size_t kCount>
[[gnu::always_inline]] inline void exp2_by_fraction(
    Vector<float> (&x)[kCount]) {
  using V = Vector<float>;
  constexpr float kCoefficients[] = {0x1.b7f734p-7F, 0x1.abf868p-5F,
                                     0x1.ee2452p-3F, 0x1.62d6c6p-1F, 1.0F};
  V p[kCount];
  V fraction[kCount];
  each<kCount>([&](size_t i) {
    constexpr int kOfFloor = _MM_FROUND_TO_NEG_INF;
    fraction[i] = std::bit_cast<V>(
        _mm512_maskz_reduce_ps(0xFFFF, std::bit_cast<__m512>(x[i]), kOfFloor));
    p[i] = fraction[i] * kCoefficients[0] + kCoefficients[1];
  });
#pragma GCC unroll 3
  for (int term = 2; term < 5; ++term) {
    each<kCount>(
        [&](size_t i) { p[i] = p[i] * fraction[i] + kCoefficients[term]; });
  }
  each<kCount>([&](size_t i) {
    constexpr float kLeast = kLeastOf<float, kRange> * 1.44269504F;
    const __m512 power = std::bit_cast<__m512>(x[i]);
    // True for NaN, which stays.
    const __mmask16 counts =
        kRange == ExpRange::kFinite
            ? __mmask16{0xFFFF}
            : _mm512_cmp_ps_mask(power, _mm512_set1_ps(kLeast), _CMP_NLT_UQ);
    x[i] = std::bit_cast<V>(
        _mm512_maskz_scalef_ps(counts, std::bit_cast<__m512>(p[i]), power));
  });
}
#endif

}  // namespace detail

// exp of x <= 0, kCount registers side by side. Error under 1.5 ulp; a relative
// 2^-17 where not kPrecise. What is negligible is 0: a denormal number, be it
// the result, one that is rounded to 0 at once, or the product of the result
// with what it weighs, takes Intel's processors as long as twenty registers (a
// boolean mask took 3 times, ALiBi twice as long for it). With another ExpRange
// x may be positive.
template <bool kPrecise = true, ExpRange kRange = ExpRange::kNonpositive,
          class V, size_t kCount>
[[gnu::always_inline]] inline void exp_of_nonpositive(V (&x)[kCount]) {
  using T = detail::ElementOf<V>;
#if defined(__AMX_TILE__)
  if constexpr (std::is_same_v<T, float> && !kPrecise) {
#pragma GCC unroll 8
    for (size_t i = 0; i < kCount; ++i) {
      x[i] = x[i] * 1.44269504F;
    }
    return detail::exp2_by_fraction<kRange>(x);
  }
#endif
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    return detail::exp_by_table<kPrecise, kRange>(x);
  }
#endif
  using C = detail::ExpConstants<T>;
  constexpr auto& kCoefficients = detail::kExp<T, kPrecise>;
  V n[kCount];
  V p[kCount];
  // The comparisons are false for NaN, which stays.
  constexpr T kZero = detail::kExpIsZero<T>;
  each<kCount>([&](size_t i) {
    x[i] = kRange == ExpRange::kNormal ? detail::at_least(kZero, x[i])
           : C::kNegligible > x[i]     ? V{} + kZero
                                       : x[i];
  });
  if constexpr (kRange == ExpRange::kFinite || kRange == ExpRange::kAny) {
    each<kCount>([&](size_t i) {
      x[i] = x[i] > C::kLargest ? V{} + C::kLargest : x[i];
    });
  }
  each<kCount>(
      [&](size_t i) { n[i] = x[i] * T(1.442695040888963407) + C::kRound; });
  each<kCount>([&](size_t i) { n[i] = n[i] - C::kRound; });
  if constexpr (kPrecise) {
    each<kCount>([&](size_t i) { x[i] = x[i] - n[i] * C::kLn2High; });
    each<kCount>([&](size_t i) { x[i] = x[i] - n[i] * C::kLn2Low; });
  } else {
    each<kCount>(
        [&](size_t i) { x[i] = x[i] - n[i] * T(0.693147180559945309); });
  }
  each<kCount>(
      [&](size_t i) { p[i] = x[i] * kCoefficients[0] + kCoefficients[1]; });
#pragma GCC unroll 16
  for (size_t c = 2; c < kCoefficients.size(); ++c) {
    each<kCount>([&](size_t i) { p[i] = p[i] * x[i] + kCoefficients[c]; });
  }
  each<kCount>([&](size_t i) { p[i] = p[i] * x[i] + 1; });
  each<kCount>([&](size_t i) { p[i] = p[i] * x[i] + 1; });
  each<kCount>([&](size_t i) {
    x[i] = detail::times_normal_power_of_two<T>(p[i], n[i]);
  });
}

// The unit in which exp takes its arguments in the fewest steps, for callers
// whose arguments are products anyhow: 1, or the logarithm of 2.
template <class T, bool kPrecise>
inline constexpr T kExpUnits = 1;
#if defined(__AMX_TILE__)
template <>
inline constexpr float kExpUnits<float, false> = 1.44269504F;
#endif

// exp_of_nonpositive of x / kExpUnits.
template <bool kPrecise, ExpRange kRange, class V, size_t kCount>
[[gnu::always_inline]] inline void exp_of_units(V (&x)[kCount]) {
#if defined(__AMX_TILE__)
  if constexpr (kExpUnits<detail::ElementOf<V>, kPrecise> != 1) {
    return detail::exp2_by_fraction<kRange>(x);
  }
#endif
  exp_of_nonpositive<kPrecise, kRange>(x);
}

template <class V>
inline V abs(V x) {
  using T = detail::ElementOf<V>;
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  constexpr Bits kSign = std::bit_cast<Bits>(T(-0.0));
  return std::bit_cast<V>(std::bit_cast<Vector<Bits>>(x) & ~kSign);
}

// 1 / x for a normal number, in one Newton step where there is a first guess.
template <class V>
inline V reciprocal(V x) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<detail::ElementOf<V>, float>) {
    const V guess = std::bit_cast<V>(
        _mm512_maskz_rcp14_ps(0xFFFF, std::bit_cast<__m512>(x)));
    return guess * (2 - x * guess);
  }
#endif
  return 1 / x;
}

// 1 / (1 + exp(-x)), from exp(-|x|) so that no digits cancel. Error under 3
// ulp.
template <class V>
inline V sigmoid(V x) {
  const V e = exp(-abs(x));
  return (x < 0 ? e : V{} + 1) * reciprocal(e + 1);
}

// The same for several registers, side by side; 0 where it is no normal number.
template <class V, size_t kCount>
[[gnu::always_inline]] inline void sigmoids(V (&x)[kCount]) {
  V e[kCount];
  each<kCount>([&](size_t i) { e[i] = -abs(x[i]); });
  exp_of_nonpositive<true, ExpRange::kNormal>(e);
  each<kCount>([&](size_t i) {
    x[i] = (x[i] < 0 ? e[i] : V{} + 1) * reciprocal(e[i] + 1);
  });
}

namespace detail {

// Coefficients of (a + 4) exp(a^2 / 2) Phi(-a) as a polynomial in
// (a - 4) / (a + 4), for every a >= 0: the form of Shepherd and Laframboise,
// "Chebyshev Approximation of (1 + 2x) exp(x^2) erfc x" (doi 10.2307/2007742).
// Relative error of the rounded coefficients: 2^-23 and 2^-53.7.
template <class T>
inline constexpr std::array<T, 0> kNormal{};
template <>
inline constexpr std::array kNormal<float>{
    0x1.82b4bcp-1F,  -0x1.373e32p-1F, 0x1.8c6dcap-2F,  -0x1.7e01b8p-3F,
    0x1.eec21ep-5F,  -0x1.ec5254p-8F, -0x1.c7a0d6p-9F, 0x1.99eff6p-10F,
    0x1.0f3732p-13F, -0x1.49ecd6p-13F};
template <>
inline constexpr std::array kNormal<double>{
    0x1.82b4bb8c94dcep-1,   -0x1.373e3a893c28cp-1,  0x1.8c6dbf2cfc2afp-2,
    -0x1.7dff2bff68052p-3,  0x1.eec4cc3e4db3ep-5,   -0x1.ee2761054e5e1p-8,
    -0x1.c81719d60dcdbp-9,  0x1.ab825ff09481bp-10,  0x1.17a4aec9fa29ap-13,
    -0x1.e4a431b3465b0p-13, -0x1.001f7d33a2ff5p-19, 0x1.26d193750d626p-15,
    0x1.80ca2044c09bdp-21,  -0x1.8d64fadf80ed1p-18, -0x1.523a2fde9b829p-21,
    0x1.1319f41c90a11p-20,  0x1.24d40b9cf1122p-22,  -0x1.5739b1a22c213p-23,
    -0x1.763bb001aa685p-24, 0x1.33354e7ae3599p-26,  0x1.7329462b6b607p-26,
    -0x1.4b02181dd18fdp-31, -0x1.04ffdbe7bdef2p-28, -0x1.0236305d3fd38p-33,
    0x1.828df1c3afaadp-32};

// 2^r for |r| <= 1/2, interpolated in the Chebyshev nodes: 2^-25.7.
inline constexpr std::array kPowerOfTwo{
    0x1.000000p+0F, 0x1.62e430p-1F,  0x1.ebfbe0p-3F, 0x1.c6aeccp-5F,
    0x1.3b29d8p-7F, 0x1.5f48c8p-10F, 0x1.446c7ep-13F};

// exp(-a^2 / 2) by 2^y, y = -a^2 log2(e) / 2, whose rounding error of 2.5
// half-ulps is one of 1.25 a^2 half-ulps in the result. It may be 0 where it is
// no normal number.
template <size_t kCount>
[[gnu::always_inline]] inline void exp_of_half_squares(
    Vector<float> (&a)[kCount]) {
  using V = Vector<float>;
  constexpr float kRound = ExpConstants<float>::kRound;
#if defined(__AVX512F__)
  constexpr float kZero = -151;  // 2^y is zero
#else
  constexpr float kZero = -127;  // times_normal_power_of_two makes it zero
#endif
  V n[kCount];
  V power[kCount];
  each<kCount>([&](size_t i) { a[i] = a[i] * a[i] * -0.721347520F; });
  each<kCount>([&](size_t i) { a[i] = at_least(kZero, a[i]); });
  each<kCount>([&](size_t i) { n[i] = (a[i] + kRound) - kRound; });
  each<kCount>([&](size_t i) { a[i] = a[i] - n[i]; });
  polynomials<kPowerOfTwo>(a, power);
  each<kCount>([&](size_t i) {
#if defined(__AVX512F__)
    a[i] = times_power_of_two<float>(power[i], n[i]);
#else
    a[i] = times_normal_power_of_two<float>(power[i], n[i]);
#endif
  });
}

// The same with all digits: a^2 has twice those of a, and exp turns an absolute
// error into a relative one, so a^2 = high^2 + (a - high)(a + high), the first
// of which is exact.
inline Vector<double> exp_of_half_square(Vector<double> a) {
  constexpr int64_t kLowBits = (int64_t{1} << 27) - 1;
  a = at_most(40.0, a);  // exp is zero
  const auto rounded = std::bit_cast<Vector<int64_t>>(a) + (kLowBits / 2 + 1);
  const auto high = std::bit_cast<Vector<double>>(rounded & ~kLowBits);
  const auto [tail, n] =
      reduce_exp<double>(high * high * -0.5, (high - a) * (high + a) * 0.5);
  return times_power_of_two<double>(tail + 1, n);
}
template <size_t kCount>
[[gnu::always_inline]] inline void exp_of_half_squares(
    Vector<double> (&a)[kCount]) {
  each<kCount>([&](size_t i) { a[i] = exp_of_half_square(a[i]); });
}

template <class T>
struct LogConstants;

// Coefficients of 2 atanh(s) / s - 2 as a polynomial in s^2 without a constant,
// for |s| <= 3 - 2 sqrt(2): fdlibm's (e_log.c, and e_logf.c of FreeBSD), with
// an error of 2^-58.45 and 2^-34.24.
template <>
struct LogConstants<float> {
  using Bits = uint32_t;
  static constexpr float kLn2High = 0x1.62e300p-1F;  // 17 bits
  static constexpr float kLn2Low = 0x1.2fefa2p-17F;
  static constexpr std::array kCoefficients{0xaaaaaa.0p-24F, 0xccce13.0p-25F,
                                            0x91e9ee.0p-25F, 0xf89e26.0p-26F};
};

template <>
struct LogConstants<double> {
  using Bits = uint64_t;
  static constexpr double kLn2High = 6.93147180369123816490e-01;  // 33 bits
  static constexpr double kLn2Low = 1.90821492927058770002e-10;
  static constexpr std::array kCoefficients{
      6.666666666666735130e-01, 3.999999999940941908e-01,
      2.857142874366239149e-01, 2.222219843214978396e-01,
      1.818357216161805012e-01, 1.531383769920937332e-01,
      1.479819860511658591e-01};
};

}  // namespace detail

// The natural logarithm: log(2^n m) = n ln 2 + log(1 + f) for m = 1 + f from
// sqrt(1/2) to sqrt(2), and log(1 + f) = f - f^2 / 2 + s (f^2 / 2 + R(s^2)),
// s = f / (2 + f), as in fdlibm. Error under 1 ulp; -infinity for zero, NaN
// below it and for NaN.
template <class V>
inline V log(V x) {
  using T = detail::ElementOf<V>;
  using C = detail::LogConstants<T>;
  using E = detail::ExpConstants<T>;
  using Bits = typename C::Bits;
  constexpr int kMantissaBits = E::kMantissaBits;
  // A denormal number is made normal.
  const auto is_denormal = x < std::numeric_limits<T>::min();
  constexpr T kScale = static_cast<T>(Bits{1} << (kMantissaBits + 1));
  const V normal = is_denormal ? x * kScale : x;
  const V denormal_n = is_denormal ? V{} - T(kMantissaBits + 1) : V{};
  // So that the exponent changes at sqrt(1/2) in place of 1.
  constexpr auto kOne = std::bit_cast<Bits>(T(1));
  constexpr auto kRootOfHalf = std::bit_cast<Bits>(T(0.70710678118654752440));
  const auto shifted =
      std::bit_cast<Vector<Bits>>(normal) + (kOne - kRootOfHalf);
  // The exponent as a number: the lowest bits of one that has no others.
  constexpr T kIntegers = static_cast<T>(Bits{1} << kMantissaBits);
  const V n = std::bit_cast<V>((shifted >> kMantissaBits) |
                               std::bit_cast<Bits>(kIntegers)) -
              (kIntegers + T(E::kExponentBias)) + denormal_n;
  constexpr Bits kMantissa = (Bits{1} << kMantissaBits) - 1;
  const V f = std::bit_cast<V>((shifted & kMantissa) + kRootOfHalf) - T(1);
  const V s = f / (f + T(2));
  const V z = s * s;
  const V half_square = f * f * T(0.5);
  const V rest =
      s * (half_square + z * detail::polynomial<C::kCoefficients>(z));
  const V result =
      n * C::kLn2High + (f - (half_square - (rest + n * C::kLn2Low)));
  // Infinity and NaN stay.
  const V finite = x <= std::numeric_limits<T>::max() ? result : x;
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  const V positive = x < 0 ? V{} + std::numeric_limits<T>::quiet_NaN() : finite;
  return x == 0 ? V{} - kInfinity : positive;
}

template <class V, size_t kCount>
struct Normal {
  V cumulative[kCount];  // Phi(x)
  V density[kCount];     // exp(-x^2 / 2) / sqrt(2 pi)
};

// The standard normal distribution at each x; Phi(x) = (1 + erf(x / sqrt(2))) /
// 2. Relative error in both tails: under 5 ulp for double, under 8 + 1.25 x^2
// half-ulps for float, whose results may be 0 where they are no normal number.
template <class V, size_t kCount>
[[gnu::always_inline]] inline Normal<V, kCount> normal_distribution(
    const V (&x)[kCount]) {
  using T = detail::ElementOf<V>;
  // Of an infinite a the reciprocal is no number; this one is small enough.
  constexpr T kFar = T(1e6);
  V e[kCount];
  V inverse[kCount];
  V part[kCount];
  V sum[kCount];
  Normal<V, kCount> result;
  each<kCount>([&](size_t i) { e[i] = abs(x[i]); });
  each<kCount>([&](size_t i) {
    inverse[i] = reciprocal(detail::at_most(kFar, e[i]) + 4);
  });
  detail::exp_of_half_squares(e);
  each<kCount>([&](size_t i) { part[i] = 1 - 8 * inverse[i]; });
  detail::polynomials<detail::kNormal<T>>(part, sum);
  each<kCount>([&](size_t i) {
    const V below = e[i] * (inverse[i] * sum[i]);
    result.cumulative[i] = x[i] < 0 ? below : 1 - below;
    result.density[i] = e[i] * T(0.398942280401432678);
  });
  return result;
}

}  // namespace pkg::simd
