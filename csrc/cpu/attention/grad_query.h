// dQ: where its sums lie while keys are gone through, and what becomes of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/attention/backward_operands.h"
#include "cpu/attention/backward_problem.h"
#include "cpu/attention/blocking.h"
#include "cpu/attention/compensation.h"
#include "cpu/attention/key_range.h"
#include "cpu/attention/probabilities.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/runtime/parallel.h"
#include "cpu/simd/simd.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

// The layout of one split's sums of dQ of one head, unscaled, and behind them
// what is summed for the compensation of its rows (compensation.h).
template <class Input>
struct GradQuerySums {
  using Number = simd::Compute<Input>;
  using Arithmetic = typename ArithmeticOf<Input>::type;
  int64_t stride;    // numbers of a row
  int64_t rows;      // of whole strips
  int64_t sums_end;  // the first number that is not of dQ
  int64_t size;      // numbers of all

  GradQuerySums(const AttentionShape& shape, int64_t key_stride)
      : stride(key_stride),
        rows(padded_rows(shape.rows)),
        sums_end(rows * stride) {
    if constexpr (kRoundsProbabilities<Arithmetic>) {
      size = sums_end + rows / 2 *
                            int64_t{sizeof(PairCompensation<Arithmetic>)} /
                            int64_t{sizeof(Number)};
    } else {
      size = sums_end + rows * (simd::kLanes<Number> + stride);
    }
  }
  void reset(Number* sums) const {
    std::memset(sums, 0, static_cast<size_t>(size) * sizeof(Number));
  }
  Number* row(Number* sums, int64_t row) const { return sums + row * stride; }
  PairCompensation<Arithmetic>& pair_compensation(Number* sums,
                                                  int64_t row) const {
    return reinterpret_cast<PairCompensation<Arithmetic>*>(sums +
                                                           sums_end)[row / 2];
  }
  RowCompensation<Arithmetic> row_compensation(Number* sums,
                                               int64_t row) const {
    Number* after = sums + sums_end;
    return {after + row * simd::kLanes<Number>,
            after + rows * simd::kLanes<Number> + row * stride};
  }
};

// Adds the rows of a strip to what is summed for their compensation, of whole
// blocks of `count` keys in rows of kScoreStride.
template <class Pieces, class Input, class Number>
void add_to_row_compensation(const GradQuerySums<Input>& layout, int64_t row,
                             int64_t rows, const Number* probabilities,
                             const Number* grad_scores, int64_t count,
                             const Number* key_means, Number* sums) {
  for (int64_t i = 0; i < rows; ++i) {
    layout.row_compensation(sums, row + i)
        .template add<Pieces>(probabilities + i * kScoreStride,
                              grad_scores + i * kScoreStride, count, key_means,
                              layout.stride);
  }
}

// The same of capped scores. Behind the cap the gradients sum to 0; before it
// an error of theirs is that much of each probability times the cap's slope.
// The keys `seen` are those that have slopes, from the first of these on.
template <class Pieces, class Input, class Number>
void add_capped_to_row_compensation(const GradQuerySums<Input>& layout,
                                    int64_t row, int64_t rows,
                                    const Number* probabilities,
                                    const Number* grad_scores, int64_t count,
                                    const KeyRange& seen,
                                    const Number* cap_slopes,
                                    const Number* key_means, Number* sums) {
  alignas(64) Number weights[kScoreStride] = {};
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t at = i * kScoreStride;
    for (int64_t j = seen.begin; j < seen.end; j += simd::kLanes<Number>) {
      simd::store(weights + j,
                  simd::load(probabilities + at + j) *
                      simd::load(cap_slopes + at + j - seen.begin));
    }
    layout.row_compensation(sums, row + i)
        .template add<Pieces>(weights, grad_scores + at, count, key_means,
                              layout.stride);
  }
}

// Adds the other splits' sums of a row to the first one's, and what is summed
// for its compensation, in the order of the keys; then compensates. `sums` are
// those of the row's head, split by split.
template <class Input, class Number>
void merge_splits(const BackwardProblem<Input>& problem,
                  const GradQuerySums<Input>& layout, int64_t batch,
                  int64_t row, int64_t splits, Number* sums) {
  using Arithmetic = typename ArithmeticOf<Input>::type;
  const AttentionShape& shape = problem.shape();
  Number* first = layout.row(sums, row);
  for (int64_t s = 1; s < splits; ++s) {
    const Number* other = first + s * layout.size;
    for (int64_t i = 0; i < layout.stride; ++i) {
      first[i] += other[i];
    }
  }
  if constexpr (kRoundsProbabilities<Arithmetic>) {
    auto compensation = layout.pair_compensation(sums, row);
    for (int64_t s = 1; s < splits; ++s) {
      compensation.merge(layout.pair_compensation(sums + s * layout.size, row));
    }
    compensate(compensation, row % 2, problem.forward.key.at(shape, batch),
               shape.columns, shape.head_size, first);
  } else {
    const auto compensation = layout.row_compensation(sums, row);
    for (int64_t s = 1; s < splits; ++s) {
      compensation.merge(layout.row_compensation(sums + s * layout.size, row),
                         layout.stride);
    }
    compensation.compensate(layout.stride, first);
  }
}

// Merges and stores dQ of `heads` query heads from `batch` on.
template <class Input, class Number>
void store_grad_query(const BackwardProblem<Input>& problem,
                      const GradQuerySums<Input>& layout, int64_t batch,
                      int64_t heads, int64_t splits, Number* sums,
                      const GradientTarget<Input>& grad_query) {
  const AttentionShape& shape = problem.shape();
  const int64_t grain =
      std::max<int64_t>(1, 16384 / (layout.stride * splits + 1));
  parallel_for(heads * shape.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t flat = begin; flat < end; ++flat) {
      const int64_t head = flat / shape.rows;
      const int64_t row = flat % shape.rows;
      Number* of_head = sums + head * splits * layout.size;
      merge_splits(problem, layout, batch + head, row, splits, of_head);
      grad_query.store(shape, batch + head, row, layout.row(of_head, row),
                       shape.head_size, static_cast<Number>(shape.scale));
    }
  });
}

}  // namespace pkg::cpu::attention
