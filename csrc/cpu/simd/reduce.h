// Sums of the lanes of many registers at a time.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
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

// The same of kCount registers: as many as there are lanes at a time; of at
// most half as many, halves are added first.
template <int kCount, class V, class T>
[[gnu::always_inline]] inline void reduce_add_run(const V* values, T* totals) {
  constexpr int kLanes = sizeof(V) / sizeof(T);
  if constexpr (2 * kCount <= kLanes && sizeof(V) > 16) {
    using Half = typename VectorOf<T, sizeof(V) / 2>::type;
    struct Halves {
      Half low, high;
    };
    Half sums[kCount];
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      const auto halves = std::bit_cast<Halves>(values[i]);
      sums[i] = halves.low + halves.high;
    }
    reduce_add_run<kCount>(sums, totals);
  } else {
    constexpr int kTaken = std::min(kCount, kLanes);
    V square[kLanes] = {};
#pragma GCC unroll 16
    for (int i = 0; i < kTaken; ++i) {
      square[i] = values[i];
    }
    const V sums = reduce_add_square<1>(square);
    std::memcpy(totals, &sums, kTaken * sizeof(T));
    if constexpr (kCount > kTaken) {
      reduce_add_run<kCount - kTaken>(values + kTaken, totals + kTaken);
    }
  }
}

}  // namespace detail

// totals[i] = the sum of the lanes of values[i].
template <class V, class T, int kCount>
[[gnu::always_inline]] inline void reduce_add_each(const V (&values)[kCount],
                                                   T* totals) {
  detail::reduce_add_run<kCount>(values, totals);
}

}  // namespace pkg::simd
