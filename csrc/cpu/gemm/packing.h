// Packing: a block of an operand with any strides becomes the micro-panels that
// the micro-kernel reads from front to back, converted to the arithmetic's
// k-groups; cpu/gemm/contract.h draws them.
//
// A: strips of up to MR rows (for_each_strip), the k-groups of their rows side
// by side; or for an arithmetic that uses tile registers row after row. B:
// micro-panels of NR columns, their k-groups side by side, the last filled up
// with zeros. K is filled up with zeros to whole k-groups.
//
// Rows of A and columns of B are "lines" here. Where k-groups must change their
// direction, squares of registers are transposed (0.3 cycles for each float32
// on Zen 4; gathering them one by one took 2.1), elsewhere whole registers are
// copied or interleaved.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/gemm/arithmetic.h"
#include "cpu/gemm/micro_kernel.h"
#include "cpu/runtime/cache.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/transpose.h"
#include "host/integer_math.h"

namespace pkg::cpu {

namespace detail {

// A whole register is stored even where `count` k-groups are meant: the next
// ones are written over it later. Not at the end of the micro-panel, behind
// which the next one begins.
template <class KGroup>
[[gnu::always_inline]] inline void store_k_groups(KGroup* to, const KGroup* end,
                                                  Vector<KGroup> k_groups,
                                                  int count) {
  if (count == simd::kLanes<KGroup> || end - to >= simd::kLanes<KGroup>) {
    simd::store(to, k_groups);
  } else {
    simd::store_partial(to, k_groups, count);
  }
}

// A register of k-groups of a line of which `values` values are left.
template <class Arithmetic, class Source>
[[gnu::always_inline]] inline Vector<typename Arithmetic::KGroup> load_line(
    const Source* from, int64_t values) {
  constexpr int kValues =
      simd::kLanes<typename Arithmetic::KGroup> * Arithmetic::kKGroupSize;
  if (values >= kValues) {
    return Arithmetic::load_k_groups(from);
  }
  Source rest[kValues] = {};
  std::memcpy(static_cast<void*>(rest), from,
              static_cast<size_t>(values) * sizeof(Source));
  return Arithmetic::load_k_groups(rest);
}

// Whether transposed lines fill whole registers. If not, as 6 lines in 8 lanes
// (float32 with AVX2), each is written over the end of the one before, and the
// last reaches beyond its k-group.
template <class KGroup, int kWidth>
inline constexpr bool kFillsPanel =
    kWidth % simd::kLanes<KGroup> == 0 ||
    simd::transposes_without_gaps<Vector<KGroup>>(kWidth);

// kLanes k-groups of each of kWidth contiguous lines, all of which are there.
template <class Arithmetic, int kWidth, class Source>
[[gnu::always_inline]] inline void pack_whole_squares(
    const Source* source, int64_t line_stride,
    typename Arithmetic::KGroup* packed) {
  using V = Vector<typename Arithmetic::KGroup>;
  constexpr int kLanes = simd::kLanes<typename Arithmetic::KGroup>;
  if constexpr (kWidth % kLanes != 0 &&
                simd::transposes_without_gaps<V>(kWidth)) {
    V lines[kWidth];
#pragma GCC unroll 16
    for (int line = 0; line < kWidth; ++line) {
      lines[line] = Arithmetic::load_k_groups(source + line * line_stride);
    }
    simd::transpose_without_gaps(lines);
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      simd::store(packed + i * kLanes, lines[i]);
    }
  } else {
    constexpr int kLines = std::min(kWidth, kLanes);
    static_assert(kWidth % kLines == 0 && kLanes <= 2 * kLines);
    for (int first = 0; first < kWidth; first += kLines) {
      V square[kLanes] = {};
#pragma GCC unroll 16
      for (int line = 0; line < kLines; ++line) {
        square[line] =
            Arithmetic::load_k_groups(source + (first + line) * line_stride);
      }
      simd::transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        simd::store(packed + i * kWidth + first, square[i]);
      }
    }
  }
}

