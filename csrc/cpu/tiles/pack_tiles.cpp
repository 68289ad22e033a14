#include "cpu/tiles/pack_tiles.h"

#if defined(PKG_HAS_TILES)

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <type_traits>

#include "cpu/simd/transpose.h"
#include "cpu/tiles/lanes.h"
#include "cpu/tiles/split.h"
#include "cpu/tiles/transpose_tile.h"

namespace pkg::cpu::tiles {
namespace {

using Words = simd::Vector<uint32_t>;

constexpr int kWords = 16;  // of a tile's row

simd::Vector<float> load_floats(__mmask16 lanes, const float* from) {
  return std::bit_cast<simd::Vector<float>>(_mm512_maskz_loadu_ps(lanes, from));
}
simd::Vector<float> load_floats(__mmask16 lanes, const Half* from) {
  return std::bit_cast<simd::Vector<float>>(
      _mm512_maskz_cvtph_ps(lanes, _mm256_maskz_loadu_epi16(lanes, from)));
}

// Ones where one of the two is: rounding the bits may make a zero of either.
Words nan_or_denormal(simd::Vector<float> low, simd::Vector<float> high) {
  constexpr int kQuietNan = 0x01;
  constexpr int kDenormal = 0x20;
  constexpr int kSignallingNan = 0x80;
  const auto lanes = [](simd::Vector<float> values) {
    return _mm512_fpclass_ps_mask(std::bit_cast<__m512>(values),
                                  kQuietNan | kDenormal | kSignallingNan);
  };
  return std::bit_cast<Words>(
      _mm512_movm_epi32(static_cast<__mmask16>(lanes(low) | lanes(high))));
}

// One row of words of each part: values `low` in the low halves of the words,
// `high` in the high ones.
template <class Scheme>
[[gnu::always_inline]] inline void split(simd::Vector<float> low,
                                         simd::Vector<float> high,
                                         Words* (&rows)[Scheme::kParts],
                                         int row, Range& range) {
  constexpr int kLast = Scheme::kParts - 1;
  if constexpr (is_rounded<Scheme>(kLast)) {
    range.add_lost(nan_or_denormal(low, high));
  }
  const SplitValues<Scheme> of_low(low);
  const SplitValues<Scheme> of_high(high);
#pragma GCC unroll 3
  for (int part = 0; part < Scheme::kParts; ++part) {
    const Words words = words_of(of_low.parts[part], of_high.parts[part]);
    rows[part][row] = words;
    if (part == 0) {
      range.add(words);
    }
  }
  if constexpr (!is_rounded<Scheme>(kLast)) {
    range.add_rest(of_low.parts[kLast], of_high.parts[kLast]);
  }
}

template <class Scheme>
inline constexpr bool kSplits = std::is_same_v<typename Scheme::Input, float> ||
                                std::is_same_v<typename Scheme::Input, Half>;

// Values that are one part.
template <class Scheme>
[[gnu::always_inline]] inline void add_whole(Words words, Range& range) {
  if constexpr (Scheme::kHasRange) {
    range.add(words);
  }
}

// A line's unit whose values are contiguous; bits of `present` say which exist.
template <class Scheme>
[[gnu::always_inline]] inline void read_along(const typename Scheme::Input* at,
                                              uint64_t present,
                                              Words* (&rows)[Scheme::kParts],
                                              int row, Range& range) {
  if constexpr (kSplits<Scheme>) {
    split<Scheme>(load_floats(static_cast<__mmask16>(present), at),
                  load_floats(static_cast<__mmask16>(present >> 16), at + 16),
                  rows, row, range);
  } else if constexpr (sizeof(*at) == 2) {
    rows[0][row] = std::bit_cast<Words>(
        _mm512_maskz_loadu_epi16(static_cast<__mmask32>(present), at));
    add_whole<Scheme>(rows[0][row], range);
  } else {
    rows[0][row] = std::bit_cast<Words>(_mm512_maskz_loadu_epi8(present, at));
  }
}

// One word of lines that lie side by side, of which `lanes` exist.
template <class Scheme>
[[gnu::always_inline]] inline void read_across(
    const typename Scheme::Input* from, int64_t value_stride, __mmask16 lanes,
    int64_t values, Words* (&rows)[Scheme::kParts], int row, int to,
    Range& range) {
  if constexpr (kSplits<Scheme>) {
    const auto load = [&](int64_t value) {
      return value < values ? load_floats(lanes, from + value * value_stride)
                            : simd::Vector<float>{};
    };
    split<Scheme>(load(row), load(row + 16), rows, to, range);
  } else {
    using Input = typename Scheme::Input;
    constexpr int kInWord = sizeof(uint32_t) / sizeof(Input);
    Words words{};
    for (int i = 0; i < kInWord; ++i) {
      const int64_t value = int64_t{kInWord} * row + i;
      if (value < values) {
        const Input* at = from + value * value_stride;
        if constexpr (kInWord == 2) {
          words |= std::bit_cast<Words>(_mm512_maskz_cvtepu16_epi32(
                       lanes, _mm256_maskz_loadu_epi16(lanes, at)))
                   << (16 * i);
        } else {
          words |= std::bit_cast<Words>(_mm512_maskz_cvtepu8_epi32(
                       lanes, _mm_maskz_loadu_epi8(lanes, at)))
                   << (8 * i);
        }
      }
    }
    rows[0][to] = words;
    add_whole<Scheme>(words, range);
  }
}

constexpr int64_t kPartBytes = 2 * kTileBytes;

// Two rows of 32 values become the words of two tiles' columns: each is a value
// of the first row and the one below it.
class PairWords {
 public:
  std::array<Words, 2> of(const BFloat16* row, int64_t row_stride) const {
    const __m512i even = _mm512_loadu_si512(row);
    const __m512i odd = _mm512_loadu_si512(row + row_stride);
    return {std::bit_cast<Words>(_mm512_permutex2var_epi16(even, low_, odd)),
            std::bit_cast<Words>(_mm512_permutex2var_epi16(even, high_, odd))};
  }

