// Tiles of dot products, for every type of elements.
#include "cpu/gemm/few_rows.h"

#include "cpu/simd/reduce.h"

namespace pkg::cpu::detail {
namespace {

// Rows and columns of a tile: as many sums as registers allow, beside those of
// the columns and one of a row.
constexpr int kTileOfRows = simd::kVectorRegisters >= 32 ? 6 : 2;
constexpr int kTileOfColumns = 4;
// Terms that are summed before the sums leave the registers: a tile's columns
// stay in L1 from one tile of rows to the next.
constexpr int64_t kTerms = 1024;

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

  // The products of one register of k-groups of each line, loaded by `load`.
  template <class Load>
  [[gnu::always_inline]] void add(V (&sums)[kRows * kColumns], int64_t k,
                                  const Load& load) const {
    KGroups b[kColumns];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      b[c] = load(columns + c * column_stride + k);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const KGroups a = load(rows + r * row_stride + k);
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        V& sum = sums[r * kColumns + c];
        sum = Arithmetic::multiply_add(a, b[c], sum);
      }
    }
  }

  // Adds the dot products of `terms` terms to the sums, or stores them.
  void multiply(int64_t terms, bool is_first, C* to) const {
    V sums[kRows * kColumns];
#pragma GCC unroll 24
    for (int i = 0; i < kRows * kColumns; ++i) {
      sums[i] = V{};
    }
    int64_t k = 0;
    for (; k + kValues <= terms; k += kValues) {
      add(sums, k,
          [](const auto* from) { return Arithmetic::load_k_groups(from); });
    }
    if (k < terms) {
      const int rest = static_cast<int>(terms - k);
      add(sums, k, [&](const auto* from) {
        if constexpr (Arithmetic::kKGroupSize == 1) {
          return simd::load_partial(from, rest);
        } else {
          return load_line<Arithmetic>(from, rest);
        }
      });
    }
    C totals[kRows * kColumns];
    simd::reduce_add_each(sums, totals);
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kColumns; ++c) {
        C& sum = to[r * kDotColumns + c];
        sum = is_first ? totals[r * kColumns + c]
                       : sum + totals[r * kColumns + c];
      }
    }
  }
};

// One block of terms: a tile of columns with all rows.
template <int kColumns, class T>
void dot_columns_with_rows(const DotRow<T>* rows_at, int64_t row_stride,
                           int64_t rows, const T* columns,
                           int64_t column_stride, int64_t terms, bool is_first,
                           simd::Compute<T>* sums) {
  for_each_strip<kTileOfRows>(rows, [&](int64_t row, int height) {
    with_strip_height<kTileOfRows>(height, [&](auto tile_rows) {
      Tile<T, tile_rows(), kColumns>{rows_at + row * row_stride, row_stride,
                                     columns, column_stride}
          .multiply(terms, is_first, sums + row * kDotColumns);
    });
  });
}

}  // namespace

template <class T>
void dot_rows(const DotRow<T>* rows_at, int64_t row_stride, int64_t rows,
              const MatrixView<T>& matrix, int64_t columns, int64_t inner,
              simd::Compute<T>* sums) {
  for (int64_t column = 0; column < columns;) {
    const bool is_tile = column + kTileOfColumns <= columns;
    for (int64_t k = 0; k < inner; k += kTerms) {
      const auto dot = is_tile ? &dot_columns_with_rows<kTileOfColumns, T>
                               : &dot_columns_with_rows<1, T>;
      dot(rows_at + k, row_stride, rows, matrix.at(k, column),
          matrix.column_stride, std::min(kTerms, inner - k), k == 0,
          sums + column);
    }
    column += is_tile ? kTileOfColumns : 1;
  }
}

#define PKG_DOT_ROWS(T)                                          \
  template void dot_rows(const DotRow<T>*, int64_t, int64_t,     \
                         const MatrixView<T>&, int64_t, int64_t, \
                         simd::Compute<T>*)
PKG_DOT_ROWS(Half);
PKG_DOT_ROWS(BFloat16);
PKG_DOT_ROWS(float);
PKG_DOT_ROWS(double);

}  // namespace pkg::cpu::detail
