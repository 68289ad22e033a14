// The online softmax: a row's weights relative to the largest score so far, and
// how partial results are combined (FlashAttention-2, arXiv 2307.08691, 3.1).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/attention/problem.h"
#include "cpu/attention/products.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/math.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/transpose.h"

namespace pkg::cpu::attention {

// How weights are held to be the left operand of a product: as the numbers that
// they are, in place of the scores, or as pairs of bfloat16 of the same row.
// Rounded ones are summed as such: the output of values that have a mean would
// not have it otherwise, nor D of the backward pass, where it is most of D.
template <class Arithmetic>
struct WeightsOf {
  using Element = typename Arithmetic::Accumulator;
  // Returns the sum of what is stored and what is there.
  static Vector<Element> store(Element* to, Vector<Element> weights,
                               Vector<Element> sum = Vector<Element>{}) {
    simd::store(to, weights);
    return sum + weights;
  }
};
#if defined(__AVX512BF16__)
template <>
struct WeightsOf<Bfloat16Dot> {
  using Element = uint16_t;
  static Vector<float> store(uint16_t* to, Vector<float> weights,
                             Vector<float> sum = Vector<float>{}) {
    const auto bits = std::bit_cast<simd::detail::Bits16>(
        _mm512_cvtneps_pbh(std::bit_cast<__m512>(weights)));
    std::memcpy(to, &bits, sizeof(bits));
    constexpr uint32_t kOne = 0x3F80;  // and 0 in the other half
    return Bfloat16Dot::multiply_add(simd::detail::widen(bits),
                                     simd::broadcast(kOne), sum);
  }
};
#endif
template <class Arithmetic>
using Weight = typename WeightsOf<Arithmetic>::Element;

// A row's largest score so far and the sum of its weights relative to that.
template <class Number>
struct SoftmaxState {
  Number maximum = -kInfinity<Number>;
  Number sum = 0;
};

// Scores that are scaled in the same instruction that subtracts the maximum are
// not rounded as the maximum was. Up to this the difference is at most an
// eighth; beyond, all have to be scaled before.
template <class Number>
inline bool compares_with_products(Number maximum) {
  constexpr Number kLargest =
      Number{1} / (4 * std::numeric_limits<Number>::epsilon());
  return std::abs(maximum) <= kLargest;
}

// The states of a block's rows, of which the sums are held lane by lane, to be
// added up at the end.
template <class Number>
struct SoftmaxStates {
  Number* maxima;
  Vector<Number>* sums;

  void reset(int64_t rows) const {
    std::fill_n(maxima, rows, -kInfinity<Number>);
    std::fill_n(sums, rows, Vector<Number>{});
  }
  SoftmaxStates from(int64_t row) const { return {maxima + row, sums + row}; }

