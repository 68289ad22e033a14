// What the host sides of the operators on the tensor-core tiled layout share.
#pragma once

#include "cuda/host/launch.h"
#include "cuda/int4/tiled_layout.cuh"
#include "tensor_core_tiled_layout.h"

namespace pkg::cuda {

inline TiledWords tiled_words(const TiledLayout& layout) {
  return {layout.rows, layout.columns, layout.inner_k_tiles};
}

}  // namespace pkg::cuda
