// Sums and maxima over the lanes of a warp. Every lane of the warp must call
// them, and each gets the result of its group of kLanes neighbours.
#pragma once

#include "cuda/device/device.cuh"

namespace pkg::cuda {

constexpr int kWarp = 32;

template <int kLanes = kWarp, class Number>
__device__ __forceinline__ Number lanes_sum(Number value) {
  PKG_UNROLL
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, lanes);
  }
  return value;
}

// NaN only where all are NaN.
template <int kLanes = kWarp, class Number>
__device__ __forceinline__ Number lanes_maximum(Number value) {
  PKG_UNROLL
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    value = fmax(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  }
  return value;
}

}  // namespace pkg::cuda