  // Whether each of the first rows has a maximum that products may be compared
  // with: it has seen a key.
  bool are_known(int rows) const {
    return std::all_of(maxima, maxima + rows, &compares_with_products<Number>);
  }
  SoftmaxState<Number> at(int64_t row) const {
    return {maxima[row], simd::reduce_add(sums[row])};
  }
};

template <class V>
inline V larger(V a, V b) {
  return a > b ? a : b;
}

// What takes the maximum's place in differences, of one row or a register of
// them: while a row has no key its maximum is -inf, and -inf - -inf would be
// NaN.
template <class T>
inline T origin_of(T maximum) {
  if constexpr (std::is_floating_point_v<T>) {
    return maximum == -kInfinity<T> ? T{0} : maximum;
  } else {
    using Number = std::remove_cvref_t<decltype(maximum[0])>;
    return maximum == -kInfinity<Number> ? T{} : maximum;
  }
}

template <class Number>
void scale_row(Number* row, int64_t count, Number factor) {
  for (int64_t i = 0; i < count; i += simd::kLanes<Number>) {
    simd::store(row + i, simd::load(row + i) * factor);
  }
}

// Weights are as exact as what they are rounded to.
template <class Input>
inline constexpr bool kPreciseWeights =
    std::is_same_v<Input, simd::Compute<Input>>;

namespace detail {

template <class Number>
inline Vector<Number> largest_of_row(const Number* scores, int64_t count) {
  Vector<Number> largest = Vector<Number>{} - kInfinity<Number>;
  for (int64_t i = 0; i < count; i += simd::kLanes<Number>) {
    largest = larger(simd::load(scores + i), largest);
  }
  return largest;
}

// Registers of scores whose exponentials are taken side by side.
inline constexpr int kExpRegisters = 3;

// Makes weights of a row's scores and adds them to `sum`, and then multiplies
// them by dropout's factors, if there are such.
template <class Arithmetic, bool kPrecise, class Number>
[[gnu::always_inline]] inline Vector<Number> weigh_row(
    const Number* scores, int64_t count, Number scale, Number origin,
    const Number* factors, Vector<Number> sum, Weight<Arithmetic>* weights) {
  constexpr int kLanes = simd::kLanes<Number>;
  const auto weigh = [&](int64_t from, auto registers) {
    Vector<Number> weight[registers()];
    for (int i = 0; i < registers(); ++i) {
      weight[i] = simd::load(scores + from + i * kLanes) * scale - origin;
    }
    simd::exp_of_nonpositive<kPrecise>(weight);
    for (int i = 0; i < registers(); ++i) {
      Weight<Arithmetic>* to = weights + from + i * kLanes;
      if (factors == nullptr) {
        sum = WeightsOf<Arithmetic>::store(to, weight[i], sum);
      } else {
        sum += weight[i];
        WeightsOf<Arithmetic>::store(
            to, weight[i] * simd::load(factors + from + i * kLanes));
      }
    }
  };
  int64_t i = 0;
  for (; i + kExpRegisters * kLanes <= count; i += kExpRegisters * kLanes) {
    weigh(i, std::integral_constant<int, kExpRegisters>{});
  }
  for (; i < count; i += kLanes) {
    weigh(i, std::integral_constant<int, 1>{});
  }
  return sum;
}

}  // namespace detail

// Makes weights of the scores of a strip of rows, kStride elements apart, of
// `count` keys, a whole number of registers, times a positive scale, and
// updates the rows' states.
// corrections[row] becomes the factor for all that was accumulated before;
// returns whether any of them is not 1. factors_of(row) gives a row's factors
// of dropout, or nothing. A NaN among the scores may be lost to the maximum,
// never to the sum.
template <class Arithmetic, bool kPrecise, int kRows, int64_t kStride,
          class Number, class FactorsOf>
bool softmax_strip(Number* scores, int64_t count, Number scale,
                   const SoftmaxStates<Number>& states,
                   const FactorsOf& factors_of, Weight<Arithmetic>* weights,
                   Number (&corrections)[kRows]) {
  constexpr int kLanes = simd::kLanes<Number>;
  Number origins[kRows];
  for (int first = 0; first < kRows; first += kLanes) {
    const int rows = std::min(kLanes, kRows - first);
    Vector<Number> largest[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      largest[i] = i < rows ? detail::largest_of_row(
                                  scores + (first + i) * kStride, count)
                            : Vector<Number>{};
    }
    const auto before = simd::load_partial(states.maxima + first, rows);
    const auto maximum = larger(
        simd::combine_each(largest, larger<Vector<Number>>) * scale, before);
    const auto origin = origin_of(maximum);
    Vector<Number> correction[1] = {before - origin};
    simd::exp_of_nonpositive(correction);
    simd::store_partial(states.maxima + first, maximum, rows);
    simd::store_partial(origins + first, origin, rows);
    simd::store_partial(corrections + first, correction[0], rows);
  }
  if (!std::all_of(origins, origins + kRows, &compares_with_products<Number>)) {
    for (int i = 0; i < kRows; ++i) {
      scale_row(scores + i * kStride, count, scale);
    }
    scale = Number{1};
  }
  bool corrects = false;
  for (int i = 0; i < kRows; ++i) {
    // Summed apart: each addition to the sum of all keys rounds off more.
    const auto sum = detail::weigh_row<Arithmetic, kPrecise>(
        scores + i * kStride, count, scale, origins[i], factors_of(i),
        Vector<Number>{}, weights + i * kStride);
    states.sums[i] = states.sums[i] * corrections[i] + sum;
    corrects |= corrections[i] != Number{1};
  }
  return corrects;
}

// Once a strip's rows have seen keys, their maxima seldom grow by much, and
// weights need not be relative to the very largest score: what counts is that
// none overflows. So the weights of another block are made relative to the
// maxima so far, of scores that are still in registers, and nothing has to be
// corrected; where a sum of weights comes out beyond this or is not a number,
// the block is done again in full (softmax_strip). Values up to 2^100 do not
// overflow for it.
inline constexpr int kLargestWeight = 1 << 16;

// A mask's elements for the tiles of a strip. Booleans hide weights, numbers
// are added to scores.
template <class Element>
struct MaskRows {
  const Element* data;
  int64_t stride;

