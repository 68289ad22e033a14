// An operand of a product by tensor cores on its way through shared memory: a
// slice of 128 bytes of the summed dimension, for every row or column of the
// block's tile.
//
// A dense and aligned operand is copied asynchronously, 16 bytes at a time, as
// it lies: lines are its rows or columns, or, where those are neighbours in
// memory, steps of the summed dimension, which are transposed on their way to
// the registers. Any other operand goes element by element through registers
// to where the first kind would be.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/gemm/panel.cuh"

namespace pkg::cuda {

template <class Element, int kOuterSize, int kThreads>
class OperandTile {
 public:
  static constexpr int kOuter = kOuterSize;
  static constexpr int kDepth = 128 / sizeof(Element);
  static constexpr int kElements = kOuter * kDepth;
  static constexpr int kStep = 32 / sizeof(Element);

  // `warp_outer` is where the part of the calling warp begins, and
  // `outer_first` says which operand of mma it is: the second of four parts of
  // 8 rows or columns by 16 bytes is further in the outer dimension in operand
  // A, and in the summed one in two of operand B.
  __device__ __forceinline__ OperandTile(const PanelSource<Element>& source,
                                         int64_t outer_begin, int warp_outer,
                                         bool outer_first)
      : first_(source.data + outer_begin * source.outer_stride),
        outer_stride_(source.outer_stride),
        depth_stride_(source.depth_stride),
        depth_size_(source.depth_size),
        outer_size_(at_most<kOuter>(source.outer_size - outer_begin)) {
    const bool is_whole = is_aligned(source.data, kVector);
    along_depth_ =
        is_whole && depth_stride_ == 1 && outer_stride_ % kVector == 0;
    along_outer_ = kTransposes && !along_depth_ && is_whole &&
                   outer_stride_ == 1 && depth_stride_ % kVector == 0;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int low = lane / 8 % 2;
    const int high = lane / 16;
    const int outer = warp_outer + 8 * (outer_first ? low : high);
    const int depth = kVector * (outer_first ? high : low);
    lane_index_ = along_outer_ ? ByDepth::index(depth + lane % 8, outer)
                               : ByOuter::index(outer + lane % 8, depth);
  }

  // Begins to copy the slice from `depth_begin` on, zeros beyond the operand.
  // The caller commits the copies.
  __device__ __forceinline__ void load(const SharedSpan<Element>& to,
                                       int64_t depth_begin) const {
    const int depth_size = at_most<kDepth>(depth_size_ - depth_begin);
    const Element* from = first_ + depth_begin * depth_stride_;
    if (along_depth_) {
      copy_vectors<ByOuter, kDepth>(to, from, outer_stride_, outer_size_,
                                    depth_size);
    } else if (along_outer_) {
      copy_vectors<ByDepth, kOuter>(to, from, depth_stride_, depth_size,
                                    outer_size_);
    } else {
      copy_elements(to, from, depth_size);
    }
  }

  // The words of mma for 16 rows or columns of the warp, the `part`-th, and the
  // `step`-th 32 bytes of the summed dimension. Where they lie follows from the
  // lane's first place by constants: an exclusive or within a line, a sum for
  // other lines. So `warp_outer` must be a multiple of the warp's extent, or
  // that of a line.
  __device__ __forceinline__ void fragments(const SharedSpan<Element>& from,
                                            int part, int step,
                                            uint32_t (&words)[4]) const {
    constexpr int kLine = ByOuter::kLine;
    if constexpr (kTransposes) {
      if (along_outer_) {
        const int line = part * 16 / kLine * kDepth + step * kStep;
        from.load_matrices((lane_index_ ^ part * 16 % kLine) + line * kLine,
                           true, words);
        return;
      }
    }
    from.load_matrices((lane_index_ ^ step * kStep) + part * 16 * kLine, false,
                       words);
  }

 private:
  static constexpr int kVector = 16 / sizeof(Element);
  // ldmatrix transposes elements of 16 bits.
  static constexpr bool kTransposes = sizeof(Element) == 2;
  using ByOuter = SwizzledTile<Element, kOuter, kDepth>;
  using ByDepth = SwizzledTile<Element, kDepth, kOuter>;

  // Lines of kWidth elements, of which `lines` exist, `width` elements of each.
  template <class Layout, int kWidth>
  __device__ __forceinline__ void copy_vectors(const SharedSpan<Element>& to,
                                               const Element* from,
                                               int64_t line_stride, int lines,
                                               int width) const {
    constexpr int kInLine = kWidth / kVector;
    constexpr int kLines = kThreads / kInLine;  // at a time
    constexpr int kCopies = kElements / kVector / kThreads;
    static_assert(kCopies * kVector * kThreads == kElements);
    static_assert(kThreads % kInLine == 0 && kLines % 8 == 0);
    const int place = static_cast<int>(threadIdx.x) % kInLine * kVector;
    const int line = static_cast<int>(threadIdx.x) / kInLine;
    const int left = width - place;
    const int valid = left < 0 ? 0 : left < kVector ? left : kVector;
    const Element* vector = from + line * line_stride + place;
    const int index = Layout::index(line, place);
    PKG_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      to.copy_async(index + i * kLines * Layout::kLine, vector,
                    line + i * kLines < lines ? valid : 0);
      vector += kLines * line_stride;
    }
  }

  // A thread puts sixteen bytes together. Neighbouring threads read along the
  // dimension of the smaller stride.
  __device__ __forceinline__ void copy_elements(const SharedSpan<Element>& to,
                                                const Element* from,
                                                int depth_size) const {
    constexpr int kVectors = kDepth / kVector;
    const bool by_depth = depth_stride_ <= outer_stride_;
    PKG_UNROLL_BY(1)  // what is in flight is in registers
    for (int index = static_cast<int>(threadIdx.x); index < kOuter * kVectors;
         index += kThreads) {
      const int outer = by_depth ? index / kVectors : index % kOuter;
      const int depth =
          kVector * (by_depth ? index % kVectors : index / kOuter);
      const int valid = outer < outer_size_ ? depth_size - depth : 0;
      const Element* element =
          from + outer * outer_stride_ + depth * depth_stride_;
      Packet<Element, kVector> vector;
      PKG_UNROLL
      for (int i = 0; i < kVector; ++i) {
        vector.values[i] =
            i < valid ? element[i * depth_stride_] : convert<Element>(0.0f);
      }
      to.store(ByOuter::index(outer, depth), vector);
    }
  }

  const Element* first_;
  int64_t outer_stride_;
  int64_t depth_stride_;
  int64_t depth_size_;
  int outer_size_;
  int lane_index_;
  bool along_depth_;
  bool along_outer_;
};

}  // namespace pkg::cuda
