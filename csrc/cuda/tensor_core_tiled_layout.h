// What the host sides of the operators on the tensor-core tiled layout share.
#pragma once

#include "../tensor_core_tiled_layout.h"
#include "launch.h"
#include "tensor_core_tiled_layout.cuh"

namespace pkg::cuda {

inline TiledWords tiled_words(const TiledLayout& layout) {
  return {layout.rows, layout.columns, layout.inner_k_tiles};
}

}  // namespace pkg::cuda
