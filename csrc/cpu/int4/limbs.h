// A row of activations as block floating point, for products with 4-bit weights
// by dot products of bytes.
//
// A block, or chunk, is 128 columns that share a unit, a power of two. x
// becomes the whole number X, the nearest to x / unit, and X is written in base
// 256 with signed bytes, its limbs:
//
//   x = X unit + e,  |e| <= unit / 2      X = L0 + 256 L1 (+ 65536 L2)
//                                         -128 <= Li <= 127
//
// n signed bytes reach 127 (256^n - 1) / 255 = 0.996 2^(8n - 1); the unit is
// the smallest for which the chunk's largest |X| is not more. So x is off by at
// most 1.009 2^-15 (two limbs) or 1.009 2^-23 (three) of the chunk's largest
// |x|; what has all its bits above the unit is exact. For comparison: float32
// makes an error of 2^-24 of the partial sum at each addition, and rounding the
// result to bfloat16 or float16 one of 2^-9 or 2^-12 of it. float32 takes three
// limbs, half precision two.
//
// To limbs: X + 128 (1 + 256 + 65536) has the bytes Li + 128, from 0 to 255,
// for base 256 with such digits is unique; and a byte less 128 is the byte with
// its highest bit flipped.
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

// A chunk in the order in which one of a row of the weight lies in memory
// (cpu/int4/few_rows.h draws it): 64 bytes of the columns in the lower halves
// of the weight's bytes, and 64 of those in the upper halves.
template <int kLimbs>
struct alignas(64) LimbChunk {
  int8_t limbs[kLimbs][2][64];
  // -8 times the sum of each word's X, since the weight's values are q - 8.
  int32_t compensation[kChunkWords];
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

  // Where the word of a block and one of its four lanes (TiledLayout) lies
  // among the 16 of a chunk of a row.
  static int64_t word_of(const TiledLayout& layout, int64_t block,
                         int64_t lane) {
    return block / layout.words_of_lane() * layout.words_of_row() +
           lane * layout.words_of_lane() + block % layout.words_of_lane();
  }
};

// The unit for a chunk whose largest |x| is `largest`, or 0 where block
// floating point will not do: for infinities, NaN, and numbers so large or so
// small that products could leave float's range on the way.
template <int kLimbs>
float unit_of_chunk(float largest) {
  if (largest == 0) {
    return 1;
  }
  if (!(largest > 0x1p-60F && largest < 0x1p60F)) {
    return 0;
  }
  // The largest number of signed bytes is 0.996 2^(8 kLimbs - 1).
  const uint32_t exponent =
      std::bit_cast<uint32_t>(largest * 1.009F) & 0x7F800000U;
  constexpr float kScale = kLimbs == 2 ? 0x1p-14F : 0x1p-22F;
  return std::bit_cast<float>(exponent) * kScale;
}

namespace detail {

using ChunkValues = float[kChunkColumns];
using ChunkIntegers = int32_t[kChunkColumns];

// `count` values `stride` apart, and zeros behind them.
template <class T>
void load_chunk_values(const T* from, int64_t stride, int64_t count,
                       ChunkValues& values) {
  if (stride == 1 && count == kChunkColumns) {
    constexpr int kLanes = simd::kLanes<float>;
    for (int64_t i = 0; i < kChunkColumns; i += kLanes) {
      simd::store(values + i, simd::load(from + i));
    }
    return;
  }
  std::fill_n(values, kChunkColumns, 0.0F);
  for (int64_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>(from[i * stride]);
  }
}

// The largest magnitude; infinity or NaN where there is one, since as integers
// magnitudes are in order, and these beyond all.
inline float largest_magnitude(const ChunkValues& values) {
  constexpr int kLanes = simd::kLanes<float>;
  Vector<int32_t> most{};
  for (int64_t i = 0; i < kChunkColumns; i += kLanes) {
    const auto bits =
        std::bit_cast<Vector<int32_t>>(simd::load(values + i)) & 0x7FFFFFFF;
    most = bits > most ? bits : most;
  }
  int32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) {
    largest = std::max(largest, most[i]);
  }
  return std::bit_cast<float>(largest);
}

// X of each column, and its limbs as bytes from the lowest on.
template <int kLimbs>
void round_to_units(const ChunkValues& values, float unit, ChunkIntegers& whole,
                    ChunkIntegers& limbs) {
  constexpr int kLanes = simd::kLanes<float>;
  constexpr int32_t kOffset = kLimbs == 2 ? 0x8080 : 0x808080;
  const float scale = 1 / unit;
  for (int64_t i = 0; i < kChunkColumns; i += kLanes) {
    const Vector<float> scaled = simd::load(values + i) * scale;
    const Vector<float> half =
        scaled < 0 ? Vector<float>{} - 0.5F : Vector<float>{} + 0.5F;
    const auto x = __builtin_convertvector(scaled + half, Vector<int32_t>);
    simd::store(whole + i, x);
    simd::store(limbs + i, (x + kOffset) ^ kOffset);
  }
}

// Limbs in the weight's order, and each word's compensation.
template <int kLimbs>
void reorder_limbs(const ChunkIntegers& whole, const ChunkIntegers& limbs,
                   const ChunkOrder& order, LimbChunk<kLimbs>& chunk) {
  for (int word = 0; word < kChunkWords; ++word) {
    int32_t sum = 0;
    for (int at = 4 * word; at < 4 * word + 4; ++at) {
      for (int half = 0; half < 2; ++half) {
        const int column = order.column[half][at];
        const auto bytes = static_cast<uint32_t>(limbs[column]);
        sum += whole[column];
        for (int limb = 0; limb < kLimbs; ++limb) {
          chunk.limbs[limb][half][at] =
              static_cast<int8_t>(bytes >> (8 * limb));
        }
      }
    }
    chunk.compensation[word] = -8 * sum;
  }
}

}  // namespace detail

// Writes a chunk of `count` values `stride` apart, the others being zero, and
// to `sums` the sum of each of its blocks of 32. False where block floating
// point will not do.
template <int kLimbs, class T>
bool write_limbs(const T* from, int64_t stride, int64_t count,
                 const ChunkOrder& order, LimbChunk<kLimbs>& chunk,
                 float* sums) {
  detail::ChunkValues values;
  detail::load_chunk_values(from, stride, count, values);
  const float unit = unit_of_chunk<kLimbs>(detail::largest_magnitude(values));
  chunk.unit = unit;
  if (unit == 0) {
    return false;
  }
  detail::ChunkIntegers whole;
  detail::ChunkIntegers limbs;
  detail::round_to_units<kLimbs>(values, unit, whole, limbs);
  for (int64_t block = 0; block < kChunkColumns / kTiledBlock; ++block) {
    int32_t sum = 0;  // at most 2^5 2^23
    for (int64_t i = 0; i < kTiledBlock; ++i) {
      sum += whole[block * kTiledBlock + i];
    }
    sums[block] = static_cast<float>(sum) * unit;
  }
  detail::reorder_limbs(whole, limbs, order, chunk);
  return true;
}

}  // namespace pkg::cpu
