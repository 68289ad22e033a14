#include "cpu/residues/pack.h"

#if defined(PKG_HAS_TILES)

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "cpu/residues/remainders.h"
#include "cpu/runtime/workspace.h"
#include "cpu/tiles/lanes.h"
#include "cpu/tiles/transpose_tile.h"

namespace pkg::cpu::residues {
namespace {

constexpr int kLanes = 8;  // of float64

using Doubles = simd::Vector<double>;
using Quads = simd::Vector<uint64_t>;

constexpr int64_t padded_lines(int64_t lines) {
  return tiles::strips_of(lines) * kStrip;
}

// Of a register's, which there may be more of than lanes.
__mmask8 first_lanes(int64_t count) {
  return static_cast<__mmask8>(tiles::first_lanes(count));
}

// Of magnitudes: the bits of the largest, of which a NaN's are larger than an
// infinity's; their sum, and that of their squares.
struct Statistics {
  Quads largest{};
  Doubles sum{};
  Doubles squares{};

  [[gnu::always_inline]] void add(__mmask8 lanes, const double* from) {
    const auto values =
        std::bit_cast<Doubles>(_mm512_maskz_loadu_pd(lanes, from));
    const Quads bits =
        std::bit_cast<Quads>(values) & static_cast<uint64_t>(INT64_MAX);
    largest = largest > bits ? largest : bits;
    sum += std::bit_cast<Doubles>(bits);
    squares += values * values;
  }
};

struct LineStatistics {
  uint64_t largest = 0;
  double sum = 0;
  double squares = 0;
};

// 2^exponent, of a normal number.
double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(1023 + exponent) << 52);
}

bool set_scale(const LineStatistics& line, int64_t values, Scales& scales,
               int at) {
  // Far enough from the ends of the exponent's range for squares, and for
  // every product of an integer and two scales.
  constexpr int kMostExponent = 400;
  constexpr int kLeadingBits = 7;
  if (line.largest == 0) {
    scales.to_integer[at] = scales.from_integer[at] = 0;
    scales.leading[at] = 0;
    scales.need[at] = scales.unit[at] = 0;
    return true;
  }
  const int exponent = static_cast<int>(line.largest >> 52) - 1023;
  if (exponent < -kMostExponent || exponent > kMostExponent) {
    return false;
  }
  // The largest one that the norm allows, whose square is 2^2s larger.
  const int scale = std::ilogb(kMostSquares / line.squares) >> 1;
  const int leading = std::max(exponent + scale + 1 - kLeadingBits, 0);
  const double inner = static_cast<double>(values);
  const double sum = line.sum * power_of_two(scale) + inner / 4;
  scales.to_integer[at] = power_of_two(scale);
  scales.from_integer[at] = power_of_two(-scale);
  scales.leading[at] = static_cast<uint64_t>(leading);
  // An element needs 2^53 / K times the sum of its two lines' magnitudes, in
  // units of 2^t of both. Rounded up.
  scales.need[at] =
      static_cast<float>(sum / inner * 0x1p53 * power_of_two(-leading) * 1.001);
  scales.unit[at] = static_cast<float>(power_of_two(-leading));
  return true;
}

// Of up to kLinesTogether lines that lie side by side: rows of values are read
// in the order in which they lie.
bool find_scales_across(const Lines<double>& source, int64_t lines,
                        int64_t values, Scales* scales) {
  constexpr int64_t kRowsTogether = 4;
  Statistics statistics[kLinesTogether / kLanes];
  for (int64_t value = 0; value < values; value += kRowsTogether) {
    const int64_t rows = std::min(kRowsTogether, values - value);
    for (int64_t line = 0; line < lines; line += kLanes) {
      const double* from = source.data + line + value * source.value_stride;
      Statistics some = statistics[line / kLanes];
      for (int64_t row = 0; row < rows; ++row, from += source.value_stride) {
        some.add(first_lanes(lines - line), from);
      }
      statistics[line / kLanes] = some;
    }
  }
  for (int64_t line = 0; line < padded_lines(lines); ++line) {
    const Statistics& from = statistics[line / kLanes];
    const int64_t lane = line % kLanes;
    if (!set_scale({from.largest[lane], from.sum[lane], from.squares[lane]},
                   values, scales[line / kStrip],
                   static_cast<int>(line % kStrip))) {
      return false;
    }
  }
  return true;
}

