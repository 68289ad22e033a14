// Which stage a tile goes to where kernels of warpgroups take them in turns.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"

namespace pkg::cuda {

// One stage after the other, and the parity of the phase that its barriers are
// in. Producer and consumers each count on through all that the block does.
template <int kStages>
struct TileTurn {
  int count = 0;

  __device__ __forceinline__ int stage() const { return count % kStages; }
  __device__ __forceinline__ uint32_t parity() const {
    return count / kStages & 1;
  }
  __device__ __forceinline__ TileTurn next() const { return {count + 1}; }
};

}  // namespace pkg::cuda
