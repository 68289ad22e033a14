// The activations of linear and their derivatives, of one element.
//
// gelu is x Phi(x), its approximation x sigmoid(2u) with the u of the usual
// x (1 + tanh(u)) / 2, silu x sigmoid(x): written so, nothing cancels for
// negative x.
//
// An activation's Quick is for results that are rounded to half precision: its
// exponentials and reciprocals are those of the special function unit. Their
// errors, most of all that of x rounded to x log2(e), are 2^-7 of that rounding
// and less.
#pragma once

#include "activation.h"
#include "cuda/device/device.cuh"
#include "cuda/device/fast_math.cuh"

namespace pkg::cuda {

// e / (1 + e) and 1 / (1 + e) with e = exp(-|x|): the smaller and the larger of
// sigmoid(x) and sigmoid(-x).
template <class Number, bool kQuick = false>
struct Gate {
  Number open;    // sigmoid(x)
  Number closed;  // sigmoid(-x)

  __device__ __forceinline__ explicit Gate(Number x) {
    Number e;
    Number larger;
    if constexpr (kQuick) {
      e = quick_exponential(-fabs(x));
      larger = quick_reciprocal(Number(1) + e);
    } else {
      e = exp(-fabs(x));
      larger = Number(1) / (Number(1) + e);
    }
    const Number smaller = e * larger;
    open = x < Number(0) ? smaller : larger;
    closed = x < Number(0) ? larger : smaller;
  }
};

struct NoActivation {
  using Quick = NoActivation;
  static constexpr Activation kKind = Activation::None;
  template <class Number>
  __device__ __forceinline__ Number operator()(Number x) const {
    return x;
  }
};

struct Relu {
  using Quick = Relu;
  static constexpr Activation kKind = Activation::Relu;
  template <class Number>
  __device__ __forceinline__ Number operator()(Number x) const {
    return x < Number(0) ? Number(0) : x;
  }
  // Of the argument or of the result.
  template <class Number>
  __device__ __forceinline__ Number gradient(Number grad, Number x) const {
    return x <= Number(0) ? Number(0) : grad;
  }
};

struct Gelu {
  using Quick = Gelu;
  static constexpr Activation kKind = Activation::Gelu;
  // Phi(x) = erfc(-x / sqrt(2)) / 2, accurate in both tails.
  template <class Number>
  static __device__ __forceinline__ Number cumulative(Number x) {
    return Number(0.5) * erfc(x * Number(-0.707106781186547524));
  }
  template <class Number>
  __device__ __forceinline__ Number operator()(Number x) const {
    return x * cumulative(x);
  }
  template <class Number>
  __device__ __forceinline__ Number gradient(Number grad, Number x) const {
    const Number density =
        Number(0.398942280401432678) * exp(Number(-0.5) * x * x);
    return grad * (cumulative(x) + x * density);
  }
};

template <bool kQuick>
struct GeluTanhBy {
  using Quick = GeluTanhBy<true>;
  static constexpr Activation kKind = Activation::GeluTanh;
  static constexpr double kScale = 1.59576912160573071;  // sqrt(8 / pi)
  static constexpr double kCubic = 0.044715;

  template <class Number>
  static __device__ __forceinline__ Number argument(Number x) {
    return x * (x * x * Number(kScale * kCubic) + Number(kScale));
  }
  template <class Number>
  __device__ __forceinline__ Number operator()(Number x) const {
    return x * Gate<Number, kQuick>(argument(x)).open;
  }
  template <class Number>
  __device__ __forceinline__ Number gradient(Number grad, Number x) const {
    const Gate<Number, kQuick> gate(argument(x));
    const Number slope = x * x * Number(3 * kScale * kCubic) + Number(kScale);
    return grad * (gate.open + x * (gate.open * gate.closed) * slope);
  }
};

using GeluTanh = GeluTanhBy<false>;

template <bool kQuick>
struct SiluBy {
  using Quick = SiluBy<true>;
  static constexpr Activation kKind = Activation::Silu;
  template <class Number>
  __device__ __forceinline__ Number operator()(Number x) const {
    return x * Gate<Number, kQuick>(x).open;
  }
  template <class Number>
  __device__ __forceinline__ Number gradient(Number grad, Number x) const {
    const Gate<Number, kQuick> gate(x);
    return grad * (gate.open + x * (gate.open * gate.closed));
  }
};
using Silu = SiluBy<false>;

// The one of these that is named when the kernel runs.
template <bool kQuick, class Number>
__device__ __forceinline__ Number activated(Activation kind, Number x) {
  switch (kind) {
    case Activation::None:
      return x;
    case Activation::Relu:
      return Relu()(x);
    case Activation::Gelu:
      return Gelu()(x);
    case Activation::GeluTanh:
      return GeluTanhBy<kQuick>()(x);
    case Activation::Silu:
      return SiluBy<kQuick>()(x);
  }
  return x;
}

// The gradient as a function of the pointwise kernels.
template <class Function>
struct ActivationBackward {
  static constexpr int kInputs = 2;
  static constexpr bool kTakesIntegers = false;
  template <class Number>
  __device__ __forceinline__ Number operator()(Number x, Number grad) const {
    return Function().gradient(grad, x);
  }
};

}  // namespace pkg::cuda
