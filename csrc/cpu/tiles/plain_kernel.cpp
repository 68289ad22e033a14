#include "cpu/tiles/plain_kernel.h"

#if defined(PKG_HAS_TILES)

#include <immintrin.h>

#include <type_traits>

#include "cpu/simd/tile_registers.h"

namespace pkg::cpu::tiles {
namespace {

constexpr int64_t kSumBytes = 4;
constexpr int64_t kRightRowBytes = 128;  // of two tiles side by side

// Registers as in cpu/tiles/micro_kernel.cpp: 0 to 3 the sums, 4 and 5 tiles of
// the left operand, 6 and 7 of the right one.
// NOLINTBEGIN(cppcoreguidelines-macro-usage)
#define PKG_MULTIPLY(sums, left, right)            \
  if constexpr (std::is_same_v<Scheme, Int8By1>) { \
    _tile_dpbssd(sums, left, right);               \
  } else {                                         \
    _tile_dpbf16ps(sums, left, right);             \
  }
// A register's sums, those from (row, column) on, leave it, and those of the
// block before take their place.
#define PKG_RENEW(sums, row, column)                                          \
  _tile_stored(sums, tile.previous + (row) * tile.previous_stride + (column), \
               tile.previous_stride * kSumBytes);                             \
  if (tile.begin != nullptr) {                                                \
    _tile_loadd(sums, tile.begin + (row) * kSumsStride + (column),            \
                kSumsStride * kSumBytes);                                     \
  } else {                                                                    \
    _tile_zero(sums);                                                         \
  }
// NOLINTEND(cppcoreguidelines-macro-usage)

template <class Scheme, int kRowTiles, int kColumnTiles>
struct Kernel {
  using Tile = PlainTile<typename Scheme::Accumulator>;

  // B's tiles are loaded past the L1 cache, which A's strip nearly fills: n =
  // 512 1.26 TFLOP/s instead of 1.16. Loads are not all before the products, so
  // that they seldom wait for one another: 4 %.
  template <bool kFirst>
  [[gnu::always_inline]] static void multiply_unit(const std::byte* left,
                                                   const std::byte* right,
                                                   const Tile& tile) {
    _tile_loadd(4, left, tile.left_layout.row);
    _tile_stream_loadd(6, right, kRightRowBytes);
    if constexpr (kColumnTiles == 2) {
      _tile_stream_loadd(7, right + kRightRowBytes / 2, kRightRowBytes);
    }
    if constexpr (kFirst) {
      PKG_RENEW(0, 0, 0)
    }
    PKG_MULTIPLY(0, 4, 6)
    if constexpr (kFirst) {
      PKG_RENEW(1, 0, kTileRows)
    }
    if constexpr (kColumnTiles == 2) {
      PKG_MULTIPLY(1, 4, 7)
    }
    if constexpr (kRowTiles == 2) {
      _tile_loadd(5, left + tile.left_layout.tile, tile.left_layout.row);
    }
    if constexpr (kFirst) {
      PKG_RENEW(2, kTileRows, 0)
    }
    if constexpr (kRowTiles == 2) {
      PKG_MULTIPLY(2, 5, 6)
    }
    if constexpr (kFirst) {
      PKG_RENEW(3, kTileRows, kTileRows)
    }
    if constexpr (kRowTiles == 2 && kColumnTiles == 2) {
      PKG_MULTIPLY(3, 5, 7)
    }
  }

  [[gnu::noinline]] static void run(int64_t units, const Tile& tile) {
    cpu::detail::finish_stores();
    const std::byte* left = tile.left;
    const std::byte* right = tile.right;
    multiply_unit<true>(left, right, tile);
    for (int64_t unit = 1; unit < units; ++unit) {
      left += tile.left_layout.unit;
      right += kUnitBytes<Scheme>;
      multiply_unit<false>(left, right, tile);
      if (unit <= tile.work_steps) {
        tile.work.step(tile.work.state);
      }
    }
  }
};

}  // namespace

template <class Scheme>
void multiply_plain_tile(int row_tiles, int column_tiles, int64_t units,
                         const PlainTile<typename Scheme::Accumulator>& tile) {
  if (row_tiles == 2) {
    return column_tiles == 2 ? Kernel<Scheme, 2, 2>::run(units, tile)
                             : Kernel<Scheme, 2, 1>::run(units, tile);
  }
  return column_tiles == 2 ? Kernel<Scheme, 1, 2>::run(units, tile)
                           : Kernel<Scheme, 1, 1>::run(units, tile);
}

// NOLINTNEXTLINE(cppcoreguidelines-macro-usage)
#define PKG_PLAIN_TILE(Scheme)               \
  template void multiply_plain_tile<Scheme>( \
      int, int, int64_t, const PlainTile<Scheme::Accumulator>&)
PKG_PLAIN_TILE(Float32By1);
PKG_PLAIN_TILE(Bfloat16By1);
PKG_PLAIN_TILE(Int8By1);

}  // namespace pkg::cpu::tiles

#endif
