// What the gradients of attention by products of warpgroups share; for compute
// capability 9.0 alone.
//
// Two warpgroups have 64 rows each of the block's tile of a gradient and of all
// that is added to it, a warp of a third has the copies made, by the copy
// engine and in stages. Heads are padded with zeros to 64, 128 or 256
// columns by the copies.
#pragma once

#include <cstdint>

#include "cuda/attention/gradients.cuh"
#include "cuda/attention/mapped_operand.cuh"
#include "cuda/attention/tile_turn.cuh"
#include "cuda/attention/warpgroup_lines.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// Lines of a box of queries where they come in turns, as the tiles of
// grad_key_value_mma.cuh have them.
constexpr int kQueryBoxLines = 32;

// Of a pair of operands two warps copy one each. They have few registers:
// what both do is there once, and places are counted in 32 bits.
template <class Call>
struct MappedGradients {
  MappedOperand queries[2];  // the query and the gradient of the output
  MappedOperand keys[2];     // the key and the value
  Call call;
};

// Of a launch; 384 threads begin with 168 registers each, of which those that
// copy give to the others.
template <int kRegisters>
struct GradientWarpgroups {
  static constexpr int kConsumers = 2 * kWarpgroup;
  static constexpr int kThreads = kConsumers + kWarpgroup;
  static constexpr int kConsumerWarps = kConsumers / kWarp;
  static constexpr int kConsumerRegisters = kRegisters;
  static constexpr int kProducerRegisters = 3 * 168 - 2 * kRegisters;
};

// Calls compute() by the two warpgroups, copy(0) and copy(1), and so on where
// there are more, by a warp of the third each.
template <class Launch, int kCopies = 2, class Compute, class Copy>
__device__ __forceinline__ void divide_warpgroups(Compute&& compute,
                                                  Copy&& copy) {
  if (warpgroup_of_thread() < Launch::kConsumers / kWarpgroup) {
    take_registers<Launch::kConsumerRegisters>();
    compute();
  } else {
    give_registers<Launch::kProducerRegisters>();
    const int warp =
        __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0) -
        Launch::kConsumerWarps;
    if (warp < kCopies) {
      copy(warp);
    }
  }
}

// By whole warps, of which one lane arrives: what all of them have read may be
// written.
__device__ __forceinline__ void release(const Mbarriers& barriers,
                                        int barrier) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) {
    barriers.arrive(barrier);
  }
}

}  // namespace pkg::cuda
