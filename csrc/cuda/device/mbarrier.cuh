// Barriers in shared memory for threads and copies that do not all take the
// same way: a phase ends when so many threads have arrived, and as many bytes
// as they expect have been copied. (PTX ISA, "mbarrier"; from compute
// capability 9.0 on.)
//
// Waiting is by the phase's parity: phases count from 0, and one that is over
// is told by its last bit. So nobody may be two phases ahead of who waits.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"

namespace pkg::cuda {

#ifdef __CUDACC__

// PKG_MBARRIERS(barriers, 4): so many, that all threads of the block share.
#define PKG_MBARRIERS(name, count)                      \
  __shared__ __align__(8) uint64_t name##_words[count]; \
  const ::pkg::cuda::Mbarriers name(name##_words)

class Mbarriers {
 public:
  __device__ __forceinline__ explicit Mbarriers(uint64_t* words)
      : first_(static_cast<uint32_t>(__cvta_generic_to_shared(words))) {}

  // By one thread, once; then publish_mbarriers() and a barrier of the block.
  __device__ __forceinline__ void init(int index, int arrivals) const {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(index)),
        "r"(arrivals)
        : "memory");
  }

  // What the thread has done before, who waits for the phase sees.
  __device__ __forceinline__ void arrive(int index) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile(
        "mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(index))
        : "memory");
#else
    __trap();
#endif
  }

  // The same, and the phase lasts until that many bytes have been copied.
  __device__ __forceinline__ void arrive_and_expect(int index,
                                                    int bytes) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     address(index)),
                 "r"(bytes)
                 : "memory");
#else
    __trap();
#endif
  }

  // Until the phase of this parity is over. Before the first ends, that of
  // parity 1 counts as over.
  __device__ __forceinline__ void wait(int index, uint32_t parity) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    uint32_t is_over = 0;
    do {
      asm volatile(
          "{\n"
          ".reg .pred over;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
          "selp.u32 %0, 1, 0, over;\n"
          "}"
          : "=r"(is_over)
          : "r"(address(index)), "r"(parity)
          : "memory");
    } while (is_over == 0);
#else
    __trap();
#endif
  }

  __device__ __forceinline__ uint32_t address(int index) const {
    return first_ + static_cast<uint32_t>(index) * 8;
  }

 private:
  uint32_t first_;
};

// By the thread that has made the barriers: copies see them too.
__device__ __forceinline__ void publish_mbarriers() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
  __trap();
#endif
}

// What the thread has written to shared memory by itself, products of
// warpgroups and bulk copies see after the next barrier.
__device__ __forceinline__ void publish_shared_memory() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
  __trap();
#endif
}

#endif

}  // namespace pkg::cuda

#ifndef __CUDACC__

#include "emulated_mbarrier.h"

namespace pkg::cuda {

using emulation::Mbarriers;
using emulation::publish_mbarriers;
using emulation::publish_shared_memory;

}  // namespace pkg::cuda

#endif
