// Copies of numbers that follow one another, between shared and global memory,
// by one instruction of one thread, that the device's copy engine carries out.
// To global memory it may add instead: where the memory is, so that what is
// there does not come and go. (PTX ISA, "cp.async.bulk" and
// "cp.reduce.async.bulk"; from compute capability 9.0 on.)
//
// Addresses and sizes are multiples of 16 bytes. What goes to shared memory
// counts for a barrier, as boxes do (device/tensor_map.cuh). What goes to
// global memory the thread waits for by groups: until it has been read, so that
// there is room again, or until it has arrived.
//
// The engine sees what threads have written to shared memory only after
// publish_shared_memory(), and what other blocks have done in their turns
// (device/turns.cuh) after order_copies_after_turn().
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/shared.cuh"

namespace pkg::cuda {

#ifdef __CUDACC__

// Begins to copy to where `index` is; the bytes count for the barrier.
template <class Element>
__device__ __forceinline__ void copy_numbers_in_turn(
    const SharedSpan<Element>& to, int index, const float* from, int bytes,
    const Mbarriers& barriers, int barrier) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1], %2, [%3];" ::"r"(to.address(index)),
      "l"(from), "r"(bytes), "r"(barriers.address(barrier))
      : "memory");
#else
  __trap();
#endif
}

// Begins to copy from where `index` is.
template <class Element>
__device__ __forceinline__ void store_numbers_in_turn(
    const SharedSpan<Element>& from, int index, float* to, int bytes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
      "r"(from.address(index)), "r"(bytes)
      : "memory");
#else
  __trap();
#endif
}

// The same, and adds. Each number is added to once, so that the sum depends on
// the order of such copies alone.
template <class Element>
__device__ __forceinline__ void add_numbers_in_turn(
    const SharedSpan<Element>& from, int index, float* to, int bytes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], "
      "%2;" ::"l"(to),
      "r"(from.address(index)), "r"(bytes)
      : "memory");
#else
  __trap();
#endif
}

// What the thread has begun to copy to global memory since the last commit is a
// group.
__device__ __forceinline__ void commit_bulk_copies() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#else
  __trap();
#endif
}

// Until all groups have been read: others may write there after they have heard
// of it.
__device__ __forceinline__ void wait_for_bulk_reads() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#else
  __trap();
#endif
}

// Until all groups have arrived: the thread may pass the turn on.
__device__ __forceinline__ void wait_for_bulk_copies() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#else
  __trap();
#endif
}

// By the thread that has waited for its turn: what copies have done there
// before comes before those that it begins from now on.
__device__ __forceinline__ void order_copies_after_turn() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#else
  __trap();
#endif
}

#endif

}  // namespace pkg::cuda

#ifndef __CUDACC__

#include "emulated_bulk_copy.h"

namespace pkg::cuda {

using emulation::add_numbers_in_turn;
using emulation::commit_bulk_copies;
using emulation::copy_numbers_in_turn;
using emulation::order_copies_after_turn;
using emulation::store_numbers_in_turn;
using emulation::wait_for_bulk_copies;
using emulation::wait_for_bulk_reads;

}  // namespace pkg::cuda

#endif