// Contiguous lines, kLanes k-groups of kLanes lines at a time, from k-group
// `begin` on. The last lines come first, so that what a store writes beyond its
// k-group is written over.
template <class Arithmetic, class Source>
void pack_contiguous_lines(const Source* source, int64_t line_stride, int count,
                           int width, int64_t inner,
                           typename Arithmetic::KGroup* packed,
                           int64_t begin = 0) {
  using KGroup = typename Arithmetic::KGroup;
  constexpr int kLanes = simd::kLanes<KGroup>;
  constexpr int kKGroupSize = Arithmetic::kKGroupSize;
  const int64_t depth = depth_of<Arithmetic>(inner);
  const KGroup* end = packed + depth * width;
  for (int64_t step = begin; step < depth; step += kLanes) {
    const int steps = static_cast<int>(std::min<int64_t>(kLanes, depth - step));
    const int64_t values = inner - step * kKGroupSize;
    for (int first = (width - 1) / kLanes * kLanes; first >= 0;
         first -= kLanes) {
      const int lines = std::clamp(count - first, 0, kLanes);
      const int kept = std::min(width - first, kLanes);
      const Source* from = source + first * line_stride + step * kKGroupSize;
      Vector<KGroup> square[kLanes] = {};
      for (int line = 0; line < kLanes; ++line) {
        if (line < lines) {
          square[line] =
              load_line<Arithmetic>(from + line * line_stride, values);
        }
      }
      simd::transpose(square);
      KGroup* to = packed + step * width + first;
      for (int i = 0; i < kLanes; ++i) {
        if (i < steps) {
          store_k_groups(to + i * width, end, square[i], kept);
        }
      }
    }
  }
}

// The same of kWidth lines that are all there. Whole squares, of which nothing
// need be asked, stay in registers: Zen 4, 0.3 cycles for each k-group, 0.7
// (32 lines) and 1.2 (12) as above.
template <class Arithmetic, int kWidth, class Source>
void pack_whole_lines(const Source* source, int64_t line_stride, int64_t inner,
                      typename Arithmetic::KGroup* packed) {
  using KGroup = typename Arithmetic::KGroup;
  constexpr int kLanes = simd::kLanes<KGroup>;
  constexpr bool kFills = kFillsPanel<KGroup, kWidth>;
  int64_t step = 0;
  if constexpr (kFills || kWidth < kLanes) {
    // A k-group is left to be written over what the last register leaves.
    const int64_t depth = inner / Arithmetic::kKGroupSize - (kFills ? 0 : 1);
    for (; step + kLanes <= depth; step += kLanes) {
      pack_whole_squares<Arithmetic, kWidth>(
          source + step * Arithmetic::kKGroupSize, line_stride,
          packed + step * kWidth);
    }
  }
  pack_contiguous_lines<Arithmetic>(source, line_stride, kWidth, kWidth, inner,
                                    packed, step);
}

// One k-group of each of up to kLanes lines that lie side by side, of which
// `values` values of the inner dimension are left.
template <class Arithmetic, class Source>
[[gnu::always_inline]] inline Vector<typename Arithmetic::KGroup> load_step(
    const Source* from, int64_t inner_stride, int lines, int64_t values) {
  constexpr int kLanes = simd::kLanes<typename Arithmetic::KGroup>;
  constexpr int kKGroupSize = Arithmetic::kKGroupSize;
  static constexpr Source kZeros[kLanes] = {};
  const Source* runs[kKGroupSize];
  for (int d = 0; d < kKGroupSize; ++d) {
    runs[d] = d < values ? from + d * inner_stride : kZeros;
  }
  if (lines == kLanes) {
    return Arithmetic::interleave(runs);
  }
  Source rest[kKGroupSize][kLanes] = {};
  for (int d = 0; d < kKGroupSize; ++d) {
    std::memcpy(static_cast<void*>(rest[d]), runs[d],
                static_cast<size_t>(lines) * sizeof(Source));
    runs[d] = rest[d];
  }
  return Arithmetic::interleave(runs);
}

