// What the pointwise operators compute of one element.
//
// Functions see their arguments in the type of the computation: float32 for
// halves and float32, float64, or an unsigned integer. Integers are computed
// modulo 2^64 and cut to their type afterwards, which gives the same bits as
// computing in any narrower type, and no undefined overflow.
#pragma once

#include <cstdint>

#include "device.cuh"

namespace pkg::cuda {

struct Multiply {
  static constexpr int kInputs = 2;
  static constexpr bool kTakesIntegers = true;
  template <class Number>
  __device__ __forceinline__ Number operator()(Number a, Number b) const {
    return a * b;
  }
};

struct Add {
  static constexpr int kInputs = 2;
  static constexpr bool kTakesIntegers = true;
  template <class Number>
  __device__ __forceinline__ Number operator()(Number a, Number b) const {
    return a + b;
  }
};

struct MultiplyAdd {
  static constexpr int kInputs = 2;
  static constexpr bool kTakesIntegers = false;
  double c;
  template <class Number>
  __device__ __forceinline__ Number operator()(Number a, Number b) const {
    return a * b + static_cast<Number>(c);
  }
};

// (1 - s) s with s = sigmoid(z), written in e = exp(-|z|) as e / (1 + e)^2:
// 1 - s would cancel for large z.
struct SigmoidDerivative {
  static constexpr int kInputs = 1;
  static constexpr bool kTakesIntegers = false;
  template <class Number>
  __device__ __forceinline__ Number operator()(Number z, Number) const {
    const Number e = exp(-fabs(z));
    const Number denominator = Number(1) + e;
    return e / (denominator * denominator);
  }
};

// grad times the derivative of the above, s (1 - s) (1 - 2 s). The last factor
// is -tanh(z / 2) = expm1(-|z|) / (1 + e) with the sign of z; expm1, since
// e - 1 would cancel for small z.
struct SigmoidDerivativeBackward {
  static constexpr int kInputs = 2;
  static constexpr bool kTakesIntegers = false;
  template <class Number>
  __device__ __forceinline__ Number operator()(Number z, Number grad) const {
    const Number magnitude = fabs(z);
    const Number e = exp(-magnitude);
    const Number denominator = Number(1) + e;
    const Number derivative = e / (denominator * denominator);
    return grad * derivative * copysign(expm1(-magnitude) / denominator, -z);
  }
};

}  // namespace pkg::cuda