 private:
  // Where words come from: a column of the first row, of the second.
  static __m512i columns_from(int first) {
    std::array<uint16_t, 32> lanes{};
    for (int i = 0; i < 32; ++i) {
      lanes[i] = static_cast<uint16_t>(first + i / 2 + i % 2 * 32);
    }
    return _mm512_loadu_si512(lanes.data());
  }

  __m512i low_ = columns_from(0);
  __m512i high_ = columns_from(kTileRows);
};

}  // namespace

template <class Scheme, Side side>
void TilePacker<Scheme, side>::gather() {
  for (int64_t line = 0; line < lines_; ++line) {
    const Input* from = source_.data + line * source_.line_stride;
    Input* to = gathered_ + line * Scheme::kValues;
    for (int64_t value = 0; value < values_; ++value) {
      to[value] = from[value * source_.value_stride];
    }
  }
  source_ = {gathered_, Scheme::kValues, 1};
}

template <class Scheme, Side side>
template <bool kAcross, bool kWhole>
void TilePacker<Scheme, side>::pack_rows(int first, Range& to) {
  constexpr int kRows = kTileRows / kRowPieces;
  constexpr bool kTurned = kAcross != (side == Side::Right);
  constexpr int kStep =
      kTurned ? 1 : static_cast<int>(kTileRowStep<side> / sizeof(Words));
  Words* rows[Scheme::kParts];
  for (int part = 0; part < Scheme::kParts; ++part) {
    rows[part] = kTurned
                     ? reinterpret_cast<Words*>(turned_[part])
                     : reinterpret_cast<Words*>(packed_ + part * kPartBytes);
  }
  const int64_t lines = kWhole ? kTileRows : lines_;
  const int64_t values = kWhole ? Scheme::kValues : values_;
  const Input* const from = source_.data;
  const int64_t stride = kAcross ? source_.value_stride : source_.line_stride;
  const uint64_t present = first_lanes(kAcross ? lines : values);
  Range range = to;  // in registers
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    const int row = first + i;
    const int place = row * kStep;
    if constexpr (kAcross) {
      read_across<Scheme>(from, stride, static_cast<__mmask16>(present), values,
                          rows, row, place, range);
    } else if (row < lines) {
      read_along<Scheme>(from + row * stride, present, rows, place, range);
    } else {
      for (Words* part : rows) {
        part[place] = Words{};
      }
    }
  }
  to = range;
}

