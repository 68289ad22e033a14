// Many rows of rowwise_scaled_linear: micro-panels of the weight are unpacked
// once for all rows and multiplied by the micro-kernel of cpu/gemm.
//
// A word of a column has eight values: its lower halves are those of four even
// columns of the matrix, its upper ones of four odd ones. Words of as many
// columns as a register has lanes are transposed, and each is two k-groups of a
// micro-panel, of unsigned bytes q + 8; what that adds is taken off where sums
// are stored. The left rows lie in the same order, their even columns and their
// odd ones apart, and are packed as strips. Sums go over all of the inner
// dimension, so that no result is added up from lanes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/gemm/micro_kernel.h"
#include "cpu/gemm/operands.h"
#include "cpu/int4/arithmetic.h"
#include "cpu/int4/rowwise_store.h"
#include "cpu/runtime/cache.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/transpose.h"

namespace pkg::cpu {

// Rows of bytes: the values of the even columns, and behind them those of the
// odd ones, each filled up with zeros to a cache line.
struct LeftRows {
  const int8_t* data;
  int64_t stride;
  int64_t odd;  // where the odd columns begin
  const int32_t* totals;
};

struct RightColumns {
  const uint8_t* data;  // bytes of a column are contiguous
  int64_t stride;
  int64_t bytes;

  const uint8_t* column(int64_t index) const { return data + index * stride; }
};

namespace detail {

inline constexpr int64_t kQuadColumns = kNR<Int4Quads>;
inline constexpr int kQuadLanes = simd::kLanes<uint32_t>;

// The left rows as strips, a word of even columns and one of odd ones in turn.
inline void pack_quads(const LeftRows& left, int64_t rows, int64_t words,
                       uint32_t* to) {
  for_each_strip(rows, [&](int64_t first, int height) {
    for (int64_t r = 0; r < height; ++r) {
      const int8_t* even = left.data + (first + r) * left.stride;
      const int8_t* odd = even + left.odd;
      uint32_t* at = to + first * 2 * words + r;
      for (int64_t word = 0; word < words; ++word, at += 2 * height) {
        std::memcpy(at, even + 4 * word, sizeof(*at));
        std::memcpy(at + height, odd + 4 * word, sizeof(*at));
      }
    }
  });
}

// A micro-panel of `count` columns from `column` on; the others repeat the last
// one and are not stored.
inline void unpack_quads(const RightColumns& right, int64_t column,
                         int64_t count, uint32_t* to) {
  constexpr int64_t kBytes = simd::kVectorBytes;
  constexpr int64_t kAhead = kQuadColumns;  // columns
  for (int64_t first = 0; first < kQuadColumns; first += kQuadLanes) {
    for (int64_t at = 0; at < right.bytes; at += kBytes) {
      const auto bytes =
          static_cast<size_t>(std::min(kBytes, right.bytes - at));
      Vector<uint32_t> words[kQuadLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kQuadLanes; ++i) {
        const uint8_t* from =
            right.column(column + std::min(first + i, count - 1)) + at;
        prefetch_line<PrefetchTo::L2>(from + kAhead * right.stride);
        Vector<uint32_t> loaded{};
        if (bytes == kBytes) {
          std::memcpy(&loaded, from, kBytes);
        } else {
          std::memcpy(&loaded, from, bytes);
        }
        words[i] = loaded;
      }
      simd::transpose(words);
      const auto count_of_words = static_cast<int>((bytes + 3) / 4);
      uint32_t* quads = to + at / 4 * 2 * kQuadColumns + first;
#pragma GCC unroll 16
      for (int i = 0; i < kQuadLanes; ++i) {
        if (i < count_of_words) {
          simd::store(quads + 2 * i * kQuadColumns, Int4Quads::low(words[i]));
          simd::store(quads + (2 * i + 1) * kQuadColumns,
                      Int4Quads::high(words[i]));
        }
      }
    }
  }
}

}  // namespace detail

// Whether so many rows are multiplied faster so than by dot products along the
// columns (cpu/int4/rowwise.cpp). Zen 4, one core, GOP/s of 473 by those and
// so, 24 / 128 / 512 rows: 256 values 185 / 185 / 171 and 307 / 359 / 338, 768
// 299 / 297 / 291 and 337 / 397 / 396, 2048 351 / 359 / 357 and 342 / 406 /
// 403, 4096 364 / 384 / 391 and 326 / 389 / 413, 11008 382 / 406 / 401 and 317
// / 361 / 370: then a micro-panel takes a third of L2. With AVX2's registers,
// whose micro-panels are half as wide, 24 / 128 / 512 rows of 4096 values 332 /
// 319 / 311 and 359 / 401 / 404, 11008 322 / 308 / 296 and 349 / 365 / 359.
constexpr bool multiplies_by_quad_panels(int64_t rows, int64_t inner) {
#if defined(PKG_HAS_BYTE_DOT)
  constexpr int64_t kMost =
      kInstructionSet == InstructionSet::Avx2 ? 16384 : 2048;
  return rows >= 24 && inner > 0 && inner <= kMost;
#else
  static_cast<void>(rows);
  static_cast<void>(inner);
  return false;
#endif
}

// Rows of the result from `row` on, of which `left` has the operand, and
// columns from `column` on.
inline void multiply_by_quad_panels(const LeftRows& left,
                                    const RightColumns& right,
                                    const ScaledOutput& output, int64_t row,
                                    int64_t rows, int64_t column,
                                    int64_t columns) {
  const int64_t words = (right.bytes + 3) / 4;
  const int64_t depth = 2 * words;
  uint32_t* const strips =
      Workspace::of_this_thread<Slot::QuadStrips>().template request<uint32_t>(
          rows * depth);
  uint32_t* const panel =
      Workspace::of_this_thread<Slot::QuadPanel>().template request<uint32_t>(
          depth * detail::kQuadColumns);
  int32_t* const sums =
      Workspace::of_this_thread<Slot::IntegerSums>().template request<int32_t>(
          rows * detail::kQuadColumns);
  detail::pack_quads(left, rows, words, strips);
  for_each_block(
      columns, detail::kQuadColumns, [&](int64_t done, int64_t count) {
        detail::unpack_quads(right, column + done, count, panel);
        for_each_strip(rows, [&](int64_t first, int height) {
          with_strip_height(height, [&](auto strip) {
            detail::micro_kernel<Int4Quads, strip(), kNRVectors>(
                depth, PackedStrips<uint32_t>{strips}, panel,
                detail::kQuadColumns, first, 0,
                static_cast<int>(detail::kQuadColumns),
                MicroTileSums<int32_t>{nullptr, 0,
                                       sums + first * detail::kQuadColumns,
                                       detail::kQuadColumns, nullptr});
          });
        });
        output.store(output, {sums, detail::kQuadColumns, left.totals, row,
                              column + done, rows, count});
      });
}

}  // namespace pkg::cpu
