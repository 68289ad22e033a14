// What the host sides of the operators on the tensor-core tiled layout share.
#pragma once

#include "cuda/host/launch.h"
#include "cuda/int4/tiled_layout.cuh"
#include "tensor_core_tiled_layout.h"

namespace pkg::cuda {

inline TiledWords tiled_words(const TiledLayout& layout) {
  return {layout.rows, layout.columns, layout.inner_k_tiles};
}

// Writes the weight of contiguous words and pairs to `values`, which is
// contiguous. The caller holds a DeviceGuard.
template <class Element>
void launch_dequantize(const TiledWords& layout, int64_t group_size,
                       const Tensor& words, const Tensor& pairs,
                       const Tensor& values) {
  const DequantizeTiled<Element> call = {
      layout, group_size, static_cast<const uint32_t*>(words.const_data_ptr()),
      static_cast<const bfloat16*>(pairs.const_data_ptr()),
      static_cast<Element*>(values.mutable_data_ptr())};
  launch(dequantize_tiled_kernel<DequantizeTiled<Element>>,
         call.layout.pieces(), kTiledThreads, current_stream(values), call);
}

}  // namespace pkg::cuda
