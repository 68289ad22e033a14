// The micro-kernel of matrix multiplication: a tile of kRows x (kVectors
// registers of columns), accumulated in registers over the whole inner
// dimension. For each step it loads kVectors vectors of the right panel and
// broadcasts kRows lanes of the left one.
//
// Tile: as many accumulators as leave registers for the right panel's vectors
// and one broadcast. 32 registers (AVX-512, NEON): 12 x 2 = 24 of them; 16
// (AVX2, SSE): 6 x 2 = 12. Two independent chains of 12 or more hide the
// latency of 4 cycles of two multiply-add units.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "gemm_arithmetic.h"
#include "simd.h"

namespace pkg::cpu {

inline constexpr int kTileRows = simd::kVectorRegisters >= 32 ? 12 : 6;
inline constexpr int kTileVectors = 2;

template <class Arithmetic>
inline constexpr int kTileColumns =
    kTileVectors * simd::kLanes<typename Arithmetic::Accumulator>;

// Where a tile's result goes: `data` is the block's first element, rows are
// `row_stride` elements apart. `Output` may be narrower than the accumulator;
// then `accumulate` would round at each step and is not allowed.
template <class Output>
struct StoreTo {
  Output* data;
  int64_t row_stride;
  bool accumulate = false;

  template <class V>
  void operator()(int64_t row, int64_t column, V value, int count) const {
    constexpr int kLanes =
        static_cast<int>(sizeof(V) / sizeof(simd::Compute<Output>));
    Output* to = data + row * row_stride + column;
    if (count == kLanes) {
      simd::store(to, accumulate ? simd::load(to) + value : value);
    } else if (count > 0) {
      simd::store_partial(
          to, accumulate ? simd::load_partial(to, count) + value : value,
          count);
    }
  }
};

namespace detail {

template <class Arithmetic, int kRows, int kVectors, class Store>
[[gnu::always_inline]] inline void multiply_tile(
    int64_t depth, const typename Arithmetic::Lane* left,
    const typename Arithmetic::Lane* right, int64_t row, int64_t column,
    int columns, const Store& store) {
  using Lane = typename Arithmetic::Lane;
  using Accumulator = typename Arithmetic::Accumulator;
  constexpr int kLanes = simd::kLanes<Accumulator>;
  Vector<Accumulator> sums[kRows][kVectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vector<Lane> b[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      b[v] = simd::load(right + v * kLanes);
    }
    for (int r = 0; r < kRows; ++r) {
      const Vector<Lane> a = simd::broadcast(left[r]);
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = Arithmetic::multiply_add(a, b[v], sums[r][v]);
      }
    }
    left += kRows;
    right += kTileColumns<Arithmetic>;
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      store(row + r, column + v * kLanes, sums[r][v],
            std::clamp(columns - v * kLanes, 0, kLanes));
    }
  }
}

// Calls function(std::integral_constant<int, rows>) for rows in 1 ...
// kTileRows.
template <class Function>
void with_static_rows(int rows, const Function& function) {
  [&]<int... r>(std::integer_sequence<int, r...>) {
    static_cast<void>(
        ((rows == r + 1 ? (function(std::integral_constant<int, r + 1>{}), true)
                        : false) ||
         ...));
  }(std::make_integer_sequence<int, kTileRows>{});
}

}  // namespace detail

// Multiplies a packed block of rows by a packed block of columns (gemm_pack.h):
// depth counts lanes, so depth * kDepth values of the inner dimension. The last
// panel of rows is packed with as many rows as are left. Each right panel stays
// in the L1 cache while the left panels stream past it from L2.
template <class Arithmetic, class Store>
void multiply_panels(int64_t rows, int64_t columns, int64_t depth,
                     const typename Arithmetic::Lane* left,
                     const typename Arithmetic::Lane* right,
                     const Store& store) {
  constexpr int64_t kColumns = kTileColumns<Arithmetic>;
  constexpr int64_t kHalf = kColumns / kTileVectors;
  for (int64_t column = 0; column < columns; column += kColumns) {
    const int count = static_cast<int>(std::min(kColumns, columns - column));
    const auto* panel = right + column * depth;
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const int height =
          static_cast<int>(std::min<int64_t>(kTileRows, rows - row));
      const auto* strip = left + row * depth;
      if (height == kTileRows && count > kHalf) [[likely]] {
        detail::multiply_tile<Arithmetic, kTileRows, kTileVectors>(
            depth, strip, panel, row, column, count, store);
        continue;
      }
      detail::with_static_rows(height, [&](auto static_rows) {
        if (count > kHalf) {
          detail::multiply_tile<Arithmetic, static_rows(), kTileVectors>(
              depth, strip, panel, row, column, count, store);
        } else {
          detail::multiply_tile<Arithmetic, static_rows(), 1>(
              depth, strip, panel, row, column, count, store);
        }
      });
    }
  }
}

}  // namespace pkg::cpu
