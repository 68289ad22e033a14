#include <torch/csrc/stable/ops.h>

#include "cuda/int4/tiled_layout_host.h"
#include "host/namespace.h"

namespace pkg::cuda {
namespace {

Tensor unpack_tensor_core_tiled_layout(const Tensor& packed_w,
                                       int64_t inner_k_tiles) {
  const TiledLayout layout =
      plan_unpack_tensor_core_tiled_layout(packed_w, inner_k_tiles);
  const DeviceGuard guard(device_of(packed_w).index);
  const Tensor words = torch::stable::contiguous(packed_w);
  const std::array sizes{layout.rows, layout.columns};
  const Tensor values =
      empty_contiguous(sizes, ScalarType::Int, device_of(packed_w));
  const UnpackTiled call = {
      tiled_words(layout), static_cast<const uint32_t*>(words.const_data_ptr()),
      static_cast<int32_t*>(values.mutable_data_ptr())};
  launch(unpack_tiled_kernel<UnpackTiled>, call.layout.pieces(), kTiledThreads,
         current_stream(values), call);
  return values;
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&unpack_tensor_core_tiled_layout>(
      "unpack_tensor_core_tiled_layout");
}

}  // namespace
}  // namespace pkg::cuda
