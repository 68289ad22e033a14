// P and dS of a strip of rows against the keys that it sees:
//
//   S = scale Q K^T + mask        the product, scaled; mask_strip
//   dP' = dO V^T                  the product
//   P = exp(S - LSE)              recompute_probabilities
//   dS = P * (M * dP' - D)        differentiate_row, which also makes M * P
//
// with M of dropout and * element by element, as in backward.h. What else may
// happen to a score, its cap and its bias, is in mask_strip too.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/attention/backward_operands.h"
#include "cpu/attention/backward_problem.h"
#include "cpu/attention/blocking.h"
#include "cpu/attention/dropout.h"
#include "cpu/attention/online_softmax.h"
#include "cpu/attention/prefetch.h"
#include "cpu/attention/probabilities.h"
#include "cpu/attention/problem.h"
#include "cpu/attention/products.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/gemm/micro_kernel.h"
#include "cpu/simd/math.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu::attention {

// Where a strip lies: rows from `row` of matrix `batch`, of which `used` exist,
// against `count` keys from `column`.
struct StripPlace {
  int64_t batch;
  int64_t mask_offset;
  int64_t row;
  int used;
  int64_t column;
  int64_t count;
};

// Its packed operands: of the strip's rows, and from its first key on, which
// begins a micro-panel.
template <class KGroup>
struct StripOperands {
  const KGroup* queries;
  const KGroup* grad_outputs;
  const KGroup* keys;
  const KGroup* values;
  int64_t key_depth;    // k-groups of a query and of a key
  int64_t value_depth;  // and of an output gradient and of a value
};

// exp(score - origin), registers side by side, each with an origin. The
// difference of two numbers of some size is small, and rounding it to their
// precision would be the largest error of the gradients: its rounding residual
// (Knuth's exact sum of two numbers) is put back. Half precision does not
// notice.
template <bool kPrecise, class Number, size_t kCount>
[[gnu::always_inline]] inline void recompute_probabilities(
    Vector<Number> (&scores)[kCount], const Vector<Number> (&origins)[kCount],
    const Vector<Number> (&origin_residuals)[kCount]) {
  Vector<Number> probabilities[kCount];
  for (size_t i = 0; i < kCount; ++i) {
    probabilities[i] = scores[i] - origins[i];
  }
  if constexpr (!kPrecise) {
    simd::exp_of_nonpositive<kPrecise>(probabilities);
    std::copy_n(probabilities, kCount, scores);
    return;
  }
  for (size_t i = 0; i < kCount; ++i) {
    const Vector<Number> taken = scores[i] - probabilities[i];
    const Vector<Number> residual = (scores[i] - (probabilities[i] + taken)) +
                                    (taken - origins[i] - origin_residuals[i]);
    // Of infinite scores it is NaN.
    scores[i] = residual == residual ? residual : Vector<Number>{};
  }
  simd::exp_of_nonpositive<kPrecise>(probabilities);
  for (size_t i = 0; i < kCount; ++i) {
    scores[i] = probabilities[i] * scores[i] + probabilities[i];
  }
}

// What rounding took off a large origin is more than the first term of a series
// stands for: subtracts both from a whole number of registers of scores, and
// returns statistics that leave them as they are. Where a mask adds -1e9 to
// every key of a row, all of the sum's logarithm is in the residual.
template <class Number>
RowStatistics<Number> subtract_far_origin(
    Number* scores, int64_t count, const RowStatistics<Number>& statistics) {
  constexpr int kLanes = simd::kLanes<Number>;
  const Number residual = statistics.origin_residual;
  if (residual * residual <= std::numeric_limits<Number>::epsilon()) {
    return statistics;
  }
  for (int64_t i = 0; i < count; i += kLanes) {
    simd::store(scores + i,
                (simd::load(scores + i) - statistics.origin) - residual);
  }
  return {Number{0}, statistics.delta, Number{0}};
}

// Makes of a row's scores S and of dP' = dO V^T
//   probabilities = M * P           P = exp(S - LSE)
//   grad_scores   = P * (M * dP' - D)
// with M of dropout, over a whole number of registers.
template <bool kPrecise, class Number>
[[gnu::always_inline]] inline void differentiate_row(
    Number* probabilities, Number* grad_scores, int64_t count,
    const RowStatistics<Number>& of_row, const Number* factors) {
  using V = Vector<Number>;
  constexpr int kLanes = simd::kLanes<Number>;
  const RowStatistics<Number> statistics =
      subtract_far_origin(probabilities, count, of_row);
  const auto differentiate = [&](int64_t from, auto registers) {
    V probability[registers()];
    for (int i = 0; i < registers(); ++i) {
      probability[i] = simd::load(probabilities + from + i * kLanes);
    }
    V origins[registers()];
    V origin_residuals[registers()];
    std::fill_n(origins, registers(), V{} + statistics.origin);
    std::fill_n(origin_residuals, registers(),
                V{} + statistics.origin_residual);
    recompute_probabilities<kPrecise, Number>(probability, origins,
                                              origin_residuals);
    for (int i = 0; i < registers(); ++i) {
      const int64_t at = from + i * kLanes;
      V gradient = simd::load(grad_scores + at);
      V dropped = probability[i];
      if (factors != nullptr) {
        const V factor = simd::load(factors + at);
        gradient *= factor;
        dropped *= factor;
      }
      simd::store(grad_scores + at,
                  probability[i] * (gradient - statistics.delta));
      simd::store(probabilities + at, dropped);
    }
  };
  int64_t i = 0;
  for (; i + detail::kExpRegisters * kLanes <= count;
       i += detail::kExpRegisters * kLanes) {
    differentiate(i, std::integral_constant<int, detail::kExpRegisters>{});
  }
  for (; i < count; i += kLanes) {
    differentiate(i, std::integral_constant<int, 1>{});
  }
}

