// Packing for products by residues: lines' scales, and the tiles of their
// remainders.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/residues/scheme.h"
#include "cpu/tiles/lines.h"
#include "cpu/tiles/pack_tiles.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::residues {

using tiles::Lines;
using tiles::Side;

// Lines that are read together where they lie side by side.
inline constexpr int64_t kLinesTogether = 512;

// Of a strip's lines. All are zero for a line of zeros.
struct alignas(64) Scales {
  // What a value is multiplied by to be an integer, 2^s, and its inverse.
  double to_integer[kStrip];
  double from_integer[kStrip];
  // How far the leading bits of a magnitude are above its last: t.
  uint64_t leading[kStrip];
  // The sum T of products of leading bits that an element needs is a's need
  // times b's unit plus a's unit times b's need.
  float need[kStrip];
  float unit[kStrip];
};

// Finds the scales of lines of `values` values, strip after strip; lines that
// do not exist are zeros. False if a value is not finite, or a line's largest
// so large or small that its scale, or a result's, might not be a number.
bool find_scales(const Lines<double>& source, int64_t lines, int64_t values,
                 Scales* scales);

// Packs `values` values of lines of which the scales are known, strip after
// strip; of each, planes are plane_bytes apart.
template <Side side>
void pack_lines(const Lines<double>& source, int64_t lines, int64_t values,
                const Scales* scales, std::byte* packed, int64_t plane_bytes);

}  // namespace pkg::cpu::residues

#endif
