// Which operands of a product are better read where they lie than packed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/gemm/blocking.h"
#include "cpu/gemm/operands.h"
#include "cpu/runtime/cache.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu::detail {

// Processors with tile registers have 12 ways of L1 and load two registers a
// cycle, whatever lines they lie in: an operand in place costs them little.
inline constexpr bool kReadsAnyRows = kInstructionSet == InstructionSet::Amx;

// So few rows that B, which each strip of them goes over, is not worth packing.
inline constexpr int64_t kFewRows = kReadsAnyRows ? 48 : 24;
// The same where it is converted for each strip; tile registers are the way of
// more. Intel Xeon (AMX), one thread, float16, PyTorch's time over ours, packed
// and in place, 4096 to 4096: 2 rows 0.64 and 1.80, 8 0.71 and 1.25, 16 0.74
// and 1.32.
inline constexpr int64_t kFewConvertedRows = 16;

// As what B's rows are read where they lie: as they are, or converted as they
// are loaded, for each strip of A's rows anew (float16; the kernels are those
// of cpu/gemm/packed_product.h).
template <class Arithmetic, class Input>
inline constexpr bool kIsConverted =
    kReadsAnyRows && std::is_same_v<Input, simd::Half> &&
    std::is_same_v<typename Arithmetic::KGroup, float>;
template <class Arithmetic, class Input>
inline constexpr bool kCanBeInPlace =
    std::is_same_v<Input, typename Arithmetic::KGroup> ||
    kIsConverted<Arithmetic, Input>;
template <class Arithmetic, class Input>
using InPlaceKGroup =
    std::conditional_t<kIsConverted<Arithmetic, Input>, Streamed<Input>,
                       typename Arithmetic::KGroup>;

// Columns that fill a register.
template <class Arithmetic>
inline constexpr int64_t kRegisterColumns =
    simd::kLanes<typename Arithmetic::Accumulator>;

// On the same processor float64 of more rows is (64 times 1024 x 1024 54
// GFLOP/s packed, 70 in place; 128 69 and 70).
template <class Arithmetic>
inline constexpr bool kHasFewRowsOfDouble =
    kReadsAnyRows && std::is_same_v<typename Arithmetic::KGroup, double>;
template <class Arithmetic>
inline constexpr int64_t kMostRowsInPlace =
    kHasFewRowsOfDouble<Arithmetic> ? 96 : kFewRows;

// Whether B's rows can be read where they lie, and one fills a register.
template <class Arithmetic, class Input>
bool has_rows_of_registers(const MatrixView<Input>& right, int64_t columns) {
  return kCanBeInPlace<Arithmetic, Input> && right.column_stride == 1 &&
         columns >= kRegisterColumns<Arithmetic>;
}

// Columns up to which A, which each micro-panel of B goes over, is not either,
// whatever sets its rows share.
inline constexpr int64_t kFewColumns = 512;

// NC where B is read in place: long runs in its rows, and columns of C that
// stay in L2 for few rows. float64 of 48 rows or more times 256 x 4096 has 52
// to 56 GFLOP/s so on an Intel Xeon (AMX), 66 to 71 where C's columns are no
// more than 256 KiB; float32 loses.
template <class Arithmetic>
int64_t columns_at_a_time_in_place(int64_t rows) {
  constexpr int64_t kMost = 4096;
  constexpr int64_t kLeast = 256;
  constexpr int64_t kBytes = 256 << 10;
  return kHasFewRowsOfDouble<Arithmetic>
             ? std::clamp(kBytes / (rows * int64_t{sizeof(double)}), kLeast,
                          kMost)
             : kMost;
}

// Micro-panels of B up to which A of dot products is read in place elsewhere.
// Their A is packed for a half or a quarter of the work, and that pays sooner
// (Zen 4, A packed against in place: int8 1.04 times as fast with three
// micro-panels, 512 x 96 x 512, 0.97 with one; bfloat16 1.04 with eight, 0.99
// with three).
template <class Arithmetic>
inline constexpr int64_t kFewPanels = Arithmetic::kCompensated ? 1 : 2;

