// What the backward pass computes of each row beforehand: D = rowsum(dO * O),
// which is rowsum(P * dP) in another form, and the origin of its probabilities.
//
// A register of rows at a time: their elements are multiplied and added in the
// order in which the micro-kernel adds those of dO V^T, so that the difference
// of the two is exactly 0 where one key has all the probability.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "cpu/attention/backward_problem.h"
#include "cpu/attention/number.h"
#include "cpu/attention/problem.h"
#include "cpu/attention/scratch.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/gemm/packing.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/simd.h"
#include "host/integer_math.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

// A row without any key has probabilities of 0; one whose largest score is
// infinite has none that is a number.
template <class Number>
Number probability_origin(Number log_sum_exp) {
  if (log_sum_exp == -kInfinity<Number>) {
    return kInfinity<Number>;
  }
  return log_sum_exp == kInfinity<Number>
             ? std::numeric_limits<Number>::quiet_NaN()
             : log_sum_exp;
}

// dO and O of a register of rows, transposed: a row is a lane.
template <class Input>
class TransposedOutputs {
 public:
  using Number = simd::Compute<Input>;

  // D of the rows. It is another form of the sum of the probabilities times
  // their gradients, which is NaN where an output gradient is infinite: terms
  // of either sign meet. So there `excess` is NaN, and 0 else.
  struct Delta {
    Vector<Number> sum;
    Vector<Number> excess;
  };

  explicit TransposedOutputs(int64_t value_size)
      : value_size_(value_size), array_{value_size * kLanes} {
    std::byte* memory =
        Workspace::of_this_thread<Slot::AttentionTask>().request<std::byte>(
            3 * array_.size());
    grad_outputs_ = array_.take(memory);
    outputs_ = array_.take(memory);
    residuals_ = array_.take(memory);
  }

  void pack(const BackwardProblem<Input>& problem, int64_t batch, int64_t row,
            int rows) {
    const auto pack = [&](const Matrices<Input>& matrices, Number* to) {
      const auto matrix = matrices.at(problem.shape(), batch).from(row, 0);
      pack_lines<Floating<Number>>(matrix.data, matrix.row_stride,
                                   matrix.column_stride, rows, kLanes,
                                   value_size_, to);
    };
    pack(problem.grad_output, grad_outputs_);
    pack(problem.output, outputs_);
    if (problem.output_residual.data != nullptr) {
      pack(problem.output_residual, residuals_);
      for (int64_t i = 0; i < array_.count; i += kLanes) {
        simd::store(outputs_ + i,
                    simd::load(outputs_ + i) + simd::load(residuals_ + i));
      }
    }
  }

  Delta delta(int64_t accumulation_length) const {
    Vector<Number> delta{};
    Vector<Number> excess{};
    for (int64_t first = 0; first < value_size_; first += accumulation_length) {
      Vector<Number> sum{};
      const int64_t last = std::min(first + accumulation_length, value_size_);
      for (int64_t i = first * kLanes; i < last * kLanes; i += kLanes) {
        const Vector<Number> gradient = simd::load(grad_outputs_ + i);
        sum = Floating<Number>::multiply_add(gradient, simd::load(outputs_ + i),
                                             sum);
        excess += gradient * Number{0};
      }
      delta = first == 0 ? sum : delta + sum;
    }
    return {delta, excess};
  }

 private:
  static constexpr int kLanes = simd::kLanes<Number>;

  int64_t value_size_;
  Scratch<Number> array_;
  Number* grad_outputs_;
  Number* outputs_;  // and what rounding took off them
  Number* residuals_;
};

// Stores what is computed of up to a strip's rows. Returns whether all of it
// are numbers.
template <class Input>
bool store_statistics(const BackwardProblem<Input>& problem, int64_t batch,
                      int64_t row, int rows,
                      const simd::Compute<Input>* deltas) {
  using Number = simd::Compute<Input>;
  const AttentionShape& shape = problem.shape();
  const auto log_sum_exp = problem.log_sum_exp.at(shape, batch).from(row, 0);
  bool are_numbers = true;
  for (int i = 0; i < rows; ++i) {
    const int64_t flat = batch * shape.rows + row + i;
    const Number origin = probability_origin(*log_sum_exp.at(i, 0));
    problem.statistics[flat] = {origin, deltas[i],
                                problem.log_sum_exp_residual == nullptr
                                    ? Number{0}
                                    : problem.log_sum_exp_residual[flat]};
    are_numbers &= !std::isnan(origin) && !std::isnan(deltas[i]);
  }
  return are_numbers;
}

// Computes and stores those of some rows of a matrix. Returns whether all of it
// are numbers.
template <class Input>
bool compute_statistics(const BackwardProblem<Input>& problem, int64_t batch,
                        int64_t row, int64_t rows) {
  using Number = simd::Compute<Input>;
  constexpr int kLanes = simd::kLanes<Number>;
  TransposedOutputs<Input> outputs(problem.shape().value_size);
  bool are_numbers = true;
  for (const int64_t end = row + rows; row < end; row += kLanes) {
    const int used = static_cast<int>(std::min<int64_t>(kLanes, end - row));
    outputs.pack(problem, batch, row, used);
    const auto delta = outputs.delta(problem.forward.accumulation_length);
    alignas(64) Number deltas[kLanes];
    simd::store(deltas, delta.sum + delta.excess);
    are_numbers &= store_statistics(problem, batch, row, used, deltas);
  }
  return are_numbers;
}

template <class Input>
void compute_row_statistics(const BackwardProblem<Input>& problem) {
  constexpr int kLanes = simd::kLanes<simd::Compute<Input>>;
  const AttentionShape& shape = problem.shape();
  const int64_t groups = ceil_div(shape.rows, kLanes);
  const int64_t grain = std::max<int64_t>(
      1, 16384 / (kLanes * std::max<int64_t>(shape.value_size, 1)));
  parallel_for(shape.batch() * groups, grain, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t row = group % groups * kLanes;
      compute_statistics(problem, group / groups, row,
                         std::min<int64_t>(kLanes, shape.rows - row));
    }
  });
}

}  // namespace pkg::cpu::attention
