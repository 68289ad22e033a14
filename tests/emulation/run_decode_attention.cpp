#include <algorithm>
#include <string>

#include "attention_request.h"
#include "cuda/attention/decode_kernels.cuh"

namespace pkg::emulation {
namespace {

template <class Element>
cuda::DecodeTensor<Element> decode_tensor(const Request& request,
                                          const std::string& name) {
  cuda::DecodeTensor<Element> tensor = {};
  tensor.data = request.buffer<std::remove_const_t<Element>>(name);
  std::ranges::copy(request.integers(name + "_strides"), tensor.strides);
  return tensor;
}

cuda::DecodeIndices decode_indices(const Request& request,
                                   const std::string& name) {
  cuda::DecodeIndices indices = {};
  indices.data = request.buffer<uint8_t>(name);
  if (indices.data != nullptr) {
    std::ranges::copy(request.integers(name + "_strides"), indices.strides);
    indices.is_wide = request.text(name + "_type") == "int64";
  }
  return indices;
}

cuda::DecodeSlopes decode_slopes(const Request& request) {
  cuda::DecodeSlopes slopes = {};
  slopes.data = request.buffer<uint8_t>("slopes");
  if (slopes.data != nullptr) {
    std::ranges::copy(request.integers("slopes_strides"), slopes.strides);
    slopes.is_single = request.text("slopes_type") == "float32";
  }
  return slopes;
}

template <class Element>
cuda::DecodeAttention<Element> decode_call(const Request& request) {
  using Number = cuda::Accumulator<Element>;
  return {
      .batch = request.integer("batch"),
      .key_heads = request.integer("key_heads"),
      .group = request.integer("group"),
      .rows = request.integer("rows"),
      .head_size = request.integer("head_size"),
      .value_size = request.integer("value_size"),
      .capacity = request.integer("capacity"),
      .page_size = request.integer("page_size"),
      .pages = request.integer("pages"),
      .splits = request.integer("splits"),
      .scale = request.real("scale"),
      .query = decode_tensor<const Element>(request, "query"),
      .key = decode_tensor<const Element>(request, "key"),
      .value = decode_tensor<const Element>(request, "value"),
      .output = decode_tensor<Element>(request, "output"),
      .lengths = decode_indices(request, "lengths"),
      .table = decode_indices(request, "table"),
      .states = request.buffer<Number>("states"),
      .sums = request.buffer<Number>("sums"),
      .window_left = request.integer("window"),
      .softcap = static_cast<Number>(request.real("softcap")),
      .slopes = decode_slopes(request),
  };
}

template <class Element>
void run_parts(const Request& request) {
  const auto call = decode_call<Element>(request);
  cuda::with_decode_kernel(
      call, most_shared_bytes(request, false),
      [&](auto kernel, int64_t pieces, int, cuda::LaunchShape shape) {
        launch_blocks(request, pieces, shape, kernel, call);
      });
}

}  // namespace

bool run_decode_attention(const Request& request) {
  const std::string& kernel = request.text("kernel");
  if (kernel != "decode_attention" && kernel != "decode_attention_combine") {
    return false;
  }
  for_attention_type(request, [&]<class Element>() {
    if (kernel == "decode_attention") {
      run_parts<Element>(request);
      return;
    }
    const auto call = decode_call<Element>(request);
    launch_blocks(
        request, cuda::tiles_of(call.result_count(), cuda::kCombineThreads),
        cuda::kCombineThreads, cuda::decode_attention_combine<Element>, call);
  });
  return true;
}

}  // namespace pkg::emulation
