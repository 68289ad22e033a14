// The functions of a formula (host/formula.h), of vectors of float or double:
// csrc/cuda/pointwise/formula_math.cuh has the same for one number.
#pragma once

#include <cmath>
#include <type_traits>

#include "cpu/simd/math.h"

namespace pkg::cpu::math {

using simd::abs;
using simd::exp;
using simd::expm1_of_nonpositive;
using simd::log;
using simd::max_or_nan;
using simd::sigmoid;

// Correctly rounded; NaN below zero.
template <class V>
[[gnu::always_inline]] inline V sqrt(V x) {
  using T = simd::detail::ElementOf<V>;
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<V>(
        _mm512_maskz_sqrt_ps(0xFFFF, std::bit_cast<__m512>(x)));
  } else {
    return std::bit_cast<V>(
        _mm512_maskz_sqrt_pd(0xFF, std::bit_cast<__m512d>(x)));
  }
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<V>(_mm256_sqrt_ps(std::bit_cast<__m256>(x)));
  } else {
    return std::bit_cast<V>(_mm256_sqrt_pd(std::bit_cast<__m256d>(x)));
  }
#else
  for (int lane = 0; lane < simd::kLanes<T>; ++lane) {
    x[lane] = std::sqrt(x[lane]);
  }
  return x;
#endif
}

// -m / (m + 2) with m = exp(-2 |x|) - 1 and the sign of x: no digits cancel. An
// error of 2 ulp in m, over m + 2 >= 1, and the two roundings: under 4 ulp.
template <class V>
[[gnu::always_inline]] inline V tanh(V x) {
  const V less_one = simd::expm1_of_nonpositive(-2 * simd::abs(x));
  const V magnitude = -less_one / (less_one + 2);
  return x < 0 ? -magnitude : x == 0 ? x : magnitude;
}

}  // namespace pkg::cpu::math
