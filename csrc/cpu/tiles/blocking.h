// How a product by tile registers is divided into blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/gemm/grid.h"
#include "cpu/tiles/micro_kernel.h"
#include "cpu/tiles/scheme.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::tiles {

// MC, NC and KC, the last in units, and whether all blocks of the inner
// dimension stay packed: of B while rows go by, of A while columns do.
struct BlockSizes {
  int64_t rows;
  int64_t columns;
  int64_t units;
  bool keeps_left;
  bool keeps_right;
};

// Right: the class of blocks of B. turns_left: rows of A are columns in memory.
template <class Scheme, class Right>
BlockSizes block_sizes(int64_t rows, int64_t columns, int64_t inner,
                       bool turns_left = false) {
  using cpu::detail::even_block;
  constexpr bool kPlain = Scheme::kParts == 1;
  // Packed blocks that stay, beside the sums and what is packed meanwhile.
  // Plain ones may lie in L3, which takes less time than to pack them again.
  constexpr int64_t kKeptBytes = int64_t{kPlain ? 4 : 1} << 20;
  constexpr int64_t kMostBlocks = 32;
  constexpr int64_t kMostRows = 512;
  constexpr int64_t kMostRowsBesideKept = 128;
  // Where many plain blocks of B stay, they come from L3 for each block of
  // rows.
  constexpr int64_t kMostRowsBesideMany = 256;
  constexpr int64_t kManyBlocks = 4;
  constexpr int64_t kMostColumns = 256;
  // Where nothing stays packed; where what is packed is turned.
  constexpr int64_t kMostColumnsPackedAgain = 384;
  constexpr int64_t kMostColumnsOfTurned = 1024;
  const int64_t units = units_of<Scheme>(inner);
  const int64_t kc =
      even_block(units, block_units<Scheme>(inner), Right::kUnitsTogether);
  const int64_t blocks = (units + kc - 1) / kc;
  const auto fits = [&](int64_t lines) {
    return blocks > 1 && blocks <= kMostBlocks &&
           packed_bytes<Scheme>(lines, units) <= kKeptBytes;
  };
  const bool has_many_rows = rows > kMostRowsBesideKept;
  const bool keeps_narrow = Right::kMayStay && has_many_rows &&
                            fits(even_block(columns, kMostColumns, kStrip));
  int64_t most_columns = kMostColumns;
  if (kPlain && Right::kMayStay && blocks == 1) {
    // The sums need no place, and rows of A are packed only once; beside rows
    // that are turned B had better lie in L2.
    const int64_t bytes = turns_left ? kKeptBytes / 4 : kKeptBytes;
    most_columns =
        std::max(most_columns, bytes / (units * kUnitBytes<Scheme>)*kStrip);
  } else if (kPlain && Right::kMayStay && turns_left) {
    // Turning takes longer than to go over sums that do not all lie in L2.
    most_columns = kMostColumnsOfTurned;
  } else if (!kPlain && has_many_rows && !keeps_narrow && blocks > 1) {
    most_columns = kMostColumnsPackedAgain;
  }
  const int64_t nc = even_block(columns, most_columns, kStrip);
  const bool keeps_right = keeps_narrow && most_columns == kMostColumns;
  int64_t most_rows = kMostRows;
  if (keeps_right && kPlain && blocks >= kManyBlocks) {
    most_rows = kMostRowsBesideMany;
  } else if (keeps_right || Right::kInPlace) {
    most_rows = kMostRowsBesideKept;
  }
  const int64_t mc = even_block(rows, most_rows, kStrip);
  const bool keeps_left = columns > nc && rows <= mc && fits(mc);
  return {mc, nc, kc, keeps_left, keeps_right};
}

}  // namespace pkg::cpu::tiles

#endif