  const Element* at(int64_t row, int64_t column) const {
    return data + row * stride + column;
  }
};
struct NoMaskRows {};

// Makes weights of the scores of a tile, times a positive scale, and adds them
// to the rows' sums. Two rows go side by side, as exp_of_nonpositive
// wants it.
template <class Arithmetic, bool kPrecise, int64_t kStride, class Number,
          class Mask>
struct WeighTile {
  Weight<Arithmetic>* weights;
  Number scale;
  const Number* maxima;
  Vector<Number>* sums;
  Mask mask;
  FetchedRows fetched;

  static constexpr bool kInOrder = true;
  static constexpr bool kHides = std::is_same_v<Mask, MaskRows<bool>>;
  static constexpr bool kAdds = !kHides && !std::is_same_v<Mask, NoMaskRows>;

  template <int kRows, int kVectors>
  [[gnu::always_inline]] void prefetch(int64_t row, int64_t column) const {
    if constexpr (kHides || kAdds) {
      fetched.prefetch<kRows>(row, column, kVectors * simd::kLanes<Number>);
    }
  }

  template <int kRows, int kVectors>
  [[gnu::always_inline]] void operator()(
      int64_t row, int64_t column, Vector<Number> (&scores)[kRows][kVectors],
      int /*tail*/) const {
    constexpr int kPair = 2;
    static_assert(kRows % kPair == 0);
    const auto column_of = [&](int i) {
      return column + i % kVectors * simd::kLanes<Number>;
    };
#pragma GCC unroll 16
    for (int first = 0; first < kRows; first += kPair) {
      Vector<Number> weight[kPair * kVectors];
#pragma GCC unroll 4
      for (int i = 0; i < kPair * kVectors; ++i) {
        const int r = first + i / kVectors;
        weight[i] = scores[r][i % kVectors] * scale - maxima[row + r];
        if constexpr (kAdds) {
          weight[i] += simd::load(mask.at(row + r, column_of(i)));
        }
      }
      simd::exp_of_nonpositive<kPrecise, kAdds ? simd::ExpRange::kAny
                                               : simd::ExpRange::kFinite>(
          weight);
#pragma GCC unroll 4
      for (int i = 0; i < kPair * kVectors; ++i) {
        const int64_t r = row + first + i / kVectors;
        const int64_t c = column_of(i);
        if constexpr (kHides) {
          weight[i] = detail::load_booleans<Number>(mask.at(r, c)) != 0
                          ? weight[i]
                          : Vector<Number>{};
        }
        sums[r] = WeightsOf<Arithmetic>::store(weights + r * kStride + c,
                                               weight[i], sums[r]);
      }
    }
  }
};

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

// row / sum by a product with the reciprocal and a step of correction, which
// leaves one rounding where the product has two; half precision does not
// notice.
template <class Output, class Number>
void divide_row(const Number* row, int64_t count, Number sum, Output* to) {
  constexpr int kLanes = simd::kLanes<Number>;
  const Number reciprocal = Number{1} / sum;
  if constexpr (!std::is_same_v<Output, Number>) {
    store_row(row, count, reciprocal, to);
    return;
  }
  for (int64_t i = 0; i < count; i += kLanes) {
    const auto lanes = static_cast<int>(std::min<int64_t>(kLanes, count - i));
    const Vector<Number> value = lanes == kLanes
                                     ? simd::load(row + i)
                                     : simd::load_partial(row + i, lanes);
    const Vector<Number> quotient = value * reciprocal;
    const Vector<Number> nearer =
        (value - quotient * sum) * reciprocal + quotient;
    simd::store_partial(to + i, nearer == nearer ? nearer : quotient, lanes);
  }
}

// The output of a row: what was summed divided by the sum of the weights, or
// zero without any key.
template <class Output, class Number>
void store_output(const SoftmaxState<Number>& state, const Number* row,
                  int64_t count, Output* output) {
  if (state.sum == Number{0}) {
    std::fill_n(output, count, Output{0});
  } else {
    divide_row(row, count, state.sum, output);
  }
}

// What rounding took off the output of a row. Where either is not finite that
// is nothing: infinity less itself would be NaN.
template <class Output, class Number>
void store_residual(const SoftmaxState<Number>& state, const Number* row,
                    int64_t count, const Output* output, Output* residual) {
  constexpr int kLanes = simd::kLanes<Number>;
  const Number reciprocal =
      state.sum == Number{0} ? Number{0} : Number{1} / state.sum;
  const auto residual_of = [&](Vector<Number> value, Vector<Number> rounded) {
    const Vector<Number> rest = value * reciprocal - rounded;
    return rest - rest == Number{0} ? rest : Vector<Number>{};
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    simd::store(residual + i,
                residual_of(simd::load(row + i), simd::load(output + i)));
  }
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    simd::store_partial(residual + i,
                        residual_of(simd::load_partial(row + i, rest),
                                    simd::load_partial(output + i, rest)),
                        rest);
  }
}

