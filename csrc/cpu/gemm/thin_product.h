// Products with a few rows and a few columns of long sums, where an operand
// does not lie as dot products read it: a covariance, a sum weighted in two
// ways, the gradient of a narrow layer. By dot products of parts that are
// turned while they are in the L1 cache; what there is for larger results would
// fill a part of each register.
//
// 2 M N K operations on (M + N) K elements: bound by reading and turning them.
// Parts of K are shared among the threads, and their sums are added in float64
// and in their order, whatever the number of threads.
//
// Measurements are in docs/tuning/gemm.md.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/gemm/gemm.h"
#include "cpu/gemm/gemv.h"
#include "cpu/gemm/small_product.h"
#include "cpu/runtime/parallel.h"
#include "cpu/simd/simd.h"
#include "host/integer_math.h"

namespace pkg::cpu {

namespace detail {

inline constexpr int64_t kMostThinSize = 8;
// Shorter sums are small_product.h's where there is one.
inline constexpr int64_t kLeastThinInner =
    kHasSmallProducts ? kAccumulationLength + 1 : 64;

// Adds to `sums` (rows x columns) the product over `inner` terms. In
// cpu/gemm/thin_product.cpp.
template <class T>
void add_thin_product(const MatrixView<T>& left, int64_t rows,
                      const MatrixView<T>& right, int64_t columns,
                      int64_t inner, simd::Compute<T>* sums);

}  // namespace detail

template <class Input, class Output>
bool is_thin(const Product<Input, Output>& product) {
  const auto [left, right, rows, columns, inner, output, stride] = product;
  constexpr int64_t kLanes = simd::kLanes<simd::Compute<Input>>;
  const bool turns_left = left.column_stride != 1 && rows > 1;
  const bool turns_right = right.row_stride != 1 && columns > 1;
  const int64_t fewer = std::min(rows, columns);
  const int64_t more = std::max(rows, columns);
  // A vector times what fills a register is gemv.h's.
  return (turns_left || turns_right) && more <= detail::kMostThinSize &&
         fewer < kLanes && (fewer > 1 || more < kLanes) &&
         inner >= detail::kLeastThinInner;
}

// Multiplies as cpu/gemm/matrix_product.h does, where is_thin().
template <class Input, class Output, class Epilogue>
void multiply_thin(const Product<Input, Output>& product, int64_t threads,
                   const Epilogue& epilogue) {
  using C = simd::Compute<Input>;
  const auto [left, right, rows, columns, inner, output, stride] = product;
  constexpr int64_t kPart = detail::kDotPart;
  const int64_t parts = ceil_div(inner, kPart);
  const int64_t results = rows * columns;
  std::vector<C> sums(static_cast<size_t>(parts * results));
  const int64_t grain =
      threads > 1 ? grain_of(kElementGrain, kPart * (rows + columns)) : parts;
  parallel_for(parts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t first = part * kPart;
      detail::add_thin_product(
          product.left.from(0, first), product.rows,
          product.right.from(first, 0), product.columns,
          std::min(kPart, product.inner - first),
          sums.data() + part * product.rows * product.columns);
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    C of_row[detail::kMostThinSize];
    for (int64_t column = 0; column < columns; ++column) {
      double total = 0;
      for (int64_t part = 0; part < parts; ++part) {
        total +=
            sums[static_cast<size_t>(part * results + row * columns + column)];
      }
      of_row[column] = static_cast<C>(total);
    }
    const detail::EpilogueFrom<Epilogue> place{epilogue, row, 0};
    detail::store_finished(of_row, 0, columns, output + row * stride, place);
  }
}

}  // namespace pkg::cpu
