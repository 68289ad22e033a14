// The online softmax: a row's weights relative to the largest score so far, and
// how partial results are combined (FlashAttention-2, arXiv 2307.08691, 3.1).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gemm_arithmetic.h"
#include "scaled_dot_product_attention_problem.h"
#include "simd.h"
#include "simd_math.h"

namespace pkg::cpu::attention {

// How weights are held to be the left operand of a product: as the numbers that
// they are, in place of the scores, or as pairs of bfloat16 of the same row.
template <class Arithmetic>
struct WeightsOf {
  using Element = typename Arithmetic::Accumulator;
  static void store(Element* to, Vector<Element> weights) {
    simd::store(to, weights);
  }
};
#if defined(__AVX512BF16__)
template <>
struct WeightsOf<Bfloat16Dot> {
  using Element = uint16_t;
  static void store(uint16_t* to, Vector<float> weights) {
    const __m256bh bits = _mm512_cvtneps_pbh(std::bit_cast<__m512>(weights));
    std::memcpy(to, &bits, sizeof(bits));
  }
};
#endif
template <class Arithmetic>
using Weight = typename WeightsOf<Arithmetic>::Element;

template <class Number>
struct SoftmaxState {
  Number maximum = -kInfinity<Number>;
  Number sum = 0;
};

template <class V>
inline auto reduce_max(V value) {
  auto largest = value[0];
  for (size_t lane = 1; lane < sizeof(V) / sizeof(largest); ++lane) {
    largest = value[lane] > largest ? value[lane] : largest;
  }
  return largest;
}

// What takes the maximum's place in differences: while a row has no key its
// maximum is -inf, and -inf - -inf would be NaN.
template <class Number>
inline Number origin_of(Number maximum) {
  return maximum == -kInfinity<Number> ? Number{0} : maximum;
}

// Makes weights of `count` scores, a whole number of registers, and updates the
// row's state. Returns the factor for all that was accumulated before. A NaN
// among the scores may be lost to the maximum, never to the sum.
template <class Arithmetic, class Number>
Number softmax_row(const Number* scores, int64_t count,
                   SoftmaxState<Number>& state, Weight<Arithmetic>* weights) {
  constexpr int kLanes = simd::kLanes<Number>;
  Vector<Number> largest = simd::broadcast(state.maximum);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vector<Number> score = simd::load(scores + i);
    largest = score > largest ? score : largest;
  }
  const Number maximum = reduce_max(largest);
  const Number origin = origin_of(maximum);
  Vector<Number> sum{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vector<Number> weight = simd::exp(simd::load(scores + i) - origin);
    sum += weight;
    WeightsOf<Arithmetic>::store(weights + i, weight);
  }
  const Number correction =
      maximum == state.maximum ? Number{1} : std::exp(state.maximum - origin);
  state.maximum = maximum;
  state.sum = state.sum * correction + simd::reduce_add(sum);
  return correction;
}

// The same with dropout, which the sum does not see. `scores` is used up;
// `factors` are dropout's.
template <class Arithmetic, class Number>
Number softmax_row(Number* scores, int64_t count, SoftmaxState<Number>& state,
                   Weight<Arithmetic>* weights, const Number* factors) {
  const Number correction =
      softmax_row<Floating<Number>>(scores, count, state, scores);
  for (int64_t i = 0; i < count; i += simd::kLanes<Number>) {
    WeightsOf<Arithmetic>::store(
        weights + i, simd::load(scores + i) * simd::load(factors + i));
  }
  return correction;
}

template <class Number>
void scale_row(Number* row, int64_t count, Number factor) {
  for (int64_t i = 0; i < count; i += simd::kLanes<Number>) {
    simd::store(row + i, simd::load(row + i) * factor);
  }
}

// Writes `count` elements of a row, converted and multiplied by `factor`.
template <class Output, class Number>
void store_row(const Number* row, int64_t count, Number factor, Output* to) {
  constexpr int kLanes = simd::kLanes<Number>;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    simd::store(to + i, simd::load(row + i) * factor);
  }
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    simd::store_partial(to + i, simd::load_partial(row + i, rest) * factor,
                        rest);
  }
}

// A finished row: its output is divided by the sum, or zero without any key.
template <class Output, class Number>
void finish_row(const SoftmaxState<Number>& state, const Number* row,
                int64_t count, Output* output, Number* log_sum_exp) {
  if (state.sum == Number{0}) {
    std::fill_n(output, count, Output{0});
  } else {
    store_row(row, count, Number{1} / state.sum, output);
  }
  // The gradients recompute weights from it: one rounding, not two.
  *log_sum_exp = static_cast<Number>(static_cast<double>(state.maximum) +
                                     std::log(static_cast<double>(state.sum)));
}

}  // namespace pkg::cpu::attention
