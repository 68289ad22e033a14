// Blocks of an operand, packed as tiles piece by piece.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/runtime/workspace.h"
#include "cpu/tiles/micro_kernel.h"
#include "cpu/tiles/pack_tiles.h"
#include "cpu/tiles/plain_kernel.h"
#include "cpu/tiles/range.h"
#include "cpu/tiles/scheme.h"
#include "host/integer_math.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::tiles {

// A packed block: strip after strip.
struct PackedBlock {
  const std::byte* data;
  int64_t strip_bytes;

  const std::byte* strip(int64_t index) const {
    return data + index * strip_bytes;
  }
  // How its tiles lie, if it is of a left operand of one part.
  static LeftLayout layout_of(int64_t /*index*/) { return {}; }
};

// Packs blocks of one operand. All blocks of the inner dimension stay, each in
// a buffer of its own, or they take turns in two: either way the next block is
// packed while the one before is in use. Those of one part are not, and do with
// one buffer.
template <class Scheme, Side side>
class OperandBlocks {
 public:
  using Input = typename Scheme::Input;
  using Source = Strips<Input>;

  // Whether all blocks of the inner dimension may stay packed, and of how many
  // units a block is a multiple.
  static constexpr bool kMayStay = true;
  static constexpr int kUnitsTogether = 1;
  static constexpr bool kInPlace = false;

  // Of blocks of up to `lines` lines and `units` units.
  OperandBlocks(const Source& source, int64_t total_lines, int64_t inner,
                int64_t lines, int64_t units, bool keeps)
      : source_(source),
        total_lines_(total_lines),
        inner_(inner),
        most_units_(units),
        keeps_(keeps),
        buffer_bytes_(packed_bytes<Scheme>(lines, units)) {
    constexpr Slot kSlot =
        side == Side::Left ? Slot::PackedLeft : Slot::PackedRight;
    const int64_t count =
        keeps ? ceil_div(units_of<Scheme>(inner), units) : kTurns;
    buffers_ = Workspace::of_this_thread<kSlot>().template request<std::byte>(
        count * buffer_bytes_);
  }

  // Begins a block that pack() is then called for; a block that is there
  // already stays.
  void begin(int64_t line, int64_t lines, int64_t unit, int64_t units) {
    const bool same_lines = line == line_;
    const bool is_there = same_lines && !takes_turns() &&
                          (keeps_ ? unit < next_unit_ : unit == unit_);
    if (!same_lines) {
      next_unit_ = 0;
    }
    line_ = line;
    unit_ = unit;
    units_ = units;
    if (keeps_) {
      buffer_ = unit / most_units_;
    }
    if (is_there) {
      return;
    }
    if (!keeps_) {
      buffer_ = kTurns - 1 - buffer_;
    }
    next_unit_ = unit + units;
    count_ = ceil_div(lines, kTileRows) * units;
    done_ = 0;
    end_ = line + lines;
    at_ = {line, 0, 0};
    ahead_ = at_;
    for (int i = 0; i < ReadAhead<Scheme>::kTilesAhead; ++i) {
      advance(ahead_);
    }
    to_ = buffers_ + buffer_ * buffer_bytes_;
  }

  PackedBlock packed() const {
    return {buffers_ + buffer_ * buffer_bytes_,
            takes_turns() ? 0 : units_ * kUnitBytes<Scheme>};
  }

  // Pieces that are to be packed.
  int64_t left() const {
    return (count_ - done_) * TilePacker<Scheme, side>::pieces(source_.first) -
           (is_packing_ ? packer_.done() : 0);
  }
  // Strips of the block that are wholly packed; those beyond its end too.
  int64_t strips() const {
    return done_ == count_ ? INT64_MAX : (at_.strip - line_) / kStrip;
  }
  // Packs the next piece.
  void step(Range& range) {
    if constexpr (kIsWords) {
      if (copies_strip()) {
        return copy_strip(range);
      }
    }
    if constexpr (std::is_same_v<Input, BFloat16>) {
      if (const int64_t whole = whole_strips(); whole > 0) {
        return pack_whole(whole, range);
      }
    }
    if (!is_packing_) {
      begin_tile();
      is_packing_ = true;
    }
    if (packer_.step(range)) {
      advance_tile();
      is_packing_ = false;
    }
  }

 private:
  // A tile of a block: its strip's first line and how far it is from there, its
  // unit in the block.
  struct Place {
    int64_t strip;
    int64_t tile;
    int64_t unit;
  };

  // Of values of one part it brings nothing (docs/tuning/tiles.md).
  static constexpr bool kReadsAhead = Scheme::kParts > 1;

  // Buffers of blocks that do not stay.
  static constexpr int64_t kTurns = Scheme::kParts == 1 ? 1 : 2;
  // Strips packed together, whose rows are longer runs of memory then: all of a
  // block of B; of A, where 2 to 16 take as long, no more than are in L1.
  static constexpr int64_t kMostTogether = side == Side::Left ? 4 : 32;

  // Whether bytes of a line are words of tiles as they are.
  static constexpr bool kIsWords = Scheme::kParts == 1 && !Scheme::kHasRange &&
                                   sizeof(Input) * Scheme::kValues == 64;

  // Rows of A that are only copied: each strip takes the place of the one
  // before, which is in L1 then.
  bool takes_turns() const {
    return kIsWords && side == Side::Left && source_.first.value_stride == 1;
  }

