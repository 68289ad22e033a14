// The operands of the forward pass as tile registers multiply them: how each
// dtype is split into parts, and keys and values packed once for all blocks of
// rows.
//
// float32 goes by three parts and six products, which is more exact than fused
// multiply-adds are. Probabilities of float16 are split into two bfloat16s, 16
// bits.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/attention/blocking.h"
#include "cpu/attention/problem.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/runtime/cache.h"
#include "cpu/tiles/pack_tiles.h"
#include "cpu/tiles/precision.h"
#include "cpu/tiles/range.h"
#include "cpu/tiles/scheme.h"
#include "host/integer_math.h"
#include "scaled_dot_product_attention.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::attention {

// Scores: of queries and keys. Values: how values are packed. Probabilities:
// how these are, and which products of parts with those of values are added.
// Sums of probabilities times values are scaled by kProbabilityScale: so that
// the last part of the least normal number is one.
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
  using Values = tiles::Float16By4;
  using Probabilities = tiles::Float32By3;
  static constexpr float kProbabilityScale = 1;
};
template <>
struct TileSchemes<simd::BFloat16> {
  using Scores = tiles::RangedBfloat16By1;
  using Values = tiles::RangedBfloat16By1;
  using Probabilities = tiles::Bfloat16By1;
  static constexpr float kProbabilityScale = 1;
};

template <class Input>
inline constexpr bool kIsOnePart = TileSchemes<Input>::Scores::kParts == 1;

// Of bfloat16 the forward pass alone: the backward one goes by the strips of
// key_block_gradients.h, whose micro-kernel has tile registers too.
template <class Input>
inline constexpr bool kTrainsByTiles =
    std::is_same_v<Input, float> || std::is_same_v<Input, Half>;
template <class Input>
inline constexpr bool kGoesByTiles =
    kTrainsByTiles<Input> || std::is_same_v<Input, simd::BFloat16>;

// The largest head or value size of which the backward pass goes by tiles.
inline constexpr int64_t kMostTrainedSize = 256;

// Whether it is the faster way: with few rows or keys, or short ones, splitting
// and packing take longer than what they save. As fast with squares of so many:
// float32 96 to 128, others 32. Where a backward pass may follow it says so of
// both, whose scores have to be the same.
template <class Input>
bool goes_by_tiles(const AttentionShape& shape, bool has_backward) {
  constexpr bool kSingle = std::is_same_v<Input, float>;
  constexpr int64_t kLeastLength = kSingle ? 128 : 32;
  constexpr int64_t kLeastSize = 32;
  if (kSingle && tiles::float32_products() == tiles::Float32Products::None) {
    return false;
  }
  if (has_backward &&
      std::max(shape.head_size, shape.value_size) > kMostTrainedSize) {
    return false;
  }
  return std::min(shape.rows, shape.columns) >= kLeastLength &&
         std::min(shape.head_size, shape.value_size) >= kLeastSize;
}

// Heads of so many bytes that are packed at a time: about what the L2 caches of
// so many threads hold (docs/tuning/tiles.md).
constexpr int64_t tile_heads_at_once(int64_t head_bytes, int64_t threads) {
  return threads * kLargeL2Bytes / std::max<int64_t>(head_bytes, 1);
}

// Whether parts say all of an operand's values, which are below 2^most. Of
// float16 they do if these are finite.
template <class Input>
bool keeps_all_parts(const tiles::Range& range, int most) {
  constexpr int kLeast = -100;
  return std::is_same_v<Input, Half> ? range.lies_below(most)
                                     : range.lies_within(kLeast, most);
}

// Of queries and keys: what parts in bfloat16 cannot say changes no score that
// matters, as long as all are finite. Of values: their least bits count.
// One part says all of bfloat16: it has to be finite where keys are hidden,
// since 0 times infinity is NaN.
template <class Input>
bool is_fit_for_scores(const tiles::Range& range, bool hides_keys) {
  if constexpr (kIsOnePart<Input>) {
    return !hides_keys || range.is_finite();
  }
  constexpr int kMost = 60;
  return range.lies_below(kMost);
}
template <class Input>
bool is_fit_for_values(const tiles::Range& range, bool hides_keys) {
  if constexpr (kIsOnePart<Input>) {
    return !hides_keys || range.is_finite();
  }
  constexpr int kMost = 80;
  return keeps_all_parts<Input>(range, kMost);
}

template <class T>
tiles::Lines<T> rows_of(const MatrixView<T>& matrix) {
  return {matrix.data, matrix.row_stride, matrix.column_stride};
}
template <class T>
tiles::Lines<T> columns_of(const MatrixView<T>& matrix) {
  return rows_of(matrix.transposed());
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
        size(key_size + ceil_div(shape.columns, kKeyBlock) * value_block_size) {
  }

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
    const bool hides_keys = problem.hides_keys();
    if (!is_fit_for_scores<Input>(key_range, hides_keys) ||
        !is_fit_for_values<Input>(value_range, hides_keys)) {
      is_refused = true;
    }
    return true;  // what is not is refused
  }
};

}  // namespace pkg::cpu::attention

#endif
