#include <array>

#include "cuda/attention/decode_host.h"
#include "host/namespace.h"

namespace pkg::cuda {
namespace {

// Memory for the parts of several splits, as one tensor.
template <class Element>
Tensor allocate_parts(DecodeAttention<Element>& call, const Tensor& query) {
  using Number = Accumulator<Element>;
  const int64_t parts = call.splits > 1 ? call.part_count() : 0;
  const std::array size{parts * (2 + call.value_size)};
  const Tensor memory =
      empty_contiguous(size, number_type<Number>(), device_of(query));
  call.states = static_cast<Number*>(memory.mutable_data_ptr());
  call.sums = call.states + 2 * parts;
  return memory;
}

}  // namespace

template <class Element>
void launch_decoding(DecodeAttention<Element> call, const Tensor& query) {
  const cudaStream_t stream = current_stream(query);
  call.splits = 1;
  with_decode_kernel(
      call, most_shared_bytes(),
      [&](auto kernel, int64_t pieces, int blocks, LaunchShape shape) {
        call.splits = decode_splits(call.capacity, pieces,
                                    int64_t{multiprocessor_count()} * blocks);
        const Tensor parts = allocate_parts(call, query);
        launch(kernel, pieces * call.splits, shape, stream, call);
        if (call.splits > 1) {
          launch(decode_attention_combine<Element>,
                 tiles_of(call.result_count(), kCombineThreads),
                 LaunchShape(kCombineThreads).that_waits(), stream, call);
        }
      });
}
template void launch_decoding(DecodeAttention<double>, const Tensor&);
template void launch_decoding(DecodeAttention<float>, const Tensor&);
template void launch_decoding(DecodeAttention<float16>, const Tensor&);
template void launch_decoding(DecodeAttention<bfloat16>, const Tensor&);

namespace {

template <class Element>
DecodeAttention<Element> decode_call(
    const DecodeAttentionPlan& plan, const Tensor& query,
    const Tensor& key_cache, const Tensor& value_cache,
    const Tensor& cache_lengths, const std::optional<Tensor>& block_table,
    const AttentionExtras& extras, const Tensor& output) {
  DecodeAttention<Element> call = {};
  call.batch = plan.batch;
  call.key_heads = plan.key_heads;
  call.group = plan.group;
  call.rows = plan.rows;
  call.head_size = plan.head_size;
  call.value_size = plan.value_size;
  call.capacity = plan.capacity;
  call.page_size = plan.page_size;
  call.pages = plan.pages;
  call.scale = plan.scale;
  call.query = decode_operand<Element>(query);
  call.key = decode_operand<Element>(key_cache);
  call.value = decode_operand<Element>(value_cache);
  call.output.data = static_cast<Element*>(output.mutable_data_ptr());
  std::ranges::copy(strides_of(output), call.output.strides);
  call.lengths = decode_indices(cache_lengths);
  if (block_table) {
    call.table = decode_indices(*block_table);
  }
  call.window_left = plan.window_left;
  call.softcap = static_cast<Accumulator<Element>>(plan.softcap);
  if (extras.alibi_slopes) {
    const TensorView& slopes = *extras.alibi_slopes;
    const DecodeSlopeStrides strides = decode_slope_strides(slopes);
    call.slopes = {slopes.const_data_ptr(),
                   {strides.sequence, strides.head},
                   dtype_of(slopes) == ScalarType::Float};
  }
  return call;
}

Tensor decode_attention(const Tensor& query, const Tensor& key_cache,
                        const Tensor& value_cache, const Tensor& cache_lengths,
                        const std::optional<Tensor>& block_table,
                        std::optional<double> scale, int64_t window_left,
                        double softcap,
                        const std::optional<Tensor>& alibi_slopes) {
  const AttentionExtras extras{alibi_slopes, window_left, -1, softcap};
  const DecodeAttentionPlan plan = plan_decode_attention(
      query, key_cache, value_cache, cache_lengths, block_table, scale, extras);
  const DeviceGuard guard(device_of(query).index);
  const Tensor output = allocate_decode_output(plan, query);
  with_floating_type(plan.type, [&](auto example) {
    using Element = decltype(example);
    launch_decoding(
        decode_call<Element>(plan, query, key_cache, value_cache, cache_lengths,
                             block_table, extras, output),
        query);
  });
  return output;
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&decode_attention>("decode_attention");
}

}  // namespace
}  // namespace pkg::cuda
