// The loop of a block whose operands pass through shared memory in stages:
// while the warps multiply one, the copies of the next ones are on their way.
#pragma once

#include "cuda/device/device.cuh"
#include "cuda/device/shared.cuh"

namespace pkg::cuda {

// Calls load(step, stage), which begins to copy to the stage, and
// multiply(step, stage) once what was copied is there, for the steps from
// `begin` to `end`. The loop is one for filling the stages and emptying them,
// so that either call is compiled once. On return every thread is done with the
// memory.
template <int kStages, class Load, class Multiply>
__device__ __forceinline__ void pass_through_stages(int begin, int end,
                                                    Load&& load,
                                                    Multiply&& multiply) {
  static_assert(kStages >= 2);
  int stage = 0;
  // The first turns only fill the stages.
  PKG_UNROLL_BY(1)
  for (int step = begin + 1 - kStages; step < end; ++step) {
    const bool multiplies = step >= begin;
    if (multiplies) {
      wait_for_copies<kStages - 2>();
      // What was copied is seen by all, and all are done with the stage before.
      __syncthreads();
    }
    const int ahead = step + kStages - 1;
    if (ahead < end) {
      load(ahead, stage);
    }
    commit_copies();  // a group for each step, so that groups count steps
    stage = stage + 1 < kStages ? stage + 1 : 0;
    if (multiplies) {
      multiply(step, stage);
    }
  }
  wait_for_copies<0>();
  __syncthreads();
}

}  // namespace pkg::cuda
