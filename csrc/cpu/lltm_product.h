// The products of lltm, over the core of gemm.h: a left operand that is used
// with many panels, and a right operand that is packed once for many steps of a
// sequence. Sums are kept in the accumulator's type, and may be added to.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gemm.h"
#include "workspace.h"

namespace pkg::cpu {

// Rows of a left operand that a thread packs at a time: at 1536 lanes each
// they fill 2 MiB. A right panel that is packed for them is used for as many.
inline constexpr int64_t kMostLeftRows = 32 * kTileRows;

inline int64_t left_rows(int64_t rows) {
  return std::min(rows, detail::even_block(rows, kMostLeftRows, kTileRows));
}

// Lanes of the inner dimension that are summed one after the other: a quarter
// of gemm.h's. A step's errors are carried through all later steps of a
// sequence, and those of a chain grow with its length: with kBlockDepth the
// gates at (128, 512, 1024) had 1.7 times PyTorch's error. The sums in between
// stay in the cache; adding to them costs about 2 %.
inline constexpr int64_t kDeepestStep = 128;

// The inner dimension is summed in steps of so many lanes at the most.
template <class Arithmetic>
int64_t inner_step(int64_t inner) {
  return detail::even_block(inner, kDeepestStep * Arithmetic::kDepth,
                            Arithmetic::kDepth);
}

// Calls body(k, values) for each step of the inner dimension.
template <class Arithmetic, class Body>
void for_each_step(int64_t inner, const Body& body) {
  const int64_t step = inner_step<Arithmetic>(inner);
  for (int64_t k = 0; k < inner; k += step) {
    body(k, std::min(step, inner - k));
  }
}

// Some rows of a left operand, packed or in place.
template <class T>
class LeftOperand {
 public:
  using Arithmetic = typename ArithmeticOf<T>::type;
  using Lane = typename Arithmetic::Lane;
  using Sum = typename Arithmetic::Accumulator;

  LeftOperand(const MatrixView<T>& view, int64_t inner)
      : view_(view),
        inner_(inner),
        in_place_(detail::reads_left_in_place<Arithmetic>(view, inner)) {}

  // That take() packs into.
  int64_t lanes(int64_t rows) const {
    return in_place_ ? 0 : rows * depth_of<Arithmetic>(inner_);
  }

  void take(int64_t row, int64_t rows, Lane* packed) {
    row_ = row;
    rows_ = rows;
    packed_ = packed;
    if (!in_place_) {
      for_each_step<Arithmetic>(inner_, [&](int64_t k, int64_t values) {
        pack_rows<Arithmetic>(view_.from(row, k), rows, values,
                              packed + rows * depth_of<Arithmetic>(k));
      });
    }
  }

  // Adds the product of the rows taken and a right operand's panels for the
  // step at k to sums; where `first`, writes it.
  void multiply(int64_t k, int64_t values, const RightPanels<Lane>& right,
                int64_t columns, Sum* sums, int64_t sums_stride,
                bool first) const {
    const KeepSums keep;
    const detail::EpilogueFrom<KeepSums> epilogue(keep, 0, 0);
    const StoreSums<Sum, Sum, detail::EpilogueFrom<KeepSums>> store{
        sums, sums_stride, first, false, nullptr, 0, epilogue};
    const int64_t depth = depth_of<Arithmetic>(values);
    if (in_place_) {
      multiply_panels<Arithmetic>(
          rows_, columns, depth,
          RowsInPlace<Lane>{
              reinterpret_cast<const std::byte*>(view_.at(row_, k)),
              view_.row_stride * static_cast<int64_t>(sizeof(T))},
          right, store);
    } else {
      multiply_panels<Arithmetic>(
          rows_, columns, depth,
          PackedStrips<Lane>{packed_ + rows_ * depth_of<Arithmetic>(k)}, right,
          store);
    }
  }

 private:
  MatrixView<T> view_;
  int64_t inner_;
  bool in_place_;
  int64_t row_ = 0;
  int64_t rows_ = 0;
  const Lane* packed_ = nullptr;
};

// Packs `count` columns of a right operand, of the step at k, as one panel.
template <class T>
void pack_panel(const MatrixView<T>& right, int64_t column, int64_t count,
                int64_t k, int64_t values,
                typename ArithmeticOf<T>::type::Lane* panel) {
  using Arithmetic = typename ArithmeticOf<T>::type;
  pack_lines<typename Arithmetic::Right>(
      right.at(k, column), right.column_stride, right.row_stride,
      static_cast<int>(count), kTileColumns<Arithmetic>, values, panel);
}

// output (rows x columns, the columns filled up to whole panels) = left right,
// where right was packed beforehand: panels of all steps, one after the other.
template <class T>
void multiply_panels_of_all_steps(LeftOperand<T> left, int64_t rows,
                                  int64_t columns, int64_t inner,
                                  const typename LeftOperand<T>::Lane* packed,
                                  typename LeftOperand<T>::Sum* output,
                                  int64_t output_stride, int64_t threads) {
  using Arithmetic = typename LeftOperand<T>::Arithmetic;
  using Lane = typename LeftOperand<T>::Lane;
  constexpr int kColumns = kTileColumns<Arithmetic>;
  const int64_t panel_stride = depth_of<Arithmetic>(inner) * kColumns;
  if (columns == 0) {
    return;
  }
  detail::for_each_rectangle(
      rows, columns, kTileRows, kColumns,
      detail::useful_threads(rows, columns, inner, threads),
      [&](int64_t row, int64_t part_rows, int64_t column,
          int64_t part_columns) {
        LeftOperand<T> own = left;
        const int64_t block = left_rows(part_rows);
        Lane* lanes = Workspace::of_this_thread<0>().template request<Lane>(
            left.lanes(block));
        for (int64_t first = 0; first < part_rows; first += block) {
          own.take(row + first, std::min(block, part_rows - first), lanes);
          for_each_step<Arithmetic>(inner, [&](int64_t k, int64_t values) {
            const RightPanels<Lane> panels{
                packed + column / kColumns * panel_stride +
                    depth_of<Arithmetic>(k) * kColumns,
                kColumns, panel_stride};
            own.multiply(k, values, panels, part_columns,
                         output + (row + first) * output_stride + column,
                         output_stride, k == 0);
          });
        }
      });
}

}  // namespace pkg::cpu