LineStatistics statistics_along(const double* from, int64_t values) {
  constexpr int kTogether = 2;
  Statistics some[kTogether];
  for (int64_t value = 0; value < values; value += kTogether * kLanes) {
#pragma GCC unroll 2
    for (int i = 0; i < kTogether; ++i) {
      const int64_t at = value + int64_t{i} * kLanes;
      some[i].add(first_lanes(values - at), from + at);
    }
  }
  LineStatistics line;
  for (const Statistics& each : some) {
    for (int i = 0; i < kLanes; ++i) {
      line.largest = std::max<uint64_t>(line.largest, each.largest[i]);
      line.sum += each.sum[i];
      line.squares += each.squares[i];
    }
  }
  return line;
}

LineStatistics statistics_apart(const double* from, int64_t stride,
                                int64_t values) {
  LineStatistics line;
  for (int64_t value = 0; value < values; ++value) {
    const double magnitude = std::abs(from[value * stride]);
    line.largest = std::max(line.largest, std::bit_cast<uint64_t>(magnitude));
    line.sum += magnitude;
    line.squares += magnitude * magnitude;
  }
  return line;
}

// Eight values as integers.
[[gnu::always_inline]] inline Quads integers_of(__mmask8 lanes,
                                                const double* from,
                                                __m512d scale) {
  return std::bit_cast<Quads>(_mm512_maskz_cvtpd_epi64(
      0xFF, _mm512_mul_pd(_mm512_maskz_loadu_pd(lanes, from), scale)));
}

// Their digits of base 2^16, from -2^15 to 2^15 - 1, the least in the lowest
// bits; and the leading bits of their magnitudes. Adding 2^15 to each of three
// digits leaves none of them negative, and so none that borrows: these are the
// digits with their highest bits turned.
struct Digits {
  Quads digits;
  Quads leading;
};
[[gnu::always_inline]] inline Digits digits_of(Quads integers,
                                               __m512i leading) {
  constexpr uint64_t kOffset = 0x0000800080008000;
  const __m512i magnitudes =
      _mm512_maskz_abs_epi64(0xFF, std::bit_cast<__m512i>(integers));
  return {
      (integers + kOffset) ^ kOffset,
      std::bit_cast<Quads>(_mm512_maskz_srlv_epi64(0xFF, magnitudes, leading))};
}

// Sixteen values: their two lower digits, their two upper ones, their leading
// bits. The values' order is that of a shuffle of two registers: lane 4 l + c
// is of value 2 l + c % 2 of the first or second register, by c / 2.
struct SixteenValues {
  __m512i low;
  __m512i high;
  __m512i leading;
};
[[gnu::always_inline]] inline SixteenValues join(const Digits& first,
                                                 const Digits& second) {
  constexpr int kLows = 0x88;
  constexpr int kHighs = 0xDD;
  const auto shuffle = [](auto which, Quads a, Quads b) {
    return _mm512_castps_si512(_mm512_shuffle_ps(
        std::bit_cast<__m512>(a), std::bit_cast<__m512>(b), which()));
  };
  constexpr auto kLow = std::integral_constant<int, kLows>{};
  constexpr auto kHigh = std::integral_constant<int, kHighs>{};
  return {shuffle(kLow, first.digits, second.digits),
          shuffle(kHigh, first.digits, second.digits),
          shuffle(kLow, first.leading, second.leading)};
}

// Where rows of words of a tile's planes go.
struct PlaneRows {
  std::byte* first;
  int64_t stride;

  void store(int plane, __m512i words) const {
    std::memcpy(first + plane * stride, &words, sizeof(words));
  }
};

// The planes' bytes of 64 values. finish(bytes) puts them in order.
template <class Finish>
[[gnu::always_inline]] inline void store_planes(
    const SixteenValues (&values)[4], const PlaneRows& to,
    const Finish& finish) {
  for (int plane = 0; plane < kModuli; ++plane) {
    __m512i words[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      words[i] = remainders(values[i].low, values[i].high, plane);
    }
    to.store(plane, finish(bytes_of(words)));
  }
  const __m512i leading[4] = {values[0].leading, values[1].leading,
                              values[2].leading, values[3].leading};
  to.store(kModuli, finish(bytes_of(leading)));
}

// The order of a unit's values, the same for both operands: word 4 l + a of a
// line's row has values 16 a + 2 l + (0, 1, 8, 9).
constexpr int value_of(int word, int byte) {
  return 16 * (word % 4) + 2 * (word / 4) + byte % 2 + byte / 2 * kLanes;
}

