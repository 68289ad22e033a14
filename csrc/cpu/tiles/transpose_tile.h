// Tiles transposed: a tile's words, which makes a right one of lines, or a left
// one of columns; and the sums of a micro-tile.
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

// A micro-tile's sums where they are, `added` to them if it is not null: rows
// become columns. Of the 16 x 16 elements of each tile, which need not exist
// beyond so many rows and columns of the micro-tile.
template <class Accumulator>
void turn_sums(Accumulator* sums, const Accumulator* added, int rows,
               int columns) {
  using Vector = simd::Vector<Accumulator>;
  static_assert(simd::kLanes<Accumulator> == kTileRows);
  const auto turned = [&](int64_t at, Vector(&square)[kTileRows]) {
#pragma GCC unroll 16
    for (int row = 0; row < kTileRows; ++row) {
      const int64_t element = at + row * kSumsStride;
      square[row] = simd::load(sums + element);
      if (added != nullptr) {
        square[row] += simd::load(added + element);
      }
    }
    simd::transpose(square);
  };
  const auto store = [&](int64_t at, const Vector(&square)[kTileRows]) {
#pragma GCC unroll 16
    for (int row = 0; row < kTileRows; ++row) {
      simd::store(sums + at + row * kSumsStride, square[row]);
    }
  };
  constexpr int64_t kBelow = kTileRows * kSumsStride;
  Vector first[kTileRows];
  turned(0, first);
  store(0, first);
  const bool has_below = rows > kTileRows;
  const bool has_beside = columns > kTileRows;
  Vector second[kTileRows];
  if (has_below) {
    turned(kBelow, first);
  }
  if (has_beside) {
    turned(kTileRows, second);
    store(kBelow, second);
  }
  if (has_below) {
    store(kTileRows, first);
  }
  if (has_below && has_beside) {
    turned(kBelow + kTileRows, first);
    store(kBelow + kTileRows, first);
  }
}

}  // namespace pkg::cpu::tiles

#endif