// The gradients recompute weights from it: one rounding, not two.
template <class Number>
double log_sum_exp_of(const SoftmaxState<Number>& state) {
  return static_cast<double>(state.maximum) +
         std::log(static_cast<double>(state.sum));
}

// Where the keys of a row are split, each part leaves its maximum, sum and
// weighted values, to be merged in the order of the keys.
template <class Number>
struct SoftmaxParts {
  Number* data;
  int64_t value_stride;  // whole registers

  int64_t size() const { return kState + value_stride; }
  Number* values(int64_t part) const { return at(part) + kState; }

  void put(int64_t part, const SoftmaxState<Number>& state,
           const Number* from) const {
    at(part)[0] = state.maximum;
    at(part)[1] = state.sum;
    std::copy_n(from, value_stride, values(part));
  }

  // Of `count` parts, `stride` apart; the values are added to the first one's.
  SoftmaxState<Number> merge(int64_t first, int64_t count,
                             int64_t stride) const {
    constexpr int kLanes = simd::kLanes<Number>;
    SoftmaxState<Number> state;
    for (int64_t i = 0; i < count; ++i) {
      state.maximum = std::max(state.maximum, at(first + i * stride)[0]);
    }
    Number* sums = values(first);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t part = first + i * stride;
      const Number factor =
          simd::exp(simd::broadcast(at(part)[0] - origin_of(state.maximum)))[0];
      state.sum += at(part)[1] * factor;
      for (int64_t j = 0; j < value_stride; j += kLanes) {
        const Vector<Number> scaled = simd::load(values(part) + j) * factor;
        simd::store(sums + j, i == 0 ? scaled : simd::load(sums + j) + scaled);
      }
    }
    return state;
  }

 private:
  static constexpr int64_t kState = 64 / static_cast<int64_t>(sizeof(Number));

  Number* at(int64_t part) const { return data + part * size(); }
};

}  // namespace pkg::cpu::attention