// A line whose values lie side by side: a row of a left tile.
void read_along(const double* from, int64_t values, double to_integer,
                uint64_t leading, const PlaneRows& to) {
  const __m512d scale = _mm512_set1_pd(to_integer);
  const __m512i shift = _mm512_set1_epi64(static_cast<int64_t>(leading));
  const auto load = [&](int64_t at) {
    return digits_of(integers_of(first_lanes(values - at), from + at, scale),
                     shift);
  };
  SixteenValues all[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    all[i] = join(load(int64_t{i} * 16), load(int64_t{i} * 16 + kLanes));
  }
  store_planes(all, to, [](__m512i bytes) { return bytes; });
}

// Integers of lines that lie side by side, a unit's values of each: rows of
// whole tiles, with zeros for what does not exist. Rows of a matrix are read to
// their ends so; those of a tile alone are too short for the processor's
// prefetchers, and often meet in one set of the caches.
struct IntegerRows {
  // Between rows, which do not meet there.
  static constexpr int64_t kStride = kLinesTogether + kLanes;

  alignas(64) uint64_t integers[kValues * kStride];

  void read(const Lines<double>& source, int64_t lines, int64_t values,
            const Scales* scales) {
    const int64_t padded = padded_lines(lines);
    for (int64_t value = 0; value < kValues; ++value) {
      const double* from = source.data + value * source.value_stride;
      for (int64_t line = 0; line < padded; line += kLanes) {
        const __mmask8 present =
            value < values ? first_lanes(lines - line) : __mmask8{0};
        const Quads row = integers_of(
            present, from + line,
            _mm512_load_pd(scales[line / kStrip].to_integer + line % kStrip));
        std::memcpy(integers + value * kStride + line, &row, sizeof(row));
      }
    }
  }
};

// Word `word` of each of sixteen lines that lie side by side: a row of a right
// tile.
void read_across(const uint64_t* integers, const uint64_t* leading, int word,
                 const PlaneRows& to) {
  const auto load = [&](int64_t value, int line) {
    Quads row;
    std::memcpy(&row, integers + value * IntegerRows::kStride + line,
                sizeof(row));
    return digits_of(row, _mm512_load_si512(leading + line));
  };
  SixteenValues all[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const int64_t value = value_of(word, i);
    all[i] = join(load(value, 0), load(value, kLanes));
  }
  // Each 128 bits have four lines' bytes of the first value, then of the
  // second; and line 2 l + c % 2 + 8 (c / 2) is c there.
  const __m512i of_line = _mm512_maskz_broadcast_i32x4(
      ~__mmask16{0},
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512i in_order = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13,  //
                                             2, 3, 6, 7, 10, 11, 14, 15);
  store_planes(all, to, [&](__m512i bytes) {
    return _mm512_maskz_permutexvar_epi32(
        ~__mmask16{0}, in_order,
        _mm512_maskz_shuffle_epi8(~__mmask64{0}, bytes, of_line));
  });
}

// A unit of up to kTileRows lines whose values have any stride, row by row.
void read_apart(const Lines<double>& source, int64_t lines, int64_t values,
                const Scales& scales, int first, int row, const PlaneRows& to) {
  alignas(64) double gathered[kValues];
  const double* from = source.data + row * source.line_stride;
  values = row < lines ? values : 0;
  if (source.value_stride != 1) {
    for (int64_t value = 0; value < values; ++value) {
      gathered[value] = from[value * source.value_stride];
    }
    from = gathered;
  }
  read_along(from, values, scales.to_integer[first + row],
             scales.leading[first + row], to);
}

// Packs a tile, whose rows read_row(row, to) writes: as they are, or transposed
// first.
template <Side side, bool kTurned, class ReadRow>
void pack_tile(std::byte* packed, int64_t plane_bytes,
               const ReadRow& read_row) {
  constexpr int64_t kRowStep = tiles::kTileRowStep<side>;
  if constexpr (!kTurned) {
    for (int row = 0; row < kTileRows; ++row) {
      read_row(row, PlaneRows{packed + row * kRowStep, plane_bytes});
    }
  } else {
    alignas(64) std::byte turned[kPlanes][kTileBytes];
    for (int row = 0; row < kTileRows; ++row) {
      read_row(row, PlaneRows{turned[0] + row * 64, kTileBytes});
    }
    for (int plane = 0; plane < kPlanes; ++plane) {
      tiles::transpose_tile<side>(turned[plane], packed + plane * plane_bytes);
    }
  }
}

