// How a product by tile registers is divided into blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/gemm/grid.h"
#include "cpu/runtime/cache.h"
#include "cpu/tiles/micro_kernel.h"
#include "cpu/tiles/scheme.h"
#include "host/integer_math.h"

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

// Of values of several parts.
template <class Scheme>
BlockSizes block_sizes(int64_t rows, int64_t columns, int64_t inner) {
  using cpu::detail::even_block;
  // Packed blocks that stay, beside the sums and what is packed meanwhile.
  constexpr int64_t kKeptBytes = kLargeL2Bytes / 2;
  constexpr int64_t kMostBlocks = 32;
  constexpr int64_t kMostRows = 512;
  constexpr int64_t kMostRowsBesideKept = 128;
  constexpr int64_t kMostColumns = 256;
  // Where nothing stays packed, so that A is packed anew for each block of
  // columns: wide ones, whose sums do not all lie in L2; of float32 in short
  // blocks of the inner dimension narrow ones are better
  // (docs/tuning/tiles.md).
  constexpr int64_t kMostColumnsPackedAgain = 2048;
  constexpr int64_t kMostColumnsOfShortBlocks = 384;
  const int64_t units = units_of<Scheme>(inner);
  const int64_t kc = even_block(units, block_units<Scheme>(inner), 1);
  const int64_t blocks = ceil_div(units, kc);
  const auto fits = [&](int64_t lines) {
    return blocks > 1 && blocks <= kMostBlocks &&
           packed_bytes<Scheme>(lines, units) <= kKeptBytes;
  };
  const bool has_many_rows = rows > kMostRowsBesideKept;
  const bool keeps_right =
      has_many_rows && fits(even_block(columns, kMostColumns, kStrip));
  const bool packs_again = has_many_rows && !keeps_right && blocks > 1;
  const bool is_short = Scheme::kParts == 3 && kc <= Scheme::kUnits;
  const int64_t nc = even_block(columns,
                                !packs_again ? kMostColumns
                                : is_short   ? kMostColumnsOfShortBlocks
                                             : kMostColumnsPackedAgain,
                                kStrip);
  const int64_t mc =
      even_block(rows, keeps_right ? kMostRowsBesideKept : kMostRows, kStrip);
  const bool keeps_left = columns > nc && rows <= mc && fits(mc);
  return {mc, nc, kc, keeps_left, keeps_right};
}

// The same of values of one part; Right is the class of blocks of B. Strips of
// A go one after the other, each with a block of B that had better lie in L2,
// and its own block of the inner dimension in L1. So B's blocks are narrow
// enough for the whole inner dimension to stay there, and sums are those of one
// strip; where they would be too narrow, since A is read for each, the sums of
// many rows lie there instead. turns_left: rows of A are columns in memory, and
// take long to pack.
template <class Scheme, class Right>
BlockSizes plain_block_sizes(int64_t rows, int64_t columns, int64_t inner,
                             bool turns_left) {
  using cpu::detail::even_block;
  constexpr bool kMayStay = Right::kMayStay || Right::kInPlace;
  constexpr int64_t kStayingBytes = kLargeL2Bytes / 2;
  constexpr int64_t kLeastStaying = 256;
  constexpr int64_t kLeastStayingBesideTurned = 512;
  constexpr int64_t kMostRows = 512;
  // Where sums of many rows lie in L2, and in part beyond it, which costs less
  // than packing B again: beside 512 rows bfloat16 n = 3072 takes 92 % of the
  // time, 4096 95 %.
  constexpr int64_t kMostRowsOfSums = 1024;
  constexpr int64_t kMostColumns = 768;
  constexpr int64_t kMostColumnsBesideTurned = 1024;
  // Of a B that is unpacked for each block of rows, which had better be in L1
  // when it is used.
  constexpr int64_t kMostColumnsUnpacked = 64;
  // So many strips are turned together.
  constexpr int64_t kRowsTurned = 128;
  const int64_t units = units_of<Scheme>(inner);
  const int64_t kc =
      even_block(units, block_units<Scheme>(inner), Right::kUnitsTogether);
  const bool is_one_block = kc >= units;
  const int64_t staying = kStayingBytes / (units * kUnitBytes<Scheme>)*kStrip;
  const int64_t least =
      std::min(columns, turns_left ? kLeastStayingBesideTurned : kLeastStaying);
  if (kMayStay && staying >= least) {
    const int64_t mc = is_one_block ? kMostRows
                       : turns_left ? kRowsTurned
                                    : kStrip;
    return {even_block(rows, mc, kStrip), even_block(columns, staying, kStrip),
            kc, false, !is_one_block};
  }
  const int64_t nc = !kMayStay    ? kMostColumnsUnpacked
                     : turns_left ? kMostColumnsBesideTurned
                                  : kMostColumns;
  return {even_block(rows, kMostRowsOfSums, kStrip),
          even_block(columns, nc, kStrip), kc, false, false};
}

}  // namespace pkg::cpu::tiles

#endif
