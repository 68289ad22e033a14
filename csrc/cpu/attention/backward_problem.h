// One call of the backward pass: what it has besides the forward pass's
// operands, and where its results go.
#pragma once

#include <cstdint>

#include "cpu/attention/blocking.h"
#include "cpu/attention/problem.h"
#include "cpu/attention/rows.h"
#include "cpu/simd/simd.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

// Rows of a block: even, since bfloat16 goes by pairs of rows.
inline constexpr int64_t kRowBlock = kStripRows * 8;
static_assert(kRowBlock % 2 == 0);

// What of a row is needed to recompute its probabilities and their gradients.
template <class Number>
struct RowStatistics {
  Number origin;  // its log-sum-exp; a probability is exp(score - origin)
  Number delta;   // D = rowsum(dO * O)
  Number origin_residual;  // what rounding took off the origin, if known
};

template <class Input>
struct BackwardProblem {
  using Number = simd::Compute<Input>;
  Problem<Input> forward;
  Matrices<Input> grad_output;
  Matrices<Input> output;
  Matrices<Input> output_residual;  // without data, if there is none
  Matrices<Number> log_sum_exp;
  RowStatistics<Number>* statistics;             // of each row of the batch
  const Number* log_sum_exp_residual = nullptr;  // likewise, or null

  const AttentionShape& shape() const { return forward.shape; }
};

// Where a gradient goes: to the matrices of a result of the inputs' type, or of
// the type of the sums where the operand was broadcast and the gradient is yet
// to be summed over the batch.
template <class Input>
struct GradientTarget {
  using Number = simd::Compute<Input>;
  Input* narrow;
  Number* wide;
  AttentionOperand layout;  // its columns are contiguous

  void store(const AttentionShape& shape, int64_t batch, int64_t row,
             const Number* from, int64_t count, Number factor) const {
    const int64_t to = layout.offset(shape, batch) + row * layout.row_stride;
    if (wide != nullptr) {
      store_row(from, count, factor, wide + to);
    } else {
      store_row(from, count, factor, narrow + to);
    }
  }
};

}  // namespace pkg::cpu::attention
