// Blocks of a left operand that are not packed: rows of a matrix whose values
// are contiguous are rows of tiles where they lie. Only the last rows, if they
// do not fill a strip, are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/gemm/operands.h"
#include "cpu/runtime/cache.h"
#include "cpu/runtime/workspace.h"
#include "cpu/tiles/operand_blocks.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::tiles {

template <class Scheme>
class PlainRowsInPlace {
 public:
  using Input = typename Scheme::Input;
  using Source = Strips<Input>;

  // Whether rows had better be read where they are: whole units, at cache
  // lines, since others take twice the time to load (bfloat16, 512 rows of 512,
  // products at 0.97 TFLOP/s instead of 1.9), and not all in a few sets of the
  // L1 cache, which holds no strip of them then; for few columns that is as
  // well.
  static bool suits(const MatrixView<Input>& left, int64_t inner,
                    int64_t columns) {
    constexpr int64_t kFewColumns = 128;
    const int64_t row_bytes = left.row_stride * int64_t{sizeof(Input)};
    return kAreTiles && left.column_stride == 1 &&
           inner % Scheme::kValues == 0 && row_bytes % kCacheLine == 0 &&
           reinterpret_cast<uintptr_t>(left.data) % kCacheLine == 0 &&
           (columns <= kFewColumns || !rows_share_two_sets(row_bytes));
  }

  // Rows in place, and the strip that is packed behind them.
  struct Block {
    const std::byte* data;
    LeftLayout layout;
    int64_t strips;  // in place
    const std::byte* tail;

    const std::byte* strip(int64_t index) const {
      return index < strips ? data + index * 2 * layout.tile : tail;
    }
    LeftLayout layout_of(int64_t index) const {
      return index < strips ? layout : LeftLayout{};
    }
  };

  PlainRowsInPlace(const Source& source, int64_t total_lines, int64_t inner,
                   int64_t /*lines*/, int64_t /*units*/, bool /*keeps*/)
      : lines_(source.first),
        row_bytes_(lines_.line_stride * int64_t{sizeof(Input)}) {
    const int64_t present = total_lines % kStrip;
    if (present == 0) {
      return;
    }
    tail_ = Workspace::of_this_thread<Slot::PackedLeft>().request<std::byte>(
        packed_bytes<Scheme>(kStrip, units_of<Scheme>(inner)));
    line_ = total_lines - present;
    Range range;
    pack_strips<Scheme, Side::Left>({row(0), lines_.line_stride, 1}, present,
                                    inner, tail_, range);
  }

  void begin(int64_t line, int64_t lines, int64_t unit, int64_t /*units*/) {
    line_ = line;
    unit_ = unit;
    whole_strips_ = lines / kStrip;
  }

  Block packed() const {
    return {reinterpret_cast<const std::byte*>(row(0)),
            {row_bytes_, kTileRows * row_bytes_, kTileRowBytes},
            whole_strips_,
            tail_ == nullptr ? nullptr : tail_ + unit_ * kUnitBytes<Scheme>};
  }

  // Nothing is left to be packed.
  int64_t left() const { return 0; }
  int64_t strips() const { return INT64_MAX; }
  void step(Range& /*range*/) {}

 private:
  static constexpr int64_t kTileRowBytes = kTileRowStep<Side::Left>;
  static constexpr bool kAreTiles =
      Scheme::kParts == 1 && sizeof(Input) * Scheme::kValues == kTileRowBytes;

  const Input* row(int64_t line) const {
    return lines_.data + (line_ + line) * lines_.line_stride +
           unit_ * Scheme::kValues;
  }

  Lines<Input> lines_;
  int64_t row_bytes_;
  std::byte* tail_ = nullptr;
  int64_t line_ = 0;
  int64_t unit_ = 0;
  int64_t whole_strips_ = 0;
};

}  // namespace pkg::cpu::tiles

#endif
