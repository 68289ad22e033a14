// The micro-kernel of many rows of int4_linear by tile registers: the sums of a
// group, and beside its products those of an earlier group scaled.
//
// Groups are short, 4 products of tiles for each 32 of their values, so what
// goes on beside the products stands between them, some rows after each: the
// processor looks ahead by about eight tiles, and waits longer for the next
// ones where all of a step's vectors stand before them.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "cpu/simd/tile_registers.h"
#include "cpu/tiles/pack_tiles.h"
#include "host/integer_math.h"

#if defined(PKG_HAS_TILES)

#include <immintrin.h>

namespace pkg::cpu {

using simd::Vector;

// The sums of a group, and what becomes of them: they are scaled and added to
// totals, with the sums of its activations times the zeros. Rows of 32.
struct GroupSums {
  const float* stored;
  float* totals;
  bool first;             // whether there are no totals yet
  const float* scales;    // of 32 columns, and as many zeros
  const float* row_sums;  // of its activations
};

// Where the kernel finds what; sums that the registers hold from the call
// before go to `previous`.
struct GroupTile {
  const std::byte* left;   // tiles of parts, as TilePacker packs them
  const std::byte* right;  // tiles of one part
  float* previous;
};

namespace detail {

// NOLINTBEGIN(cppcoreguidelines-macro-usage)
// The intrinsics want a register's number as it stands. Registers 0 to 3 are
// the sums, row by row of tiles; 4 and 5 left tiles, 6 and 7 right ones.
#define PKG_GROUP_PRODUCT(sums, left, right, row, column)          \
  if constexpr (kBegins) {                                         \
    _tile_stored(sums, tile.previous + (row) * kStride + (column), \
                 kStride * int64_t{sizeof(float)});                \
    _tile_zero(sums);                                              \
  }                                                                \
  _tile_dpbf16ps(sums, left, right);                               \
  scale_rows<kBefore + (sums)>();                                  \
  finish_stores();
// NOLINTEND(cppcoreguidelines-macro-usage)

// Of kRowTiles x 2 tiles and groups of kUnits units; beside it kRows rows are
// scaled.
template <int kParts, int kRowTiles, int kUnits, int kRows>
class GroupKernel {
 public:
  [[gnu::noinline]] static void run(const GroupTile& tile,
                                    const GroupSums& sums) {
    GroupKernel kernel(sums);
    finish_stores();
    kernel.add_unit<true>(tile, tile.left, tile.right);
    for (int unit = 1; unit < kUnits; ++unit) {
      kernel.add_unit<false>(tile, tile.left + unit * kLeftBytes,
                             tile.right + unit * kRightBytes);
    }
  }

 private:
  static constexpr int64_t kStride = tiles::kStrip;
  static constexpr int64_t kRightBytes = 2 * tiles::kTileBytes;
  static constexpr int64_t kLeftBytes = kParts * kRightBytes;
  static constexpr int kLanes = simd::kLanes<float>;
  static constexpr int kRowsOfUnit = kRows / kUnits;
  static constexpr int kProducts = kParts * kRowTiles * 2;  // of a unit
  static constexpr int kRowsBeside = ceil_div(kRowsOfUnit, kProducts);

  [[gnu::always_inline]] explicit GroupKernel(const GroupSums& sums)
      : stored_(sums.stored),
        totals_(sums.totals),
        row_sums_(sums.row_sums),
        added_(sums.first ? 0 : 0xFFFF),
        scale_{simd::load(sums.scales), simd::load(sums.scales + kLanes)},
        zero_{simd::load(sums.scales + kStride),
              simd::load(sums.scales + kStride + kLanes)} {}

  // Small parts first.
  template <bool kFirst>
  [[gnu::always_inline]] void add_unit(const GroupTile& tile,
                                       const std::byte* left,
                                       const std::byte* right) {
    add_part<kFirst, kParts - 1>(tile, left, right);
  }

  template <bool kBegins, int kPart>
  [[gnu::always_inline]] void add_part(const GroupTile& tile,
                                       const std::byte* left,
                                       const std::byte* right) {
    constexpr int64_t kRowBytes = 64;
    constexpr int kBefore = (kParts - 1 - kPart) * kRowTiles * 2;
    constexpr bool kLoadsRight = kPart == kParts - 1;
    const std::byte* const part = left + kPart * kRightBytes;
    _tile_loadd(4, part, kRowBytes);
    if constexpr (kLoadsRight) {
      _tile_loadd(6, right, 2 * kRowBytes);
    }
    PKG_GROUP_PRODUCT(0, 4, 6, 0, 0)
    if constexpr (kLoadsRight) {
      _tile_loadd(7, right + kRowBytes, 2 * kRowBytes);
    }
    PKG_GROUP_PRODUCT(1, 4, 7, 0, tiles::kTileRows)
    if constexpr (kRowTiles == 2) {
      _tile_loadd(5, part + tiles::kTileBytes, kRowBytes);
      PKG_GROUP_PRODUCT(2, 5, 6, tiles::kTileRows, 0)
      PKG_GROUP_PRODUCT(3, 5, 7, tiles::kTileRows, tiles::kTileRows)
    } else if constexpr (kBegins) {
      _tile_stored(2, tile.previous + tiles::kTileRows * kStride, 128);
      _tile_stored(3, tile.previous + tiles::kTileRows * kStride + 16, 128);
    }
    if constexpr (kPart > 0) {
      add_part<false, kPart - 1>(tile, left, right);
    }
  }

  // Rows beside the product of that number in its unit.
  template <int kProduct>
  [[gnu::always_inline]] void scale_rows() {
    constexpr int kCount =
        std::clamp(kRowsOfUnit - kProduct * kRowsBeside, 0, kRowsBeside);
    for (int i = 0; i < kCount; ++i) {
      const float row_sum = *row_sums_++;
#pragma GCC unroll 2
      for (int v = 0; v < kStride / kLanes; ++v) {
        const auto total = std::bit_cast<Vector<float>>(
            _mm512_maskz_loadu_ps(added_, totals_ + v * kLanes));
        simd::store(totals_ + v * kLanes,
                    simd::load(stored_ + v * kLanes) * scale_[v] +
                        (zero_[v] * row_sum + total));
      }
      totals_ += kStride;
      stored_ += kStride;
    }
  }

  const float* stored_;
  float* totals_;
  const float* row_sums_;
  __mmask16 added_;
  Vector<float> scale_[2];
  Vector<float> zero_[2];
};

}  // namespace detail

using GroupKernelFunction = void (*)(const GroupTile&, const GroupSums&);

// Of groups of so many units, where kRows rows of a micro-tile exist at most.
template <int kParts, int kRowTiles, int kRows>
GroupKernelFunction group_kernel(int64_t units) {
  switch (units) {
    case 1:
      return &detail::GroupKernel<kParts, kRowTiles, 1, kRows>::run;
    case 2:
      return &detail::GroupKernel<kParts, kRowTiles, 2, kRows>::run;
    case 4:
      return &detail::GroupKernel<kParts, kRowTiles, 4, kRows>::run;
    default:
      return &detail::GroupKernel<kParts, kRowTiles, 8, kRows>::run;
  }
}

}  // namespace pkg::cpu

#endif
