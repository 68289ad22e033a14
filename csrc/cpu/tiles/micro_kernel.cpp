#include "cpu/tiles/micro_kernel.h"

#if defined(PKG_HAS_TILES)

#include <immintrin.h>

#include <algorithm>

#include "cpu/simd/tile_registers.h"

namespace pkg::cpu::tiles {
namespace {

using cpu::detail::finish_stores;
using cpu::detail::TileShapes;

constexpr TileShapes square_tiles() {
  TileShapes shapes;
  std::fill_n(shapes.row_bytes, 8, uint16_t{64});
  std::fill_n(shapes.rows, 8, uint8_t{kTileRows});
  return shapes;
}

// Registers 0 to 3 are the sums, row by row of tiles; 4 and 5 tiles of the left
// operand; 6 and 7 of the right one. The intrinsics want a register's number as
// it stands.
constexpr int64_t kTileRowBytes = 64;
constexpr int64_t kRightRowBytes = 2 * kTileRowBytes;  // side by side
constexpr int64_t kNumberBytes = 4;                    // of a sum

// NOLINTBEGIN(cppcoreguidelines-macro-usage)
#define PKG_LOAD(side, tile, from, row_bytes)  \
  if constexpr (streamed == Streamed::side) {  \
    _tile_stream_loadd(tile, from, row_bytes); \
  } else {                                     \
    _tile_loadd(tile, from, row_bytes);        \
  }
// A register's sums, those from (row, column) on, leave it.
#define PKG_STORE_PREVIOUS(sums, row, column)                                 \
  _tile_stored(sums, tile.previous + (row) * tile.previous_stride + (column), \
               tile.previous_stride * kNumberBytes);
// The first product of a block: the register's sums of the block before leave.
#define PKG_MULTIPLY_FIRST(sums, left, right, row, column) \
  PKG_STORE_PREVIOUS(sums, row, column)                    \
  _tile_zero(sums);                                        \
  _tile_dpbf16ps(sums, left, right);
// NOLINTEND(cppcoreguidelines-macro-usage)

template <class Scheme, Streamed streamed, int kRowTiles, int kColumnTiles>
struct Kernel {
  using Tile = MicroTile<typename Scheme::Accumulator>;

  [[gnu::always_inline]] static void load_left(const std::byte* from) {
    PKG_LOAD(Left, 4, from, kTileRowBytes)
    if constexpr (kRowTiles == 2) {
      PKG_LOAD(Left, 5, from + kTileBytes, kTileRowBytes)
    }
  }
  [[gnu::always_inline]] static void load_right(const std::byte* from) {
    PKG_LOAD(Right, 6, from, kRightRowBytes)
    if constexpr (kColumnTiles == 2) {
      PKG_LOAD(Right, 7, from + kTileRowBytes, kRightRowBytes)
    }
  }

