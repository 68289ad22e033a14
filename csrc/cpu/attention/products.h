// The products of attention: the micro-kernel of cpu/gemm/micro_kernel.h over a
// strip of rows at a time. What differs from a matrix product is the left
// operand, since attention weights are multiplied from where the softmax left
// them, by rows or transposed, and never packed; and what becomes of the sums.
//
// Strips: kTileRows, as the micro-kernel has them, and for what is left a third
// of that, filled up with zeros: two kinds of strips keep the code small, and a
// block of 16, 64 or 128 rows, being a multiple of 4, wastes none.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/gemm/arithmetic.h"
#include "cpu/gemm/micro_kernel.h"
#include "cpu/gemm/packing.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/tile_registers.h"
#include "cpu/simd/transpose.h"

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
inline constexpr int64_t kLongestSum = kKeyBlock / 6;
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

// Left operands in place: rows of kStride lanes, or the transpose of such.
template <class Lane, int64_t kStride>
struct LeftByRows {
  const Lane* data;

  static constexpr int64_t row_bytes = kStride * int64_t{sizeof(Lane)};
  template <int kRows>
  const Lane* strip(int64_t row, int64_t /*depth*/) const {
    return data + row * kStride;
  }
  template <int kRows>
  Lane lane(const Lane* at, int row) const {
    return at[row * kStride];
  }
  template <int kRows>
  static constexpr int64_t kStep = 1;
};
template <class Lane, int64_t kStride>
struct LeftTransposed {
  const Lane* data;

  template <int kRows>
  const Lane* strip(int64_t row, int64_t /*depth*/) const {
    return data + row;
  }
  template <int kRows>
  Lane lane(const Lane* at, int row) const {
    return at[row];
  }
  template <int kRows>
  static constexpr int64_t kStep = kStride;
};

// The transpose of kRows columns of `depth` rows of kStride lanes, kDepth at
// the most, as left operand: in place, or for tile registers by rows in
// `memory`.
template <class Arithmetic, int kRows, int64_t kStride, int64_t kDepth>
auto transposed_left(const typename Arithmetic::Lane* data,
                     [[maybe_unused]] int64_t depth,
                     [[maybe_unused]]
                     typename Arithmetic::Lane (&memory)[kRows * kDepth]) {
  using Lane = typename Arithmetic::Lane;
  if constexpr (kUsesTiles<Arithmetic>) {
    constexpr int kLanes = simd::kLanes<Lane>;
    static_assert(kRows <= kLanes && kDepth % kLanes == 0);
    for (int64_t step = 0; step < depth; step += kLanes) {
      Vector<Lane> square[kLanes] = {};
      for (int i = 0; i < kLanes; ++i) {
        if (step + i < depth) {
          square[i] = simd::load(data + (step + i) * kStride);
        }
      }
      simd::transpose(square);
      for (int i = 0; i < kRows; ++i) {
        simd::store(memory + i * kDepth + step, square[i]);
      }
    }
    return LeftByRows<Lane, kDepth>{memory};
  } else {
    return LeftTransposed<Lane, kStride>{data};
  }
}

// Rows of memory that will be read next to a strip's sums. The processor's own
// prefetcher does not see short pieces of many rows coming.
struct FetchedRows {
  const std::byte* data = nullptr;
  int64_t row_bytes = 0;
  int64_t column_bytes = 0;

  // Asks for kRows of them, `columns` wide, if there are any.
  template <int kRows>
  [[gnu::always_inline]] void prefetch(int64_t row, int64_t column,
                                       int64_t columns) const {
    constexpr int64_t kLine = 64;
    if (data == nullptr) {
      return;
    }
    for (int r = 0; r < kRows; ++r) {
      const std::byte* from =
          data + (row + r) * row_bytes + column * column_bytes;
      for (int64_t i = 0; i < columns * column_bytes; i += kLine) {
        __builtin_prefetch(from + i);
      }
    }
  }
};

// What becomes of the sums of a tile: they are stored, or added to what is
// there, after transform(sums). Rows are as wide as whole tiles, so that the
// last register of a row may reach beyond what is asked for.
template <class Accumulator, class Transform>
struct StoreTile {
  Accumulator* to;
  int64_t row_stride;
  Transform transform;
  bool adds;
  FetchedRows fetched;

