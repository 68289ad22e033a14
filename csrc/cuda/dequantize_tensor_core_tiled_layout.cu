#include <torch/csrc/stable/ops.h>

#include "cuda/int4/tiled_layout_host.h"
#include "host/namespace.h"

namespace pkg::cuda {
namespace {

Tensor dequantize_tensor_core_tiled_layout(const Tensor& packed_w,
                                           const Tensor& scales_and_zeros,
                                           int64_t group_size,
                                           int64_t inner_k_tiles) {
  const TiledLayout layout = plan_dequantize_tensor_core_tiled_layout(
      packed_w, scales_and_zeros, group_size, inner_k_tiles);
  const DeviceGuard guard(device_of(packed_w).index);
  const Tensor words = torch::stable::contiguous(packed_w);
  const Tensor pairs = torch::stable::contiguous(scales_and_zeros);
  const std::array sizes{layout.rows, layout.columns};
  const Tensor values =
      empty_contiguous(sizes, ScalarType::BFloat16, device_of(packed_w));
  launch_dequantize<bfloat16>(tiled_words(layout), group_size, words, pairs,
                              values);
  return values;
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&dequantize_tensor_core_tiled_layout>(
      "dequantize_tensor_core_tiled_layout");
}

}  // namespace
}  // namespace pkg::cuda
