#include "cuda/int4/tiled_layout_host.h"
#include "host/namespace.h"

namespace pkg::cuda {
namespace {

template <class Value>
void pack(const TiledLayout& layout, const Tensor& w, const Tensor& packed) {
  const PackTiled<Value> call = {
      tiled_words(layout), static_cast<const Value*>(w.const_data_ptr()),
      sizes_of(w)[0],      strides_of(w)[0],
      strides_of(w)[1],    static_cast<uint32_t*>(packed.mutable_data_ptr())};
  launch(pack_tiled_kernel<PackTiled<Value>>, call.layout.pieces(),
         kTiledThreads, current_stream(packed), call);
}

Tensor pack_tensor_core_tiled_layout(const Tensor& w, int64_t inner_k_tiles) {
  const TiledLayout layout =
      plan_pack_tensor_core_tiled_layout(w, inner_k_tiles);
  const DeviceGuard guard(device_of(w).index);
  const Tensor packed =
      empty_contiguous(layout.sizes(), ScalarType::Int, device_of(w));
  if (dtype_of(w) == ScalarType::Byte) {
    pack<uint8_t>(layout, w, packed);
  } else {
    pack<int32_t>(layout, w, packed);
  }
  return packed;
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&pack_tensor_core_tiled_layout>("pack_tensor_core_tiled_layout");
}

}  // namespace
}  // namespace pkg::cuda
