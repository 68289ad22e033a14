// Packing: a block of an operand with any strides becomes the panels that the
// micro-kernel reads from front to back, converted to the arithmetic's lanes.
//
// Left operand: strips of rows (for_each_strip), a step's lanes side by side;
// or for an arithmetic that uses tile registers row after row. Right operand:
// panels of kTileColumns columns, a step's lanes side by side, the last filled
// up with zeros. The inner dimension is filled up with zeros to whole lanes.
//
// Rows of the left and columns of the right operand are "lines" here. Where
// lanes must change their direction, squares of registers are transposed (0.3
// cycles for each float32 on Zen 4, 2026-11-20; gathering them one by one took
// 2.1), elsewhere whole registers are copied or interleaved.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/gemm/arithmetic.h"
#include "cpu/gemm/micro_kernel.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/transpose.h"

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

// Whether rows that far apart share sets of the L1 cache: 12 of them are read
// side by side (a way is 4 KiB; 2 KiB apart they fill 6 of 8 ways of two sets).
constexpr bool rows_collide(int64_t row_bytes) { return row_bytes % 2048 == 0; }

namespace detail {

// Lanes that the packed panel is short of whole registers are not written over
// the next panel, while within it the next step's lanes come later.
template <class Lane>
[[gnu::always_inline]] inline void store_lanes(Lane* to, const Lane* end,
                                               Vector<Lane> lanes, int count) {
  if (count == simd::kLanes<Lane> || end - to >= simd::kLanes<Lane>) {
    simd::store(to, lanes);
  } else {
    simd::store_partial(to, lanes, count);
  }
}

// The lanes of kLanes steps of a line of which `values` values are left.
template <class Arithmetic, class Source>
[[gnu::always_inline]] inline Vector<typename Arithmetic::Lane> load_line(
    const Source* from, int64_t values) {
  constexpr int kValues =
      simd::kLanes<typename Arithmetic::Lane> * Arithmetic::kDepth;
  if (values >= kValues) {
    return Arithmetic::load_lanes(from);
  }
  Source rest[kValues] = {};
  std::memcpy(static_cast<void*>(rest), from,
              static_cast<size_t>(values) * sizeof(Source));
  return Arithmetic::load_lanes(rest);
}

// Contiguous lines, kLanes steps of kLanes lines at a time. The last lines come
// first, so that what a store writes beyond its step is written over.
template <class Arithmetic, class Source>
void pack_contiguous_lines(const Source* source, int64_t line_stride, int count,
                           int width, int64_t inner,
                           typename Arithmetic::Lane* packed) {
  using Lane = typename Arithmetic::Lane;
  constexpr int kLanes = simd::kLanes<Lane>;
  constexpr int kDepth = Arithmetic::kDepth;
  const int64_t depth = depth_of<Arithmetic>(inner);
  const Lane* end = packed + depth * width;
  for (int64_t step = 0; step < depth; step += kLanes) {
    const int steps = static_cast<int>(std::min<int64_t>(kLanes, depth - step));
    const int64_t values = inner - step * kDepth;
    for (int first = (width - 1) / kLanes * kLanes; first >= 0;
         first -= kLanes) {
      const int lines = std::clamp(count - first, 0, kLanes);
      const int lanes = std::min(width - first, kLanes);
      const Source* from = source + first * line_stride + step * kDepth;
      Vector<Lane> square[kLanes] = {};
      for (int line = 0; line < kLanes; ++line) {
        if (line < lines) {
          square[line] =
              load_line<Arithmetic>(from + line * line_stride, values);
        }
      }
      simd::transpose(square);
      Lane* to = packed + step * width + first;
      for (int i = 0; i < kLanes; ++i) {
        if (i < steps) {
          store_lanes(to + i * width, end, square[i], lanes);
        }
      }
    }
  }
}

// The lanes of one step of up to kLanes lines that lie side by side, of which
// `values` values of the inner dimension are left.
template <class Arithmetic, class Source>
[[gnu::always_inline]] inline Vector<typename Arithmetic::Lane> load_step(
    const Source* from, int64_t inner_stride, int lines, int64_t values) {
  constexpr int kLanes = simd::kLanes<typename Arithmetic::Lane>;
  constexpr int kDepth = Arithmetic::kDepth;
  static constexpr Source kZeros[kLanes] = {};
  const Source* runs[kDepth];
  for (int d = 0; d < kDepth; ++d) {
    runs[d] = d < values ? from + d * inner_stride : kZeros;
  }
  if (lines == kLanes) {
    return Arithmetic::interleave(runs);
  }
  Source rest[kDepth][kLanes] = {};
  for (int d = 0; d < kDepth; ++d) {
    std::memcpy(static_cast<void*>(rest[d]), runs[d],
                static_cast<size_t>(lines) * sizeof(Source));
    runs[d] = rest[d];
  }
  return Arithmetic::interleave(runs);
}

// Lines side by side: a step of kLanes lines at a time.
template <class Arithmetic, class Source>
[[gnu::always_inline]] inline void pack_neighbouring_lines(
    const Source* source, int64_t inner_stride, int count, int width,
    int64_t inner, typename Arithmetic::Lane* packed) {
  using Lane = typename Arithmetic::Lane;
  constexpr int kLanes = simd::kLanes<Lane>;
  const Lane* end = packed + depth_of<Arithmetic>(inner) * width;
  Lane* to = packed;
  for (int64_t k = 0; k < inner; k += Arithmetic::kDepth, to += width) {
    for (int first = 0; first < width; first += kLanes) {
      store_lanes(to + first, end,
                  load_step<Arithmetic>(
                      source + k * inner_stride + first, inner_stride,
                      std::clamp(count - first, 0, kLanes), inner - k),
                  std::min(width - first, kLanes));
    }
  }
}

// No two values side by side: they are gathered, some steps at a time.
template <class Arithmetic, class Source>
void pack_scattered_lines(const Source* source, int64_t line_stride,
                          int64_t inner_stride, int count, int width,
                          int64_t inner, typename Arithmetic::Lane* packed) {
  constexpr int kRun =
      simd::kLanes<typename Arithmetic::Lane> * Arithmetic::kDepth;
  constexpr int kLines = std::max(kTileRows, kTileColumns<Arithmetic>);
  Source run[kLines * kRun];
  for (int64_t k = 0; k < inner; k += kRun) {
    const int64_t values = std::min<int64_t>(kRun, inner - k);
    for (int line = 0; line < count; ++line) {
      const Source* from = source + line * line_stride + k * inner_stride;
      for (int64_t i = 0; i < values; ++i) {
        run[line * kRun + i] = from[i * inner_stride];
      }
    }
    pack_contiguous_lines<Arithmetic>(run, int64_t{kRun}, count, width, values,
                                      packed + k / Arithmetic::kDepth * width);
  }
}

}  // namespace detail

