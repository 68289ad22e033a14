// Small products of float32 and float64 with nothing around them: both operands
// where they lie, no scratch, no epilogue, one call for the whole product.
//
// 2 M N K operations on operands in the L1 and L2 caches; at 64 x 64 x 64 what
// gemm.h does around a micro-tile takes as long as 40 k-groups of one.
#pragma once

#include <cstdint>
#include <type_traits>

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

// In cpu/gemm/small_product.cpp.
template <class T>
void multiply_small(const Product<T, T>& product);

}  // namespace detail

// Multiplies as cpu/gemm/matrix_product.h does; false: it is not the way for
// this product, and nothing was done.
template <class Input, class Output>
bool multiply_small(const Product<Input, Output>& product) {
  if constexpr (detail::kHasSmallProducts && std::is_same_v<Input, Output> &&
                (std::is_same_v<Input, float> ||
                 std::is_same_v<Input, double>)) {
    const auto [left, right, rows, columns, inner, output, stride] = product;
    // Each below the limit first: the product of three sizes may pass 2^63.
    constexpr int64_t kMost = detail::kMostSmallWork;
    if (right.column_stride == 1 && inner <= kAccumulationLength &&
        rows <= kMost && columns <= kMost && rows * columns <= kMost / inner) {
      detail::multiply_small<Input>(product);
      return true;
    }
  }
  return false;
}

}  // namespace pkg::cpu
