// Packing: a block of an operand with any strides becomes the panels that the
// micro-kernel reads from front to back, converted to the arithmetic's lanes.
//
// Left operand: panels of kTileRows rows; for each lane of the inner dimension,
// the rows' lanes side by side. The last panel is as narrow as what is left.
// Right operand: panels of kTileColumns columns, the last filled up with zeros.
// The inner dimension is filled up with zeros to whole lanes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "gemm_arithmetic.h"
#include "gemm_kernel.h"
#include "simd.h"

namespace pkg::cpu {

template <class T>
struct MatrixView {
  const T* data;
  int64_t row_stride;
  int64_t column_stride;

  const T* at(int64_t row, int64_t column) const {
    return data + row * row_stride + column * column_stride;
  }
  MatrixView from(int64_t row, int64_t column) const {
    return {at(row, column), row_stride, column_stride};
  }
  MatrixView transposed() const { return {data, column_stride, row_stride}; }
};

// Lanes of the inner dimension that `inner` values fill.
template <class Arithmetic>
constexpr int64_t depth_of(int64_t inner) {
  return (inner + Arithmetic::kDepth - 1) / Arithmetic::kDepth;
}

// Lanes that a packed right operand takes.
template <class Arithmetic>
constexpr int64_t packed_columns_size(int64_t columns, int64_t inner) {
  constexpr int64_t kColumns = kTileColumns<Arithmetic>;
  return (columns + kColumns - 1) / kColumns * kColumns *
         depth_of<Arithmetic>(inner);
}

// Lanes that a packed left operand takes.
template <class Arithmetic>
constexpr int64_t packed_rows_size(int64_t rows, int64_t inner) {
  return rows * depth_of<Arithmetic>(inner);
}

namespace detail {

// Packs `count` vectors of the inner dimension ("lines": rows of the left
// operand, columns of the right one) side by side, `width` lanes apart a step.
// lines.row(i) strides are given as (line_stride, inner_stride).
template <class Arithmetic, class Source>
void pack_panel(const Source* source, int64_t line_stride, int64_t inner_stride,
                int count, int width, int64_t inner,
                typename Arithmetic::Lane* packed) {
  constexpr int kDepth = Arithmetic::kDepth;
  using Value = decltype(Arithmetic::value(*source));
  const int64_t whole = inner / kDepth;
  const auto lane_at = [&](int line, int64_t k, int values) {
    Value lane[kDepth] = {};
    const Source* from = source + line * line_stride + k * inner_stride;
    for (int d = 0; d < values; ++d) {
      lane[d] = Arithmetic::value(from[d * inner_stride]);
    }
    return Arithmetic::lane(lane);
  };
  if (line_stride == 1) {
    // Neighbours in memory are neighbours in the panel: whole rows of it at a
    // time, which the compiler vectorises.
    for (int64_t step = 0; step < whole; ++step) {
      const Source* from = source + step * kDepth * inner_stride;
      typename Arithmetic::Lane* to = packed + step * width;
      int line = 0;
      if constexpr (kDepth == 1) {
        constexpr int kLanes = simd::kLanes<typename Arithmetic::Lane>;
        for (; line + kLanes <= count; line += kLanes) {
          simd::store(to + line, simd::load(from + line));
        }
      }
      for (; line < count; ++line) {
        Value lane[kDepth];
        for (int d = 0; d < kDepth; ++d) {
          lane[d] = Arithmetic::value(from[d * inner_stride + line]);
        }
        to[line] = Arithmetic::lane(lane);
      }
      std::fill(to + count, to + width, typename Arithmetic::Lane{});
    }
  } else {
    for (int line = 0; line < count; ++line) {
      for (int64_t step = 0; step < whole; ++step) {
        packed[step * width + line] = lane_at(line, step * kDepth, kDepth);
      }
    }
    for (int line = count; line < width; ++line) {
      for (int64_t step = 0; step < whole; ++step) {
        packed[step * width + line] = {};
      }
    }
  }
  if (whole * kDepth < inner) {
    typename Arithmetic::Lane* to = packed + whole * width;
    std::fill(to, to + width, typename Arithmetic::Lane{});
    for (int line = 0; line < count; ++line) {
      to[line] = lane_at(line, whole * kDepth,
                         static_cast<int>(inner - whole * kDepth));
    }
  }
}

}  // namespace detail

// Packs a left operand of rows x inner.
template <class Arithmetic, class Source>
void pack_rows(const MatrixView<Source>& left, int64_t rows, int64_t inner,
               typename Arithmetic::Lane* packed) {
  const int64_t depth = depth_of<Arithmetic>(inner);
  for (int64_t row = 0; row < rows; row += kTileRows) {
    const int height =
        static_cast<int>(std::min<int64_t>(kTileRows, rows - row));
    detail::pack_panel<Arithmetic>(left.at(row, 0), left.row_stride,
                                   left.column_stride, height, height, inner,
                                   packed + row * depth);
  }
}

// Packs a right operand of inner x columns.
template <class Arithmetic, class Source>
void pack_columns(const MatrixView<Source>& right, int64_t columns,
                  int64_t inner, typename Arithmetic::Lane* packed) {
  constexpr int64_t kColumns = kTileColumns<Arithmetic>;
  const int64_t depth = depth_of<Arithmetic>(inner);
  for (int64_t column = 0; column < columns; column += kColumns) {
    detail::pack_panel<Arithmetic>(
        right.at(0, column), right.column_stride, right.row_stride,
        static_cast<int>(std::min(kColumns, columns - column)),
        static_cast<int>(kColumns), inner, packed + column * depth);
  }
}

}  // namespace pkg::cpu