  bool is_at_strip() const { return at_.tile == 0 && at_.unit == 0; }
  // Values that there are of the block, and its units all of whose are.
  int64_t values() const {
    return std::min(units_ * Scheme::kValues, inner_ - unit_ * Scheme::kValues);
  }
  int64_t whole_units() const { return values() / Scheme::kValues; }
  // The block's part of the next strip.
  Lines<Input> next_lines() const {
    const Lines<Input>& lines = source_.first;
    return {lines.data + (at_.strip / kStrip) * source_.stride +
                unit_ * Scheme::kValues * lines.value_stride,
            lines.line_stride, lines.value_stride};
  }

  // Whether the next strip's lines all exist, and are contiguous.
  bool copies_strip() const {
    return is_at_strip() && source_.first.value_stride == 1 &&
           end_ - at_.strip >= kStrip;
  }
  void copy_strip(Range& range) {
    constexpr int64_t kBytes = sizeof(Input);
    const Lines<Input> lines = next_lines();
    const auto* from = reinterpret_cast<const std::byte*>(lines.data);
    const int64_t stride = lines.line_stride * kBytes;
    if constexpr (side == Side::Left) {
      copy_rows(from, stride, values() * kBytes, to_);
    } else {
      pack_turned_columns(from, stride, whole_units(), to_);
      pack_rest(1, range);
    }
    advance_strips(1);
  }

  // Strips whose lines all exist and lie side by side, to be packed together.
  int64_t whole_strips() const {
    const bool lies_in_rows =
        source_.first.line_stride == 1 && source_.stride == kStrip;
    return is_at_strip() && lies_in_rows
               ? std::min(kMostTogether, (end_ - at_.strip) / kStrip)
               : 0;
  }
  void pack_whole(int64_t strips, Range& range) {
    constexpr auto kPack =
        side == Side::Left ? &pack_turned_pairs : &pack_pairs;
    const Lines<Input> lines = next_lines();
    kPack(lines.data, lines.value_stride, whole_units(), strips,
          units_ * kUnitBytes<Scheme>, to_);
    pack_rest(strips, range);
    advance_strips(strips);
  }

  // The unit that is not whole.
  void pack_rest(int64_t strips, Range& range) {
    const int64_t whole = whole_units();
    if (whole == units_) {
      return;
    }
    const int64_t packed = whole * Scheme::kValues;
    Lines<Input> lines = next_lines();
    lines.data += packed * lines.value_stride;
    pack_strips<Scheme, side>(lines, strips * kStrip, values() - packed,
                              to_ + whole * kUnitBytes<Scheme>, range, units_);
  }
  void advance_strips(int64_t strips) {
    to_ += takes_turns() ? 0 : strips * units_ * kUnitBytes<Scheme>;
    at_.strip += strips * kStrip;
    done_ += 2 * strips * units_;
  }

  Lines<Input> lines_at(const Place& place) const {
    const Lines<Input>& lines = source_.first;
    return {lines.data + place.strip / kStrip * source_.stride +
                place.tile * lines.line_stride +
                (unit_ + place.unit) * Scheme::kValues * lines.value_stride,
            lines.line_stride, lines.value_stride};
  }
  // Lines and values of the tile, of those that there are.
  int64_t lines_left(const Place& place) const {
    return std::min<int64_t>(kTileRows,
                             total_lines_ - place.strip - place.tile);
  }
  int64_t values_left(const Place& place) const {
    return std::min<int64_t>(Scheme::kValues,
                             inner_ - (unit_ + place.unit) * Scheme::kValues);
  }

  // Two tiles of a strip's unit, then the next unit's.
  void advance(Place& place) const {
    place.tile += kTileRows;
    if (place.tile < kStrip && place.strip + place.tile < end_) {
      return;
    }
    place.tile = 0;
    if (++place.unit == units_) {
      place.unit = 0;
      place.strip += kStrip;
    }
  }

  void begin_tile() {
    packer_.begin(lines_at(at_), lines_left(at_), values_left(at_),
                  to_ + at_.tile / kTileRows * kTileStep<side>);
    if constexpr (kReadsAhead) {
      packer_.fetch(lines_at(ahead_),
                    lines_left(ahead_) == kTileRows &&
                        values_left(ahead_) == Scheme::kValues);
      advance(ahead_);
    }
  }
  void advance_tile() {
    ++done_;
    advance(at_);
    if (at_.tile == 0) {
      to_ += kUnitBytes<Scheme>;
      to_ -= at_.unit == 0 && takes_turns() ? units_ * kUnitBytes<Scheme> : 0;
    }
  }

  Source source_;
  int64_t total_lines_;
  int64_t inner_;
  int64_t most_units_;
  bool keeps_;
  int64_t buffer_bytes_;
  std::byte* buffers_;
  int64_t buffer_ = 0;
  int64_t line_ = -1;
  int64_t unit_ = -1;
  int64_t units_ = 0;
  int64_t next_unit_ = 0;  // of the first block that is not there
  // Tiles of the block, and those that are packed; then where the next one is,
  // and the next that is fetched.
  int64_t count_ = 0;
  int64_t done_ = 0;
  int64_t end_ = 0;
  Place at_{};
  Place ahead_{};
  std::byte* to_ = nullptr;
  TilePacker<Scheme, side> packer_;
  bool is_packing_ = false;
};

}  // namespace pkg::cpu::tiles

#endif
