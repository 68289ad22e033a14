#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "cuda/attention/varlen_host.h"
#include "host/namespace.h"

namespace pkg::cuda {
namespace {

std::tuple<Tensor, Tensor, Tensor> scaled_dot_product_attention_varlen_backward(
    const Tensor& grad_output, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
    const std::optional<Tensor>& dropout_seed, const Tensor& output,
    const Tensor& log_sum_exp, const Tensor& output_residual,
    int64_t max_seqlen_q, int64_t max_seqlen_k, double dropout_p,
    std::optional<double> softmax_scale, bool causal,
    const std::optional<Tensor>& alibi_slopes, int64_t window_left,
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
  const DeviceGuard guard(device_of(query).index);
  const auto like = [&](const Tensor& tensor) {
    return allocate_attention_gradient(tensor, shape.heads == 0);
  };
  const Tensor grad_query = like(query);
  const Tensor grad_key = like(key);
  const Tensor grad_value = like(value);
  if (shape.heads == 0) {
    return {grad_query, grad_key, grad_value};
  }
  const Tensor delta = empty_contiguous(
      shape.log_sum_exp_sizes(), shape.accumulate_type(), device_of(query));
  // As the forward pass makes it; a caller may have changed its strides.
  const Tensor dense_log_sum_exp = torch::stable::contiguous(log_sum_exp);
  const Tensor dense_grad_output = with_dense_rows(grad_output);
  const PackedTensors tensors{query,        key,          value,
                              cu_seqlens_q, cu_seqlens_k, dropout_seed};
  with_floating_type(shape.type, [&](auto example) {
    using Element = decltype(example);
    using Number = Accumulator<Element>;
    const cudaStream_t stream = current_stream(query);
    const AttentionBackward<Element> backward = {
        packed_problem<Element>(shape, tensors, options),
        packed_matrices<Element>(shape, dense_grad_output, true),
        packed_matrices<Element>(shape, output, true),
        packed_residual<Element>(shape, output_residual),
        static_cast<const Number*>(dense_log_sum_exp.const_data_ptr()),
        static_cast<Number*>(delta.mutable_data_ptr())};
    launch_uncovered_gradients(backward.problem, grad_query, grad_key,
                               grad_value, stream);
    launch_attention_delta(backward, stream);
    launch_attention_gradients<Element>(
        {backward, packed_partition(shape, true),
         packed_result<Element>(shape, grad_query, true)},
        {backward, packed_partition(shape, false),
         packed_result<Element>(shape, grad_key, false),
         packed_result<Element>(shape, grad_value, false)},
        device_of(query), stream);
  });
  return {grad_query, grad_key, grad_value};
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&scaled_dot_product_attention_varlen_backward>(
      "scaled_dot_product_attention_varlen_backward");
}

}  // namespace
}  // namespace pkg::cuda
