// Memory that the threads of a block share, as a span that instructions of
// vectors, of warps and of asynchronous copies take. The emulator's
// (tests/emulation/shared_span.h) checks each access.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"

#ifndef __CUDACC__
#include "shared_span.h"
#endif

namespace pkg::cuda {

#ifdef __CUDACC__

template <class Element>
class SharedSpan {
 public:
  __device__ __forceinline__ explicit SharedSpan(Element* data) : data_(data) {}

  __device__ __forceinline__ Element& operator[](int index) const {
    return data_[index];
  }

  __device__ __forceinline__ SharedSpan part(int first, int) const {
    return SharedSpan(data_ + first);
  }

  template <class Vector>
  __device__ __forceinline__ void store(int index, const Vector& value) const {
    *reinterpret_cast<Vector*>(data_ + index) = value;
  }

  template <class Vector>
  __device__ __forceinline__ Vector load(int index) const {
    return *reinterpret_cast<const Vector*>(data_ + index);
  }

  // Of sixteen bytes the first `valid` elements from global memory, then zeros.
  // (PTX ISA, "cp.async"; past the first-level cache.)
  __device__ __forceinline__ void copy_async(int index, const Element* from,
                                             int valid) const {
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(index)),
        "l"(from), "r"(valid * static_cast<int>(sizeof(Element)))
        : "memory");
  }

  // An element from global memory, or 0 where it is not `valid`. (By the
  // first-level cache: a line is asked for by several copies.)
  __device__ __forceinline__ void copy_element_async(int index,
                                                     const Element* from,
                                                     bool valid) const {
    constexpr int kSize = sizeof(Element);
    static_assert(kSize == 4 || kSize == 8);
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address(index)),
        "l"(from), "n"(kSize), "r"(valid ? kSize : 0)
        : "memory");
  }

  // Four matrices of eight rows of sixteen bytes: lane i says where row i % 8
  // of matrix i / 8 begins, and gets 32 bits of each matrix. (PTX ISA,
  // "ldmatrix".)
  __device__ __forceinline__ void load_matrices(int index, bool transposed,
                                                uint32_t (&words)[4]) const {
    if (transposed) {
      asm volatile(
          "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, "
          "[%4];"
          : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
          : "r"(address(index))
          : "memory");
    } else {
      asm volatile(
          "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
          : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
          : "r"(address(index))
          : "memory");
    }
  }

  // The bits of an element, by a load of the whole warp.
  __device__ __forceinline__ uint32_t load_word(int index) const {
    static_assert(sizeof(Element) == sizeof(uint32_t));
    return load<uint32_t>(index);
  }

  // Counted from the beginning of the block's shared memory.
  __device__ __forceinline__ uint32_t address(int index) const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(data_ + index));
  }

 private:
  Element* data_;
};

// What the launch asked for: of one type in one kernel.
template <class Element>
__device__ __forceinline__ SharedSpan<Element> dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char pkg_dynamic_span[];
  return SharedSpan<Element>(reinterpret_cast<Element*>(pkg_dynamic_span));
}

// What the thread has copied since the last commit is a group, which lands by
// the time that at most `kPending` later groups are on their way. Other threads
// see it after a barrier.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#else

using emulation::commit_copies;
using emulation::SharedSpan;

template <class Element>
SharedSpan<Element> dynamic_shared() {
  return emulation::dynamic_shared<Element>("memory");
}

template <int kPending>
void wait_for_copies() {
  emulation::wait_for_copies(kPending);
}

#endif

// Lines of 128 bytes, in which the eight vectors of 16 bytes lie in another
// order in each of eight lines: those of one column, and those of one line, lie
// in different banks. (The order is that of the 128-byte swizzle of bulk tensor
// copies.) A tile wider than a line is several such parts, one after the other.
//
// A warp may instead load words of 32 bits, one a lane, of four lines by eight
// neighbours (`kByWords`). Those are two vectors of each line, and so the lines
// differ in the other bits of the order.
template <class Element, int kLines, int kWidth, bool kByWords = false>
struct SwizzledTile {
  static constexpr int kVector = 16 / sizeof(Element);
  static constexpr int kLine = 128 / sizeof(Element);
  static constexpr int kElements = kLines * kWidth;
  static_assert(kWidth % kLine == 0 && kLines % 8 == 0);

  // Where the element at `place` of a line is.
  __device__ __forceinline__ static constexpr int index(int line, int place) {
    const int order = kByWords ? line % 4 * 2 + line / 4 % 2 : line % 8;
    const int vector = place % kLine / kVector ^ order;
    return (place / kLine * kLines + line) * kLine + vector * kVector +
           place % kVector;
  }

  // Where the same place of another vector of the line is, whose number is that
  // of this one's with the bits of `vectors` turned over.
  __device__ __forceinline__ static constexpr int in_vector(int index,
                                                            int vectors) {
    return index ^ vectors * kVector;
  }
};

}  // namespace pkg::cuda
