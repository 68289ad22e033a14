// Packing of attention's operands. Their rows are usually contiguous (the head
// size is the last dimension), so that queries, and keys as columns, are packed
// by transposing squares of registers: a fraction of a cycle for each element,
// where gathering them one by one takes a cycle or two.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "gemm_pack.h"
#include "scaled_dot_product_attention_tile.h"

namespace pkg::cpu::attention {

namespace detail {

// One stage of the transposition: exchanges the lanes that have bit kBit set
// with those of the partner that have not.
template <int kBit, class V, size_t... lane>
[[gnu::always_inline]] inline void exchange(V& low, V& high,
                                            std::index_sequence<lane...>) {
  constexpr int kLanes = sizeof...(lane);
  using Index = std::conditional_t<sizeof(low[0]) == 8, int64_t, int32_t>;
  using Indices = Vector<Index>;
  constexpr Indices kLow = {
      ((lane & kBit) == 0 ? Index(lane) : Index(kLanes + (lane ^ kBit)))...};
  constexpr Indices kHigh = {
      ((lane & kBit) == 0 ? Index(lane ^ kBit) : Index(kLanes + lane))...};
  const V a = low;
  const V b = high;
#if defined(__clang__)
  low = __builtin_shufflevector(
      a, b, ((lane & kBit) == 0 ? int(lane) : int(kLanes + (lane ^ kBit)))...);
  high = __builtin_shufflevector(
      a, b, ((lane & kBit) == 0 ? int(lane ^ kBit) : int(kLanes + lane))...);
  static_cast<void>(kLow);
  static_cast<void>(kHigh);
#else
  low = __builtin_shuffle(a, b, kLow);
  high = __builtin_shuffle(a, b, kHigh);
#endif
}

template <int kBit, class V, int kLanes>
[[gnu::always_inline]] inline void transpose_from(V (&rows)[kLanes]) {
  if constexpr (kBit < kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      if ((i & kBit) == 0) {
        exchange<kBit>(rows[i], rows[i | kBit],
                       std::make_index_sequence<kLanes>{});
      }
    }
    transpose_from<kBit * 2>(rows);
  }
}

// The lanes of up to kLanes steps of one line, from contiguous values.
template <class Arithmetic, class Source>
[[gnu::always_inline]] inline Vector<typename Arithmetic::Lane> load_steps(
    const Source* from, int64_t values) {
  using Lane = typename Arithmetic::Lane;
  constexpr int kStep = simd::kLanes<Lane> * Arithmetic::kDepth;
  const int count = static_cast<int>(std::min<int64_t>(values, kStep));
  if constexpr (Arithmetic::kDepth == 1) {
    return count == kStep ? simd::load(from) : simd::load_partial(from, count);
  } else {
    static_assert(sizeof(Source) * Arithmetic::kDepth == sizeof(Lane));
    Vector<Lane> lanes{};
    std::memcpy(&lanes, from, static_cast<size_t>(count) * sizeof(Source));
    return lanes;
  }
}

}  // namespace detail

// Packs `count` lines of `inner` values side by side, `width` lanes apart a
// step, filled up with zeros. `width` is at most two registers.
template <class Arithmetic, class Source>
void pack_lines(const Source* source, int64_t line_stride, int64_t inner_stride,
                int count, int width, int64_t inner,
                typename Arithmetic::Lane* packed) {
  using Lane = typename Arithmetic::Lane;
  constexpr int kLanes = simd::kLanes<Lane>;
  constexpr int kDepth = Arithmetic::kDepth;
  if (inner_stride != 1 || line_stride == 1) {
    cpu::detail::pack_panel<Arithmetic>(source, line_stride, inner_stride,
                                        count, width, inner, packed);
    return;
  }
  const int64_t depth = depth_of<Arithmetic>(inner);
  for (int first = 0; first < width; first += kLanes) {
    const int lines = std::clamp(count - first, 0, kLanes);
    const int wide = std::min(width - first, kLanes);
    for (int64_t step = 0; step < depth; step += kLanes) {
      Vector<Lane> square[kLanes] = {};
      const Source* from = source + first * line_stride + step * kDepth;
      for (int line = 0; line < lines; ++line) {
        square[line] = detail::load_steps<Arithmetic>(from + line * line_stride,
                                                      inner - step * kDepth);
      }
      detail::transpose_from<1>(square);
      const int steps =
          static_cast<int>(std::min<int64_t>(kLanes, depth - step));
      for (int i = 0; i < kLanes && i < steps; ++i) {  // GCC needs the bound
        Lane* to = packed + (step + i) * width + first;
        if (wide == kLanes) {
          simd::store(to, square[i]);
        } else {
          std::memcpy(to, &square[i], static_cast<size_t>(wide) * sizeof(Lane));
        }
      }
    }
  }
}

// A block of a left operand, in strips.
template <class Arithmetic, class Source>
void pack_strips(const MatrixView<Source>& left, int64_t rows, int64_t inner,
                 typename Arithmetic::Lane* packed) {
  for_each_strip(rows, [&](int64_t row, int used, auto height) {
    pack_lines<Arithmetic>(left.at(row, 0), left.row_stride, left.column_stride,
                           used, height, inner,
                           packed + row * depth_of<Arithmetic>(inner));
  });
}

// A right operand of inner x columns.
template <class Arithmetic, class Source>
void pack_right(const MatrixView<Source>& right, int64_t columns, int64_t inner,
                typename Arithmetic::Lane* packed) {
  constexpr int kColumns = kTileColumns<Arithmetic>;
  const int64_t depth = depth_of<Arithmetic>(inner);
  for (int64_t column = 0; column < columns; column += kColumns) {
    pack_lines<Arithmetic>(
        right.at(0, column), right.column_stride, right.row_stride,
        static_cast<int>(std::min<int64_t>(kColumns, columns - column)),
        kColumns, inner, packed + column * depth);
  }
}

}  // namespace pkg::cpu::attention
