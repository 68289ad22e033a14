// A call of the forward pass, and how it is divided among blocks.
#pragma once

#include <cstdint>

#include "cuda/correlation/correlation.cuh"
#include "cuda/device/device.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// What the kernels of all element types are given.
struct CorrelationPlan {
  CorrelationShape shape;
  CorrelationClasses classes[2];
  int64_t piece_count;
};

template <class Element>
struct Correlation : CorrelationPlan {
  CorrelationImages<Element> images1;
  CorrelationImages<Element> images2;
  Element* output;  // contiguous
};

// The part of the output that a block computes at a time: so many rows of
// positions of a class at so many rows of shifts of a class, in width the
// groups and the shifts of a tile. Of each `kSkewed` rows of positions the
// later ones are computed at a row of shifts less, with the same row of input2:
// for them the shifts of the first piece begin before the patch.
template <class WidthTile, int kRows, int kShiftRows, int kSkewed = 1>
struct CorrelationPiece {
  static_assert(kRows % kSkewed == 0);
  static constexpr int kRows2 = kRows - kSkewed + kShiftRows;  // of input2
  using Width = WidthTile;
  using Place = typename Width::Place;
  const CorrelationPlan& plan;
  int64_t image;
  int64_t first_row;        // position
  int64_t first_shift_row;  // of the patch
  int64_t shift_class;
  int64_t first_shift;  // of its class
  Width width;

  static int64_t count(const CorrelationPlan& plan) {
    const CorrelationClasses& rows = plan.classes[0];
    const CorrelationClasses& columns = plan.classes[1];
    return plan.shape.batch * rows.position_classes *
           tiles_of(rows.positions, kRows) * rows.shift_classes *
           shift_row_tiles(rows) * Width::tiles(columns) *
           columns.shift_classes * Width::shift_tiles(columns.shifts);
  }

  // Pieces that follow one another read the same rows of input1.
  __device__ __forceinline__ CorrelationPiece(const CorrelationPlan& of_plan,
                                              int64_t index)
      : plan(of_plan) {
    const CorrelationClasses& rows = plan.classes[0];
    const CorrelationClasses& columns = plan.classes[1];
    const auto take = [&index](int64_t count) {
      const int64_t taken = index % count;
      index /= count;
      return taken;
    };
    first_shift = take(Width::shift_tiles(columns.shifts)) * Width::kShiftStep;
    shift_class = take(columns.shift_classes);
    const int64_t shift_row = take(shift_row_tiles(rows)) * kShiftRows;
    first_shift_row = take(rows.shift_classes) + shift_row * rows.shift_step;
    width = Width(columns, take(Width::tiles(columns)));
    const int64_t row = take(tiles_of(rows.positions, kRows)) * kRows;
    first_row = take(rows.position_classes) + row * rows.position_step;
    image = index;
  }

  // Positions and shifts: some of a piece at the border do not exist.
  __device__ __forceinline__ int64_t row(int line) const {
    return first_row + line * plan.classes[0].position_step;
  }
  __device__ __forceinline__ int64_t shift_row(int line) const {
    return first_shift_row + line * plan.classes[0].shift_step;
  }
  __device__ __forceinline__ int64_t shift_of(int index) const {
    return shift_class + (first_shift + index) * plan.classes[1].shift_step;
  }

  // Pixels of input1 at place ki of the window, and of input2, that the piece
  // reads: row i of positions and row j of shifts meet in row i + j.
  __device__ __forceinline__ int64_t row1(int64_t ki, int line) const {
    return moved(plan.shape.pixel(0, first_row, ki), line,
                 plan.classes[0].pitch);
  }
  __device__ __forceinline__ int64_t row2(int64_t ki, int line) const {
    return moved(row1(ki, 0) + plan.shape.shift(0, first_shift_row), line,
                 plan.classes[0].pitch);
  }
  __device__ __forceinline__ int64_t column1(int64_t kj, Place place) const {
    return moved(plan.shape.pixel(1, place.of_class, kj), place.index,
                 plan.classes[1].pitch);
  }
  __device__ __forceinline__ int64_t column2(int64_t kj, Place place) const {
    const int64_t shift = plan.shape.shift(1, shift_of(0));
    return moved(plan.shape.pixel(1, place.of_class, kj) + shift, place.index,
                 plan.classes[1].pitch);
  }
  // Whether any of those rows exist of both images.
  __device__ __forceinline__ bool has_rows(int64_t ki) const {
    bool any1 = false;
    bool any2 = false;
    for (int line = 0; line < kRows || line < kRows2; ++line) {
      any1 |= line < kRows && plan.shape.has_pixel(0, row1(ki, line));
      any2 |= line < kRows2 && plan.shape.has_pixel(0, row2(ki, line));
    }
    return any1 && any2;
  }

 private:
  __host__ __device__ static int64_t shift_row_tiles(
      const CorrelationClasses& rows) {
    return tiles_of(rows.shifts + kSkewed - 1, kShiftRows);
  }
};

// A call for blocks that work as `Block` says.
template <class Block, class Element>
Correlation<Element> correlation_of(const CorrelationShape& shape,
                                    const CorrelationImages<Element>& images1,
                                    const CorrelationImages<Element>& images2,
                                    Element* output) {
  Correlation<Element> call = {{shape, {}, 0}, images1, images2, output};
  for (int axis = 0; axis < 2; ++axis) {
    call.classes[axis] =
        CorrelationClasses(shape.stride[axis], shape.dilation_patch[axis],
                           shape.output[axis], shape.patch[axis]);
  }
  call.piece_count = Block::Piece::count(call);
  return call;
}

}  // namespace pkg::cuda
