// The forward pass of attention over a packed batch of sequences.
//
// Each sequence is a problem of scaled_dot_product_attention_forward.cpp, which
// says how it is computed; only the operands' places are the sequence's own,
// and the causal diagonal ends in the last key. What is new here is which
// threads run it: cpu/attention/varlen_schedule.h. Nothing is padded and
// nothing is computed for a key of another sequence: 2 sum(q k) (E + Ev)
// operations a head for sequences of q queries and k keys. Bound by the
// multiply-add units.
#include <cstdint>
#include <optional>
#include <tuple>

#include "cpu/attention/forward.h"
#include "cpu/attention/forward_outputs.h"
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

template <class Input>
void run_forward(const PackedInputs& inputs, const PackedSchedule& schedule,
                 const UncoveredTokens& uncovered, const Tensor& output,
                 const Tensor& output_residual, const Tensor& log_sum_exp) {
  using Number = simd::Compute<Input>;
  const PackedAttentionShape& shape = inputs.shape;
  const AttentionOperand layout = packed_operand(strides_of(output), 1);
  auto* const outputs = static_cast<Input*>(output.mutable_data_ptr());
  auto* const residuals = data_or_null<Input>(output_residual);
  auto* const sums = static_cast<Number*>(log_sum_exp.mutable_data_ptr());
  uncovered.zero(output);
  if (residuals != nullptr) {
    uncovered.zero(output_residual);
  }
  uncovered.have_no_key(sums, shape.heads);
  const auto run = [&](const PackedHeads& heads) {
    const int64_t row = heads.sequence.rows.begin;
    const int64_t head = heads.key_head * shape.group();
    if (heads.sequence.rows.count > 0) {
      const int64_t at =
          row * layout.row_stride + head * layout.lead_strides[0];
      attention_forward<Input>(
          packed_problem<Input>(inputs, heads),
          {outputs + at, residuals == nullptr ? nullptr : residuals + at,
           layout, sums + head * shape.total_rows + row, shape.total_rows});
    }
  };
  schedule.run([&](const PackedSequence& sequence,
                   int64_t key_head) { run({sequence, key_head, 1, 1}); },
               [&](const PackedSequence& sequence, int64_t threads) {
                 run({sequence, 0, shape.key_heads, threads});
               });
}

std::tuple<Tensor, Tensor, Tensor> scaled_dot_product_attention_varlen_forward(
    const TensorView& query, const TensorView& key, const TensorView& value,
    const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k,
    const std::optional<TensorView>& dropout_seed, int64_t max_seqlen_q,
    int64_t max_seqlen_k, double dropout_p, std::optional<double> softmax_scale,
    bool causal, bool keeps_residual,
    const std::optional<TensorView>& alibi_slopes, int64_t window_left,
    int64_t window_right, double softcap) {
  const PackedAttentionOptions options{
      max_seqlen_q, max_seqlen_k,
      dropout_p,    softmax_scale,
      causal,       {alibi_slopes, window_left, window_right, softcap}};
  const PackedAttentionShape shape = plan_packed_attention(
      query, key, value, cu_seqlens_q, cu_seqlens_k, options);
  check_packed_dropout_seed(query, dropout_seed, dropout_p);
  const auto rows = read_packed_rows(shape, cu_seqlens_q);
  const PackedSchedule schedule(
      shape, rows, read_packed_columns(shape, cu_seqlens_k), options);
  const UncoveredTokens uncovered(rows, shape.total_rows);
  const Tensor output =
      empty_contiguous(shape.output_sizes(), shape.type, device_of(query));
  const Tensor log_sum_exp = empty_contiguous(
      shape.log_sum_exp_sizes(), shape.accumulate_type(), device_of(query));
  const Tensor output_residual =
      allocate_packed_residual(shape, query, keeps_residual);
  if (shape.heads == 0) {
    return {output, log_sum_exp, output_residual};
  }
  const PackedInputs inputs{shape, query, key, value, dropout_seed, options};
  with_floating_type(shape.type, [&](auto example) {
    run_forward<decltype(example)>(inputs, schedule, uncovered, output,
                                   output_residual, log_sum_exp);
  });
  return {output, log_sum_exp, output_residual};
}

// The composite operator where it has no seed to draw.
Tensor packed_attention_without_dropout(
    const TensorView& query, const TensorView& key, const TensorView& value,
    const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k,
    int64_t max_seqlen_q, int64_t max_seqlen_k, double dropout_p,
    std::optional<double> softmax_scale, bool causal, int64_t window_left,
    int64_t window_right, double softcap,
    const std::optional<TensorView>& alibi_slopes) {
  PKG_CHECK(dropout_p == 0.0, "dropout draws a seed");
  return std::get<0>(scaled_dot_product_attention_varlen_forward(
      query, key, value, cu_seqlens_q, cu_seqlens_k, std::nullopt, max_seqlen_q,
      max_seqlen_k, dropout_p, softmax_scale, causal, false, alibi_slopes,
      window_left, window_right, softcap));
}

PKG_IMPLEMENT(CPU, library) {
  library.impl_directly<&packed_attention_without_dropout>(
      "scaled_dot_product_attention_varlen");
  library.impl<&scaled_dot_product_attention_varlen_forward>(
      "scaled_dot_product_attention_varlen_forward");
}

}  // namespace
}  // namespace pkg::cpu
