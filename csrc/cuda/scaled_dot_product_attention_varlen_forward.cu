#include <tuple>

#include "cuda/attention/varlen_host.h"
#include "host/namespace.h"

namespace pkg::cuda {
namespace {

std::tuple<Tensor, Tensor, Tensor> scaled_dot_product_attention_varlen_forward(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
    const std::optional<Tensor>& dropout_seed, int64_t max_seqlen_q,
    int64_t max_seqlen_k, double dropout_p, std::optional<double> softmax_scale,
    bool causal, bool keeps_residual, const std::optional<Tensor>& alibi_slopes,
    int64_t window_left, int64_t window_right, double softcap) {
  const PackedAttentionOptions options{
      max_seqlen_q, max_seqlen_k,
      dropout_p,    softmax_scale,
      causal,       {alibi_slopes, window_left, window_right, softcap}};
  const PackedAttentionShape shape = plan_packed_attention(
      query, key, value, cu_seqlens_q, cu_seqlens_k, options);
  check_packed_dropout_seed(query, dropout_seed, dropout_p);
  const DeviceGuard guard(device_of(query).index);
  const Tensor output =
      empty_contiguous(shape.output_sizes(), shape.type, device_of(query));
  const Tensor log_sum_exp = empty_contiguous(
      shape.log_sum_exp_sizes(), shape.accumulate_type(), device_of(query));
  const Tensor output_residual =
      allocate_packed_residual(shape, query, keeps_residual);
  if (shape.heads == 0) {
    return {output, log_sum_exp, output_residual};
  }
  const PackedTensors tensors{query,        key,          value,
                              cu_seqlens_q, cu_seqlens_k, dropout_seed};
  with_floating_type(shape.type, [&](auto example) {
    using Element = decltype(example);
    const cudaStream_t stream = current_stream(query);
    const auto problem = packed_problem<Element>(shape, tensors, options);
    auto* const sums =
        static_cast<Accumulator<Element>*>(log_sum_exp.mutable_data_ptr());
    const bool has_residual = has_elements(output_residual);
    launch_uncovered_queries(
        problem, zeroed_rows(output),
        has_residual ? zeroed_rows(output_residual) : ZeroedRows{}, sums,
        stream);
    launch_attention_forward<Element>(
        {problem, packed_result<Element>(shape, output, true),
         has_residual ? packed_result<Element>(shape, output_residual, true)
                      : ResultBatch<Element>{},
         sums},
        device_of(query), stream);
  });
  return {output, log_sum_exp, output_residual};
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&scaled_dot_product_attention_varlen_forward>(
      "scaled_dot_product_attention_varlen_forward");
}

}  // namespace
}  // namespace pkg::cuda