// Lines side by side: a k-group of kLanes lines at a time. Where fewer are to
// be packed, a whole register is still read: what is behind them lies before
// the same lines' next k-group, so in the same memory, and the next store
// writes over it. But for the last k-group (12 lines put together in memory
// first, Zen 4: a product of 1536 x 384 x 1024 88 GFLOP/s).
template <class Arithmetic, class Source>
[[gnu::always_inline]] inline void pack_neighbouring_lines(
    const Source* source, int64_t inner_stride, int count, int width,
    int64_t inner, typename Arithmetic::KGroup* packed) {
  using KGroup = typename Arithmetic::KGroup;
  constexpr int kLanes = simd::kLanes<KGroup>;
  const KGroup* end = packed + depth_of<Arithmetic>(inner) * width;
  KGroup* to = packed;
  for (int64_t k = 0; k < inner; k += Arithmetic::kKGroupSize, to += width) {
    for (int first = 0; first < width; first += kLanes) {
      const int lines = std::clamp(count - first, 0, kLanes);
      const int kept = std::min(width - first, kLanes);
      const bool reads_on = lines == kept && inner_stride >= kLanes - lines &&
                            k + Arithmetic::kKGroupSize < inner;
      store_k_groups(
          to + first, end,
          load_step<Arithmetic>(source + k * inner_stride + first, inner_stride,
                                reads_on ? kLanes : lines, inner - k),
          kept);
    }
  }
}

// No two values side by side: they are gathered, some k-groups at a time.
template <class Arithmetic, class Source>
void pack_scattered_lines(const Source* source, int64_t line_stride,
                          int64_t inner_stride, int count, int width,
                          int64_t inner, typename Arithmetic::KGroup* packed) {
  constexpr int kRun =
      simd::kLanes<typename Arithmetic::KGroup> * Arithmetic::kKGroupSize;
  constexpr int kLines = std::max(kMicroTileRows<Arithmetic>, kNR<Arithmetic>);
  Source run[kLines * kRun];
  for (int64_t k = 0; k < inner; k += kRun) {
    const int64_t values = std::min<int64_t>(kRun, inner - k);
    for (int line = 0; line < count; ++line) {
      const Source* from = source + line * line_stride + k * inner_stride;
      for (int64_t i = 0; i < values; ++i) {
        run[line * kRun + i] = from[i * inner_stride];
      }
    }
    pack_contiguous_lines<Arithmetic>(
        run, int64_t{kRun}, count, width, values,
        packed + k / Arithmetic::kKGroupSize * width);
  }
}

}  // namespace detail

// Packs `count` lines of `inner` values side by side, `width` from one k-group
// to the next, and fills up with zeros. width <= max(MR, NR).
template <class Arithmetic, class Source>
  requires PacksFrom<Arithmetic, Source>
