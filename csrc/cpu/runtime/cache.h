// The caches as the kernels see them: lines, software prefetch, and rows that
// meet in the same sets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/simd/simd.h"

namespace pkg::cpu {

inline constexpr int64_t kCacheLine = 64;
// Bytes of a way of the L1 cache: lines that far apart lie in the same set.
inline constexpr int64_t kL1Way = 4096;
// Of the L2 cache, as much as the kernels reckon with.
inline constexpr int64_t kL2Bytes = 1 << 20;
// The L2 cache of the processor with tile registers on which reading in place
// and the blocks of cpu/tiles were measured.
inline constexpr int64_t kLargeL2Bytes = 2 << 20;

// Which rows are too often in the same sets to be read side by side, MR at a
// time. There are two rules, since what else there is to do differs:
//
// A that gemm.h could pack, and rows that are copied anyhow. 12 rows half a way
// apart fill 6 of the 8 ways of two sets; packing, which many columns share,
// costs less than what that leaves no room for.
constexpr bool rows_share_two_sets(int64_t row_bytes) {
  return row_bytes % (kL1Way / 2) == 0;
}
// The weights of lltm, which are read once: packing them is not shared. Rows of
// 1536 floats, one and a half ways apart, take 11.7 ms in place and 12.4 packed
// (docs/tuning/gemm.md).
constexpr bool rows_share_one_set(int64_t row_bytes) {
  return row_bytes % kL1Way == 0;
}

// Software prefetch: for what the processor's own prefetchers do not foresee,
// as short runs in many rows. L1 for what is read within the next hundreds of
// cycles, L2 for more than L1 has room for, Write for what is read and written.
enum class PrefetchTo { L1, L2, Write };

template <PrefetchTo kTo>
[[gnu::always_inline]] inline void prefetch_line(const void* at) {
  if constexpr (kTo == PrefetchTo::L1) {
    __builtin_prefetch(at);
  } else if constexpr (kTo == PrefetchTo::L2) {
    __builtin_prefetch(at, 0, 2);
  } else {
    __builtin_prefetch(at, 1);
  }
}

// The lines of `bytes` contiguous bytes that begin at one.
template <PrefetchTo kTo>
[[gnu::always_inline]] inline void prefetch_bytes(const void* from,
                                                  int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kCacheLine) {
    prefetch_line<kTo>(static_cast<const std::byte*>(from) + at);
  }
}

// kVectors registers of each of `rows` rows, `stride` elements apart, that need
// not begin at a line.
template <PrefetchTo kTo, int kVectors, class T>
[[gnu::always_inline]] inline void prefetch_registers(const T* from,
                                                      int64_t stride,
                                                      int rows) {
  constexpr int kLanes = simd::kLanes<simd::Compute<T>>;
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      prefetch_line<kTo>(from + r * stride + v * kLanes);
    }
  }
}

}  // namespace pkg::cpu
