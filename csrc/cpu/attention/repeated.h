// The forward pass again, for the gradients of one that went the decoding way.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpu/attention/decode.h"
#include "cpu/attention/forward.h"
#include "cpu/attention/tiled_backward.h"

namespace pkg::cpu::attention {

// Contiguous matrices of every batch index, or of every key head.
inline AttentionOperand contiguous_operand(const AttentionShape& shape,
                                           int64_t group, int64_t rows,
                                           int64_t columns) {
  AttentionOperand operand{columns, 1, group, {}};
  int64_t stride = rows * columns;
  for (size_t d = shape.lead_dims; d-- > 0;) {
    operand.lead_strides[d] = stride;
    stride *= d + 1 == shape.lead_dims ? shape.lead_sizes[d] / group
                                       : shape.lead_sizes[d];
  }
  return operand;
}

// What the forward pass left, made again of scores as the backward pass sums
// them, which a decoding one did in another order: with large scores their
// difference would be the largest error of the gradients. Few rows, so that it
// costs little, and that PyTorch sums the scores in short parts: so does this.
template <class Input>
class RepeatedForward {
 public:
  using Number = simd::Compute<Input>;

  // Replaces what `problem` has, where there is need.
  explicit RepeatedForward(BackwardProblem<Input>& problem) {
    if constexpr (std::is_same_v<Input, Number>) {
      const AttentionShape& shape = problem.shape();
      if (shape.batch() * shape.rows > 0 && decodes(problem.forward)) {
        run(problem);
      }
    }
  }

 private:
  static constexpr int64_t kShortSum = 16;

  void run(BackwardProblem<Input>& problem) {
    const AttentionShape& shape = problem.shape();
    const int64_t rows = shape.batch() * shape.rows;
    log_sum_exp_.resize(static_cast<size_t>(rows));
    log_sum_exp_rest_.resize(static_cast<size_t>(rows));
    output_.resize(static_cast<size_t>(rows * shape.value_size));
    problem.forward.longest_sum = kShortSum;
    problem.output = {output_.data(), contiguous_operand(shape, 1, shape.rows,
                                                         shape.value_size)};
    problem.log_sum_exp = {log_sum_exp_.data(),
                           contiguous_operand(shape, 1, shape.rows, 1)};
    attention_forward_tiled(
        problem.forward,
        ForwardOutputs<Input>{output_.data(), nullptr, problem.output.layout,
                              log_sum_exp_.data(), shape.rows,
                              log_sum_exp_rest_.data()});
    problem.log_sum_exp_rest = log_sum_exp_rest_.data();
  }

  std::vector<Input> output_;
  std::vector<Number> log_sum_exp_;
  std::vector<Number> log_sum_exp_rest_;
};

}  // namespace pkg::cpu::attention
