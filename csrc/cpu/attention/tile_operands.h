// The operands of the forward pass as tile registers multiply them: how each
// dtype is split into parts, and keys and values packed once for all blocks of
// rows.
//
// float32 goes by three parts and six products, which is more exact than fused
// multiply-adds are. Probabilities of float16 are split into two bfloat16s, 16
// bits, of bfloat16 rounded to one, as their dot products have it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/attention/blocking.h"
#include "cpu/attention/finiteness.h"
#include "cpu/attention/problem.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/tiles/packing.h"
#include "cpu/tiles/precision.h"
#include "cpu/tiles/range.h"
#include "cpu/tiles/scheme.h"
#include "scaled_dot_product_attention.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::attention {

// Scores: of queries and keys. Values: of values, and of what multiplies them
// by Probabilities. Sums of probabilities times values are scaled by
// kProbabilityScale: so that the last part of the least normal number is one.
template <class Input>
struct TileSchemes;
template <>
struct TileSchemes<float> {
  using Scores = tiles::Float32By6;
  using Values = tiles::Float32By6;
  using Probabilities = tiles::Float32By6;
  static constexpr float kProbabilityScale = 0x1p23F;
};
template <>
struct TileSchemes<Half> {
  using Scores = tiles::Float16By4;
  using Values = tiles::Float16By3;
  using Probabilities = tiles::Float32By3;
  static constexpr float kProbabilityScale = 1;
};
template <>
struct TileSchemes<BFloat16> {
  using Scores = tiles::Bfloat16By1;
  using Values = tiles::Bfloat16By1;
  using Probabilities = tiles::Bfloat16By1;
  static constexpr float kProbabilityScale = 1;
};

// Whether a dtype goes by tiles.
template <class Input>
inline constexpr bool kGoesByTiles = !std::is_same_v<Input, double>;
template <class Input>
bool goes_by_tiles() {
  // A choice of less exact products is for products of matrices.
  return !std::is_same_v<Input, float> ||
         tiles::float32_products() != tiles::Float32Products::None;
}

// Of queries and keys: what parts in bfloat16 cannot say changes no score that
// matters, as long as all are finite. Of values: their least bits count.
template <class Input>
bool is_fit_for_scores(const tiles::Range& range) {
  constexpr int kMost = 60;
  return std::is_same_v<Input, BFloat16> || range.lies_below(kMost);
}
template <class Input>
bool is_fit_for_values(const tiles::Range& range) {
  constexpr int kLeast = -100;
  constexpr int kMost = 80;
  return std::is_same_v<Input, BFloat16> ||
         (std::is_same_v<Input, Half> ? range.is_finite()
                                      : range.lies_within(kLeast, kMost));
}

template <class T>
tiles::Lines<T> rows_of(const MatrixView<T>& matrix) {
  return {matrix.data, matrix.row_stride, matrix.column_stride};
}
template <class T>
tiles::Lines<T> columns_of(const MatrixView<T>& matrix) {
  return rows_of(matrix.transposed());
}

// Whether all are finite, of a dtype whose range nobody looks at.
template <class Input>
bool are_finite(const MatrixView<Input>& matrix, int64_t rows,
                int64_t columns) {
  bool finite = true;
  for (int64_t row = 0; row < rows && finite; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      const float value = static_cast<float>(*matrix.at(row, column));
      finite &= value - value == 0.0F;
    }
  }
  return finite;
}

// Keys and values of one head, as PackedKeyValue (forward_operands.h) has them
// for vectors: keys in strips of 32, values block of keys by block of keys.
template <class Input>
struct TilePackedKeyValue {
  using Element = std::byte;
  using Schemes = TileSchemes<Input>;
  using Scores = typename Schemes::Scores;
  using Values = typename Schemes::Values;
  static constexpr int64_t kBlockUnits = kKeyBlock / Values::kValues;
  static_assert(kKeyBlock % Values::kValues == 0 &&
                kKeyBlock % tiles::kStrip == 0);

  int64_t key_units;         // units of a key
  int64_t value_stride;      // columns of the values, filled up
  int64_t value_block_size;  // bytes of a block's values
  int64_t key_size;          // bytes of all keys
  int64_t size;              // bytes of both
  // Whether an operand was met that tiles are not right for: then nothing that
  // came out is.
  mutable std::atomic<bool> is_refused = false;

  explicit TilePackedKeyValue(const AttentionShape& shape)
      : key_units(tiles::units_of<Scores>(shape.head_size)),
        value_stride(round_up(shape.value_size, tiles::kStrip)),
        value_block_size(
            tiles::packed_bytes<Values>(shape.value_size, kBlockUnits)),
        key_size(tiles::packed_bytes<Scores>(shape.columns, key_units)),
        size(key_size +
             (shape.columns + kKeyBlock - 1) / kKeyBlock * value_block_size) {}

  // Keys from `column` on, a multiple of 32.
  const std::byte* keys(const std::byte* packed, int64_t column) const {
    return packed + column / tiles::kStrip * key_strip_size();
  }
  int64_t key_strip_size() const {
    return key_units * tiles::kUnitBytes<Scores>;
  }
  // Values of the block of keys from `column` on: strips of columns, of units.
  std::byte* values(std::byte* packed, int64_t column) const {
    return packed + key_size + column / kKeyBlock * value_block_size;
  }

  // Returns whether all of the block is finite, where keys are hidden; else
  // nobody needs to know.
  bool pack_block(const Problem<Input>& problem, int64_t key_head,
                  int64_t column, std::byte* packed) const {
    const AttentionShape& shape = problem.shape;
    const int64_t batch = key_head * shape.group;
    const int64_t count = std::min(kKeyBlock, shape.columns - column);
    const auto key = problem.key.at(shape, batch).from(column, 0);
    const auto value = problem.value.at(shape, batch).from(column, 0);
    tiles::Range key_range;
    tiles::Range value_range;
    tiles::pack_strips<Scores, tiles::Side::Right>(
        rows_of(key), count, shape.head_size,
        packed + column / tiles::kStrip * key_strip_size(), key_range);
    tiles::pack_strips<Values, tiles::Side::Right>(
        columns_of(value), shape.value_size, count, values(packed, column),
        value_range, kBlockUnits);
    if (!is_fit_for_scores<Input>(key_range) ||
        !is_fit_for_values<Input>(value_range)) {
      is_refused = true;
    }
    if constexpr (std::is_same_v<Input, BFloat16>) {
      return problem.hides_keys() && are_finite(key, count, shape.head_size) &&
             are_finite(value, count, shape.value_size);
    }
    return true;  // others are refused
  }
};

}  // namespace pkg::cpu::attention

#endif