  static constexpr bool kInOrder = true;  // as compute_statistics adds them

  template <int kRows, int kVectors>
  [[gnu::always_inline]] void prefetch(int64_t row, int64_t column) const {
    fetched.prefetch<kRows>(row, column, kVectors * simd::kLanes<Accumulator>);
  }

  // Unrolled, or else the compiler keeps the sums in memory.
  template <int kRows, int kVectors>
  [[gnu::always_inline]] void operator()(
      int64_t row, int64_t column, Vector<Accumulator> (&sums)[kRows][kVectors],
      int /*tail*/) const {
    const auto for_each = [&](const auto& body) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          body(to + (row + r) * row_stride + column +
                   v * simd::kLanes<Accumulator>,
               transform(sums[r][v]));
        }
      }
    };
    if (adds) {
      for_each([](Accumulator* at, Vector<Accumulator> value) {
        simd::store(at, simd::load(at) + value);
      });
    } else {
      for_each([](Accumulator* at, Vector<Accumulator> value) {
        simd::store(at, value);
      });
    }
  }
};

struct KeepTile {
  template <class V>
  V operator()(V sums) const {
    return sums;
  }
};
template <class Accumulator>
struct ScaleTile {
  Accumulator scale;
  Vector<Accumulator> operator()(Vector<Accumulator> sums) const {
    return sums * scale;
  }
};

template <class Accumulator>
auto store_to(Accumulator* to, int64_t row_stride,
              const FetchedRows& fetched = {}) {
  return StoreTile<Accumulator, KeepTile>{to, row_stride, {}, false, fetched};
}
template <class Accumulator>
auto store_scaled(Accumulator* to, int64_t row_stride, Accumulator scale,
                  const FetchedRows& fetched = {}) {
  return StoreTile<Accumulator, ScaleTile<Accumulator>>{
      to, row_stride, {scale}, false, fetched};
}
template <class Accumulator>
auto add_to(Accumulator* to, int64_t row_stride) {
  return StoreTile<Accumulator, KeepTile>{to, row_stride, {}, true, {}};
}

// Multiplies the strip of kRows rows at the beginning of `left` by the columns
// of a right operand, over `depth` lanes one after the other.
template <class Arithmetic, int kRows, class Left, class Store>
void multiply_tiles(const Left& left,
                    const RightPanels<typename Arithmetic::Lane>& right,
                    int64_t depth, int64_t columns, const Store& store) {
  constexpr int kColumns = kTileColumns<Arithmetic>;
  const auto* panel = right.data;
  int64_t column = 0;
  for (; column + kColumns / 2 < columns; column += kColumns) {
    cpu::detail::multiply_tile<Arithmetic, kRows, kTileVectors>(
        depth, left, panel, right.step_stride, 0, column, kColumns, store);
    panel += right.panel_stride;
  }
  if (column < columns) {
    cpu::detail::multiply_tile<Arithmetic, kRows, 1>(
        depth, left, panel, right.step_stride, 0, column, kColumns / 2, store);
  }
}

// The same, at most `longest` lanes at a time.
template <class Arithmetic, int kRows, class Left, class Store>
void multiply_strip(Left left, RightPanels<typename Arithmetic::Lane> right,
                    int64_t depth, int64_t columns, Store store,
                    int64_t longest = kLongestSum) {
  for (;;) {
    const int64_t lanes = std::min(depth, longest);
    multiply_tiles<Arithmetic, kRows>(left, right, lanes, columns, store);
    depth -= lanes;
    if (depth == 0) {
      return;
    }
    left.data += lanes * Left::template kStep<kRows>;
    right.data += lanes * right.step_stride;
    store.adds = true;
    store.fetched = {};
  }
}

// A packed right operand of `depth` lanes, from its `first` on.
template <class Arithmetic>
RightPanels<typename Arithmetic::Lane> packed_panels(
    const typename Arithmetic::Lane* packed, int64_t depth, int64_t first = 0) {
  constexpr int64_t kColumns = kTileColumns<Arithmetic>;
  return {packed + first * kColumns, kColumns, depth * kColumns};
}

}  // namespace pkg::cpu::attention
