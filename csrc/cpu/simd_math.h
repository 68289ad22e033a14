// Elementary functions on vectors of float or double.
//
// exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln(2)/2, with r by Cody and
// Waite's two-part ln 2 and exp(r) by its Taylor polynomial, whose remainder at
// |r| = 0.347 is under 2^-27 (float, degree 7) and 2^-57 (double, degree 13).
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "simd.h"

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
  static constexpr int kDegree = 13;
};

template <class T>
struct ReducedExp {
  Vector<T> tail;    // exp(r) - 1
  Vector<T> scale1;  // 2^n = scale1 * scale2, each a normal number
  Vector<T> scale2;
};

template <class T>
inline ReducedExp<T> reduce_exp(Vector<T> x) {
  using C = ExpConstants<T>;
  using Bits = Vector<typename C::Bits>;
  // Selections keep NaN, since each comparison with it is false.
  x = x > C::kLargest ? Vector<T>{} + C::kLargest : x;
  x = x < C::kSmallest ? Vector<T>{} + C::kSmallest : x;
  const Vector<T> shifted = x * T(1.442695040888963407) + C::kRound;
  const Vector<T> n = shifted - C::kRound;
  const Bits n_bits =
      std::bit_cast<Bits>(shifted) - std::bit_cast<typename C::Bits>(C::kRound);
  const Vector<T> r = (x - n * C::kLn2High) - n * C::kLn2Low;

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
  const Bits half_n = n_bits >> 1;
  const auto power_of_two = [](Bits exponent) {
    return std::bit_cast<Vector<T>>((exponent + C::kExponentBias)
                                    << C::kMantissaBits);
  };
  return {p * r * r + r, power_of_two(half_n), power_of_two(n_bits - half_n)};
}

template <class V>
using ElementOf = std::remove_cvref_t<decltype(V{}[0])>;

}  // namespace detail

// Error under 1.5 ulp; infinity above the range, denormal numbers and zero
// below it, NaN for NaN.
template <class V>
inline V exp(V x) {
  const auto [tail, scale1, scale2] =
      detail::reduce_exp<detail::ElementOf<V>>(x);
  return (tail + 1) * scale1 * scale2;
}

// exp(x) - 1 for x <= 0, without cancellation near zero.
template <class V>
inline V expm1_of_nonpositive(V x) {
  using T = detail::ElementOf<V>;
  const auto [tail, scale1, scale2] = detail::reduce_exp<T>(x);
  const V scale = scale1 * scale2;
  return tail * scale + (scale - T(1));
}

template <class V>
inline V abs(V x) {
  return x < 0 ? -x : x;
}

}  // namespace pkg::simd
