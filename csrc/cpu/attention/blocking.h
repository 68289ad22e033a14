// How attention's matrices are cut. Of a matrix of scores (L x S) the kernels
// hold one block at a time:
//
//            S keys
//        +--------+--------+--
//        | block  |        |     block  rows x kKeyBlock; a cache holds it
//   L    |--------|        |
//   rows | strip  |        |     strip  MR = kMR rows of a block
//        |--------|        |     tile   MR x NR of a strip; registers hold it,
//        |        |        |            cpu/gemm/micro_kernel.h makes it
//        +--------+--------+--
//
// Packed operands consist of k-groups, the kDepth consecutive values of the
// inner dimension (k) that one multiply-add takes: one value, or a pair of
// bfloat16. A right operand is packed in micro-panels of NR = kNR
// columns, a left one of MR rows. "Lane" means an element of a SIMD register,
// and nothing else.
//
// Strips are kMR high, as the micro-kernel has them, and for what is left
// a third of that, filled up with zeros: two kinds of strips keep the code
// small, and a block of 16, 64 or 128 rows, being a multiple of 4, wastes none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/gemm/micro_kernel.h"
#include "cpu/simd/simd.h"
#include "host/integer_math.h"

namespace pkg::cpu::attention {

// The element of a packed operand.
template <class Arithmetic>
using KGroupOf = typename Arithmetic::KGroup;

inline constexpr int kStripRows = kMR;
inline constexpr int kShortStripRows = kMR / 3;

// Keys that one block of scores covers. 192 is a multiple of every tile's width
// and of kStripRows, since a key is a row where probabilities are transposed.
inline constexpr int64_t kKeyBlock = 192;
// Elements from one row of scores to the next: a line more than the block, lest
// the rows of a strip share the sets of the L1 cache.
inline constexpr int64_t kScoreStride = kKeyBlock + 16;
static_assert(kKeyBlock % kStripRows == 0 && kStripRows % kShortStripRows == 0);

// Values of the inner dimension that are accumulated one after the other.
// Longer sums, of head sizes beyond it, are made of such parts: the rounding
// error grows with the accumulation length, and twice as fast where the product
// is rounded too, for want of a fused multiply-add.
#if defined(__FMA__) || defined(__aarch64__)
inline constexpr int64_t kAccumulationLength = kKeyBlock;
#else
inline constexpr int64_t kAccumulationLength = kKeyBlock / 6;
#endif

// How many heads, of so many bytes when they are packed, are packed at a time.
// A single thread takes as many as its L2 cache holds beside what is made of
// them, or one after the other; it is up to 1.2 times as fast as with a share
// of an L3 cache. Several threads have that: they wait for one another after
// each time, and two gained nothing by less (docs/tuning/attention.md).
constexpr int64_t heads_at_once(int64_t head_bytes, int64_t threads) {
  constexpr int64_t kOfL2 = int64_t{384} << 10;
  constexpr int64_t kOfL3 = int64_t{16} << 20;
  return std::max<int64_t>(
      (threads == 1 ? kOfL2 : kOfL3) / std::max<int64_t>(head_bytes, 1), 1);
}

// Rows that strips over `rows` rows cover.
constexpr int64_t padded_rows(int64_t rows) {
  return rows / kStripRows * kStripRows +
         round_up(rows % kStripRows, kShortStripRows);
}

// Calls body(first_row, used_rows, height) for each strip; height is a
// std::integral_constant.
template <class Body>
void for_each_strip(int64_t rows, const Body& body) {
  int64_t row = 0;
  for (; row + kStripRows <= rows; row += kStripRows) {
    body(row, kStripRows, std::integral_constant<int, kStripRows>{});
  }
  for (; row < rows; row += kShortStripRows) {
    body(row, static_cast<int>(std::min<int64_t>(kShortStripRows, rows - row)),
         std::integral_constant<int, kShortStripRows>{});
  }
}

}  // namespace pkg::cpu::attention
