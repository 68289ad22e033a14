// Software prefetch of keys and values for the decoding way.
//
// One row and a contiguous cache: some lines ahead in the same row, which loads
// memory faster than the hardware prefetcher does by itself: 4 lines of float32
// on Zen 4 (24 GB/s without, 29 with; 8 are too many), none of half precision.
// The Intel processors that have tile registers want 16 and 32 lines.
//
// Keys that are scattered, in pages or with other heads' keys between them, end
// before the hardware prefetcher has seen them coming, and several rows read
// several keys side by side: the same place in the next block, into the L2
// cache (float32 x 64, pages of 16 keys: 8.9 GB/s before, 17 with it). One row
// and a contiguous cache lose by it (28 to 24): more instructions a key, so
// fewer keys are under way.
//
// One row of half precision with AVX2 does the same, and multiplies several
// keys side by side in blocks of two pages of memory: by 32-byte registers it
// is bound by arithmetic as much as by memory, and the next block comes
// meanwhile.
//
// Pages of a cache lie on pages of memory whose addresses the processor has yet
// to translate, which takes as long as a read: the first and the last line of a
// block are asked for some blocks earlier. A line of each page of memory that
// it lies on is too much where there are many. All figures:
// docs/tuning/attention.md.
#pragma once

#include <cstdint>

#include "cpu/gemm/blocking.h"
#include "cpu/runtime/cache.h"
#include "cpu/simd/tile_registers.h"

namespace pkg::cpu::attention {

// Bytes ahead; 0 for none.
#if defined(PKG_HAS_TILES)
template <class Input>
inline constexpr int64_t kPrefetchDistance =
    kCacheLine * (sizeof(Input) >= 4 ? 16 : 32);
#else
template <class Input>
inline constexpr int64_t kPrefetchDistance =
    kCacheLine * (sizeof(Input) >= 4 ? 4 : 0);
#endif
// How many blocks earlier.
inline constexpr int64_t kBlocksTouchedAhead = 4;

// Whether one row goes over several keys side by side too.
template <class Input>
inline constexpr bool kOneRowTakesSeveralKeys =
    kInstructionSet == InstructionSet::Avx2 && sizeof(Input) < sizeof(float);

template <bool kScattered, int kRows, class Input>
inline constexpr bool kPrefetchesNextBlock =
    kScattered || kRows > 1 || kOneRowTakesSeveralKeys<Input>;

// `element` of a row that begins at a line, or is treated as if it did: where a
// register is half a line, each line is asked for once.
template <bool kScattered, int kRows, class Input>
[[gnu::always_inline]] inline void prefetch_next(const Input* now,
                                                 const Input* next,
                                                 int64_t element) {
  if constexpr (kPrefetchesNextBlock<kScattered, kRows, Input>) {
    if (!kOneRowTakesSeveralKeys<Input> ||
        element * int64_t{sizeof(Input)} % kCacheLine == 0) {
      prefetch_line<PrefetchTo::L2>(next);
    }
  } else if constexpr (kPrefetchDistance<Input> > 0) {
    prefetch_line<PrefetchTo::L1>(reinterpret_cast<const char*>(now) +
                                  kPrefetchDistance<Input>);
  }
}

}  // namespace pkg::cpu::attention
