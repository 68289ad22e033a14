// The forward pass again, for the gradients of one that went another way than
// the backward pass goes, by decoding or by tiles; and of one whose log-sum-exp
// is so large that rounding took the sum's part of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "attention_large_log_sum_exp.h"
#include "cpu/attention/backward_problem.h"
#include "cpu/attention/blocked_forward.h"
#include "cpu/attention/decoding_forward.h"
#include "cpu/attention/forward.h"
#include "cpu/attention/forward_outputs.h"
#include "cpu/attention/problem.h"
#include "cpu/simd/simd.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

// Whether any row's log-sum-exp is large.
template <class Input>
bool has_large_log_sum_exp(const BackwardProblem<Input>& problem) {
  const AttentionShape& shape = problem.shape();
  for (int64_t batch = 0; batch < shape.batch(); ++batch) {
    const auto rows = problem.log_sum_exp.at(shape, batch);
    for (int64_t row = 0; row < shape.rows; ++row) {
      if (is_large_log_sum_exp(*rows.at(row, 0))) {
        return true;
      }
    }
  }
  return false;
}

// What the forward pass left, recomputed of scores that are accumulated as in
// the backward pass; decoding, or tiles, did it in another order, and with
// large scores their difference would be the largest error of the gradients.
template <class Input>
class RecomputedForward {
 public:
  using Number = simd::Compute<Input>;

  // Replaces what `problem` has, where there is need. `by_tiles`: the forward
  // pass may have gone by tiles, which the backward pass does not. `is_large`:
  // has_large_log_sum_exp().
  RecomputedForward(BackwardProblem<Input>& problem, bool by_tiles,
                    bool is_large) {
    if constexpr (std::is_same_v<Input, Number>) {
      const AttentionShape& shape = problem.shape();
      if (shape.batch() * shape.rows == 0) {
        return;
      }
      // The rows are few, so that it costs little, and PyTorch accumulates
      // their scores in short parts: so does this.
      if (decodes(problem.forward, true)) {
        problem.forward.accumulation_length = kShortAccumulationLength;
        run(problem, true);
        return;
      }
    }
    if (is_large || (by_tiles && std::is_same_v<Input, Number>)) {
      run(problem, is_large);
    }
  }

 private:
  static constexpr int64_t kShortAccumulationLength = 16;

  void run(BackwardProblem<Input>& problem, bool keeps_residual) {
    const AttentionShape& shape = problem.shape();
    const int64_t rows = shape.batch() * shape.rows;
    log_sum_exp_.resize(static_cast<size_t>(rows));
    if (keeps_residual) {
      log_sum_exp_residual_.resize(static_cast<size_t>(rows));
      problem.log_sum_exp_residual = log_sum_exp_residual_.data();
    }
    output_.resize(static_cast<size_t>(rows * shape.value_size));
    const AttentionOperand layout =
        contiguous_operand(shape, 1, shape.rows, shape.value_size);
    // In half precision there is what rounding took off the one that is there.
    if constexpr (std::is_same_v<Input, Number>) {
      problem.output = {output_.data(), layout};
    }
    problem.log_sum_exp = {log_sum_exp_.data(),
                           contiguous_operand(shape, 1, shape.rows, 1)};
    attention_forward_by_vectors(
        problem.forward,
        ForwardOutputs<Input>{
            output_.data(), nullptr, layout, log_sum_exp_.data(), shape.rows,
            keeps_residual ? log_sum_exp_residual_.data() : nullptr});
  }

  std::vector<Input> output_;
  std::vector<Number> log_sum_exp_;
  std::vector<Number> log_sum_exp_residual_;
};

}  // namespace pkg::cpu::attention
