// A tile's words transposed: what makes a right tile of lines, or a left one of
// columns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/simd/transpose.h"
#include "cpu/tiles/pack_tiles.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::tiles {

// From rows one behind the other to where a packed tile's rows are.
template <Side side>
void transpose_tile(const void* from, std::byte* to) {
  using Words = simd::Vector<uint32_t>;
  Words square[kTileRows];
  std::memcpy(square, from, sizeof(square));
  simd::transpose(square);
#pragma GCC unroll 16
  for (int row = 0; row < kTileRows; ++row) {
    std::memcpy(to + row * kTileRowStep<side>, square + row, sizeof(Words));
  }
}

}  // namespace pkg::cpu::tiles

#endif
