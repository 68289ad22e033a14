// The activations of linear and their derivatives, on vectors of float or
// double.
//
// gelu is x Phi(x) with Phi exact in both tails, where (1 + erf(x / sqrt(2)))
// cancels for negative x. Its approximation x (1 + tanh(u)) / 2 is x
// sigmoid(2u), which silu is too with x in the place of 2u: neither cancels
// either. Infinities and NaN give what PyTorch's functions give.
#pragma once

#include "cpu/runtime/cache.h"
#include "cpu/simd/math.h"
#include "linear.h"

namespace pkg::cpu {

namespace detail {

// 2u of gelu's approximation, 2 sqrt(2 / pi) (x + 0.044715 x^3), and its
// derivative.
inline constexpr double kGeluScale = 1.59576912160573071;
inline constexpr double kGeluCubic = 0.044715;

template <class V>
V gelu_tanh_argument(V x) {
  using T = simd::detail::ElementOf<V>;
  return x * (x * x * T(kGeluScale * kGeluCubic) + T(kGeluScale));
}

template <class V>
V gelu_tanh_slope(V x) {
  using T = simd::detail::ElementOf<V>;
  return x * x * T(3 * kGeluScale * kGeluCubic) + T(kGeluScale);
}

// d/dx of x sigmoid(y) with y' = slope. With one reciprocal rather than three
// divisions the gradient of silu takes 17 us of 32 768 elements in L2 instead
// of 22, that of gelu's approximation 22 instead of 27 (Intel Xeon, AMX).
template <class V>
V derivative_of_gated(V x, V y, V slope) {
  const V e = simd::exp(-simd::abs(y));
  const V above = simd::reciprocal(e + 1);
  const V below = e * above;
  const V gate = y < 0 ? below : above;
  return gate + x * (below * above) * slope;
}

}  // namespace detail

// Each of `count` vectors becomes its activation. Not inlined, since every tile
// of the product calls it.
template <class V>
[[gnu::noinline]] void activate(Activation activation, V* values, int count) {
  const auto for_each = [&](const auto& function) {
    for (int i = 0; i < count; ++i) {
      values[i] = function(values[i]);
    }
  };
  switch (activation) {
    case Activation::None:
      return;
    case Activation::Relu:
      return for_each([](V x) { return x < 0 ? V{} : x; });
    case Activation::Gelu:
      return for_each(
          [](V x) { return x * simd::normal_distribution(x).cumulative; });
    case Activation::GeluTanh:
      return for_each(
          [](V x) { return x * simd::sigmoid(detail::gelu_tanh_argument(x)); });
    case Activation::Silu:
      return for_each([](V x) { return x * simd::sigmoid(x); });
  }
}

// grad times the activation's derivative at x; for relu its result serves as x.
template <Activation kActivation, class V>
V activation_gradient(V grad, V x) {
  static_assert(kActivation != Activation::None);
  if constexpr (kActivation == Activation::Relu) {
    return x <= 0 ? V{} : grad;
  } else if constexpr (kActivation == Activation::Gelu) {
    const auto [cumulative, density] = simd::normal_distribution(x);
    return grad * (cumulative + x * density);
  } else if constexpr (kActivation == Activation::GeluTanh) {
    return grad * detail::derivative_of_gated(x, detail::gelu_tanh_argument(x),
                                              detail::gelu_tanh_slope(x));
  } else {
    return grad * detail::derivative_of_gated(x, x, V{} + 1);
  }
}

// What becomes of finished sums: the bias is added, the activation's argument
// kept where it is asked for, the activation applied.
template <class T>
struct LinearEpilogue {
  Activation activation;
  // Contiguous, with a whole vector behind the last element; null without one.
  const simd::Compute<T>* bias;
  T* pre_activation;  // null where it is not kept
  int64_t row_stride;

  template <class V>
  void operator()(int64_t row, int64_t column, V* sums, int rows, int vectors,
                  int tail) const {
    constexpr int kLanes = simd::kLanes<simd::Compute<T>>;
    for (int v = 0; v < vectors && bias != nullptr; ++v) {
      const V added = simd::load(bias + column + v * kLanes);
      for (int r = 0; r < rows; ++r) {
        sums[r * vectors + v] += added;
      }
    }
    for (int r = 0; r < rows && pre_activation != nullptr; ++r) {
      T* to = pre_activation + (row + r) * row_stride + column;
      for (int v = 0; v < vectors; ++v) {
        const V value = sums[r * vectors + v];
        if (v < vectors - 1 || tail == kLanes) {
          simd::store(to + v * kLanes, value);
        } else {
          simd::store_partial(to + v * kLanes, value, tail);
        }
      }
    }
    activate(activation, sums, rows * vectors);
  }

  // Brings what is kept beside such elements of the result into L2.
  void prefetch(int64_t row, int64_t column, int rows, int64_t columns) const {
    if (pre_activation == nullptr) {
      return;
    }
    const T* at = pre_activation + row * row_stride + column;
    for (int r = 0; r < rows; ++r, at += row_stride) {
      prefetch_bytes<PrefetchTo::L2>(at, columns * int64_t{sizeof(T)});
    }
  }
};

}  // namespace pkg::cpu
