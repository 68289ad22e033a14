// The products of attention, over the packed operands of gemm_pack.h. They
// differ from those of gemm_kernel.h in what the left operand is: attention
// weights are multiplied from where the softmax left them, by rows or
// transposed, so that they are never packed.
//
// Tile: kStripRows x 2 registers of columns, as gemm_kernel.h has it and for
// the same reason. What is left of the rows goes in strips of a third of that,
// filled up with zeros: two kinds of strips keep the code small, and a block of
// 16, 64 or 128 rows, being a multiple of 4, wastes none.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "gemm_arithmetic.h"
#include "gemm_kernel.h"
#include "gemm_pack.h"
#include "simd.h"

namespace pkg::cpu::attention {

inline constexpr int kStripRows = kTileRows;
inline constexpr int kShortStripRows = kTileRows / 3;

// Keys that one block of scores covers. 192 is a multiple of every tile's width
// and of kStripRows, since a key is a row where weights are transposed.
inline constexpr int64_t kKeyBlock = 192;
// Elements from one row of scores to the next: a line more than the block, lest
// the rows of a strip share the sets of the L1 cache.
inline constexpr int64_t kScoreStride = kKeyBlock + 16;
static_assert(kKeyBlock % kStripRows == 0 && kStripRows % kShortStripRows == 0);

// Lanes of the inner dimension that are summed one after the other. Longer
// sums, of head sizes beyond it, are made of such parts: the rounding error of
// a chain of additions grows with its length, and twice as fast where the
// product is rounded too, for want of a fused multiply-add.
#if defined(__FMA__) || defined(__aarch64__)
inline constexpr int64_t kLongestSum = kKeyBlock;
#else
inline constexpr int64_t kLongestSum = kKeyBlock / 4;
#endif

constexpr int64_t round_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// Scratch memory of one kind, cut into parts.
template <class T>
struct Part {
  int64_t count;
  T* take(std::byte*& memory) const {
    T* part = reinterpret_cast<T*>(memory);
    memory += size();
    return part;
  }
  int64_t size() const {
    return round_up(count * static_cast<int64_t>(sizeof(T)), 64);
  }
};

// Rows that strips over `rows` rows cover.
constexpr int64_t padded_rows(int64_t rows) {
  return rows / kStripRows * kStripRows +
         round_up(rows % kStripRows, kShortStripRows);
}

// Calls body(first_row, used_rows, height) for each strip; height is a
// std::integral_constant.
template <class Body>
void for_each_strip(int64_t rows, const Body& body) {
  int64_t row = 0;
  for (; row + kStripRows <= rows; row += kStripRows) {
    body(row, kStripRows, std::integral_constant<int, kStripRows>{});
  }
  for (; row < rows; row += kShortStripRows) {
    body(row, static_cast<int>(std::min<int64_t>(kShortStripRows, rows - row)),
         std::integral_constant<int, kShortStripRows>{});
  }
}

// Where lane (row, step) of a left operand lies.
struct PackedLeft {
  template <int kRows>
  static constexpr int64_t row_stride = 1;
  template <int kRows>
  static constexpr int64_t step_stride = kRows;
};
template <int64_t kStride>
struct LeftByRows {
  template <int kRows>
  static constexpr int64_t row_stride = kStride;
  template <int kRows>
  static constexpr int64_t step_stride = 1;
};
template <int64_t kStride>
struct LeftTransposed {
  template <int kRows>
  static constexpr int64_t row_stride = 1;
  template <int kRows>
  static constexpr int64_t step_stride = kStride;
};

namespace detail {

template <class Arithmetic, class Left, int kRows, int kVectors, class Finish>
[[gnu::always_inline]] inline void multiply_tile(
    const typename Arithmetic::Lane* left,
    const typename Arithmetic::Lane* right, int64_t depth, int64_t column,
    const Finish& finish) {
  using Lane = typename Arithmetic::Lane;
  using Accumulator = typename Arithmetic::Accumulator;
  constexpr int kLanes = simd::kLanes<Accumulator>;
  Vector<Accumulator> sums[kRows][kVectors];
  Vector<Accumulator> totals[kRows][kVectors];
  for (int64_t k = 0, end = std::min(depth, kLongestSum);;) {
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = Vector<Accumulator>{};
      }
    }
    const bool first = k == 0;
    for (; k < end; ++k) {
      Vector<Lane> b[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        b[v] = simd::load(right + v * kLanes);
      }
      for (int r = 0; r < kRows; ++r) {
        const Vector<Lane> a =
            simd::broadcast(left[r * Left::template row_stride<kRows>]);
        for (int v = 0; v < kVectors; ++v) {
          sums[r][v] = Arithmetic::multiply_add(a, b[v], sums[r][v]);
        }
      }
      left += Left::template step_stride<kRows>;
      right += kTileColumns<Arithmetic>;
    }
    for (int r = 0; r < kRows && !first; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] += totals[r][v];
      }
    }
    if (end == depth) {
      break;
    }
    std::memcpy(totals, sums, sizeof(totals));
    end = std::min(depth, end + kLongestSum);
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      finish(r, column + v * kLanes, sums[r][v]);
    }
  }
}

}  // namespace detail

// Multiplies a strip of kRows rows by packed columns and hands each register of
// the product to finish(row, column, value); the last one may reach beyond
// `columns`, where the operand was filled up with zeros. `panel_stride` is the
// distance of the right operand's panels, for one that is deeper than `depth`.
template <class Arithmetic, class Left, int kRows, class Finish>
[[gnu::noinline]] void multiply_strip(const typename Arithmetic::Lane* left,
                                      const typename Arithmetic::Lane* right,
                                      int64_t panel_stride, int64_t depth,
                                      int64_t columns, const Finish& finish) {
  constexpr int64_t kColumns = kTileColumns<Arithmetic>;
  int64_t column = 0;
  for (; column + kColumns / 2 < columns; column += kColumns) {
    detail::multiply_tile<Arithmetic, Left, kRows, 2>(left, right, depth,
                                                      column, finish);
    right += panel_stride;
  }
  if (column < columns) {
    detail::multiply_tile<Arithmetic, Left, kRows, 1>(left, right, depth,
                                                      column, finish);
  }
}

// What becomes of a product: it is scaled and stored, or added to what is
// there.
template <class Accumulator>
struct StoreScaled {
  Accumulator* to;
  int64_t row_stride;
  Accumulator scale;

  [[gnu::always_inline]] void operator()(int row, int64_t column,
                                         Vector<Accumulator> value) const {
    simd::store(to + row * row_stride + column, value * scale);
  }
};
template <class Accumulator>
struct AddTo {
  Accumulator* to;
  int64_t row_stride;

  [[gnu::always_inline]] void operator()(int row, int64_t column,
                                         Vector<Accumulator> value) const {
    Accumulator* at = to + row * row_stride + column;
    simd::store(at, simd::load(at) + value);
  }
};

}  // namespace pkg::cpu::attention
