// The processor's tile registers (AMX): eight of up to 16 rows of 64 bytes, and
// a unit that multiplies two of them and adds the product to a third. An
// arithmetic that uses them (kUsesTileRegisters) has its left operands by rows,
// since a tile is loaded from rows of 64 bytes; right operands are the panels
// that all arithmetics have, a step's lanes side by side.
//
// Sums go through a buffer in the L1 cache to the vector registers, where the
// micro-kernel does with them what it does with its own. What is left of the
// inner dimension, and one or two rows, are multiplied by vectors.
//
// Intel Xeon, one core, bfloat16, 2026-11-22, in TFLOP/s: 3.17 at most; 1.8
// with tiles of 12 rows and two accumulators, operands in the L1 cache, 2.4
// with 16 rows, since a product takes 16 cycles with either; four accumulators
// bring nothing more. A right panel that comes from the L2 cache takes a third
// off. Dot products of vectors reach 0.11. Shaping and releasing the registers
// takes 52 ns: once for a thread's part of the work.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/gemm/arithmetic.h"

namespace pkg::cpu {

template <class Arithmetic>
inline constexpr bool kUsesTileRegisters = false;

// Makes the tile registers ready for multiply_by_tiles, in this thread and
// while it lives. Other libraries of the process shape them otherwise.
template <class Arithmetic>
struct TileRegisters {
  TileRegisters() {}  // nothing to do, and no unused variable
};

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define PKG_HAS_TILES 1

template <>
inline constexpr bool kUsesTileRegisters<Bfloat16Dot> = true;
template <>
inline constexpr bool kUsesTileRegisters<Int8Quads> = true;

// Rows of the two kinds of tiles, and lanes of their rows.
inline constexpr int kTallTile = 12;
inline constexpr int kShortTile = 4;
inline constexpr int kTileLanes = 16;

namespace detail {

// As LDTILECFG reads it.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t first_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Which register is what. The intrinsics want its number as it stands.
#define PKG_TALL_SUMS 0, 1
#define PKG_TALL_LEFT 2
#define PKG_SHORT_SUMS 3, 4
#define PKG_SHORT_LEFT 5
#define PKG_RIGHT 6, 7

constexpr TileShapes tile_shapes() {
  TileShapes shapes;
  for (const int tile : {PKG_TALL_SUMS, PKG_TALL_LEFT}) {
    shapes.rows[tile] = kTallTile;
  }
  for (const int tile : {PKG_SHORT_SUMS, PKG_SHORT_LEFT}) {
    shapes.rows[tile] = kShortTile;
  }
  for (const int tile : {PKG_RIGHT}) {
    shapes.rows[tile] = kTileLanes;
  }
  std::fill_n(shapes.row_bytes, 8, uint16_t{64});
  return shapes;
}

// To GCC the intrinsics read no memory. All that was written is there after
// this.
inline void finish_stores() { __asm__ volatile("" : : : "memory"); }

inline void load_shapes(const TileShapes& shapes) {
  finish_stores();
  _tile_loadconfig(&shapes);
}

class ShapedTiles {
 public:
  ShapedTiles() {
    static constexpr TileShapes kShapes = tile_shapes();
    load_shapes(kShapes);
  }
  ~ShapedTiles() { _tile_release(); }
  ShapedTiles(const ShapedTiles&) = delete;
  ShapedTiles& operator=(const ShapedTiles&) = delete;
};

}  // namespace detail

template <>
struct TileRegisters<Bfloat16Dot> : detail::ShapedTiles {};
template <>
struct TileRegisters<Int8Quads> : detail::ShapedTiles {};

namespace detail {

// Adds the products of two tiles to the sums: of pairs of bfloat16, or of four
// signed bytes with four unsigned ones, as Int8Quads packs them.
#define PKG_MULTIPLY_ADD(sums, left_tile, right_tile)      \
  if constexpr (std::is_same_v<Arithmetic, Bfloat16Dot>) { \
    _tile_dpbf16ps(sums, left_tile, right_tile);           \
  } else {                                                 \
    _tile_dpbsud(sums, left_tile, right_tile);             \
  }
// The sums of one tile's rows and kVectors registers of columns, written to
// `to`. A macro, since the intrinsics want numbers.
#define PKG_MULTIPLY_TILE(sums, more_sums, left_tile, right_tile, more_right) \
  _tile_zero(sums);                                                           \
  _tile_zero(more_sums);                                                      \
  for (int64_t lane = 0; lane < lanes; lane += kTileLanes) {                  \
    const uint32_t* step = right + lane * step_stride;                        \
    _tile_loadd(left_tile, left + lane * kLaneBytes, row_bytes);              \
    _tile_loadd(right_tile, step, step_bytes);                                \
    PKG_MULTIPLY_ADD(sums, left_tile, right_tile)                             \
    if constexpr (kVectors == 2) {                                            \
      _tile_loadd(more_right, step + kTileLanes, step_bytes);                 \
      PKG_MULTIPLY_ADD(more_sums, left_tile, more_right)                      \
    }                                                                         \
  }                                                                           \
  _tile_stored(sums, to, kStoredBytes);                                       \
  if constexpr (kVectors == 2) {                                              \
    _tile_stored(more_sums, to + kTileLanes, kStoredBytes);                   \
  }
// With the registers' numbers put in.
#define PKG_MULTIPLY_TILE_OF(...) PKG_MULTIPLY_TILE(__VA_ARGS__)

}  // namespace detail

// Whether a strip of so many rows is made of tiles.
template <int kRows>
inline constexpr bool kRowsOfTiles = kRows % kShortTile == 0;

// Adds the products of kRows rows, row_bytes apart, and kVectors registers of a
// right panel's columns, over a multiple of kTileLanes lanes, to the sums,
// which are zero but for an arithmetic's compensation.
template <class Arithmetic, int kRows, int kVectors>
[[gnu::always_inline]] inline void multiply_by_tiles(
    int64_t lanes, const void* rows, int64_t row_bytes, const uint32_t* right,
    int64_t step_stride,
    Vector<typename Arithmetic::Accumulator> (&sums)[kRows][kVectors]) {
  using Accumulator = typename Arithmetic::Accumulator;
  static_assert(kRowsOfTiles<kRows> && (kVectors == 1 || kVectors == 2));
  constexpr int kTile = kRows == kTallTile ? kTallTile : kShortTile;
  constexpr int kWidth = kVectors * kTileLanes;
  constexpr int64_t kLaneBytes = sizeof(uint32_t);
  constexpr int64_t kStoredBytes = kWidth * kLaneBytes;
  const int64_t step_bytes = step_stride * kLaneBytes;
  alignas(64) Accumulator products[kRows * kWidth];
  detail::finish_stores();
  for (int row = 0; row < kRows; row += kTile) {
    const auto* left = static_cast<const std::byte*>(rows) + row * row_bytes;
    Accumulator* to = products + row * kWidth;
    if constexpr (kTile == kTallTile) {
      PKG_MULTIPLY_TILE_OF(PKG_TALL_SUMS, PKG_TALL_LEFT, PKG_RIGHT)
    } else {
      PKG_MULTIPLY_TILE_OF(PKG_SHORT_SUMS, PKG_SHORT_LEFT, PKG_RIGHT)
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      const auto sum = simd::load(products + row * kWidth + v * kTileLanes);
      sums[row][v] = Arithmetic::kCompensated ? sums[row][v] + sum : sum;
    }
  }
}

#endif

}  // namespace pkg::cpu
