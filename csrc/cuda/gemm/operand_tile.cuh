// An operand of a product by tensor cores on its way through shared memory: a
// slice of 128 bytes of the summed dimension, for every row or column of the
// block's tile.
//
// A dense and aligned operand is copied asynchronously, 16 bytes at a time.
// Lines in shared memory are its rows or columns, or, where those are
// neighbours in memory, steps of the summed dimension; elements of 16 bits are
// transposed on the way to the registers, those of 32 loaded one by one, as
// many bytes a cycle, and int8 goes as it were not dense. Any other operand
// goes element by element through registers to the same places. A block of more
// threads than copy a tile has several tiles, one for each so many threads.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/gemm/panel.cuh"

namespace pkg::cuda {

// What the lines are of an operand's slice in shared memory.
enum class OperandLines {
  outer,  // its rows or columns
  steps,  // of the summed dimension
  as_it_lies,
};

// Elements a stride apart as neighbours, zeros behind the first `valid`.
template <class Element, int kCount>
__device__ __forceinline__ Packet<Element, kCount> gathered(const Element* from,
                                                            int64_t stride,
                                                            int valid) {
  Packet<Element, kCount> packet;
  PKG_UNROLL
  for (int i = 0; i < kCount; ++i) {
    packet.values[i] = i < valid ? from[i * stride] : convert<Element>(0.0f);
  }
  return packet;
}

template <class Element, int kOuterSize, int kThreads,
          OperandLines kLines = OperandLines::as_it_lies,
          bool kCopiesWhole = true>
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
  __device__ __forceinline__ OperandTile(
      const PanelSource<Element>& source, int64_t outer_begin, int warp_outer,
      bool outer_first, int thread = static_cast<int>(threadIdx.x))
      : first_(source.data + outer_begin * source.outer_stride),
        outer_stride_(source.outer_stride),
        depth_stride_(source.depth_stride),
        depth_size_(source.depth_size),
        outer_size_(at_most<kOuter>(source.outer_size - outer_begin)),
        thread_(thread),
        outer_first_(outer_first) {
    const bool is_whole = is_aligned(source.data, kVector);
    const bool along_depth =
        is_whole && depth_stride_ == 1 && outer_stride_ % kVector == 0;
    const bool along_outer =
        is_whole && outer_stride_ == 1 && depth_stride_ % kVector == 0;
    lines_are_steps_ = along_outer && !along_depth;
    is_dense_ = by_steps() ? along_outer : along_depth;
    const int lane = thread_ % 32;
    if (kLoadsWords && by_steps()) {
      lane_index_ = BySteps::index(lane % 4, warp_outer + lane / 4);
      return;
    }
    const int low = lane / 8 % 2;
    const int high = lane / 16;
    const int outer = warp_outer + 8 * (outer_first ? low : high);
    const int depth = kVector * (outer_first ? high : low);
    lane_index_ = by_steps() ? BySteps::index(depth + lane % 8, outer)
                             : ByOuter::index(outer + lane % 8, depth);
  }

  // Begins to copy the slice from `depth_begin` on, zeros beyond the operand.
  // The caller commits the copies.
  __device__ __forceinline__ void load(const SharedSpan<Element>& to,
                                       int64_t depth_begin) const {
    const int depth_size = at_most<kDepth>(depth_size_ - depth_begin);
    const Element* from = first_ + depth_begin * depth_stride_;
    if (by_steps()) {
      copy<BySteps, kOuter>(
          to, {from, depth_stride_, outer_stride_, depth_size, outer_size_});
    } else {
      copy<ByOuter, kDepth>(
          to, {from, outer_stride_, depth_stride_, outer_size_, depth_size});
    }
  }

  // Whether `load` copies asynchronously, and where an element goes to where
  // the lines are rows or columns: for who copies with less than `load` does.
  __device__ __forceinline__ bool is_dense() const { return is_dense_; }
  __device__ __forceinline__ static constexpr int index(int outer, int depth) {
    return ByOuter::index(outer, depth);
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
    if (!by_steps()) {
      from.load_matrices((lane_index_ ^ step * kStep) + part * 16 * kLine,
                         false, words);
    } else if constexpr (kLoadsWords) {
      load_words(from, part, step, words);
    } else {
      const int line = part * 16 / kLine * kDepth + step * kStep;
      from.load_matrices((lane_index_ ^ part * 16 % kLine) + line * kLine, true,
                         words);
    }
  }

