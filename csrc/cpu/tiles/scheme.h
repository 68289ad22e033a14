// How a product is made by tile registers: what parts an operand's values are
// split into, which products of parts are added, and in which order.
//
// A tile multiplies pairs of bfloat16 (8 significant bits) or quads of int8. A
// float32 is the sum of three bfloat16s, each the rounding of what the ones
// before it leave, and a float16 of two. Of float32's nine products of parts
// the three least are below the rounding of a fused multiply-add; the other six
// are added over a block of the inner dimension, least ones first and into the
// same tiles, so that they are added to sums as small as themselves.
//
// Error of float32 products against float64, root of mean squares, as a
// multiple of torch.mm's: 0.21 to 0.42 by six products, since a tile rounds
// half as often; 13 to 43 by three (two parts); 7000 to 20000 by one.
#pragma once

#include <cstdint>

#include "cpu/simd/simd.h"
#include "host/integer_math.h"

namespace pkg::cpu::tiles {

using simd::BFloat16;
using simd::Half;

// A tile is 16 rows of 64 bytes; a strip is the rows, or columns, of two.
inline constexpr int kTileRows = 16;
inline constexpr int kTileBytes = 1024;
inline constexpr int kStrip = 2 * kTileRows;

// Products of parts (left, right) in the order in which they are added; the
// last, of the largest parts, after the others of a whole block.
struct PartProduct {
  int left;
  int right;
};

template <class T>
struct SchemeBase {
  using Input = T;
  using Accumulator = float;
  // Values of the inner dimension in a row of a tile: a unit.
  static constexpr int kValues = 32;
  // Whether values must be seen to lie in a range, and it is told why in
  // cpu/tiles/range.h.
  static constexpr bool kHasRange = true;
};

struct Float32By6 : SchemeBase<float> {
  static constexpr int kParts = 3;
  static constexpr PartProduct kProducts[] = {{0, 2}, {0, 1}, {1, 1},
                                              {1, 0}, {2, 0}, {0, 0}};
  static constexpr int kUnits = 3;
};
struct Float32By3 : SchemeBase<float> {
  static constexpr int kParts = 2;
  static constexpr PartProduct kProducts[] = {{0, 1}, {1, 0}, {0, 0}};
  static constexpr int kUnits = 4;
};
struct Float32By1 : SchemeBase<float> {
  static constexpr int kParts = 1;
  static constexpr PartProduct kProducts[] = {{0, 0}};
  static constexpr int kUnits = 16;
};

// 11 bits = 8 + 3. Both parts are exact, and so is every product. Without that
// of the two small parts, 2^-18 of a term, sums whose terms cancel would have
// ten times the error of float32 sums, results in float16 too.
struct Float16By4 : SchemeBase<Half> {
  static constexpr int kParts = 2;
  static constexpr PartProduct kProducts[] = {{1, 1}, {0, 1}, {1, 0}, {0, 0}};
  static constexpr int kUnits = 6;
};

struct Bfloat16By1 : SchemeBase<BFloat16> {
  static constexpr int kParts = 1;
  static constexpr PartProduct kProducts[] = {{0, 0}};
  static constexpr int kUnits = 16;
  static constexpr bool kHasRange = false;
};

// As Bfloat16By1, where it matters whether all values are finite.
struct RangedBfloat16By1 : Bfloat16By1 {
  static constexpr bool kHasRange = true;
};

struct Int8By1 : SchemeBase<int8_t> {
  using Accumulator = int32_t;
  static constexpr int kParts = 1;
  static constexpr PartProduct kProducts[] = {{0, 0}};
  static constexpr int kValues = 64;
  static constexpr int kUnits = 16;
  static constexpr bool kHasRange = false;
};

template <class Scheme>
inline constexpr int kProductCount =
    static_cast<int>(sizeof(Scheme::kProducts) / sizeof(PartProduct));

// Bytes of a strip's unit: every part of two tiles.
template <class Scheme>
inline constexpr int64_t kUnitBytes = int64_t{Scheme::kParts} * 2 * kTileBytes;

// Pieces that the values of a tile are packed in; one part of bfloat16 or int8
// is little work.
template <class Scheme>
inline constexpr int kRowPieces = Scheme::kParts == 1 ? 1 : 4;

// Units of a block (KC) of so long an inner dimension: what two thirds of the
// L1 cache hold of a strip. Of a long one float32's are longer, though they do
// not lie there then: each addition of a block's sums to those before rounds,
// and it does so alike where terms have one sign.
template <class Scheme>
constexpr int64_t block_units(int64_t inner) {
  constexpr int64_t kLong = 2048;
  constexpr int64_t kVeryLong = 4096;
  if (Scheme::kParts < 3 || inner <= kLong) {
    return Scheme::kUnits;
  }
  return (inner <= kVeryLong ? 2 : 3) * int64_t{Scheme::kUnits};
}

template <class Scheme>
constexpr int64_t units_of(int64_t inner) {
  return ceil_div(inner, Scheme::kValues);
}
constexpr int64_t strips_of(int64_t lines) { return ceil_div(lines, kStrip); }
template <class Scheme>
constexpr int64_t packed_bytes(int64_t lines, int64_t units) {
  return strips_of(lines) * units * kUnitBytes<Scheme>;
}

}  // namespace pkg::cpu::tiles
