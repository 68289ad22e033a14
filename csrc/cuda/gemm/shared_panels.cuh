// Panels and tiles in the shared memory that a launch asks for, which has no
// dimensions of its own: indexed as arrays are.
#pragma once

#include "cuda/device/device.cuh"
#include "cuda/device/shared.cuh"

namespace pkg::cuda {

// [kCount][kWidth]
template <class Number, int kCount, int kWidth>
class SharedRows {
 public:
  static constexpr int kNumbers = kCount * kWidth;

  __device__ __forceinline__ explicit SharedRows(SharedSpan<Number> memory)
      : memory_(memory) {}

  __device__ __forceinline__ SharedSpan<Number> operator[](int row) const {
    return memory_.part(row * kWidth, kWidth);
  }

 private:
  SharedSpan<Number> memory_;
};

// [kCount][kDepth][kWidth]
template <class Number, int kCount, int kDepth, int kWidth>
class SharedPanels {
 public:
  using Panel = SharedRows<Number, kDepth, kWidth>;
  static constexpr int kNumbers = kCount * Panel::kNumbers;

  __device__ __forceinline__ explicit SharedPanels(SharedSpan<Number> memory)
      : memory_(memory) {}

  __device__ __forceinline__ Panel operator[](int panel) const {
    return Panel(memory_.part(panel * Panel::kNumbers, Panel::kNumbers));
  }

 private:
  SharedSpan<Number> memory_;
};

// Columns of a tile in shared memory from `first` on, as a panel whose steps
// they are: [column][row].
template <class Rows>
class SharedColumns {
 public:
  __device__ __forceinline__ SharedColumns(Rows rows, int first)
      : rows_(rows), first_(first) {}

  class Column {
   public:
    __device__ __forceinline__ Column(Rows rows, int column)
        : rows_(rows), column_(column) {}
    __device__ __forceinline__ auto operator[](int row) const {
      return rows_[row][column_];
    }

   private:
    Rows rows_;
    int column_;
  };
  __device__ __forceinline__ Column operator[](int column) const {
    return Column(rows_, first_ + column);
  }

 private:
  Rows rows_;
  int first_;
};

}  // namespace pkg::cuda
