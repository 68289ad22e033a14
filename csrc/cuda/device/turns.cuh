// Blocks of one launch that add to the same memory one after another, in an
// order that does not depend on when they run: a counter in global memory says
// whose turn it is.
//
// A block that waits keeps its multiprocessor. So it may wait only for work
// that another has begun: what a ticket of a lower number gave. The blocks that
// hold the lowest tickets then never wait, and all of them end, however few are
// resident and in whatever order they start.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"

#ifndef __CUDACC__
#include "emulated_turns.h"
#endif

namespace pkg::cuda {

using FourNumbers = Packet<float, 4>;

#ifdef __CUDACC__

// By one thread: the next number, from 0 on where the counter was 0.
__device__ __forceinline__ int take_ticket(int* counter) {
  return atomicAdd(counter, 1);
}

class TurnCounter {
 public:
  __device__ __forceinline__ explicit TurnCounter(int* counter)
      : counter_(counter) {}

  // Whether it is that turn. By one thread: the whole block sees after its next
  // barrier what was written before the turn was passed on. (PTX ISA, "Memory
  // Consistency Model": a release, an acquire, and a barrier on either side.)
  __device__ __forceinline__ bool is(int turn) const {
    int now;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                 : "=r"(now)
                 : "l"(counter_)
                 : "memory");
    return now == turn;
  }

  __device__ __forceinline__ void wait(int turn) const {
    while (!is(turn)) {
    }
  }

  // By one thread, after a barrier behind what the block has written.
  __device__ __forceinline__ void pass_to(int turn) const {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(counter_),
                 "r"(turn)
                 : "memory");
  }

 private:
  int* counter_;
};

// What one block writes and another reads in its turn: past the first-level
// cache, where nothing finds it again.
__device__ __forceinline__ FourNumbers load_in_turn(const float* from) {
  const float4 four = __ldcg(reinterpret_cast<const float4*>(from));
  return {{four.x, four.y, four.z, four.w}};
}

__device__ __forceinline__ void store_in_turn(float* to,
                                              const FourNumbers& four) {
  __stcg(reinterpret_cast<float4*>(to),
         make_float4(four.values[0], four.values[1], four.values[2],
                     four.values[3]));
}

#else

using emulation::take_ticket;
using emulation::TurnCounter;

inline FourNumbers load_in_turn(const float* from) {
  emulation::check_in_turn(from, sizeof(FourNumbers), false);
  return *reinterpret_cast<const FourNumbers*>(from);
}

inline void store_in_turn(float* to, const FourNumbers& four) {
  emulation::check_in_turn(to, sizeof(FourNumbers), true);
  *reinterpret_cast<FourNumbers*>(to) = four;
}

#endif

}  // namespace pkg::cuda
