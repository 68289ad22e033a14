#include <array>
#include <optional>
#include <tuple>

#include "cuda/attention/attention_host.h"
#include "cuda/attention/few_queries.h"
#include "cuda/attention/forward_kernels.cuh"
#include "cuda/host/tensor_map.h"
#include "host/namespace.h"

namespace pkg::cuda {

template <class Element>
void launch_attention_forward(const AttentionForward<Element>& call,
                              DeviceId device, cudaStream_t stream) {
  std::optional<Tensor> memory;
  launch_attention_forward_kernel(
      call,
      AttentionDevice{.most_shared_bytes = most_shared_bytes(),
                      .multiprocessors = multiprocessor_count(),
                      .has_warpgroup_products = has_warpgroup_products(),
                      .copies_panels = copies_panels()},
      [&](auto kernel, int64_t tiles, LaunchShape shape,
          const auto& arguments) {
        launch(kernel, tiles, shape, stream, arguments);
      },
      [&](int64_t numbers) {
        using Number = Accumulator<Element>;
        memory = empty_contiguous(std::array{numbers}, number_type<Number>(),
                                  device);
        return static_cast<Number*>(memory->mutable_data_ptr());
      });
}
template void launch_attention_forward(const AttentionForward<double>&,
                                       DeviceId, cudaStream_t);
template void launch_attention_forward(const AttentionForward<float>&, DeviceId,
                                       cudaStream_t);
template void launch_attention_forward(const AttentionForward<float16>&,
                                       DeviceId, cudaStream_t);
template void launch_attention_forward(const AttentionForward<bfloat16>&,
                                       DeviceId, cudaStream_t);

namespace {

std::tuple<Tensor, Tensor, Tensor> scaled_dot_product_attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& attn_mask,
    const std::optional<Tensor>& dropout_seed, double dropout_p, bool is_causal,
    std::optional<double> scale, bool enable_gqa, bool keeps_residual,
    const std::optional<Tensor>& alibi_slopes, int64_t window_left,
    int64_t window_right, double softcap) {
  const AttentionExtras extras{alibi_slopes, window_left, window_right,
                               softcap};
  const AttentionShape shape =
      plan_attention(query, key, value, attn_mask, dropout_p, is_causal, scale,
                     enable_gqa, extras);
  check_dropout_seed(query, dropout_seed, dropout_p);
  const DeviceGuard guard(device_of(query).index);
  const Tensor output = allocate_attention_output(shape, query);
  const Tensor log_sum_exp = allocate_log_sum_exp(shape, query);
  const Tensor output_residual =
      allocate_output_residual(shape, query, keeps_residual);
  with_floating_type(shape.type, [&](auto example) {
    using Element = decltype(example);
    auto* const sums =
        static_cast<Accumulator<Element>*>(log_sum_exp.mutable_data_ptr());
    if (auto few = as_few_queries<Element>(shape, query, key, value, attn_mask,
                                           dropout_p, extras, output)) {
      few->log_sum_exp = sums;
      few->residual =
          has_elements(output_residual)
              ? static_cast<Element*>(output_residual.mutable_data_ptr())
              : nullptr;
      launch_decoding(*few, query);
      return;
    }
    const AttentionBatch batch(shape);
    const AttentionForward<Element> call = {
        attention_problem<Element>(shape, batch, query, key, value, attn_mask,
                                   dropout_seed, dropout_p, is_causal, extras),
        result_batch<Element>(shape, batch, output),
        has_elements(output_residual)
            ? result_batch<Element>(shape, batch, output_residual)
            : ResultBatch<Element>{},
        sums};
    launch_attention_forward(call, device_of(query), current_stream(query));
  });
  return {output, log_sum_exp, output_residual};
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&scaled_dot_product_attention_forward>(
      "scaled_dot_product_attention_forward");
}

}  // namespace
}  // namespace pkg::cuda
