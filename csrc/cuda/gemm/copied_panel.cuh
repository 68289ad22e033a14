// An operand of a product without 16-bit elements on its way through shared
// memory by asynchronous copies: a panel of `depth` steps of the summed
// dimension by the rows or columns of the block's tile, [depth][outer], for
// operands of any strides. Groups of a block have panels of their own.
//
// Rows or columns that are neighbours in memory, aligned, are copied by 16
// bytes. Of any other operand each element is a copy of its own, so that it is
// transposed on the way: where steps are neighbours in memory, 32 bytes of each
// of some rows by a warp, in different banks; else 32 rows or columns of one
// step. Copies of a whole panel ask nothing: with a pointer and
// a comparison for each, as at the operand's edge, they were 15 instructions an
// element (nvcc 13.0).
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/gemm/panel.cuh"

namespace pkg::cuda {

template <class Element, int kOuter, int kDepth, int kThreads, int kGroups = 1>
class CopiedPanel {
 public:
  // Steps lie four elements further in the banks than the one before.
  static constexpr int kLine = kOuter + kPanelPadding;
  static constexpr int kElements = kDepth * kLine;

  __device__ __forceinline__ CopiedPanel(const PanelSource<Element>& source,
                                         int64_t outer_begin)
      : first_(source.data + outer_begin * source.outer_stride),
        outer_stride_(source.outer_stride),
        depth_stride_(source.depth_stride),
        depth_size_(source.depth_size),
        outer_size_(at_most<kOuter>(source.outer_size - outer_begin)),
        way_(source.outer_stride == 1 && source.depth_stride % kVector == 0 &&
                     is_aligned(source.data, kVector)
                 ? Way::vectors
             : source.depth_stride == 1 ? Way::along_depth
                                        : Way::along_outer) {}

  // Begins to copy the panel from `depth_begin` on, zeros beyond the operand.
  // The caller commits the copies.
  __device__ __forceinline__ void load(const SharedSpan<Element>& to,
                                       int64_t depth_begin) const {
    const int depth_size = at_most<kDepth>(depth_size_ - depth_begin);
    const Element* from = first_ + depth_begin * depth_stride_;
    if (outer_size_ == kOuter && depth_size == kDepth) {
      copy<true>(to, from, depth_size);
    } else {
      copy<false>(to, from, depth_size);
    }
  }

  __device__ __forceinline__ static constexpr int index(int depth, int outer) {
    return depth * kLine + outer;
  }

 private:
  enum class Way { vectors, along_depth, along_outer };
  static constexpr int kVector = 16 / sizeof(Element);
  static constexpr int kVectors = kOuter / kVector;    // of a step
  static constexpr int kSteps = 32 / sizeof(Element);  // of a row, by a warp
  static constexpr int kAcross = kOuter < kThreads ? kOuter : kThreads;
  static_assert(kThreads % kVectors == 0 && kThreads % kAcross == 0);

  __device__ __forceinline__ static int thread() {
    return of_group<kThreads, kGroups>(
        computed_here(static_cast<int>(threadIdx.x)));
  }

  template <bool kWhole>
  __device__ __forceinline__ void copy(const SharedSpan<Element>& to,
                                       const Element* from,
                                       int depth_size) const {
    if (way_ == Way::vectors) {
      copy_vectors<kWhole>(to, from, depth_size);
    } else if (way_ == Way::along_depth) {
      const int depth = thread() % kSteps;
      const int outer = thread() / kSteps;
      copy_elements<kWhole, kSteps, kThreads / kSteps>(
          to, from + depth + outer * outer_stride_, 1, depth_size, depth,
          outer);
    } else {
      const int depth = thread() / kAcross;
      const int outer = thread() % kAcross;
      copy_elements<kWhole, kThreads / kAcross, kAcross>(
          to, from + depth * depth_stride_ + outer * outer_stride_,
          depth_stride_, depth_size, depth, outer);
    }
  }

  template <bool kWhole>
  __device__ __forceinline__ void copy_vectors(const SharedSpan<Element>& to,
                                               const Element* from,
                                               int depth_size) const {
    constexpr int kAtATime = kThreads / kVectors;
    static_assert(kDepth % kAtATime == 0);
    const int outer = thread() % kVectors * kVector;
    const int depth = thread() / kVectors;
    const int left = outer_size_ - outer;
    const int valid = left < 0 ? 0 : left < kVector ? left : kVector;
    from += outer + depth * depth_stride_;
    PKG_UNROLL
    for (int i = 0; i < kDepth; i += kAtATime) {
      to.copy_async(index(depth + i, outer), from + i * depth_stride_,
                    kWhole                   ? kVector
                    : depth + i < depth_size ? valid
                                             : 0);
    }
  }

  // Every so many steps and rows or columns from the thread's first on.
  template <bool kWhole, int kStepsBetween, int kOutersBetween>
  __device__ __forceinline__ void copy_elements(const SharedSpan<Element>& to,
                                                const Element* from,
                                                int64_t depth_stride,
                                                int depth_size, int depth,
                                                int outer) const {
    static_assert(kDepth % kStepsBetween == 0 && kOuter % kOutersBetween == 0);
    PKG_UNROLL
    for (int i = 0; i < kOuter; i += kOutersBetween) {
      PKG_UNROLL
      for (int k = 0; k < kDepth; k += kStepsBetween) {
        const bool is_there =
            kWhole || (outer + i < outer_size_ && depth + k < depth_size);
        to.copy_element_async(index(depth + k, outer + i),
                              from + i * outer_stride_ + k * depth_stride,
                              is_there);
      }
    }
  }

  const Element* first_;
  int64_t outer_stride_;
  int64_t depth_stride_;
  int64_t depth_size_;
  int outer_size_;
  Way way_;
};

}  // namespace pkg::cuda
