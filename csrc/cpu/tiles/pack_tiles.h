// Packing for tile registers: lines of an operand, rows of the left one and
// columns of the right, as the tiles that the micro-kernel loads.
//
// A strip is 32 lines; of each of its units, 32 values of the inner dimension
// (64 of int8), every part of its two tiles lies side by side. A row of a left
// tile is a line's unit, and a row of a right one a pair (a quad) of values of
// 16 lines, which are the same words transposed. Lines and values that do not
// exist are zeros.
//
// Left tiles lie one behind the other, right ones side by side, in rows of 32
// words: as they lie in the panels of cpu/gemm/packed_product.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/tiles/lines.h"
#include "cpu/tiles/micro_kernel.h"
#include "cpu/tiles/range.h"
#include "cpu/tiles/read_ahead.h"
#include "cpu/tiles/scheme.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::tiles {

enum class Side { Left, Right };

// Bytes of packed tiles: from the first of a strip's two to the second, and
// from row to row.
template <Side side>
inline constexpr int64_t kTileStep = side == Side::Left ? kTileBytes : 64;
template <Side side>
inline constexpr int64_t kTileRowStep = side == Side::Left ? 64 : 128;

// Packs the unit of up to kTileRows lines and kValues values, a piece at a
// time: a few rows of words of each part, then, where they have to be
// transposed, the parts.
template <class Scheme, Side side>
class TilePacker {
 public:
  using Input = typename Scheme::Input;

  // `packed`: tiles of the parts, 2 kTileBytes apart.
  void begin(const Lines<Input>& source, int64_t lines, int64_t values,
             std::byte* packed) {
    source_ = source;
    lines_ = lines;
    values_ = values;
    packed_ = packed;
    piece_ = 0;
    if (source.line_stride != 1 && source.value_stride != 1) {
      gather();
    }
  }
  // Another tile, that is fetched beside the pieces of this one.
  void fetch(const Lines<Input>& tile, bool is_whole) {
    read_ahead_.begin(tile, is_whole);
  }
  // Packs the next piece; whether it was the last. Adds the values to the
  // range.
  bool step(Range& range);

  // Pieces that are packed of the tile that was begun last.
  int64_t done() const { return piece_; }

  // Pieces of a tile.
  static int64_t pieces(const Lines<Input>& source) {
    return kRowPieces + (is_turned(source) ? Scheme::kParts : 0);
  }

 private:
  static constexpr int kRowPieces = tiles::kRowPieces<Scheme>;

  // Lines that lie side by side give a right tile's rows, others a left one's.
  static bool is_across(const Lines<Input>& source) {
    return source.line_stride == 1;
  }
  static bool is_turned(const Lines<Input>& source) {
    return is_across(source) != (side == Side::Right);
  }

  // Of values none of which lie side by side, a copy that does.
  void gather();
  template <bool kAcross, bool kWhole>
  void pack_rows(int first, Range& range);

  Lines<Input> source_;
  int64_t lines_;
  int64_t values_;
  std::byte* packed_;
  int piece_;
  ReadAhead<Scheme> read_ahead_;
  alignas(64) uint32_t turned_[Scheme::kParts][kTileBytes / 4];
  alignas(64) Input gathered_[kTileRows * Scheme::kValues];
};

// Packs whole units of whole strips of right columns that lie side by side, one
// strip `strip_bytes` behind the other, as TilePacker does in fewer
// instructions. Rows of several strips are read in the order in which they lie:
// what is not in L2 comes a third sooner.
void pack_pairs(const BFloat16* from, int64_t value_stride, int64_t units,
                int64_t strips, int64_t strip_bytes, std::byte* packed);

// The same for left rows that lie side by side, whose tiles are transposed.
void pack_turned_pairs(const BFloat16* from, int64_t value_stride,
                       int64_t units, int64_t strips, int64_t strip_bytes,
                       std::byte* packed);

// Packs whole units of a whole strip of right columns whose values lie side by
// side, as rows of another matrix do: tiles are transposed.
void pack_turned_columns(const std::byte* from, int64_t stride, int64_t units,
                         std::byte* packed);

// Packs the rows of a whole strip of left ones, each of so many contiguous
// bytes, row by row, so that the processor's prefetchers see long runs.
void copy_rows(const std::byte* from, int64_t stride, int64_t bytes,
               std::byte* packed);

// Packs `inner` values of some lines: strip after strip, each unit after unit;
// strips are `strip_units` units apart, 0: as many as are packed.
template <class Scheme, Side side>
void pack_strips(const Lines<typename Scheme::Input>& source, int64_t lines,
                 int64_t inner, std::byte* packed, Range& range,
                 int64_t strip_units = 0) {
  struct Place {
    int64_t line;
    int64_t unit;
  };
  TilePacker<Scheme, side> packer;
  const int64_t units = units_of<Scheme>(inner);
  strip_units = strip_units == 0 ? units : strip_units;
  const auto advance = [&](Place& place) {
    if (++place.unit == units) {
      place = {place.line + kTileRows, 0};
    }
  };
  const auto lines_at = [&](const Place& place) {
    return Lines<typename Scheme::Input>{
        source.data + place.line * source.line_stride +
            place.unit * Scheme::kValues * source.value_stride,
        source.line_stride, source.value_stride};
  };
  const auto lines_left = [&](const Place& place) {
    return std::min<int64_t>(kTileRows, lines - place.line);
  };
  const auto values_left = [&](const Place& place) {
    return std::min<int64_t>(Scheme::kValues,
                             inner - place.unit * Scheme::kValues);
  };
  Place ahead{0, 0};
  for (int i = 0; i < ReadAhead<Scheme>::kTilesAhead; ++i) {
    advance(ahead);
  }
  for (Place at{0, 0}; at.line < lines; advance(at), advance(ahead)) {
    packer.begin(
        lines_at(at), lines_left(at), values_left(at),
        packed +
            (at.line / kStrip * strip_units + at.unit) * kUnitBytes<Scheme> +
            at.line % kStrip / kTileRows * kTileStep<side>);
    packer.fetch(lines_at(ahead), lines_left(ahead) == kTileRows &&
                                      values_left(ahead) == Scheme::kValues);
    while (!packer.step(range)) {
    }
  }
}

}  // namespace pkg::cpu::tiles

#endif
