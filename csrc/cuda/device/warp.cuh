// Sums and maxima over the lanes of a warp. Every lane of the warp must call
// them, and each gets the result of its group of kLanes that are neighbours, or
// kStride apart.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"

namespace pkg::cuda {

constexpr int kWarp = 32;

template <int kLanes = kWarp, int kStride = 1, class Number>
__device__ __forceinline__ Number lanes_sum(Number value) {
  PKG_UNROLL
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, lanes * kStride);
  }
  return value;
}

// NaN only where all are NaN.
template <int kLanes = kWarp, int kStride = 1, class Number>
__device__ __forceinline__ Number lanes_maximum(Number value) {
  PKG_UNROLL
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    value = fmax(value, __shfl_xor_sync(0xffffffffu, value, lanes * kStride));
  }
  return value;
}

// Of four lanes, neighbours or kStride apart, the c-th gets the c-th word of
// each, in the order of the lanes.
template <int kStride = 1>
__device__ __forceinline__ void transpose_quads(uint32_t (&words)[4]) {
  const int lane = static_cast<int>(threadIdx.x) / kStride % 4;
  PKG_UNROLL
  for (int distance = 1; distance < 4; distance *= 2) {
    const bool is_upper = (lane & distance) != 0;
    PKG_UNROLL
    for (int i = 0; i < 4; ++i) {
      if ((i & distance) == 0) {
        // A lane keeps one word of each pair, and gives the other.
        uint32_t& lower = words[i];
        uint32_t& upper = words[i + distance];
        const uint32_t received = __shfl_xor_sync(
            0xffffffffu, is_upper ? lower : upper, distance * kStride);
        (is_upper ? lower : upper) = received;
      }
    }
  }
}

}  // namespace pkg::cuda
