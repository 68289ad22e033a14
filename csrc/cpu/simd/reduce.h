// Sums of the lanes of many registers at a time.
#pragma once

#include <algorithm>
#include <utility>

#include "cpu/simd/simd.h"
#include "cpu/simd/transpose.h"

namespace pkg::simd {

namespace detail {

// Of kLanes registers: lane i of the result is the sum of the i-th's lanes. Two
// registers become one at each stage, half of the lanes of either.
template <int kBit, class V, int kLanes>
[[gnu::always_inline]] inline V reduce_add_square(V (&values)[kLanes]) {
  if constexpr (kBit < kLanes) {
    constexpr auto kSequence = std::make_index_sequence<kLanes>{};
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i += 2 * kBit) {
      const V a = values[i];
      const V b = values[i + kBit];
      values[i] = shuffle<Exchanged<kLanes, kBit, 0>>(a, b, kSequence) +
                  shuffle<Exchanged<kLanes, kBit, 1>>(a, b, kSequence);
    }
    return reduce_add_square<2 * kBit>(values);
  } else {
    return values[0];
  }
}

}  // namespace detail

// totals[i] = the sum of the lanes of values[i].
template <class V, class T, int kCount>
[[gnu::always_inline]] inline void reduce_add_each(const V (&values)[kCount],
                                                   T (&totals)[kCount]) {
  constexpr int kLanes = sizeof(V) / sizeof(T);
#pragma GCC unroll 16
  for (int first = 0; first < kCount; first += kLanes) {
    const int count = std::min(kLanes, kCount - first);
    V square[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      square[i] = i < count ? values[first + i] : V{};
    }
    const V sums = detail::reduce_add_square<1>(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i < count) {
        totals[first + i] = sums[i];
      }
    }
  }
}

}  // namespace pkg::simd
