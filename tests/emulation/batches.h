// Batch dimensions of a request, as the kernels take them.
#pragma once

#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "cuda/device/batch.cuh"

namespace pkg::emulation {

inline int64_t count_of(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1},
                         std::multiplies<>());
}

inline cuda::BatchSizes batch_sizes(const std::vector<int64_t>& sizes) {
  cuda::BatchSizes batch;
  for (const int64_t size : sizes) {
    batch.sizes[batch.count++] = size;
  }
  return batch;
}

inline cuda::BatchStrides batch_strides(const std::vector<int64_t>& strides) {
  cuda::BatchStrides batch;
  std::copy(strides.begin(), strides.end(), batch.strides);
  return batch;
}

}  // namespace pkg::emulation