  [[gnu::always_inline]] static void multiply() {
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kColumnTiles == 2) {
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRowTiles == 2) {
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (kRowTiles == 2 && kColumnTiles == 2) {
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  [[gnu::always_inline]] static void multiply_first(const Tile& tile) {
    PKG_MULTIPLY_FIRST(0, 4, 6, 0, 0)
    if constexpr (kColumnTiles == 2) {
      PKG_MULTIPLY_FIRST(1, 4, 7, 0, kTileRows)
    } else {
      PKG_STORE_PREVIOUS(1, 0, kTileRows)
    }
    if constexpr (kRowTiles == 2) {
      PKG_MULTIPLY_FIRST(2, 5, 6, kTileRows, 0)
    } else {
      PKG_STORE_PREVIOUS(2, kTileRows, 0)
    }
    if constexpr (kRowTiles == 2 && kColumnTiles == 2) {
      PKG_MULTIPLY_FIRST(3, 5, 7, kTileRows, kTileRows)
    } else {
      PKG_STORE_PREVIOUS(3, kTileRows, kTileRows)
    }
  }

  // The product of parts with that number, of one unit.
  template <int kProduct>
  [[gnu::always_inline]] static void multiply_parts(const std::byte* left,
                                                    const std::byte* right,
                                                    bool first,
                                                    const Tile& tile) {
    constexpr PartProduct kThis = Scheme::kProducts[kProduct];
    constexpr bool kBegins =
        kProduct == 0 || kProduct == kProductCount<Scheme> - 1;
    constexpr PartProduct kBefore =
        kBegins ? PartProduct{-1, -1} : Scheme::kProducts[kProduct - 1];
    if constexpr (kThis.left != kBefore.left) {
      load_left(left + kThis.left * 2 * kTileBytes);
    }
    if constexpr (kThis.right != kBefore.right) {
      load_right(right + kThis.right * 2 * kTileBytes);
    }
    if (kProduct == 0 && first) {
      multiply_first(tile);
    } else {
      multiply();
    }
    tile.work.step(tile.work.state);
  }

  // All but the last, which is of the largest parts.
  template <int kProduct = 0>
  [[gnu::always_inline]] static void multiply_small_parts(
      const std::byte* left, const std::byte* right, bool first,
      const Tile& tile) {
    if constexpr (kProduct < kProductCount<Scheme> - 1) {
      multiply_parts<kProduct>(left, right, first, tile);
      multiply_small_parts<kProduct + 1>(left, right, first, tile);
    }
  }

  [[gnu::noinline]] static void run(int64_t units, const Tile& tile) {
    constexpr int kLast = kProductCount<Scheme> - 1;
    constexpr int64_t kStep = kUnitBytes<Scheme>;
    finish_stores();
    const std::byte* left = tile.left;
    const std::byte* right = tile.right;
    multiply_small_parts(left, right, true, tile);
    for (int64_t unit = 1; unit < units; ++unit) {
      multiply_small_parts(left + unit * kStep, right + unit * kStep, false,
                           tile);
    }
    multiply_parts<kLast>(left, right, true, tile);
#pragma GCC unroll 2
    for (int64_t unit = 1; unit < units; ++unit) {
      multiply_parts<kLast>(left + unit * kStep, right + unit * kStep, false,
                            tile);
    }
  }
};

}  // namespace

Registers::Registers() {
  static constexpr TileShapes kShapes = square_tiles();
  cpu::detail::load_shapes(kShapes);
}
Registers::~Registers() { _tile_release(); }

template <class Scheme, Streamed streamed>
void multiply_micro_tile(int row_tiles, int column_tiles, int64_t units,
                         const MicroTile<typename Scheme::Accumulator>& tile) {
  if (row_tiles == 2) {
    return column_tiles == 2 ? Kernel<Scheme, streamed, 2, 2>::run(units, tile)
                             : Kernel<Scheme, streamed, 2, 1>::run(units, tile);
  }
  return column_tiles == 2 ? Kernel<Scheme, streamed, 1, 2>::run(units, tile)
                           : Kernel<Scheme, streamed, 1, 1>::run(units, tile);
}

void store_sums(void* sums, int64_t stride) {
  const MicroTile<float> tile{nullptr, nullptr, static_cast<float*>(sums),
                              stride, kNoWork};
  PKG_STORE_PREVIOUS(0, 0, 0)
  PKG_STORE_PREVIOUS(1, 0, kTileRows)
  PKG_STORE_PREVIOUS(2, kTileRows, 0)
  PKG_STORE_PREVIOUS(3, kTileRows, kTileRows)
  finish_stores();
}

// NOLINTNEXTLINE(cppcoreguidelines-macro-usage)
#define PKG_MICRO_TILE(Scheme, streamed)                         \
  template void multiply_micro_tile<Scheme, Streamed::streamed>( \
      int, int, int64_t, const MicroTile<Scheme::Accumulator>&)
PKG_MICRO_TILE(Float32By6, Neither);
PKG_MICRO_TILE(Float32By6, Left);
PKG_MICRO_TILE(Float32By6, Right);
PKG_MICRO_TILE(Float32By3, Neither);
PKG_MICRO_TILE(Float32By3, Left);
PKG_MICRO_TILE(Float32By3, Right);
PKG_MICRO_TILE(Float16By4, Neither);
PKG_MICRO_TILE(Float16By4, Left);
PKG_MICRO_TILE(Float16By4, Right);

}  // namespace pkg::cpu::tiles

#endif
