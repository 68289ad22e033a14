// The right operand of int8 products from columns of packed int4
// (cpu/int4/rowwise.cpp): two values a byte, the even column's in the low half.
//
// 64 bytes of each of 16 columns are transposed as words, 16 rows of a word of
// every column: then each word has eight values, and its low halves are a
// quad for one tile, the high ones for another. So two units are made at a
// time, of the 64 even and of the 64 odd values of 128; the left operand has to
// lie in that order. Values stay in the upper halves of their bytes, 16 times
// too large, since that spares them the way of their sign: 3 instructions for
// two rows of tiles, beside 4 of the transposition.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "cpu/simd/transpose.h"
#include "cpu/tiles/product.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::tiles {

class Int4Blocks {
 public:
  // Columns of `bytes` contiguous bytes.
  struct Source {
    const uint8_t* data;
    int64_t stride;
    int64_t bytes;
  };

  static constexpr bool kMayStay = false;
  static constexpr int kUnitsTogether = 2;
  static constexpr bool kInPlace = false;
  // Of the sums.
  static constexpr int kScaleBits = 4;

  Int4Blocks(const Source& source, int64_t total_lines, int64_t /*inner*/,
             int64_t lines, int64_t units, bool /*keeps*/)
      : source_(source),
        total_lines_(total_lines),
        buffer_(
            Workspace::of_this_thread<Slot::PackedRight>().request<std::byte>(
                packed_bytes<Int8By1>(lines, units))) {}

  void begin(int64_t line, int64_t lines, int64_t unit, int64_t units) {
    if (line == line_ && unit == unit_) {
      return;
    }
    line_ = line;
    unit_ = unit;
    units_ = units;
    steps_ = strips_of(lines) * units;
    done_ = 0;
  }

  PackedBlock packed() const { return {buffer_, units_ * kUnitBytes<Int8By1>}; }
  int64_t left() const { return steps_ - done_; }
  int64_t strips() const {
    return done_ == steps_ ? INT64_MAX : done_ / units_;
  }

  // Two units of a half of a strip; what lies beyond is zeros.
  void step(Range& /*range*/) {
    const int64_t strip = done_ / units_;
    const int64_t at = done_ % units_;
    const int64_t pair = at / 2;
    const int64_t half = at % 2;
    const int64_t column = line_ + strip * kStrip + half * kTileRows;
    std::byte* to = buffer_ +
                    (strip * units_ + 2 * pair) * kUnitBytes<Int8By1> +
                    half * kTileStep<Side::Right>;
    const int64_t byte = (unit_ / 2 + pair) * int64_t{sizeof(Words)};
    unpack(column, byte, to);
    ++done_;
  }

 private:
  using Words = simd::Vector<uint32_t>;

  void unpack(int64_t column, int64_t byte, std::byte* to) const {
    const int64_t columns =
        std::clamp<int64_t>(total_lines_ - column, 0, kTileRows);
    const int64_t bytes =
        std::min<int64_t>(source_.bytes - byte, sizeof(Words));
    const __mmask64 present =
        bytes == 64 ? ~uint64_t{0} : (uint64_t{1} << bytes) - 1;
    const uint8_t* from = source_.data + column * source_.stride + byte;
    Words square[kTileRows];
#pragma GCC unroll 16
    for (int c = 0; c < kTileRows; ++c) {
      square[c] = std::bit_cast<Words>(_mm512_maskz_loadu_epi8(
          c < columns ? present : 0, from + c * source_.stride));
    }
    simd::transpose(square);
    constexpr uint32_t kUpper = 0xF0F0F0F0U;
#pragma GCC unroll 16
    for (int row = 0; row < kTileRows; ++row) {
      const Words low = (square[row] << 4) & kUpper;
      const Words high = square[row] & kUpper;
      std::byte* at = to + row * kTileRowStep<Side::Right>;
      std::memcpy(at, &low, sizeof(low));
      std::memcpy(at + kUnitBytes<Int8By1>, &high, sizeof(high));
    }
  }

  Source source_;
  int64_t total_lines_;
  std::byte* buffer_;
  int64_t line_ = -1;
  int64_t unit_ = -1;
  int64_t units_ = 1;
  int64_t steps_ = 0;
  int64_t done_ = 0;
};

}  // namespace pkg::cpu::tiles

#endif