template <class Scheme, Side side>
bool TilePacker<Scheme, side>::step(Range& range) {
  if (piece_ < kRowPieces) {
    read_ahead_.step();
    const int first = piece_ * (kTileRows / kRowPieces);
    const bool whole = lines_ == kTileRows && values_ == Scheme::kValues;
    if (is_across(source_)) {
      whole ? pack_rows<true, true>(first, range)
            : pack_rows<true, false>(first, range);
    } else {
      whole ? pack_rows<false, true>(first, range)
            : pack_rows<false, false>(first, range);
    }
  } else {
    const int part = piece_ - kRowPieces;
    transpose_tile<side>(turned_[part], packed_ + part * kPartBytes);
  }
  ++piece_;
  return piece_ == pieces(source_);
}

void pack_pairs(const BFloat16* from, int64_t value_stride, int64_t units,
                int64_t strips, int64_t strip_bytes, std::byte* packed) {
  const PairWords words;
  for (int64_t row = 0; row < units * kTileRows; ++row) {
    for (int64_t strip = 0; strip < strips; ++strip) {
      const auto pairs = words.of(from + strip * kStrip, value_stride);
      std::byte* const to = packed + strip * strip_bytes;
      std::memcpy(to, &pairs[0], sizeof(Words));
      std::memcpy(to + sizeof(Words), &pairs[1], sizeof(Words));
    }
    from += 2 * value_stride;
    packed += kTileRowStep<Side::Right>;
  }
}

void pack_turned_pairs(const BFloat16* from, int64_t value_stride,
                       int64_t units, int64_t strips, int64_t strip_bytes,
                       std::byte* packed) {
  const PairWords words;
  for (int64_t unit = 0; unit < units; ++unit) {
    for (int64_t strip = 0; strip < strips; ++strip) {
      const BFloat16* at = from + strip * kStrip;
      Words tiles[2][kWords];
#pragma GCC unroll 16
      for (int row = 0; row < kWords; ++row, at += 2 * value_stride) {
        const auto pairs = words.of(at, value_stride);
        tiles[0][row] = pairs[0];
        tiles[1][row] = pairs[1];
      }
      std::byte* to = packed + strip * strip_bytes;
      transpose_tile<Side::Left>(tiles[0], to);
      transpose_tile<Side::Left>(tiles[1], to + kTileStep<Side::Left>);
    }
    from += Bfloat16By1::kValues * value_stride;
    packed += kUnitBytes<Bfloat16By1>;
  }
}

void pack_turned_columns(const std::byte* from, int64_t stride, int64_t units,
                         std::byte* packed) {
  constexpr int64_t kRowBytes = sizeof(Words);
  for (int64_t unit = 0; unit < units; ++unit, from += kRowBytes) {
    for (int tile = 0; tile < 2; ++tile) {
      const std::byte* at = from + tile * kTileRows * stride;
      Words square[kWords];
#pragma GCC unroll 16
      for (int row = 0; row < kWords; ++row, at += stride) {
        std::memcpy(square + row, at, kRowBytes);
      }
      simd::transpose(square);
      std::byte* to = packed + tile * kTileStep<Side::Right>;
#pragma GCC unroll 16
      for (int row = 0; row < kWords; ++row) {
        std::memcpy(to + row * kTileRowStep<Side::Right>, square + row,
                    kRowBytes);
      }
    }
    packed += 2 * kTileBytes;
  }
}

void copy_rows(const std::byte* from, int64_t stride, int64_t bytes,
               std::byte* packed) {
  constexpr int64_t kRowBytes = kTileRowStep<Side::Left>;
  for (int row = 0; row < kStrip; ++row, from += stride, packed += kRowBytes) {
    std::byte* to = packed;
    int64_t left = bytes;
    for (; left >= kRowBytes; left -= kRowBytes, to += 2 * kTileBytes) {
      std::memcpy(to, from + (bytes - left), kRowBytes);
    }
    if (left > 0) {
      const __m512i last =
          _mm512_maskz_loadu_epi8(first_lanes(left), from + (bytes - left));
      std::memcpy(to, &last, kRowBytes);
    }
  }
}

// NOLINTNEXTLINE(cppcoreguidelines-macro-usage)
#define PKG_PACK_TILES(Scheme)                   \
  template class TilePacker<Scheme, Side::Left>; \
  template class TilePacker<Scheme, Side::Right>
PKG_PACK_TILES(Float32By6);
PKG_PACK_TILES(Float32By3);
PKG_PACK_TILES(Float32By1);
PKG_PACK_TILES(Float16By4);
PKG_PACK_TILES(Bfloat16By1);
PKG_PACK_TILES(RangedBfloat16By1);
PKG_PACK_TILES(Int8By1);

}  // namespace pkg::cpu::tiles

#endif
