// Few rows times a matrix whose columns are contiguous, as linear's weight
// lies: each sum is a dot product of a row and a column, whose terms go side by
// side through the lanes of a register. Nothing is packed, where gemm.h would
// turn the whole matrix for a few rows.
//
// 2 M K N operations; K N elements are read from memory once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/gemm/gemm.h"
#include "cpu/gemm/gemv.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/precision.h"

namespace pkg::cpu {

namespace detail {

// The most rows: packing is faster beyond (AVX2, Zen 3, 64 rows times 768 x
// 768: float32 1.19 ms by packing and 1.24 by dot products, bfloat16 1.20 and
// 1.52; with 32 registers 512 x 512 257 us and 235). And the columns whose sums
// are made before they are stored.
inline constexpr int64_t kMostDotRows =
    kInstructionSet == InstructionSet::Avx2 ? 24 : 64;
inline constexpr int64_t kDotColumns = 64;

// Of int8: the two operands of pairs are widened anew for each tile of columns,
// which pays for few rows. Zen 4, 4 / 8 / 16 rows times 1024 x 4096, us by dot
// products and by packing: quads 107 / 201 / 377 and 400 / 450 / 550; pairs of
// AVX-512 310 / 626 / 1258 and 490 / 670 / 1010, of AVX2 593 / 1092 / 2146 and
// 620 / 790 / 1110 (by packing as reckoned from 25 to 65 rows). Without either
// not measured.
inline constexpr int64_t kMostInt8DotRows =
#if defined(PKG_HAS_BYTE_DOT)
    kMostDotRows;
#else
    kInstructionSet == InstructionSet::Avx512 ? 8
    : kInstructionSet == InstructionSet::Avx2 ? 4
                                              : 0;
#endif

// Rows are held in the type that they are multiplied in: bfloat16 as it is
// where the processor has its dot products.
template <class T>
using DotRow = std::conditional_t<(ArithmeticOf<T>::type::kKGroupSize > 1), T,
                                  simd::Compute<T>>;

template <class T>
using DotSum = typename ArithmeticOf<T>::type::Accumulator;

// Values that fill a register.
template <class T>
inline constexpr int64_t kDotValues =
    simd::kLanes<DotSum<T>> * ArithmeticOf<T>::type::kKGroupSize;

// sums (rows x columns, kDotColumns apart) of the rows and of up to kDotColumns
// columns, which begin at `start`, one for each row. In cpu/gemm/few_rows.cpp.
template <class T>
void dot_rows(const MatrixView<DotRow<T>>& left, int64_t rows,
              const MatrixView<T>& right, int64_t columns, int64_t inner,
              bool prefetches, const DotSum<T>* start, DotSum<T>* sums);

// The rows, contiguous and as they are multiplied: in place, or copied.
template <class T>
MatrixView<DotRow<T>> contiguous_rows(const MatrixView<T>& left, int64_t rows,
                                      int64_t inner) {
  using Row = DotRow<T>;
  if constexpr (std::is_same_v<T, Row>) {
    if (left.column_stride == 1) {
      return left;
    }
  }
  Row* to = Workspace::of_this_thread<Slot::PackedLeft>().template request<Row>(
      rows * inner);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t k = 0; k < inner; ++k) {
      to[row * inner + k] = static_cast<Row>(*left.at(row, k));
    }
  }
  return {to, inner, 1};
}

}  // namespace detail

// Rows up to which multiply_few_rows is the faster way: tile registers, where
// there are any, take over sooner. Where columns are short they end before
// adding up the lanes of their sums has paid: Zen 4 (AVX512-BF16), float32, dot
// products are faster up to 8 rows with 128 terms, 16 with 256, 24 with 384, 64
// with 1024, and float64 with half as many terms. So a row for each register
// that a column fills.
template <class Input>
int64_t most_dot_rows(int64_t inner) {
  constexpr bool kIsInt8 = std::is_same_v<Input, int8_t>;
  if constexpr (kIsInt8 || kInstructionSet == InstructionSet::Avx512Bf16) {
    return std::min(kIsInt8 ? detail::kMostInt8DotRows : detail::kMostDotRows,
                    inner / detail::kDotValues<Input>);
  }
  constexpr bool kHasTiles = kInstructionSet == InstructionSet::Amx;
  if constexpr (kHasTiles && std::is_same_v<Input, float>) {
    switch (tiles::float32_products()) {
      case tiles::Float32Products::None:
        return detail::kMostDotRows;
      case tiles::Float32Products::Six:
        return 32;
      default:
        return 16;
    }
  }
  return kHasTiles && std::is_same_v<Input, Half> ? 16 : detail::kMostDotRows;
}

// Whether multiply_few_rows is the way. Where there are tile registers, these
// are the way of bfloat16.
template <class Input, class Output>
bool has_few_rows(const Product<Input, Output>& product) {
  constexpr int64_t kLeastInner = 8 * detail::kDotValues<Input>;
  using Arithmetic = typename ArithmeticOf<Input>::type;
  return !kUsesTileRegisters<Arithmetic> &&
         product.rows <= most_dot_rows<Input>(product.inner) &&
         product.right.row_stride == 1 && product.inner >= kLeastInner;
}

// Multiplies as cpu/gemm/matrix_product.h does, where has_few_rows().
template <class Input, class Output, class Epilogue>
void multiply_few_rows(const Product<Input, Output>& product, int64_t threads,
                       const Epilogue& epilogue) {
  using C = detail::DotSum<Input>;
  using Arithmetic = typename ArithmeticOf<Input>::type;
  const auto left =
      detail::contiguous_rows(product.left, product.rows, product.inner);
  C start[detail::kMostDotRows] = {};
  if constexpr (Arithmetic::kCompensated) {
    compensate_rows<Arithmetic>(left, product.rows, product.inner, start);
  }
  const bool prefetches =
      detail::prefetches_columns<Input>(product.inner, product.columns);
  parallel_for(
      product.columns,
      gemv_grain(product.columns, product.inner * product.rows, threads),
      [&](int64_t begin, int64_t end) {
        alignas(64) C sums[detail::kMostDotRows * detail::kDotColumns];
        for (int64_t first = begin; first < end; first += detail::kDotColumns) {
          const int64_t count = std::min(detail::kDotColumns, end - first);
          detail::dot_rows(left, product.rows, product.right.from(0, first),
                           count, product.inner, prefetches, start, sums);
          for (int64_t row = 0; row < product.rows; ++row) {
            const detail::EpilogueFrom<Epilogue> place{epilogue, row, 0};
            detail::store_finished(
                sums + row * detail::kDotColumns, first, count,
                product.output + row * product.output_stride, place);
          }
        }
      });
  Workspace::of_this_thread<Slot::PackedLeft>().release_excess();
}

}  // namespace pkg::cpu
