// One matrix product of any sizes and strides, by the kernel that suits it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/gemm/empty_product.h"
#include "cpu/gemm/few_rows.h"
#include "cpu/gemm/gemm.h"
#include "cpu/gemm/gemv.h"
#include "cpu/gemm/gemv_int8.h"
#include "cpu/gemm/small_product.h"
#include "cpu/gemm/tall_product.h"
#include "cpu/gemm/thin_product.h"
#include "cpu/residues/matrix_product.h"
#include "cpu/tiles/matrix_product.h"

namespace pkg::cpu {

namespace detail {

// By tile registers where that is the way, else by vectors.
template <class Input, class Output, class Epilogue>
void multiply_many_rows(const Product<Input, Output>& product, int64_t threads,
                        const Epilogue& epilogue) {
  if constexpr (std::is_same_v<Input, double>) {
    if (residues::multiply(product, threads, epilogue)) {
      return;
    }
  }
  if (!tiles::multiply(product, threads, epilogue)) {
    multiply<typename ProductArithmeticOf<Input>::type>(product, threads,
                                                        epilogue);
  }
}

}  // namespace detail

// output (rows x columns, contiguous columns, rows output_stride apart) = left
// right; finished sums are handed through the epilogue (KeepSums in
// cpu/gemm/store_sums.h) before they are rounded.
template <class Input, class Output, class Epilogue = KeepSums>
void matrix_product(const MatrixView<Input>& left,
                    const MatrixView<Input>& right, int64_t rows,
                    int64_t columns, int64_t inner, Output* output,
                    int64_t output_stride, int64_t threads,
                    const Epilogue& epilogue = {}) {
  const Product<Input, Output> product{left,  right,  rows,         columns,
                                       inner, output, output_stride};
  if (inner == 0) {
    return multiply_nothing(product, epilogue);
  }
  constexpr bool kPlain = std::is_same_v<Epilogue, KeepSums>;
  const auto times_vector = [&](const Input* vector, int64_t stride,
                                const MatrixView<Input>& matrix,
                                int64_t results) {
    if constexpr (std::is_same_v<Input, int8_t>) {
      multiply_vector(vector, stride, matrix, results, inner, output, threads);
    } else {
      multiply_vector(vector, stride, matrix, results, inner, output, threads,
                      epilogue);
    }
  };
  const auto reads = [&](const MatrixView<Input>& matrix, int64_t results) {
    return !std::is_same_v<Input, int8_t> ||
           gemv_reads_in_place(matrix, inner, results);
  };
  if constexpr (!std::is_same_v<Input, int8_t>) {
    if (is_thin(product)) {
      return multiply_thin(product, threads, epilogue);
    }
  }
  if (rows == 1 && reads(right, columns)) {
    return times_vector(left.data, left.column_stride, right, columns);
  }
  if constexpr (kPlain) {
    if (columns == 1 && output_stride == 1 && reads(left.transposed(), rows)) {
      return times_vector(right.data, right.row_stride, left.transposed(),
                          rows);
    }
  }
  if constexpr (kPlain) {
    if (multiply_small(product) || multiply_tall(product, threads)) {
      return;
    }
  }
  if (has_few_rows(product)) {
    return multiply_few_rows(product, threads, epilogue);
  }
  detail::multiply_many_rows(product, threads, epilogue);
}

// The plain products that several sources have; in
// cpu/gemm/matrix_product.cpp.
#define PKG_MATRIX_PRODUCT(Input, Output)                                   \
  template void matrix_product<Input, Output, KeepSums>(                    \
      const MatrixView<Input>&, const MatrixView<Input>&, int64_t, int64_t, \
      int64_t, Output*, int64_t, int64_t, const KeepSums&)
extern PKG_MATRIX_PRODUCT(double, double);
extern PKG_MATRIX_PRODUCT(float, float);
extern PKG_MATRIX_PRODUCT(Half, Half);
extern PKG_MATRIX_PRODUCT(BFloat16, BFloat16);
extern PKG_MATRIX_PRODUCT(int8_t, int32_t);

}  // namespace pkg::cpu