// Packs `count` lines of `inner` values side by side, `width` lanes apart a
// step, and fills up with zeros. width <= max(kTileRows, kTileColumns).
template <class Arithmetic, class Source>
void pack_lines(const Source* source, int64_t line_stride, int64_t inner_stride,
                int count, int width, int64_t inner,
                typename Arithmetic::Lane* packed) {
  constexpr int kColumns = kTileColumns<Arithmetic>;
  if (line_stride == 1 && count == kColumns && width == kColumns) {
    // With a known width, which is a third of the time where the lines come
    // from memory: more loads are under way.
    detail::pack_neighbouring_lines<Arithmetic>(source, inner_stride, kColumns,
                                                kColumns, inner, packed);
  } else if (line_stride == 1 && count > 1) {
    detail::pack_neighbouring_lines<Arithmetic>(source, inner_stride, count,
                                                width, inner, packed);
  } else if (inner_stride == 1) {
    detail::pack_contiguous_lines<Arithmetic>(source, line_stride, count, width,
                                              inner, packed);
  } else {
    detail::pack_scattered_lines<Arithmetic>(source, line_stride, inner_stride,
                                             count, width, inner, packed);
  }
}

// Compiled in cpu/gemm/packing.cpp, once for all operators.
#define PKG_PACK_LINES(Arithmetic, Source)                                   \
  template void pack_lines<Arithmetic>(const Source*, int64_t, int64_t, int, \
                                       int, int64_t, Arithmetic::Lane*)
extern PKG_PACK_LINES(Floating<double>, double);
extern PKG_PACK_LINES(Floating<float>, float);
extern PKG_PACK_LINES(Floating<float>, Half);
extern PKG_PACK_LINES(Floating<float>, BFloat16);
extern PKG_PACK_LINES(Int8Dot, int8_t);
#if defined(__AVX512VNNI__)
extern PKG_PACK_LINES(Int8Dot::Right, int8_t);
#endif
#if defined(__AVX512BF16__)
extern PKG_PACK_LINES(Bfloat16Dot, BFloat16);
#endif

