// Small products of float32 and float64 with nothing around them: both operands
// where they lie, or B's columns turned, no epilogue, one call for the whole
// product.
//
// 2 M N K operations on operands in the L1 and L2 caches; at 64 x 64 x 64 what
// gemm.h does around a micro-tile takes as long as 40 k-groups of one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/gemm/few_rows.h"
#include "cpu/gemm/gemm.h"

namespace pkg::cpu {

namespace detail {

// Products that one thread makes, in a single accumulation.
inline constexpr int64_t kMostSmallWork = kMultiplyAddGrain;

// Where columns that do not fill a register are read and written by masks.
inline constexpr bool kHasSmallProducts =
    kInstructionSet == InstructionSet::Avx512 ||
    kInstructionSet == InstructionSet::Avx512Bf16 ||
    kInstructionSet == InstructionSet::Amx;

// Whether B, whose columns are contiguous, had better be turned than multiplied
// as it lies, by dot products (cpu/gemm/few_rows.h). Intel Xeon (AMX), us as it
// lies and turned, 16 / 24 / 32 / 64 rows of 64 times 64 x 64: float32 2.2 and
// 1.9 / 2.6 and 2.3 / 3.2 and 2.6 / 4.4 and 4.0, float64 3.5 and 3.1 / 4.5 and
// 3.8 / 5.2 and 4.6 / 10.1 and 7.2; 16 rows of 256 times 256 x 32 3.0 and 3.0,
// 4.8 and 6.4. Where A's rows are not contiguous dot products have to copy
// them, 8 rows of 64 1.7 instead of 2.2 and 2.7 instead of 2.4.
template <class T>
bool is_better_turned(const Product<T, T>& product) {
  const int64_t most_as_it_lies = product.left.column_stride == 1 ? 19 : 7;
  return product.right.row_stride == 1 &&
         product.rows >
             std::min(most_dot_rows<T>(product.inner), most_as_it_lies);
}

// In cpu/gemm/small_product.cpp.
template <class T>
void multiply_small(const Product<T, T>& product);
// The same with B's columns contiguous: a copy's rows are.
template <class T>
void multiply_small_turned(const Product<T, T>& product);

}  // namespace detail

// Multiplies as cpu/gemm/matrix_product.h does; false: it is not the way for
// this product, and nothing was done.
template <class Input, class Output>
[[nodiscard]] bool multiply_small(const Product<Input, Output>& product) {
  if constexpr (detail::kHasSmallProducts && std::is_same_v<Input, Output> &&
                (std::is_same_v<Input, float> ||
                 std::is_same_v<Input, double>)) {
    const auto [left, right, rows, columns, inner, output, stride] = product;
    // Each below the limit first: the product of three sizes may pass 2^63.
    constexpr int64_t kMost = detail::kMostSmallWork;
    if (inner > kAccumulationLength || rows > kMost || columns > kMost ||
        rows * columns > kMost / inner) {
      return false;
    }
    if (right.column_stride == 1) {
      detail::multiply_small<Input>(product);
      return true;
    }
    if (detail::is_better_turned<Input>(product)) {
      detail::multiply_small_turned<Input>(product);
      return true;
    }
  }
  return false;
}

}  // namespace pkg::cpu