// Where a line's tile of a unit is.
template <Side side>
std::byte* tile_at(std::byte* packed, int64_t line, int64_t unit,
                   int64_t units) {
  return packed + (line / kStrip * units + unit) * kUnitBytes +
         line % kStrip / kTileRows * tiles::kTileStep<side>;
}

// Lines that lie side by side, up to kLinesTogether.
template <Side side>
void pack_across(const Lines<double>& source, int64_t lines, int64_t values,
                 const Scales* scales, std::byte* packed, int64_t plane_bytes) {
  auto* const rows = Workspace::of_this_thread<Slot::IntegerRows>()
                         .template request<IntegerRows>(1);
  const int64_t units = tiles::units_of<Bytes>(values);
  for (int64_t unit = 0; unit < units; ++unit) {
    const int64_t value = unit * kValues;
    rows->read(
        {source.data + value * source.value_stride, 1, source.value_stride},
        lines, std::min<int64_t>(values - value, kValues), scales);
    for (int64_t line = 0; line < padded_lines(lines); line += kTileRows) {
      pack_tile<side, side == Side::Left>(
          tile_at<side>(packed, line, unit, units), plane_bytes,
          [&](int row, const PlaneRows& to) {
            read_across(rows->integers + line,
                        scales[line / kStrip].leading + line % kStrip, row, to);
          });
    }
  }
}

// Lines of which each is read from end to end.
template <Side side>
void pack_along(const Lines<double>& source, int64_t lines, int64_t values,
                const Scales* scales, std::byte* packed, int64_t plane_bytes) {
  const int64_t units = tiles::units_of<Bytes>(values);
  for (int64_t line = 0; line < padded_lines(lines); line += kTileRows) {
    for (int64_t unit = 0; unit < units; ++unit) {
      const int64_t value = unit * kValues;
      const Lines<double> tile{
          source.data + line * source.line_stride + value * source.value_stride,
          source.line_stride, source.value_stride};
      pack_tile<side, side == Side::Right>(
          tile_at<side>(packed, line, unit, units), plane_bytes,
          [&](int row, const PlaneRows& to) {
            read_apart(tile, lines - line,
                       std::min<int64_t>(values - value, kValues),
                       scales[line / kStrip], static_cast<int>(line % kStrip),
                       row, to);
          });
    }
  }
}

// Calls body(lines, first, count) for lines that are read together.
template <class Body>
void for_each_together(const Lines<double>& source, int64_t lines,
                       const Body& body) {
  for (int64_t line = 0; line < lines; line += kLinesTogether) {
    body(Lines<double>{source.data + line, 1, source.value_stride}, line,
         std::min(kLinesTogether, lines - line));
  }
}

}  // namespace

bool find_scales(const Lines<double>& source, int64_t lines, int64_t values,
                 Scales* scales) {
  if (source.line_stride == 1) {
    bool are_numbers = true;
    for_each_together(
        source, lines, [&](const auto& some, int64_t line, int64_t count) {
          are_numbers =
              are_numbers &&
              find_scales_across(some, count, values, scales + line / kStrip);
        });
    return are_numbers;
  }
  for (int64_t line = 0; line < padded_lines(lines); ++line) {
    const double* from = source.data + line * source.line_stride;
    const LineStatistics statistics =
        line >= lines ? LineStatistics{}
        : source.value_stride == 1
            ? statistics_along(from, values)
            : statistics_apart(from, source.value_stride, values);
    if (!set_scale(statistics, values, scales[line / kStrip],
                   static_cast<int>(line % kStrip))) {
      return false;
    }
  }
  return true;
}

template <Side side>
void pack_lines(const Lines<double>& source, int64_t lines, int64_t values,
                const Scales* scales, std::byte* packed, int64_t plane_bytes) {
  if (source.line_stride != 1) {
    return pack_along<side>(source, lines, values, scales, packed, plane_bytes);
  }
  const int64_t strip_bytes = tiles::units_of<Bytes>(values) * kUnitBytes;
  for_each_together(
      source, lines, [&](const auto& some, int64_t line, int64_t count) {
        pack_across<side>(some, count, values, scales + line / kStrip,
                          packed + line / kStrip * strip_bytes, plane_bytes);
      });
}

template void pack_lines<Side::Left>(const Lines<double>&, int64_t, int64_t,
                                     const Scales*, std::byte*, int64_t);
template void pack_lines<Side::Right>(const Lines<double>&, int64_t, int64_t,
                                      const Scales*, std::byte*, int64_t);

}  // namespace pkg::cpu::residues

#endif