// differentiate_row of each row of a strip, scaled and masked. Both matrices
// have rows of kScoreStride.
template <class Input>
void differentiate_strip(const BackwardProblem<Input>& problem,
                         const StripPlace& place,
                         simd::Compute<Input>* probabilities,
                         simd::Compute<Input>* grad_scores) {
  using Number = simd::Compute<Input>;
  const Problem<Input>& forward = problem.forward;
  const int64_t padded = round_up(place.count, simd::kLanes<Number>);
  alignas(64) Number factors[kScoreStride + Dropout<Number>::kSpare];
  for (int i = 0; i < place.used; ++i) {
    const int64_t row = place.row + i;
    if (forward.dropout) {
      forward.dropout_factors(factors, place.batch, row, place.column, padded);
    }
    differentiate_row<kPreciseProbabilities<Input>>(
        probabilities + i * kScoreStride, grad_scores + i * kScoreStride,
        padded, problem.statistics[place.batch * problem.shape().rows + row],
        forward.dropout ? factors : nullptr);
  }
}

// The products of a strip: scores, scaled and masked, and dO V^T. Rows are
// kScoreStride apart.
template <class Input, int kRows>
void strip_products(const BackwardProblem<Input>& problem,
                    const StripPlace& place,
                    const StripOperands<typename PackedKeys<Input>::KGroup>& of,
                    simd::Compute<Input>* scores,
                    simd::Compute<Input>* grad_probabilities,
                    simd::Compute<Input>* cap_slopes,
                    const PrefetchRows& to_prefetch) {
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using Number = simd::Compute<Input>;
  const Problem<Input>& forward = problem.forward;
  multiply_strip<Arithmetic, kRows>(
      packed_rows<Arithmetic>(of.queries, of.key_depth),
      packed_panels<Arithmetic>(of.keys, of.key_depth), of.key_depth,
      place.count,
      store_scaled(
          scores, kScoreStride, static_cast<Number>(problem.shape().scale),
          forward.mask.to_prefetch(place.mask_offset, place.row, place.column)),
      forward.accumulation_length);
  multiply_strip<Arithmetic, kRows>(
      packed_rows<Arithmetic>(of.grad_outputs, of.value_depth),
      packed_panels<Arithmetic>(of.values, of.value_depth), of.value_depth,
      place.count, store_to(grad_probabilities, kScoreStride, to_prefetch),
      forward.accumulation_length);
  // Scaled already: if the compiler fused the scale into the differences of
  // recompute_probabilities, these would not be exact.
  if (forward.masks_strip(place.row, place.used, place.column, place.count)) {
    forward.mask_strip(scores, kScoreStride, Number{1}, place.batch,
                       place.mask_offset, place.row, place.used, place.column,
                       place.count, cap_slopes);
  }
}

// Recomputes the probabilities of a strip and makes the gradients of its
// scores. Both have rows of kScoreStride; what is not used of the strip's rows
// is 0, and so are the keys up to a whole register. `cap_slopes`, of capped
// scores, becomes what their gradients are yet to be multiplied by, in rows of
// kScoreStride too. `to_prefetch` is what will be read next.
template <class Input, int kRows>
void compute_score_gradients(
    const BackwardProblem<Input>& problem, const StripPlace& place,
    const StripOperands<typename PackedKeys<Input>::KGroup>& operands,
    simd::Compute<Input>* probabilities, simd::Compute<Input>* grad_scores,
    simd::Compute<Input>* cap_slopes, const PrefetchRows& to_prefetch) {
  using Number = simd::Compute<Input>;
  strip_products<Input, kRows>(problem, place, operands, probabilities,
                               grad_scores, cap_slopes, to_prefetch);
  differentiate_strip(problem, place, probabilities, grad_scores);
  const int64_t padded = round_up(place.count, simd::kLanes<Number>);
  for (int i = place.used; i < kRows; ++i) {
    std::fill_n(probabilities + i * kScoreStride, padded, Number{0});
    std::fill_n(grad_scores + i * kScoreStride, padded, Number{0});
  }
}

// Makes the gradients of the scores before their cap of those behind it.
template <class Number>
void apply_cap_slopes(const Number* cap_slopes, int64_t rows, int64_t count,
                      Number* grad_scores) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < count; j += simd::kLanes<Number>) {
      const int64_t at = i * kScoreStride + j;
      simd::store(grad_scores + at,
                  simd::load(grad_scores + at) * simd::load(cap_slopes + at));
    }
  }
}

}  // namespace pkg::cpu::attention