// Where A's rows are better read in place: they need no conversion, lie in
// different sets of the cache, and are few enough that a strip's rows are no
// burden to the prefetcher (Zen 4, float32: in place is 10 % faster at n = 64,
// 1 % at 384, as fast at 768).
template <class Arithmetic, class Input>
bool reads_left_in_place(const MatrixView<Input>& left, int64_t columns,
                         int64_t inner) {
  if (!k_groups_are_contiguous<Arithmetic>(left) ||
      inner % Arithmetic::kKGroupSize != 0) {
    return false;
  }
  if (kReadsAnyRows && columns <= kFewColumns) {
    return true;
  }
  if (!kReadsAnyRows && Arithmetic::kKGroupSize > 1 &&
      columns > kFewPanels<Arithmetic> * kNR<Arithmetic>) {
    return false;
  }
  return inner <= kKC<Arithmetic> &&
         !rows_share_two_sets(left.row_stride *
                              static_cast<int64_t>(sizeof(Input)));
}

// Where B's columns are better read in place: they need no conversion, fill a
// register, and few strips of rows go over them, or they are small and do not
// straddle cache lines (a register that does costs two accesses: n = 100 then
// runs at 75 GFLOP/s on Zen 4, packed at 85).
template <class Arithmetic, class Input>
bool reads_right_in_place(const MatrixView<Input>& right, int64_t rows,
                          int64_t columns, int64_t inner) {
  constexpr int64_t kSmall = kReadsAnyRows ? 262144 : 65536;
  constexpr int64_t kBytes = sizeof(Input);
  if (!has_rows_of_registers<Arithmetic>(right, columns)) {
    return false;
  }
  if (kIsConverted<Arithmetic, Input>) {
    return rows <= kFewConvertedRows;
  }
  const bool is_aligned =
      kReadsAnyRows ||
      (reinterpret_cast<uintptr_t>(right.data) % kCacheLine == 0 &&
       right.row_stride * kBytes % kCacheLine == 0);
  return rows <= kMostRowsInPlace<Arithmetic> ||
         (is_aligned && inner * columns * kBytes <= kSmall);
}

// Columns in place are whole registers. Those left over are multiplied with as
// many before them as fill a micro-panel, or a register: the columns of the
// second range, whose results are written anew.
struct InPlaceColumns {
  int64_t first_count;
  int64_t second;
};
template <class Arithmetic>
InPlaceColumns columns_in_place(int64_t columns) {
  constexpr int64_t kLanes = kRegisterColumns<Arithmetic>;
  constexpr int64_t kColumns = kNR<Arithmetic>;
  const int64_t rest = columns % kColumns;
  if (rest % kLanes == 0) {
    return {columns, columns};
  }
  if (rest > kLanes && columns > kColumns) {
    return {columns - rest, columns - kColumns};
  }
  return {columns - columns % kLanes, columns - kLanes};
}

// The most values of K at a time where B is read in place: as many rows of it
// as the processor's prefetchers follow side by side, where they lie far apart
// in L2 or, fewer, in memory beyond. It is told by all of B, not by a thread's
// part of it, since rounding follows from it.
template <class Arithmetic, class Input>
int64_t most_values_in_place(const MatrixView<Input>& right, int64_t inner) {
  constexpr int64_t kFollowed = 32;
  constexpr int64_t kFollowedInL2 = 64;
  constexpr int64_t kFarApart = 1024;
  const int64_t row_bytes =
      right.row_stride * static_cast<int64_t>(sizeof(Input));
  if (row_bytes < kFarApart || row_bytes * inner <= kLargeL2Bytes / 4) {
    return kKC<Arithmetic>;
  }
  return row_bytes * inner <= kLargeL2Bytes ? kFollowedInL2 : kFollowed;
}

}  // namespace pkg::cpu::detail
