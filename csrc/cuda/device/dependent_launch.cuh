// A kernel whose blocks begin while the kernel before it still runs, and wait
// themselves until that one is done: what a launch takes, and what is left of
// multiprocessors meanwhile, is not lost between the two. (CUDA C++ Programming
// Guide, "Programmatic Dependent Launch and Synchronization".)
//
// The launch asks for it by LaunchShape::that_waits(), and does so where the
// device has code for compute capability 9.0. Elsewhere, and where a kernel is
// launched as any other, both functions do nothing. Only behind a kernel of the
// same call: one of somebody else's may itself have begun early, and end before
// what this one needs has been written; and a graph that is captured has no
// such edge from what is no kernel.
#pragma once

#include "cuda/device/device.cuh"

namespace pkg::cuda {

// In the kernel before, by every thread: of all that do, the next may begin.
__device__ __forceinline__ void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// In the kernel launched so, by every thread, ahead of all else: returns when
// the kernel before has ended and all that it wrote is there to be read.
__device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__)
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#elif !defined(__CUDACC__)
  emulation::note_wait_for_kernel();
#endif
}

}  // namespace pkg::cuda
