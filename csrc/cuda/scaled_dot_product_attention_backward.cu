#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>
#include <tuple>

#include "cuda/attention/attention_host.h"
#include "cuda/attention/grad_mask.cuh"
#include "cuda/attention/gradient_kernels.cuh"
#include "cuda/attention/normalized_grad_output.cuh"
#include "cuda/host/tensor_map.h"
#include "host/namespace.h"

namespace pkg::cuda {

template <class Element>
void launch_attention_delta(const AttentionBackward<Element>& call,
                            cudaStream_t stream) {
  launch(attention_delta_kernel<Element>, call.delta_tiles(), kTileThreads,
         stream, call);
}

// PKG_CUDA_JOINT_GRADIENTS=0 makes the gradients of query and key by a kernel
// each, so that the two ways can be compared.
bool joins_gradients() { return !is_turned_off("PKG_CUDA_JOINT_GRADIENTS"); }

AttentionDevice attention_device() {
  return {most_shared_bytes(), multiprocessor_count(), has_warpgroup_products(),
          joins_gradients(), copies_panels()};
}

// Without queries the gradients of keys are the first kernel of the call.
template <class Element>
LaunchShape waiting_for_delta(LaunchShape shape,
                              const AttentionBackward<Element>& call) {
  return shape.that_waits(call.delta_tiles() > 0);
}

template <class Element>
void launch_attention_grad_query(const AttentionGradQuery<Element>& call,
                                 cudaStream_t stream) {
  launch_attention_grad_query_kernel(
      call, attention_device(),
      [&](auto kernel, int64_t tiles, LaunchShape shape,
          const auto& arguments) {
        launch(kernel, tiles, waiting_for_delta(shape, call.backward), stream,
               arguments);
      });
}

template <class Element>
void launch_attention_grad_key_value(const AttentionGradKeyValue<Element>& call,
                                     cudaStream_t stream) {
  launch_attention_grad_key_value_kernel(
      call, attention_device(),
      [&](auto kernel, int64_t tiles, LaunchShape shape,
          const auto& arguments) {
        launch(kernel, tiles, waiting_for_delta(shape, call.backward), stream,
               arguments);
      });
}

template <class Element>
bool launch_joint_gradients(const AttentionGradQuery<Element>& query,
                            const AttentionGradKeyValue<Element>& key_value,
                            DeviceId memory_device, cudaStream_t stream) {
  if constexpr (kHasJointGradients<Element>) {
    const AttentionDevice device = attention_device();
    if (!suits_joint_gradients(query, key_value, device) ||
        !joint_gradients_pay(key_value, device)) {
      return false;
    }
    // Freed when the launch is queued: the stream's later allocations alone get
    // its memory.
    Tensor sums;
    Tensor turns;
    return launch_joint_gradients_kernel(
        query, key_value, device,
        [&](AttentionJointGradients<Element>& call, int64_t numbers,
            int64_t zeros) {
          sums = empty_contiguous(std::array{numbers}, ScalarType::Float,
                                  memory_device);
          turns = empty_contiguous(std::array{zeros}, ScalarType::Int,
                                   memory_device);
          torch::stable::zero_(turns);
          call.sums = static_cast<float*>(sums.mutable_data_ptr());
          call.turns = static_cast<int32_t*>(turns.mutable_data_ptr());
        },
        [&](auto kernel, int64_t blocks, LaunchShape shape,
            const auto& arguments) {
          launch(kernel, blocks, shape, stream, arguments);
        });
  }
  return false;
}

template <class Element>
void launch_attention_gradients(const AttentionGradQuery<Element>& query,
                                const AttentionGradKeyValue<Element>& key_value,
                                DeviceId device, cudaStream_t stream) {
  if (!launch_joint_gradients(query, key_value, device, stream)) {
    launch_attention_grad_query(query, stream);
    launch_attention_grad_key_value(key_value, stream);
  }
}

#define PKG_INSTANTIATE(Element)                                          \
  template void launch_attention_delta(const AttentionBackward<Element>&, \
                                       cudaStream_t);                     \
  template void launch_attention_gradients(                               \
      const AttentionGradQuery<Element>&,                                 \
      const AttentionGradKeyValue<Element>&, DeviceId, cudaStream_t);
PKG_INSTANTIATE(double)
PKG_INSTANTIATE(float)
PKG_INSTANTIATE(float16)
PKG_INSTANTIATE(bfloat16)
#undef PKG_INSTANTIATE

namespace {

// A call, with all that does not depend on the type of its elements.
struct BackwardCall {
  AttentionShape shape;
  AttentionBatch batch;
  const Tensor& query;
  const Tensor& key;
  const Tensor& value;
  const std::optional<Tensor>& attn_mask;
  Tensor grad_query;
  Tensor grad_key;
  Tensor grad_value;
  Tensor grad_mask;
  cudaStream_t stream;
};

template <class Element>
Element* data_of(const Tensor& tensor) {
  return static_cast<Element*>(tensor.mutable_data_ptr());
}

template <class Element>
void launch_gradients(const BackwardCall& call,
                      const AttentionBackward<Element>& backward) {
  const int64_t group = call.shape.group;
  const AttentionGradQuery<Element> query = {
      backward, call.batch.partition(call.shape, call.query, 1),
      result_batch<Element>(call.shape, call.batch, call.grad_query)};
  const auto key = call.batch.partition(call.shape, call.key, group);
  const auto value = call.batch.partition(call.shape, call.value, group);
  const auto grad_key =
      result_batch<Element>(call.shape, call.batch, call.grad_key, group);
  const auto grad_value =
      result_batch<Element>(call.shape, call.batch, call.grad_value, group);
  if (key == value) {
    launch_attention_gradients<Element>(query,
                                        {backward, key, grad_key, grad_value},
                                        device_of(call.query), call.stream);
  } else {
    launch_attention_grad_query(query, call.stream);
    launch_attention_grad_key_value<Element>({backward, key, grad_key, {}},
                                             call.stream);
    launch_attention_grad_key_value<Element>({backward, value, {}, grad_value},
                                             call.stream);
  }
}

// To be kept until the launches are queued that read it.
template <class Element>
Tensor normalize_grad_output(const BackwardCall& call,
                             AttentionBackward<Element>& backward) {
  Tensor normalized = allocate_attention_output(call.shape, call.query);
  const AttentionNormalizedGradOutput<Element> normalizing = {
      backward, result_batch<Element>(call.shape, call.batch, normalized)};
  launch(attention_normalized_grad_output_kernel<Element>,
         normalizing.tile_count(), NormalizedScores<Element>::Thread::kThreads,
         call.stream, normalizing);
  backward.grad_output =
      matrix_batch<Element>(call.shape, call.batch, normalized);
  return normalized;
}

template <class MaskElement, class Element>
void launch_grad_mask(const BackwardCall& call,
                      const AttentionBackward<Element>& backward) {
  const Tensor& mask = *call.attn_mask;
  const auto sizes = sizes_of(mask);
  const auto size = [&](size_t from_last) {
    return from_last <= sizes.size() ? sizes[sizes.size() - from_last] : 1;
  };
  AttentionGradMask<Element, MaskElement> gradient = {
      backward, call.batch.partition(call.shape, mask, 1),
      data_of<MaskElement>(call.grad_mask), size(2), size(1)};
  gradient.splits = gradient.suitable_splits();
  const bool has_parts = gradient.splits > 1;
  // Freed when the launches are queued: the stream's later allocations alone
  // get its memory.
  const Tensor parts = empty_contiguous(
      std::array<int64_t, 1>{
          has_parts ? gradient.splits * gradient.element_count() : 0},
      attention_accumulate_type(call.shape), device_of(mask));
  gradient.parts = data_of<Accumulator<Element>>(parts);
  launch(attention_grad_mask_kernel<Element, MaskElement>,
         gradient.piece_count(),
         GradMaskTile<Accumulator<Element>>::Thread::kThreads, call.stream,
         gradient);
  if (has_parts) {
    launch(attention_grad_mask_sum_kernel<Element, MaskElement>,
           tiles_of(gradient.element_count(), kWarp), kPartWarps * kWarp,
           call.stream, gradient);
  }
}

template <class Element>
void launch_all(const BackwardCall& call, AttentionBackward<Element> backward,
                bool needs_mask_grad) {
  Tensor normalized;
  if (backward.problem.mask.has_numbers()) {
    normalized = normalize_grad_output(call, backward);
  }
  launch_attention_delta(backward, call.stream);
  launch_gradients(call, backward);
  if (!needs_mask_grad) {
    return;
  }
  if (dtype_of(*call.attn_mask) == call.shape.type) {
    launch_grad_mask<Element>(call, backward);
  } else {
    launch_grad_mask<float>(call, backward);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor>
scaled_dot_product_attention_backward(
    const Tensor& grad_output, const Tensor& query, const Tensor& key,
    const Tensor& value, const std::optional<Tensor>& attn_mask,
    const std::optional<Tensor>& dropout_seed, const Tensor& output,
    const Tensor& log_sum_exp, const Tensor& output_residual, double dropout_p,
    bool is_causal, std::optional<double> scale, bool enable_gqa,
    bool needs_mask_grad, const std::optional<Tensor>& alibi_slopes,
    int64_t window_left, int64_t window_right, double softcap) {
  const AttentionExtras extras{alibi_slopes, window_left, window_right,
                               softcap};
  const AttentionShape shape =
      plan_attention(query, key, value, attn_mask, dropout_p, is_causal, scale,
                     enable_gqa, extras);
  check_dropout_seed(query, dropout_seed, dropout_p);
  check_attention_backward(shape, query, grad_output, output, log_sum_exp,
                           output_residual, attn_mask, needs_mask_grad);
  const DeviceGuard guard(device_of(query).index);
  const auto gradient_of = [&](const Tensor& tensor) {
    return allocate_attention_gradient(tensor, shape.batch() == 0);
  };
  const BackwardCall call = {
      shape,
      AttentionBatch(shape),
      query,
      key,
      value,
      attn_mask,
      gradient_of(query),
      gradient_of(key),
      gradient_of(value),
      needs_mask_grad ? gradient_of(*attn_mask)
                      : empty_contiguous(std::array<int64_t, 1>{0}, shape.type,
                                         device_of(query)),
      current_stream(query)};
  const Tensor delta = allocate_log_sum_exp(shape, query);
  // As the forward pass makes it; a caller may have changed its strides.
  const Tensor dense_log_sum_exp = torch::stable::contiguous(log_sum_exp);
  const Tensor dense_grad_output = with_dense_rows(grad_output);
  with_floating_type(shape.type, [&](auto example) {
    using Element = decltype(example);
    const AttentionBackward<Element> backward = {
        attention_problem<Element>(shape, call.batch, query, key, value,
                                   attn_mask, dropout_seed, dropout_p,
                                   is_causal, extras),
        matrix_batch<Element>(shape, call.batch, dense_grad_output),
        matrix_batch<Element>(shape, call.batch, output),
        has_elements(output_residual)
            ? matrix_batch<Element>(shape, call.batch, output_residual)
            : MatrixBatch<Element>{},
        static_cast<const Accumulator<Element>*>(
            dense_log_sum_exp.const_data_ptr()),
        data_of<Accumulator<Element>>(delta)};
    launch_all(call, backward, needs_mask_grad);
  });
  return {call.grad_query, call.grad_key, call.grad_value, call.grad_mask};
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&scaled_dot_product_attention_backward>(
      "scaled_dot_product_attention_backward");
}

}  // namespace
}  // namespace pkg::cuda
