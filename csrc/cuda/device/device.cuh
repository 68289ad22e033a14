// What device code needs from its compiler: nvcc, or the host compiler over
// tests/emulation/cuda_emulator.h, which runs the same kernels on a CPU and
// checks their every access to shared memory.
#pragma once

#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// PKG_SHARED(float, panel, [16][64]); aligned, so that the compiler may merge
// neighbouring reads into 128-bit ones.
#define PKG_SHARED(type, name, dimensions) \
  __shared__ __align__(16) type name dimensions

#define PKG_UNROLL _Pragma("unroll")
#define PKG_PRAGMA(words) _Pragma(#words)
#define PKG_UNROLL_BY(count) PKG_PRAGMA(unroll count)

#else

#include "cuda_emulator.h"

#endif

#include <cstdint>

#include "host/integer_math.h"

namespace pkg::cuda {

// Every kernel walks its work in steps of the grid, so any grid is right and a
// grid never has to hold more blocks than a launch may ask for.
__device__ __forceinline__ int64_t global_thread_index() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ int64_t global_thread_count() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x;
}

// The value, of which the compiler does not know that it is the same in every
// turn of a loop: what follows from it is computed where it is used, and does
// not lie in registers during the whole of the loop.
__device__ __forceinline__ int64_t computed_here(int64_t value) {
#ifdef __CUDACC__
  asm volatile("" : "+l"(value));
#endif
  return value;
}
__device__ __forceinline__ int computed_here(int value) {
#ifdef __CUDACC__
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// One of two values that are in registers: of a choice between two elements of
// an array the compiler makes one at a place it does not know, which registers
// do not have.
template <class Value>
__device__ __forceinline__ Value chosen(bool is_first, Value first,
                                        Value second) {
  return is_first ? first : second;
}

// A thread of a block of so many groups, counted in its own.
template <int kThreads, int kGroups>
__device__ __forceinline__ int of_group(int thread) {
  return kGroups == 1 ? thread : thread % kThreads;
}

// What a launch asks for beside its blocks.
struct LaunchShape {
  int threads;
  int shared_bytes = 0;  // beyond what the kernel declares
  bool waits = false;

  LaunchShape(int threads_of_block, int dynamic_shared_bytes = 0)
      : threads(threads_of_block), shared_bytes(dynamic_shared_bytes) {}

  // For a kernel that begins with wait_for_kernel_before(), where it follows
  // another kernel of the same call (dependent_launch.cuh).
  LaunchShape that_waits(bool follows = true) const {
    LaunchShape shape = *this;
    shape.waits = follows;
    return shape;
  }

  // A kernel has 48 KiB, what it declares among them, and for more the device
  // has to be asked. Here nobody knows what it declares: less than the rest.
  bool asks_for_shared_memory() const { return shared_bytes > 32 * 1024; }
};

// Of so many pieces of work, which the blocks share out.
constexpr unsigned grid_of(int64_t pieces) {
  constexpr int64_t kMostBlocks = 2147483647;
  return static_cast<unsigned>(pieces < kMostBlocks ? pieces : kMostBlocks);
}

// What the parameters of a kernel take, each at a multiple of its alignment.
template <class... Parameters>
constexpr int64_t parameter_bytes() {
  int64_t bytes = 0;
  [[maybe_unused]] const auto add = [&](int64_t size, int64_t alignment) {
    bytes = round_up(bytes, alignment) + size;
  };
  (add(sizeof(Parameters), alignof(Parameters)), ...);
  return bytes;
}

// Whether a kernel may have such parameters: what CUDA 12.1 and later take on
// compute capability 7.0 and later. (Before, 4 KiB; attention's gradients have
// more.)
template <class... Parameters>
constexpr bool fits_parameters = parameter_bytes<Parameters...>() <= 32764;

// Of a kernel whose blocks work as `Block` says.
template <class Block>
LaunchShape launch_shape() {
  return {Block::kThreads, Block::kSharedBytes};
}

}  // namespace pkg::cuda