 private:
  static constexpr int kVector = 16 / sizeof(Element);
  // ldmatrix transposes elements of 16 bits; those of 32 are words themselves.
  static constexpr bool kLoadsWords = sizeof(Element) == 4;
  static constexpr bool kTakesSteps = sizeof(Element) == 2 || kLoadsWords;
  static_assert(kTakesSteps || kLines != OperandLines::steps);
  using ByOuter = SwizzledTile<Element, kOuter, kDepth>;
  // Where lines are never steps, there may be fewer than steps have places.
  using BySteps = SwizzledTile<Element, kDepth,
                               kLines == OperandLines::outer ? kDepth : kOuter,
                               kLoadsWords>;

  // `fragments` of elements that are words, from lines that are steps: a lane's
  // are four steps, or eight rows or columns, apart.
  __device__ __forceinline__ void load_words(const SharedSpan<Element>& from,
                                             int part, int step,
                                             uint32_t (&words)[4]) const {
    constexpr int kLine = BySteps::kLine;
    PKG_UNROLL
    for (int word = 0; word < 4; ++word) {
      const int outer = part * 16 + 8 * (outer_first_ ? word % 2 : word / 2);
      const int half = outer_first_ ? word / 2 : word % 2;
      const int line = outer / kLine * kDepth + step * kStep + 4 * half;
      words[word] = from.load_word(
          (lane_index_ ^ (outer % kLine + kVector * half)) + line * kLine);
    }
  }

  // Of those that copy the tile.
  __device__ __forceinline__ int thread() const { return thread_ % kThreads; }

  // Known to the compiler where the lines do not depend on the operand.
  __device__ __forceinline__ bool by_steps() const {
    if constexpr (!kTakesSteps || kLines == OperandLines::outer) {
      return false;
    } else {
      return kLines == OperandLines::steps || lines_are_steps_;
    }
  }

  // The slice in global memory, counted by the lines it gets.
  struct Slice {
    const Element* from;
    int64_t line_stride;
    int64_t place_stride;  // in a line
    int lines;
    int width;
  };

  template <class Layout, int kWidth>
  __device__ __forceinline__ void copy(const SharedSpan<Element>& to,
                                       const Slice& slice) const {
    if (is_dense_) {
      copy_vectors<Layout, kWidth>(to, slice);
    } else {
      copy_elements<Layout, kWidth>(to, slice);
    }
  }

  // The copies of a whole slice need no sizes: of one that is computed the
  // compiler makes some eight instructions (nvcc 13.0). Kernels that have no
  // register left for it do without (kCopiesWhole).
  template <class Layout, int kWidth>
  __device__ __forceinline__ void copy_vectors(const SharedSpan<Element>& to,
                                               const Slice& slice) const {
    if (kCopiesWhole && slice.lines >= kElements / kWidth &&
        slice.width >= kWidth) {
      copy_vectors_of<Layout, kWidth>(to, slice,
                                      [](int, int) { return kVector; });
    } else {
      copy_vectors_of<Layout, kWidth>(to, slice, [&](int line, int place) {
        const int left = slice.width - place;
        const int valid = left < 0 ? 0 : left < kVector ? left : kVector;
        return line < slice.lines ? valid : 0;
      });
    }
  }

  // valid(line, place) is how many elements of a vector there are.
  template <class Layout, int kWidth, class Valid>
  __device__ __forceinline__ void copy_vectors_of(const SharedSpan<Element>& to,
                                                  const Slice& slice,
                                                  Valid&& valid) const {
    // So many lines at a time that all of a thread's are in one order: else
    // each is copied in parts, 128 bytes at a time.
    constexpr int kAll = kWidth / kVector;
    constexpr int kInLine =
        kThreads / kAll % 8 == 0 ? kAll : Layout::kLine / kVector;
    constexpr int kAtATime = kThreads / kInLine;  // lines
    constexpr int kTurns = kElements / kWidth / kAtATime;
    static_assert(kTurns * kAtATime * kWidth == kElements);
    static_assert(kThreads % kInLine == 0 && kAtATime % 8 == 0);
    const int line = thread() / kInLine;
    PKG_UNROLL
    for (int part = 0; part < kAll; part += kInLine) {
      const int place = (thread() % kInLine + part) * kVector;
      const Element* vector = slice.from + line * slice.line_stride + place;
      const int index = Layout::index(line, place);
      PKG_UNROLL
      for (int i = 0; i < kTurns; ++i) {
        to.copy_async(index + i * kAtATime * Layout::kLine, vector,
                      valid(line + i * kAtATime, place));
        vector += kAtATime * slice.line_stride;
      }
    }
  }