void pack_lines(const Source* source, int64_t line_stride, int64_t inner_stride,
                int count, int width, int64_t inner,
                typename Arithmetic::KGroup* packed) {
  constexpr int kColumns = kNR<Arithmetic>;
  constexpr int kRows = kMicroTileRows<Arithmetic>;
  // With a known width, which is a third of the time where the lines come from
  // memory: more loads are under way.
  if (line_stride == 1 && count == kColumns && width == kColumns) {
    detail::pack_neighbouring_lines<Arithmetic>(source, inner_stride, kColumns,
                                                kColumns, inner, packed);
  } else if (line_stride == 1 && count == kRows && width == kRows) {
    detail::pack_neighbouring_lines<Arithmetic>(source, inner_stride, kRows,
                                                kRows, inner, packed);
  } else if (line_stride == 1 && count > 1) {
    detail::pack_neighbouring_lines<Arithmetic>(source, inner_stride, count,
                                                width, inner, packed);
  } else if (inner_stride == 1 && count == kColumns && width == kColumns) {
    detail::pack_whole_lines<Arithmetic, kColumns>(source, line_stride, inner,
                                                   packed);
  } else if (inner_stride == 1 && count == kRows && width == kRows) {
    detail::pack_whole_lines<Arithmetic, kRows>(source, line_stride, inner,
                                                packed);
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
                                       int, int64_t, Arithmetic::KGroup*)
extern PKG_PACK_LINES(Floating<double>, double);
#if defined(PKG_HAS_TILES)
extern PKG_PACK_LINES(WideDouble, double);
#endif
extern PKG_PACK_LINES(Floating<float>, float);
extern PKG_PACK_LINES(Floating<float>, Half);
extern PKG_PACK_LINES(Floating<float>, BFloat16);
extern PKG_PACK_LINES(Int8Dot, int8_t);
#if defined(PKG_HAS_VPDPBUSD)
extern PKG_PACK_LINES(Int8Dot::Right, int8_t);
#endif
#if defined(PKG_HAS_BFLOAT16_DOT)
extern PKG_PACK_LINES(Bfloat16Dot, BFloat16);
#endif

namespace detail {

// A row after row, for tile registers.
template <class Arithmetic, class Source>
void pack_by_rows(const MatrixView<Source>& left, int64_t rows, int64_t inner,
                  typename Arithmetic::KGroup* packed) {
  using KGroup = typename Arithmetic::KGroup;
  constexpr int kLanes = simd::kLanes<KGroup>;
  constexpr int kKGroupSize = Arithmetic::kKGroupSize;
  static_assert(sizeof(Source) * kKGroupSize == sizeof(KGroup));
  const int64_t depth = depth_of<Arithmetic>(inner);
  if (left.row_stride == 1 && rows > 1) {
    for (int64_t row = 0; row < rows; row += kLanes) {
      const int lines = static_cast<int>(std::min<int64_t>(kLanes, rows - row));
      for (int64_t step = 0; step < depth; step += kLanes) {
        const int steps =
            static_cast<int>(std::min<int64_t>(kLanes, depth - step));
        Vector<KGroup> square[kLanes] = {};
        for (int i = 0; i < steps; ++i) {
          const int64_t k = (step + i) * kKGroupSize;
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
    std::fill(to + inner, to + depth * kKGroupSize, Source{});
  }
}

// The values of the inner dimension that are packed of all strips or
// micro-panels before the next ones. Where lines lie side by side, a strip has
// a few bytes of each page, and of int8 half of a cache line: so few that the
// whole width of the block is read from each before L1, of which rows 4 KiB
// apart share a set, and the processor's list of pages are full. (Zen 4, 8
// rather than 32 k-groups: int8 256 x 1024 x 4096 1.1 times as fast, 16 rows of
// it 1.15; half precision and float32 the same.) Of lines so few that these lie
// closer together, as many as fill half of L1.
template <class Arithmetic, class Source>
int64_t packed_together(int64_t line_stride, int64_t inner_stride,
                        int64_t inner) {
  constexpr int64_t kLeast = 8 * Arithmetic::kKGroupSize;
  constexpr int64_t kBytes = 4 * kL1Way;
  if (line_stride != 1) {
    return inner;
  }
  const int64_t row_bytes =
      std::max<int64_t>(inner_stride * int64_t{sizeof(Source)}, 1);
  return std::max(kBytes / row_bytes / kLeast * kLeast, kLeast);
}

}  // namespace detail

// Packs a block of A, rows x inner.
template <class Arithmetic, class Source>
  requires PacksFrom<Arithmetic, Source>
void pack_rows(const MatrixView<Source>& left, int64_t rows, int64_t inner,
               typename Arithmetic::KGroup* packed) {
  if constexpr (kUsesTileRegisters<Arithmetic>) {
    return detail::pack_by_rows<Arithmetic>(left, rows, inner, packed);
  }
  const int64_t depth = depth_of<Arithmetic>(inner);
  const int64_t run = detail::packed_together<Arithmetic, Source>(
      left.row_stride, left.column_stride, inner);
  for_each_block(inner, run, [&](int64_t k, int64_t values) {
    for (int64_t next = k + values; next < std::min(inner, k + 2 * values);
         ++next) {
      prefetch_bytes<PrefetchTo::L2>(left.at(0, next),
                                     rows * int64_t{sizeof(Source)});
    }
    for_each_strip<kMicroTileRows<Arithmetic>>(rows, [&](int64_t row,
                                                         int height) {
      pack_lines<Arithmetic>(
          left.at(row, k), left.row_stride, left.column_stride, height, height,
          values, packed + row * depth + k / Arithmetic::kKGroupSize * height);
    });
  });
}

// Packs `count` columns of B as one micro-panel.
template <class Arithmetic, class Source>
  requires PacksFrom<Arithmetic, Source>
void pack_micro_panel(const MatrixView<Source>& right, int64_t column,
                      int64_t count, int64_t inner,
                      typename Arithmetic::KGroup* packed) {
  pack_lines<typename Arithmetic::Right>(
      right.at(0, column), right.column_stride, right.row_stride,
      static_cast<int>(count), kNR<Arithmetic>, inner, packed);
}

// Packs a block of B, inner x columns. Of columns side by side the rows of the
// next run are brought into L2 meanwhile, a share beside each micro-panel: few
// bytes of each row are read at a time, which the processor's own prefetchers
// do not foresee.
template <class Arithmetic, class Source>
  requires PacksFrom<Arithmetic, Source>
void pack_columns(const MatrixView<Source>& right, int64_t columns,
                  int64_t inner, typename Arithmetic::KGroup* packed) {
  constexpr int64_t kColumns = kNR<Arithmetic>;
  const bool prefetches = right.column_stride == 1;
  const int64_t depth = depth_of<Arithmetic>(inner);
  const int64_t run = detail::packed_together<Arithmetic, Source>(
      right.column_stride, right.row_stride, inner);
  // One, of which nothing is packed, where there are no columns.
  const int64_t panels = std::max<int64_t>(ceil_div(columns, kColumns), 1);
  for_each_block(inner, run, [&](int64_t k, int64_t values) {
    int64_t next = k + values;
    const int64_t next_end = std::min(inner, next + values);
    const int64_t share = ceil_div(values, panels);
    for_each_block(columns, kColumns, [&](int64_t column, int64_t count) {
      for (int64_t end = std::min(next + share, next_end);
           prefetches && next < end; ++next) {
        prefetch_bytes<PrefetchTo::L2>(right.at(next, 0),
                                       columns * int64_t{sizeof(Source)});
      }
      pack_micro_panel<Arithmetic>(
          right.from(k, 0), column, count, values,
          packed + column * depth + k / Arithmetic::kKGroupSize * kColumns);
    });
  });
}

// The compensation of each row of A, for an arithmetic that needs it: of rows
// that are read in place, and of packed ones.
template <class Arithmetic, class Source>
  requires PacksFrom<Arithmetic, Source>
void compensate_rows(const MatrixView<Source>& left, int64_t rows,
                     int64_t inner,
                     typename Arithmetic::Accumulator* compensation) {
  using Accumulator = typename Arithmetic::Accumulator;
  constexpr int64_t kRun = simd::kLanes<Accumulator> * Arithmetic::kKGroupSize;
  for (int64_t row = 0; row < rows; ++row) {
    Vector<Accumulator> sum{};
    for (int64_t k = 0; k < inner; k += kRun) {
      sum = Arithmetic::compensate(
          sum, detail::load_line<Arithmetic>(left.at(row, k), inner - k));
    }
    compensation[row] = simd::reduce_add(sum);
  }
}

template <class Arithmetic, class Source>
void compensate_packed_rows(const typename Arithmetic::KGroup* packed,
                            int64_t rows, int64_t depth,
                            typename Arithmetic::Accumulator* compensation) {
  using Accumulator = typename Arithmetic::Accumulator;
  if constexpr (kUsesTileRegisters<Arithmetic>) {
    const int64_t values = depth * Arithmetic::kKGroupSize;
    return compensate_rows<Arithmetic>(
        MatrixView<Source>{reinterpret_cast<const Source*>(packed), values, 1},
        rows, values, compensation);
  }
  static_assert(kMR <= simd::kLanes<Accumulator>);
  for_each_strip(rows, [&](int64_t row, int height) {
    Vector<Accumulator> sum{};
    for (int64_t step = 0; step < depth; ++step) {
      sum = Arithmetic::compensate(
          sum,
          simd::load_partial(packed + row * depth + step * height, height));
    }
    simd::store_partial(compensation + row, sum, height);
  });
}

}  // namespace pkg::cpu