namespace detail {

// A left operand row after row, for tile registers.
template <class Arithmetic, class Source>
void pack_by_rows(const MatrixView<Source>& left, int64_t rows, int64_t inner,
                  typename Arithmetic::Lane* packed) {
  using Lane = typename Arithmetic::Lane;
  constexpr int kLanes = simd::kLanes<Lane>;
  constexpr int kDepth = Arithmetic::kDepth;
  static_assert(sizeof(Source) * kDepth == sizeof(Lane));
  const int64_t depth = depth_of<Arithmetic>(inner);
  if (left.row_stride == 1 && rows > 1) {
    for (int64_t row = 0; row < rows; row += kLanes) {
      const int lines = static_cast<int>(std::min<int64_t>(kLanes, rows - row));
      for (int64_t step = 0; step < depth; step += kLanes) {
        const int steps =
            static_cast<int>(std::min<int64_t>(kLanes, depth - step));
        Vector<Lane> square[kLanes] = {};
        for (int i = 0; i < steps; ++i) {
          const int64_t k = (step + i) * kDepth;
          square[i] = load_step<Arithmetic>(left.at(row, k), left.column_stride,
                                            lines, inner - k);
        }
        simd::transpose(square);
        for (int i = 0; i < lines; ++i) {
          simd::store_partial(packed + (row + i) * depth + step, square[i],
                              steps);
        }
      }
    }
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    Source* to = reinterpret_cast<Source*>(packed + row * depth);
    if (left.column_stride == 1) {
      std::memcpy(static_cast<void*>(to), left.at(row, 0),
                  static_cast<size_t>(inner) * sizeof(Source));
    } else {
      for (int64_t k = 0; k < inner; ++k) {
        to[k] = *left.at(row, k);
      }
    }
    std::fill(to + inner, to + depth * kDepth, Source{});
  }
}

}  // namespace detail

// Packs a left operand of rows x inner.
template <class Arithmetic, class Source>
void pack_rows(const MatrixView<Source>& left, int64_t rows, int64_t inner,
               typename Arithmetic::Lane* packed) {
  if constexpr (kUsesTiles<Arithmetic>) {
    return detail::pack_by_rows<Arithmetic>(left, rows, inner, packed);
  }
  const int64_t depth = depth_of<Arithmetic>(inner);
  for_each_strip(rows, [&](int64_t row, int height) {
    pack_lines<Arithmetic>(left.at(row, 0), left.row_stride, left.column_stride,
                           height, height, inner, packed + row * depth);
  });
}

// Packs a right operand of inner x columns.
template <class Arithmetic, class Source>
void pack_columns(const MatrixView<Source>& right, int64_t columns,
                  int64_t inner, typename Arithmetic::Lane* packed) {
  constexpr int kColumns = kTileColumns<Arithmetic>;
  const int64_t depth = depth_of<Arithmetic>(inner);
  for (int64_t column = 0; column < columns; column += kColumns) {
    pack_lines<typename Arithmetic::Right>(
        right.at(0, column), right.column_stride, right.row_stride,
        static_cast<int>(std::min<int64_t>(kColumns, columns - column)),
        kColumns, inner, packed + column * depth);
  }
}

// What the sums of each row start from, for an arithmetic that is corrected:
// of rows that are read in place, and of packed ones.
template <class Arithmetic, class Source>
void correct_rows(const MatrixView<Source>& left, int64_t rows, int64_t inner,
                  typename Arithmetic::Accumulator* corrections) {
  using Accumulator = typename Arithmetic::Accumulator;
  constexpr int64_t kRun = simd::kLanes<Accumulator> * Arithmetic::kDepth;
  for (int64_t row = 0; row < rows; ++row) {
    Vector<Accumulator> sum{};
    for (int64_t k = 0; k < inner; k += kRun) {
      sum = Arithmetic::correct(
          sum, detail::load_line<Arithmetic>(left.at(row, k), inner - k));
    }
    corrections[row] = simd::reduce_add(sum);
  }
}

template <class Arithmetic, class Source>
void correct_packed_rows(const typename Arithmetic::Lane* packed, int64_t rows,
                         int64_t depth,
                         typename Arithmetic::Accumulator* corrections) {
  using Accumulator = typename Arithmetic::Accumulator;
  if constexpr (kUsesTiles<Arithmetic>) {
    const int64_t values = depth * Arithmetic::kDepth;
    return correct_rows<Arithmetic>(
        MatrixView<Source>{reinterpret_cast<const Source*>(packed), values, 1},
        rows, values, corrections);
  }
  static_assert(kTileRows <= simd::kLanes<Accumulator>);
  for_each_strip(rows, [&](int64_t row, int height) {
    Vector<Accumulator> sum{};
    for (int64_t step = 0; step < depth; ++step) {
      sum = Arithmetic::correct(
          sum,
          simd::load_partial(packed + row * depth + step * height, height));
    }
    simd::store_partial(corrections + row, sum, height);
  });
}

}  // namespace pkg::cpu
