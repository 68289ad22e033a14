// The backward pass of attention over a packed batch of sequences: each one is
// a problem of cpu/attention/backward.h, which says how it is computed. Which
// threads run it: cpu/attention/varlen_schedule.h. 2 sum(q k) (3 E + 2 Ev)
// operations a head for sequences of q queries and k keys. Bound by the
// multiply-add units.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu/attention/backward.h"
#include "cpu/attention/backward_problem.h"
#include "cpu/attention/problem.h"
#include "cpu/attention/varlen_problem.h"
#include "cpu/attention/varlen_schedule.h"
#include "cpu/attention/varlen_uncovered.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/runtime/element_types.h"
#include "cpu/simd/simd.h"
#include "host/namespace.h"
#include "scaled_dot_product_attention.h"
#include "scaled_dot_product_attention_varlen.h"

namespace pkg::cpu {
namespace {

using namespace attention;

struct PackedGradients {
  Tensor query;
  Tensor key;
  Tensor value;
};

// Where the gradient of a sequence's tokens goes.
template <class Input>
GradientTarget<Input> packed_target(const Tensor& gradient,
                                    const PackedRange& tokens, int64_t head,
                                    int64_t group) {
  const auto strides = strides_of(gradient);
  return {static_cast<Input*>(gradient.mutable_data_ptr()) +
              tokens.begin * strides[0] + head * strides[1],
          nullptr, packed_operand(strides, group)};
}

// The log-sum-exp (heads, tokens) of a sequence as matrices of one column.
template <class Number>
Matrices<Number> packed_log_sum_exp(const TensorView& log_sum_exp,
                                    int64_t first_token, int64_t first_head) {
  const auto strides = strides_of(log_sum_exp);
  AttentionOperand layout{};
  layout.row_stride = strides[1];
  layout.group = 1;
  layout.lead_strides[0] = strides[0];
  return {static_cast<const Number*>(log_sum_exp.const_data_ptr()) +
              first_head * strides[0] + first_token * strides[1],
          layout};
}

struct BackwardInputs {
  const PackedInputs& forward;
  const TensorView& grad_output;
  const TensorView& output;
  const TensorView& log_sum_exp;
  const TensorView& output_residual;
};

template <class Input>
void run_backward(const BackwardInputs& inputs, const PackedSchedule& schedule,
                  const PackedGradients& gradients) {
  using Number = simd::Compute<Input>;
  const PackedAttentionShape& shape = inputs.forward.shape;
  // Of a sequence the rows of a head follow one another, then its next head.
  std::vector<RowStatistics<Number>> statistics(
      static_cast<size_t>(shape.heads * shape.total_rows));
  const auto run = [&](const PackedHeads& heads) {
    const PackedRange& rows = heads.sequence.rows;
    const PackedRange& columns = heads.sequence.columns;
    const int64_t head = heads.key_head * shape.group();
    BackwardProblem<Input> problem{
        packed_problem<Input>(inputs.forward, heads),
        packed_matrices<Input>(inputs.grad_output, rows.begin, head),
        packed_matrices<Input>(inputs.output, rows.begin, head),
        has_elements(inputs.output_residual)
            ? packed_matrices<Input>(inputs.output_residual, rows.begin, head)
            : Matrices<Input>{},
        packed_log_sum_exp<Number>(inputs.log_sum_exp, rows.begin, head),
        statistics.data() + rows.begin * shape.heads + head * rows.count};
    attention_gradients(problem,
                        packed_target<Input>(gradients.query, rows, head, 1),
                        packed_target<Input>(gradients.key, columns,
                                             heads.key_head, shape.group()),
                        packed_target<Input>(gradients.value, columns,
                                             heads.key_head, shape.group()));
  };
  schedule.run([&](const PackedSequence& sequence,
                   int64_t key_head) { run({sequence, key_head, 1, 1}); },
               [&](const PackedSequence& sequence, int64_t threads) {
                 run({sequence, 0, shape.key_heads, threads});
               });
}

std::tuple<Tensor, Tensor, Tensor> scaled_dot_product_attention_varlen_backward(
    const TensorView& grad_output, const TensorView& query,
    const TensorView& key, const TensorView& value,
    const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k,
    const std::optional<TensorView>& dropout_seed, const TensorView& output,
    const TensorView& log_sum_exp, const TensorView& output_residual,
    int64_t max_seqlen_q, int64_t max_seqlen_k, double dropout_p,
    std::optional<double> softmax_scale, bool causal,
    const std::optional<TensorView>& alibi_slopes, int64_t window_left,
    int64_t window_right, double softcap) {
  const PackedAttentionOptions options{
      max_seqlen_q, max_seqlen_k,
      dropout_p,    softmax_scale,
      causal,       {alibi_slopes, window_left, window_right, softcap}};
  const PackedAttentionShape shape = plan_packed_attention(
      query, key, value, cu_seqlens_q, cu_seqlens_k, options);
  check_packed_dropout_seed(query, dropout_seed, dropout_p);
  check_packed_attention_backward(shape, query, grad_output, output,
                                  log_sum_exp, output_residual);
  const auto rows = read_packed_rows(shape, cu_seqlens_q);
  const auto columns = read_packed_columns(shape, cu_seqlens_k);
  const PackedSchedule schedule(shape, rows, columns, options);
  const auto like = [&](const TensorView& tensor) {
    return allocate_attention_gradient(tensor, shape.heads == 0);
  };
  const PackedGradients gradients{like(query), like(key), like(value)};
  if (shape.heads == 0) {
    return {gradients.query, gradients.key, gradients.value};
  }
  UncoveredTokens(rows, shape.total_rows).zero(gradients.query);
  const UncoveredTokens uncovered_keys(columns, shape.total_columns);
  uncovered_keys.zero(gradients.key);
  uncovered_keys.zero(gradients.value);
  const PackedInputs forward{shape, query, key, value, dropout_seed, options};
  const BackwardInputs inputs{forward, grad_output, output, log_sum_exp,
                              output_residual};
  with_floating_type(shape.type, [&](auto example) {
    run_backward<decltype(example)>(inputs, schedule, gradients);
  });
  return {gradients.query, gradients.key, gradients.value};
}

PKG_IMPLEMENT(CPU, library) {
  library.impl<&scaled_dot_product_attention_varlen_backward>(
      "scaled_dot_product_attention_varlen_backward");
}

}  // namespace
}  // namespace pkg::cpu
