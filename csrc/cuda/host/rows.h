// The rows of tensors, as the kernels step through them.
#pragma once

#include <cstdint>

#include "cuda/device/batch.cuh"
#include "cuda/host/launch.h"
#include "host/tensor.h"

namespace pkg::cuda {

// The leading dimensions, outermost first, those that both tensors step through
// as one made one.
inline void merge_rows(const char* op, size_t leading_dims,
                       const TensorView& input, const TensorView& scale,
                       BatchSizes& sizes, BatchStrides& input_strides,
                       BatchStrides& scale_strides) {
  for (size_t d = 0; d < leading_dims; ++d) {
    const int64_t size = input.sizes[d];
    if (size == 1) {
      continue;
    }
    const int last = sizes.count - 1;
    if (last >= 0 && input_strides.strides[last] == size * input.strides[d] &&
        scale_strides.strides[last] == size * scale.strides[d]) {
      sizes.sizes[last] = sizes.sizes[last] * size;
      input_strides.strides[last] = input.strides[d];
      scale_strides.strides[last] = scale.strides[d];
      continue;
    }
    check_batch_dims(op, sizes.count + 1);
    sizes.sizes[sizes.count] = size;
    input_strides.strides[sizes.count] = input.strides[d];
    scale_strides.strides[sizes.count++] = scale.strides[d];
  }
}

}  // namespace pkg::cuda