  // A thread puts sixteen bytes of a line together. Neighbouring threads read
  // along the dimension of the smaller stride.
  template <class Layout, int kWidth>
  __device__ __forceinline__ void copy_elements(const SharedSpan<Element>& to,
                                                const Slice& slice) const {
    constexpr int kInLine = kWidth / kVector;
    constexpr int kAll = kElements / kWidth;  // lines
    const bool along_line = slice.place_stride <= slice.line_stride;
    PKG_UNROLL_BY(1)  // what is in flight is in registers
    for (int index = thread(); index < kAll * kInLine; index += kThreads) {
      const int line = along_line ? index / kInLine : index % kAll;
      const int place = kVector * (along_line ? index % kInLine : index / kAll);
      const int valid = line < slice.lines ? slice.width - place : 0;
      const Element* element =
          slice.from + line * slice.line_stride + place * slice.place_stride;
      to.store(Layout::index(line, place),
               gathered<Element, kVector>(element, slice.place_stride, valid));
    }
  }

  const Element* first_;
  int64_t outer_stride_;
  int64_t depth_stride_;
  int64_t depth_size_;
  int outer_size_;
  int thread_;
  int lane_index_;
  bool outer_first_;
  bool lines_are_steps_;
  bool is_dense_;
};

// Begins to copy as many slices of an operand, one after the other.
template <class Operand, class Element>
__device__ __forceinline__ void load_slices(const Operand& operand,
                                            const SharedSpan<Element>& to,
                                            int count) {
  PKG_UNROLL_BY(1)
  for (int slice = 0; slice < count; ++slice) {
    operand.load(to.part(slice * Operand::kElements, Operand::kElements),
                 int64_t{slice} * Operand::kDepth);
  }
}

// A slice of 16 lines that are rows of operand A or columns of operand B, by a
// warp that has them all. `outer_first` is as in OperandTile.
template <class Element>
class LinesAsOuter {
 public:
  static constexpr int kLines = 16;
  static constexpr int kDepth = 128 / sizeof(Element);
  static constexpr int kElements = kLines * kDepth;
  static constexpr int kStep = 32 / sizeof(Element);

  __device__ __forceinline__ explicit LinesAsOuter(bool outer_first) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int low = lane / 8 % 2;
    const int high = lane / 16;
    lane_index_ = Slice::index(8 * (outer_first ? low : high) + lane % 8,
                               Slice::kVector * (outer_first ? high : low));
  }

  // The words of mma for the `step`-th 32 bytes of the summed dimension.
  __device__ __forceinline__ void fragments(const SharedSpan<Element>& from,
                                            int, int step,
                                            uint32_t (&words)[4]) const {
    from.load_matrices(lane_index_ ^ step * kStep, false, words);
  }

 private:
  using Slice = SwizzledTile<Element, kLines, kDepth>;
  int lane_index_;
};

// Slices of an operand whose lines, kLines of them, are its rows, as operand B
// of another product, that sums over the lines: the values of a head are
// multiplied by both their rows and their columns.
template <class Element, int kLines>
class LinesAsSteps {
 public:
  using Slice = SwizzledTile<Element, kLines, 128 / sizeof(Element)>;

  // `first_column`, of a slice, is a multiple of the columns that are asked
  // for.
  __device__ __forceinline__ explicit LinesAsSteps(int first_column = 0) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    lane_index_ =
        Slice::index(lane % 16, first_column + lane / 16 * Slice::kVector);
  }

  // The words of mma for 16 columns, the `part`-th, and the `step`-th 16 lines.
  __device__ __forceinline__ void fragments(const SharedSpan<Element>& from,
                                            int part, int step,
                                            uint32_t (&words)[4]) const {
    constexpr int kLine = Slice::kLine;
    const int line = part * 16 / kLine * kLines + step * 16;
    from.load_matrices((lane_index_ ^ part * 16 % kLine) + line * kLine, true,
                       words);
  }

 private:
  static_assert(sizeof(Element) == 2);
  int lane_index_;
};

}  // namespace pkg::cuda
