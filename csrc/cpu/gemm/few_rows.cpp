// Tiles of dot products, for every type of elements.
#include "cpu/gemm/few_rows.h"

#include "cpu/simd/reduce.h"

namespace pkg::cpu::detail {
namespace {

// Rows and columns of a tile: as many sums as registers allow, beside one of
// each line of the shorter side and one of the other. Without multiply-adds a
// product takes another. With AVX2 3 rows instead of 2 are 0.58 loads instead
// of 0.75 for each multiply-add: 3 rows and from 5 on 1.0 to 1.5 times as fast,
// mostly 1.2, and 4 as fast (Zen 3, one thread, float32, bfloat16 and float64,
// 1152 x 384 and 768 x 768, 2026-11-28).
constexpr int kTileOfRows = simd::kVectorRegisters >= 32              ? 6
                            : kInstructionSet == InstructionSet::Avx2 ? 3
                                                                      : 2;
constexpr int kTileOfColumns = 4;
// Terms that are summed before the sums leave the registers: a tile's columns
// stay in L1 from one tile of rows to the next.
constexpr int64_t kTerms = 1024;
// Of all rows, which every tile of columns goes over: as much as stays in L2.
// Longer ones are multiplied a block of terms at a time by all columns: else
// each tile of them reads the rows from L3 again (docs/tuning/gemm.md).
constexpr int64_t kBytesThatStay = kL2Bytes / 2;

template <class T, int kRows, int kColumns>
struct Tile {
  using Arithmetic = typename ArithmeticOf<T>::type;
  using KGroups = simd::Vector<typename Arithmetic::KGroup>;
  using C = typename Arithmetic::Accumulator;
  using V = simd::Vector<C>;
  static constexpr int kValues = simd::kLanes<C> * Arithmetic::kKGroupSize;

  const DotRow<T>* rows;
  int64_t row_stride;
  const T* columns;
  int64_t column_stride;

  // The products of one register of k-groups of each line, loaded by `load`,
  // which is told the arithmetic of the line's operand.
  template <class Load>
  [[gnu::always_inline]] void add(V (&sums)[kRows * kColumns], int64_t k,
                                  const Load& load) const {
    if constexpr (kRows < kColumns) {
      KGroups a[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        a[r] = load(Arithmetic{}, rows + r * row_stride + k);
      }
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        const KGroups b =
            load(typename Arithmetic::Right{}, columns + c * column_stride + k);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          V& sum = sums[r * kColumns + c];
          sum = Arithmetic::multiply_add(a[r], b, sum);
        }
      }
    } else {
      KGroups b[kColumns];
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        b[c] =
            load(typename Arithmetic::Right{}, columns + c * column_stride + k);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const KGroups a = load(Arithmetic{}, rows + r * row_stride + k);
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) {
          V& sum = sums[r * kColumns + c];
          sum = Arithmetic::multiply_add(a, b[c], sum);
        }
      }
    }
  }

  // Adds the dot products of `terms` terms to the sums, or, where these are the
  // first, to what the rows start from (of a compensated arithmetic; zeros).
  // The columns behind these may be prefetched meanwhile.
  template <bool kPrefetches>
  void multiply(int64_t terms, const C* start, C* to) const {
    V sums[kRows * kColumns];
#pragma GCC unroll 24
    for (int i = 0; i < kRows * kColumns; ++i) {
      sums[i] = V{};
    }
    int64_t k = 0;
    for (; k + kValues <= terms; k += kValues) {
      if constexpr (kPrefetches) {
#pragma GCC unroll 8
        for (int c = kColumns; c < 2 * kColumns; ++c) {
          prefetch_line<PrefetchTo::L2>(columns + c * column_stride + k);
        }
      }
      add(sums, k, [](auto arithmetic, const auto* from) {
        return arithmetic.load_k_groups(from);
      });
    }
    if (k < terms) {
      const int rest = static_cast<int>(terms - k);
      add(sums, k, [&](auto arithmetic, const auto* from) {
        if constexpr (Arithmetic::kKGroupSize == 1) {
          return simd::load_partial(from, rest);
        } else {
          return load_line<decltype(arithmetic)>(from, rest);
        }
      });
    }
    C totals[kRows * kColumns];
    simd::reduce_add_each(sums, totals);
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kColumns; ++c) {
        C& sum = to[r * kDotColumns + c];
        const C total = totals[r * kColumns + c];
        if (start == nullptr) {
          sum += total;
        } else if constexpr (Arithmetic::kCompensated) {
          sum = start[r] + total;
        } else {
          sum = total;
        }
      }
    }
  }
};

// One block of terms: a tile of columns with all rows.
template <int kColumns, class T>
void dot_columns_with_rows(const MatrixView<DotRow<T>>& left, int64_t rows,
                           const T* columns, int64_t column_stride,
                           int64_t terms, bool prefetches,
                           const DotSum<T>* start, DotSum<T>* sums) {
  for_each_strip<kTileOfRows>(rows, [&](int64_t row, int height) {
    with_strip_height<kTileOfRows>(height, [&](auto tile_rows) {
      const Tile<T, tile_rows(), kColumns> tile{
          left.at(row, 0), left.row_stride, columns, column_stride};
      const DotSum<T>* const from = start == nullptr ? nullptr : start + row;
      DotSum<T>* const to = sums + row * kDotColumns;
      if (prefetches && row == 0) {
        tile.template multiply<true>(terms, from, to);
      } else {
        tile.template multiply<false>(terms, from, to);
      }
    });
  });
}

}  // namespace

template <class T>
void dot_rows(const MatrixView<DotRow<T>>& left, int64_t rows,
              const MatrixView<T>& right, int64_t columns, int64_t inner,
              bool prefetches, const DotSum<T>* start, DotSum<T>* sums) {
  const auto dot_terms = [&](int64_t first, int64_t terms) {
    for (int64_t column = 0; column < columns;) {
      const bool is_tile = column + kTileOfColumns <= columns;
      const auto dot = is_tile ? &dot_columns_with_rows<kTileOfColumns, T>
                               : &dot_columns_with_rows<1, T>;
      for_each_block(terms, kTerms, [&](int64_t offset, int64_t count) {
        const int64_t k = first + offset;
        dot(left.from(0, k), rows, right.at(k, column), right.column_stride,
            count, prefetches, k == 0 ? start : nullptr, sums + column);
      });
      column += is_tile ? kTileOfColumns : 1;
    }
  };
  const bool stays =
      rows * inner * int64_t{sizeof(DotRow<T>)} <= kBytesThatStay;
  for_each_block(inner, stays ? inner : kTerms, dot_terms);
}

#define PKG_DOT_ROWS(T)                                                \
  template void dot_rows(const MatrixView<DotRow<T>>&, int64_t,        \
                         const MatrixView<T>&, int64_t, int64_t, bool, \
                         const DotSum<T>*, DotSum<T>*)
PKG_DOT_ROWS(Half);
PKG_DOT_ROWS(BFloat16);
PKG_DOT_ROWS(float);
PKG_DOT_ROWS(double);
PKG_DOT_ROWS(int8_t);

}  // namespace pkg::cpu::detail
