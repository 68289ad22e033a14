// A row of activations as fixed point, for products with 4-bit weights by
// integer dot products.
//
// In chunks of 128 columns: x = X unit with X whole and unit the power of two
// for which the chunk's largest |X| just fits in kDigits signed bytes. X is off
// by at most half, so x by at most 1.009 2^-15 (two digits) or 1.009 2^-23
// (three) of the chunk's largest |x|; what has all its bits above the unit is
// exact. For comparison: float32 makes an error of 2^-24 of the partial sum at
// each addition, and rounding the result to bfloat16 or float16 one of 2^-9 or
// 2^-12 of it. float32 takes three digits, half precision two.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/int4/tiled_weight.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu {

using simd::Vector;

inline constexpr int64_t kChunkColumns = 128;  // columns: 16 words
inline constexpr int kChunkWords = 16;

// Of one chunk, in the order in which a chunk of a row of the weight lies in
// memory: 64 bytes of the columns in the lower halves of the weight's bytes,
// and 64 of those in the upper halves.
template <int kDigits>
struct alignas(64) DigitChunk {
  int8_t digits[kDigits][2][64];
  // -8 times the sum of each word's X, since the weight's values are q - 8.
  int32_t corrections[kChunkWords];
  float unit;
};

// The chunk's column whose value lies in the byte `at` (0..63) of a row, in its
// lower (half 0) or upper half.
struct ChunkOrder {
  uint8_t column[2][64];

  explicit ChunkOrder(int64_t inner_k_tiles) {
    const TiledLayout layout{kTiledRows, kChunkColumns, inner_k_tiles};
    for (int64_t block = 0; block < layout.blocks(); ++block) {
      for (int64_t lane = 0; lane < 4; ++lane) {
        const int64_t word = word_of(layout, block, lane);
        for (int64_t byte = 0; byte < 4; ++byte) {
          for (int64_t half = 0; half < 2; ++half) {
            const int64_t j = byte % 2 * 2 + half;
            column[half][4 * word + byte] = static_cast<uint8_t>(
                block * kTiledBlock + 8 * j + 2 * lane + byte / 2);
          }
        }
      }
    }
  }

  // Where a word lies among the 16 of a chunk of a row.
  static int64_t word_of(const TiledLayout& layout, int64_t block,
                         int64_t lane) {
    return block / layout.words_of_lane() * layout.words_of_row() +
           lane * layout.words_of_lane() + block % layout.words_of_lane();
  }
};

// The unit for a chunk whose largest |x| is `largest`, or 0 where fixed point
// will not do: for infinities, NaN, and numbers so large or so small that
// products could leave float's range on the way.
template <int kDigits>
float unit_of_chunk(float largest) {
  if (largest == 0) {
    return 1;
  }
  if (!(largest > 0x1p-60F && largest < 0x1p60F)) {
    return 0;
  }
  // The largest number of signed bytes is 0.996 2^(8 kDigits - 1).
  const uint32_t exponent =
      std::bit_cast<uint32_t>(largest * 1.009F) & 0x7F800000U;
  constexpr float kScale = kDigits == 2 ? 0x1p-14F : 0x1p-22F;
  return std::bit_cast<float>(exponent) * kScale;
}

// Writes a chunk of `count` values `stride` apart, the others being zero, and
// to `sums` the sum of each of its blocks of 32. False where fixed point will
// not do.
template <int kDigits, class T>
bool write_digits(const T* from, int64_t stride, int64_t count,
                  const ChunkOrder& order, DigitChunk<kDigits>& chunk,
                  float* sums) {
  constexpr int kLanes = simd::kLanes<float>;
  float values[kChunkColumns] = {};
  if (stride == 1 && count == kChunkColumns) {
    for (int64_t i = 0; i < kChunkColumns; i += kLanes) {
      simd::store(values + i, simd::load(from + i));
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      values[i] = static_cast<float>(from[i * stride]);
    }
  }
  // As integers magnitudes are in order, and infinity and NaN beyond all.
  Vector<int32_t> most{};
  for (int64_t i = 0; i < kChunkColumns; i += kLanes) {
    const auto bits =
        std::bit_cast<Vector<int32_t>>(simd::load(values + i)) & 0x7FFFFFFF;
    most = bits > most ? bits : most;
  }
  int32_t largest = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    largest = std::max(largest, most[lane]);
  }
  const float unit = unit_of_chunk<kDigits>(std::bit_cast<float>(largest));
  chunk.unit = unit;
  if (unit == 0) {
    return false;
  }
  // With this added, the bytes are digits from 0 to 255; less 128, signed ones.
  constexpr int32_t kOffset = kDigits == 2 ? 0x8080 : 0x808080;
  const float scale = 1 / unit;
  int32_t whole[kChunkColumns];
  int32_t digits[kChunkColumns];
  for (int64_t i = 0; i < kChunkColumns; i += kLanes) {
    const Vector<float> scaled = simd::load(values + i) * scale;
    const Vector<float> half =
        scaled < 0 ? Vector<float>{} - 0.5F : Vector<float>{} + 0.5F;
    const auto x = __builtin_convertvector(scaled + half, Vector<int32_t>);
    simd::store(whole + i, x);
    simd::store(digits + i, (x + kOffset) ^ kOffset);
  }
  for (int64_t block = 0; block < kChunkColumns / kTiledBlock; ++block) {
    int32_t sum = 0;  // at most 2^5 2^23
    for (int64_t i = 0; i < kTiledBlock; ++i) {
      sum += whole[block * kTiledBlock + i];
    }
    sums[block] = static_cast<float>(sum) * unit;
  }
  for (int word = 0; word < kChunkWords; ++word) {
    int32_t sum = 0;
    for (int at = 4 * word; at < 4 * word + 4; ++at) {
      for (int half = 0; half < 2; ++half) {
        const auto value =
            static_cast<uint32_t>(digits[order.column[half][at]]);
        sum += whole[order.column[half][at]];
        for (int digit = 0; digit < kDigits; ++digit) {
          chunk.digits[digit][half][at] =
              static_cast<int8_t>(value >> (8 * digit));
        }
      }
    }
    chunk.corrections[word] = -8 * sum;
  }
  return true;
}

}  // namespace pkg::cpu
