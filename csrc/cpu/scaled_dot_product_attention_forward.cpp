// The forward pass of scaled dot-product attention.
//
// Algorithm: FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 1). A task is a
// block of rows of one head; it walks the keys block by block:
//
//   S = Q K^T                  scaled and masked
//   m, P = exp(S - m), l       running maximum, probabilities that are not yet
//                              normalised, and their running sum, of each row
//   O = exp(m_old - m) O + P V
//
// and in the end O / l and the log-sum-exp m + log l. Within the pair of blocks
// it goes strip by strip of 12 rows, so that scores and probabilities (10 KiB)
// never leave the L1 cache, while the packed keys and values stream from L2.
// Keys and values of a head are packed once, by all threads, and shared by all
// its blocks of rows. Micro-panels of keys that causality, a window or a mask
// hides from a whole strip are left out, as long as all that their
// probabilities of 0 would be multiplied with is finite. A few rows against
// many keys (decoding) take another way, bound by memory:
// cpu/attention/decode.h.
//
//   this file                             the operator, and which way it takes
//   cpu/attention/blocked_forward.h       how the work is cut, who does what
//     forward_operands.h                  packed K and V
//     forward_block.h                     a block of rows against its keys
//       softmax_tile.h, online_softmax.h  P, in registers or of written scores
//     forward_outputs.h, merge.h          O, its rounding residual, log-sum-exp
//
// Blocks: the micro-kernel's MR x NR tiles (cpu/attention/blocking.h); 192
// keys, at most 192 rows (ForwardPlan). bfloat16 keeps probabilities as
// bfloat16 pairs for the dot product instructions where there are some, and
// sums them as rounded.
//
// Operations: 2 L S (E + Ev) and L S exponentials for each head, half if
// causal. Bytes, at the least: (L + S)(E + Ev) elements; extra memory
// S (E + Ev), never L S. Bound by the multiply-add units: on Zen 4, 1x8x1024x64
// in float32, 96 to 99 GFLOP/s; the products take 85 % of the time at 95 % of
// their peak, the softmax 9 %, packing 4 %. What brought it there, what masks
// cost and what was tried and left out: docs/tuning/attention.md.
#include <optional>
#include <tuple>

#include "cpu/attention/blocked_forward.h"
#include "cpu/attention/decoding_forward.h"
#include "cpu/attention/forward.h"
#include "cpu/attention/forward_outputs.h"
#include "cpu/attention/passes.h"
#include "cpu/attention/problem.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/runtime/element_types.h"
#include "cpu/simd/simd.h"
#include "host/namespace.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu {

namespace attention {

template <class Input>
void attention_forward(const Problem<Input>& problem,
                       const ForwardOutputs<Input>& outputs) {
  if (decodes(problem, outputs.has_backward)) {
    attention_forward_decoding(problem, outputs);
  } else {
    attention_forward_blocked(problem, outputs);
  }
}

#define PKG_ATTENTION_FORWARD(Input)                     \
  PKG_ATTENTION_FORWARD_BLOCKED(, Input);                \
  template void attention_forward(const Problem<Input>&, \
                                  const ForwardOutputs<Input>&)
PKG_ATTENTION_FORWARD(double);
PKG_ATTENTION_FORWARD(float);
PKG_ATTENTION_FORWARD(Half);
PKG_ATTENTION_FORWARD(BFloat16);

}  // namespace attention

namespace {

using namespace attention;

template <class Input>
void forward_of(const ForwardArguments& arguments,
                const ForwardResults& results) {
  using Number = simd::Compute<Input>;
  const AttentionShape& shape = arguments.shape;
  const auto problem = make_problem<Input>(
      shape, arguments.query, arguments.key, arguments.value,
      arguments.attn_mask, arguments.dropout_seed, arguments.dropout_p,
      arguments.is_causal, arguments.extras.alibi_slopes);
  const ForwardOutputs<Input> outputs{
      static_cast<Input*>(results.output.mutable_data_ptr()),
      data_or_null<Input>(results.output_residual),
      attention_operand(shape, results.output, 1),
      static_cast<Number*>(results.log_sum_exp.mutable_data_ptr()),
      shape.rows,
      nullptr,
      results.has_backward};
  attention_forward(problem, outputs);
}

}  // namespace

namespace attention {

void run_forward(const ForwardArguments& arguments,
                 const ForwardResults& results) {
  with_floating_type(arguments.shape.type, [&](auto example) {
    forward_of<decltype(example)>(arguments, results);
  });
}

}  // namespace attention

namespace {

std::tuple<Tensor, Tensor, Tensor> scaled_dot_product_attention_forward(
    const TensorView& query, const TensorView& key, const TensorView& value,
    const std::optional<TensorView>& attn_mask,
    const std::optional<TensorView>& dropout_seed, double dropout_p,
    bool is_causal, std::optional<double> scale, bool enable_gqa,
    bool keeps_residual, const std::optional<TensorView>& alibi_slopes,
    int64_t window_left, int64_t window_right, double softcap) {
  const AttentionExtras extras{alibi_slopes, window_left, window_right,
                               softcap};
  const AttentionShape shape =
      plan_attention(query, key, value, attn_mask, dropout_p, is_causal, scale,
                     enable_gqa, extras);
  check_dropout_seed(query, dropout_seed, dropout_p);
  const ForwardResults results{
      allocate_attention_output(shape, query),
      allocate_log_sum_exp(shape, query),
      allocate_output_residual(shape, query, keeps_residual), keeps_residual};
  if (shape.batch() * shape.rows > 0) {
    run_forward({shape, query, key, value, attn_mask, dropout_seed, dropout_p,
                 is_causal, extras},
                results);
  }
  return {results.output, results.log_sum_exp, results.output_residual};
}

// The composite operator where it has no seed to draw.
Tensor attention_without_dropout(
    const TensorView& query, const TensorView& key, const TensorView& value,
    const std::optional<TensorView>& attn_mask, double dropout_p,
    bool is_causal, std::optional<double> scale, bool enable_gqa,
    int64_t window_left, int64_t window_right, double softcap,
    const std::optional<TensorView>& alibi_slopes) {
  PKG_CHECK(dropout_p == 0.0, "dropout draws a seed");
  return std::get<0>(scaled_dot_product_attention_forward(
      query, key, value, attn_mask, std::nullopt, dropout_p, is_causal, scale,
      enable_gqa, false, alibi_slopes, window_left, window_right, softcap));
}

PKG_IMPLEMENT(CPU, library) {
  library.impl_directly<&attention_without_dropout>(
      "scaled_dot_product_attention");
  library.impl<&scaled_dot_product_attention_forward>(
      "scaled_dot_product_attention_forward");
}

}  // namespace
}  // namespace pkg::cpu
