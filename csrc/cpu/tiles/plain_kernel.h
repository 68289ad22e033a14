// The micro-kernel of cpu/tiles/plain_product.h: the sums of 32 x 32 elements
// of a result, in four tiles, over a long block of the inner dimension. As that
// of cpu/tiles/micro_kernel.h it leaves its sums in the registers.
//
// Intel Xeon (AMX), bfloat16, n = 512: of 780 ns for 16 units 400 are what the
// products take once the clock has fallen.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/tiles/micro_kernel.h"
#include "cpu/tiles/scheme.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::tiles {

// How the tiles of a left operand lie, in bytes: a tile's rows, the second tile
// behind the first, the next unit. Packed ones, or rows of a matrix.
struct LeftLayout {
  int64_t row = 64;
  int64_t tile = kTileBytes;
  int64_t unit = int64_t{2} * kTileBytes;
};

// Where a call finds what, all aligned to cache lines: a row of a tile that
// crosses one takes twice the time to load.
template <class Accumulator>
struct PlainTile {
  const std::byte* left;
  LeftLayout left_layout;
  const std::byte* right;
  // Sums of the blocks before, to begin with; null: zeros.
  const Accumulator* begin;
  // Where the sums that the registers hold from the call before go, and how
  // far its rows are from one another.
  Accumulator* previous;
  int64_t previous_stride;
  // What goes on beside the products, at most so many times, once a unit from
  // the second on.
  Work work;
  int64_t work_steps;
};

// Of row_tiles x column_tiles tiles, 1 or 2 of each, over `units` units.
template <class Scheme>
void multiply_plain_tile(int row_tiles, int column_tiles, int64_t units,
                         const PlainTile<typename Scheme::Accumulator>& tile);

}  // namespace pkg::cpu::tiles

#endif
