// The right operands of the forward pass, packed once for all blocks of rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/attention/blocking.h"
#include "cpu/attention/finiteness.h"
#include "cpu/attention/problem.h"
#include "cpu/attention/products.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/gemm/micro_kernel.h"
#include "cpu/gemm/packing.h"
#include "cpu/simd/simd.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

// Keys and values of one head, packed as right operands: keys as columns of
// Q K^T, all in one; values as columns of P V, block of keys by block of keys.
template <class Input>
struct PackedKeyValue {
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using KGroup = KGroupOf<Arithmetic>;
  int64_t key_depth;     // k-groups of a key
  int64_t value_stride;  // columns of the values, filled up
  int64_t key_size;      // k-groups of all keys
  int64_t size;          // k-groups of both

  explicit PackedKeyValue(const AttentionShape& shape)
      : key_depth(depth_of<Arithmetic>(shape.head_size)),
        value_stride(round_up(shape.value_size, kNR<Arithmetic>)),
        key_size(
            packed_columns_size<Arithmetic>(shape.columns, shape.head_size)),
        size(round_up(
            key_size + value_stride * depth_of<Arithmetic>(shape.columns),
            64)) {}

  // Keys from `column` on, a multiple of NR.
  RightPanels<KGroup> keys(const KGroup* packed, int64_t column) const {
    return packed_panels<Arithmetic>(packed + column * key_depth, key_depth);
  }

  // Values of the keys from `column` + `first` on, of the block from `column`.
  RightPanels<KGroup> values(const Problem<Input>& problem, int64_t batch,
                             const KGroup* packed, int64_t column,
                             int64_t first) const {
    const AttentionShape& shape = problem.shape;
    if constexpr (std::is_same_v<Input, KGroup>) {
      const MatrixView<Input> value = problem.value.at(shape, batch);
      if (reads_in_place(value, shape.value_size)) {
        return {value.at(column + first, 0), value.row_stride, kNR<Arithmetic>};
      }
    }
    const int64_t block = std::min(kKeyBlock, shape.columns - column);
    return packed_panels<Arithmetic>(
        packed + key_size + column / Arithmetic::kKGroupSize * value_stride,
        depth_of<Arithmetic>(block), first / Arithmetic::kKGroupSize);
  }

  // Returns whether all of the block is finite, where keys are hidden; else
  // nobody needs to know.
  bool pack_block(const Problem<Input>& problem, int64_t key_head,
                  int64_t column, KGroup* packed) const {
    const AttentionShape& shape = problem.shape;
    const int64_t batch = key_head * shape.group;
    const int64_t count = std::min(kKeyBlock, shape.columns - column);
    KGroup* keys = packed + column * key_depth;
    pack_columns<Arithmetic>(
        problem.key.at(shape, batch).from(column, 0).transposed(), count,
        shape.head_size, keys);
    bool finite = problem.hides_keys() &&
                  all_finite<Arithmetic>(keys, packed_columns_size<Arithmetic>(
                                                   count, shape.head_size));
    const auto value = problem.value.at(shape, batch).from(column, 0);
    if constexpr (std::is_same_v<Input, KGroup>) {
      if (reads_in_place(value, shape.value_size)) {
        for (int64_t i = 0; finite && i < count; ++i) {
          finite = all_finite<Arithmetic>(value.at(i, 0), shape.value_size);
        }
        return finite;
      }
    }
    KGroup* values =
        packed + key_size + column / Arithmetic::kKGroupSize * value_stride;
    pack_columns<Arithmetic>(value, shape.value_size, count, values);
    return finite && all_finite<Arithmetic>(
                         values, value_stride * depth_of<Arithmetic>(count));
  }

 private:
  // Whether values are as good as packed: whole registers that do not straddle
  // cache lines, of rows that follow one another closely.
  static bool reads_in_place(const MatrixView<Input>& value, int64_t size) {
    constexpr int64_t kLine = 64;
    constexpr int64_t kBytes = sizeof(Input);
    return value.column_stride == 1 && size % simd::kLanes<KGroup> == 0 &&
           reinterpret_cast<uintptr_t>(value.data) % kLine == 0 &&
           value.row_stride * kBytes % kLine == 0 && value.row_stride >= size &&
           value.row_stride <= 2 * size && value.row_stride * kBytes <= 1024;
  }
};

}  // namespace pkg::cpu::attention
