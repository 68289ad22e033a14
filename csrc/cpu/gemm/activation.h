// The activations of linear and their derivatives, on vectors of float or
// double.
//
// gelu is x Phi(x) with Phi exact in both tails, where (1 + erf(x / sqrt(2)))
// cancels for negative x. Its approximation x (1 + tanh(u)) / 2 is x
// sigmoid(2u), which silu is too with x in the place of 2u: neither cancels
// either. Infinities and NaN give what PyTorch's functions give.
#pragma once

#include <algorithm>
#include <cstddef>

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

// grad times d/dx of x sigmoid(y), with y' = slope. With one reciprocal rather
// than three divisions the gradient of silu takes 17 us of 32 768 elements in
// L2 instead of 22, that of gelu's approximation 22 instead of 27 (Intel Xeon,
// AMX).
template <class V, size_t kCount>
[[gnu::always_inline]] inline void gated_gradient(const V (&x)[kCount],
                                                  const V (&y)[kCount],
                                                  const V (&slope)[kCount],
                                                  V (&grad)[kCount]) {
  V e[kCount];
  simd::each<kCount>([&](size_t i) { e[i] = -simd::abs(y[i]); });
  simd::exp_of_nonpositive<true, simd::ExpRange::kNormal>(e);
  simd::each<kCount>([&](size_t i) {
    const V above = simd::reciprocal(e[i] + 1);
    const V below = e[i] * above;
    const V gate = y[i] < 0 ? below : above;
    grad[i] *= gate + x[i] * (below * above) * slope[i];
  });
}

}  // namespace detail

// As many registers as are activated side by side (simd::each says why), though
// AVX2 has not the room for their numbers. Zen 3, nanoseconds an element in L1
// by 1, 2, 3, 4 and 6, float32: gelu 0.79, 0.70, 0.70, 0.64 and 0.61, its
// gradient 0.86, 0.75, 0.74, 0.67 and 0.64, that of its approximation 0.77,
// 0.71, 0.66, 0.62 and 0.58, silu 0.52, 0.48, 0.45, 0.41 and 0.39.
inline constexpr int kActivatedTogether = 6;

// Registers become their activation.
template <Activation kActivation, class V, size_t kCount>
[[gnu::always_inline]] inline void activate(V (&x)[kCount]) {
  using simd::each;
  if constexpr (kActivation == Activation::Relu) {
    each<kCount>([&](size_t i) { x[i] = x[i] < 0 ? V{} : x[i]; });
  } else if constexpr (kActivation == Activation::Gelu) {
    const auto normal = simd::normal_distribution(x);
    each<kCount>([&](size_t i) { x[i] *= normal.cumulative[i]; });
  } else if constexpr (kActivation != Activation::None) {
    V gate[kCount];
    each<kCount>([&](size_t i) {
      gate[i] = kActivation == Activation::GeluTanh
                    ? detail::gelu_tanh_argument(x[i])
                    : x[i];
    });
    simd::sigmoids(gate);
    each<kCount>([&](size_t i) { x[i] *= gate[i]; });
  }
}

// From the first on, as far as groups of so many go; returns where that is.
template <int kCount, Activation kActivation, class V>
int activate_groups(V* values, int first, int count) {
  for (; first + kCount <= count; first += kCount) {
    V group[kCount];
    std::copy_n(values + first, kCount, group);
    activate<kActivation>(group);
    std::copy_n(group, kCount, values + first);
  }
  return first;
}

template <Activation kActivation, class V>
void activate_all(V* values, int count) {
  int first =
      activate_groups<kActivatedTogether, kActivation>(values, 0, count);
  first = activate_groups<2, kActivation>(values, first, count);
  activate_groups<1, kActivation>(values, first, count);
}

// Each of `count` vectors becomes its activation. Not inlined, since every tile
// of the product calls it.
template <class V>
[[gnu::noinline]] void activate(Activation activation, V* values, int count) {
  switch (activation) {
    case Activation::None:
      return;
    case Activation::Relu:
      return activate_all<Activation::Relu>(values, count);
    case Activation::Gelu:
      return activate_all<Activation::Gelu>(values, count);
    case Activation::GeluTanh:
      return activate_all<Activation::GeluTanh>(values, count);
    case Activation::Silu:
      return activate_all<Activation::Silu>(values, count);
  }
}

// Each gradient becomes itself times the activation's derivative at x; for relu
// its result serves as x.
template <Activation kActivation, class V, size_t kCount>
[[gnu::always_inline]] inline void activation_gradient(const V (&x)[kCount],
                                                       V (&grad)[kCount]) {
  using simd::each;
  static_assert(kActivation != Activation::None);
  if constexpr (kActivation == Activation::Relu) {
    each<kCount>([&](size_t i) { grad[i] = x[i] <= 0 ? V{} : grad[i]; });
  } else if constexpr (kActivation == Activation::Gelu) {
    const auto normal = simd::normal_distribution(x);
    each<kCount>([&](size_t i) {
      grad[i] *= normal.cumulative[i] + x[i] * normal.density[i];
    });
  } else {
    V argument[kCount];
    V slope[kCount];
    each<kCount>([&](size_t i) {
      constexpr bool kIsGelu = kActivation == Activation::GeluTanh;
      argument[i] = kIsGelu ? detail::gelu_tanh_argument(x[i]) : x[i];
      slope[i] = kIsGelu ? detail::gelu_tanh_slope(x[i]) : V{} + 1;
    });
    detail::gated_gradient(x, argument, slope, grad);
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
