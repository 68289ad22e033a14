// Lanes exchanged between registers. Transposition of a square: kLanes
// registers of kLanes lanes of 4 or 8 bytes, by log2(kLanes) stages of kLanes
// shuffles each. The first stages interleave lanes within the 128-bit parts
// (UNPCK: 1.5 a cycle on Zen 4), the last exchange whole parts; general
// two-register permutes run at 1 a cycle and need their indices in registers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "cpu/simd/simd.h"

namespace pkg::simd {

namespace detail {

// Lanes of two registers by indices known at compile time: 0 ... kLanes - 1 are
// a's, those from kLanes on are b's.
template <class IndexOf, class V, size_t... lane>
[[gnu::always_inline]] inline V shuffle(V a, V b,
                                        std::index_sequence<lane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, IndexOf::of(lane)...);
#else
  using Index = std::conditional_t<sizeof(a[0]) == 8, int64_t, int32_t>;
  using Indices [[gnu::vector_size(sizeof(V))]] = Index;
  return __builtin_shuffle(a, b, Indices{IndexOf::of(lane)...});
#endif
}

// Groups of kGroup lanes of a and b alternate, from the low (kHigh = 0) or the
// high half of each part of kPart lanes.
template <int kLanes, int kPart, int kGroup, int kHigh>
struct Interleaved {
  static constexpr int of(int lane) {
    const int inside = lane % kPart;
    const int group = inside / kGroup;
    const int from = lane - inside + kHigh * kPart / 2 + group / 2 * kGroup +
                     inside % kGroup;
    return group % 2 == 0 ? from : kLanes + from;
  }
};

// The even (kOdd = 0) or odd parts of a, then those of b.
template <int kLanes, int kPart, int kOdd>
struct AlternateParts {
  static constexpr int of(int lane) {
    constexpr int kHalf = kLanes / 2;
    const int inside = lane % kHalf;
    const int from = (2 * (inside / kPart) + kOdd) * kPart + inside % kPart;
    return lane < kHalf ? from : kLanes + from;
  }
};

// Lanes of a where bit kBit of the lane is clear, of b where it is set; each
// the one of its pair (lanes that differ in kBit) that has the bit clear or
// set.
template <int kLanes, int kBit, int kSet>
struct Exchanged {
  static constexpr int of(int lane) {
    const int from = (lane & ~kBit) | (kSet * kBit);
    return (lane & kBit) == 0 ? from : kLanes + from;
  }
};

struct NeighbourOf {
  static constexpr int of(int lane) { return lane ^ 1; }
};

// Stages of two registers `kDistance` apart, over all registers.
template <int kDistance, class First, class Second, class V, int kCount>
[[gnu::always_inline]] inline void butterfly(V (&rows)[kCount]) {
  constexpr int kLanes = static_cast<int>(sizeof(V) / sizeof(rows[0][0]));
  constexpr auto kSequence = std::make_index_sequence<kLanes>{};
#pragma GCC unroll 32
  for (int i = 0; i < kCount; ++i) {
    if ((i & kDistance) == 0) {
      const V a = rows[i];
      const V b = rows[i | kDistance];
      rows[i] = shuffle<First>(a, b, kSequence);
      rows[i | kDistance] = shuffle<Second>(a, b, kSequence);
    }
  }
}

// Lanes in 128 bits, a part.
template <class V>
inline constexpr int kPartLanes =
    16 / static_cast<int>(sizeof(std::declval<V>()[0]));
template <class V>
inline constexpr int kParts = static_cast<int>(sizeof(V)) / 16;

// Of each kPartLanes registers, the i-th gets lane i of every part of all.
template <class V, int kCount>
[[gnu::always_inline]] inline void transpose_parts(V (&rows)[kCount]) {
  constexpr int kPart = kPartLanes<V>;
  constexpr int kLanes = kPart * kParts<V>;
  static_assert(kCount % kPart == 0);
  butterfly<1, Interleaved<kLanes, kPart, 1, 0>,
            Interleaved<kLanes, kPart, 1, 1>>(rows);
  if constexpr (kPart == 4) {
    butterfly<2, Interleaved<kLanes, kPart, 2, 0>,
              Interleaved<kLanes, kPart, 2, 1>>(rows);
    // Interleaving leaves the lanes of a part in bit-reversed order.
#pragma GCC unroll 8
    for (int i = 0; i < kCount; i += 4) {
      std::swap(rows[i + 1], rows[i + 2]);
    }
  }
}

// Of kParts registers kDistance apart, the i-th gets the i-th part of all.
template <int kDistance, class V, int kCount>
[[gnu::always_inline]] inline void exchange_parts(V (&rows)[kCount]) {
  constexpr int kPart = kPartLanes<V>;
  constexpr int kLanes = kPart * kParts<V>;
  if constexpr (kParts<V> > 1) {
    butterfly<kDistance, AlternateParts<kLanes, kPart, 0>,
              AlternateParts<kLanes, kPart, 1>>(rows);
  }
  if constexpr (kParts<V> > 2) {
    butterfly<2 * kDistance, AlternateParts<kLanes, kPart, 0>,
              AlternateParts<kLanes, kPart, 1>>(rows);
  }
}

}  // namespace detail

// rows[i] becomes the vector of lane i of every row.
template <class V, int kLanes>
[[gnu::always_inline]] inline void transpose(V (&rows)[kLanes]) {
  static_assert(sizeof(V) == kLanes * sizeof(rows[0][0]));
  detail::transpose_parts(rows);
  detail::exchange_parts<detail::kPartLanes<V>>(rows);
}

// Whether so many rows can be transposed without gaps.
template <class V>
constexpr bool transposes_without_gaps(int rows) {
  return rows % detail::kPartLanes<V> == 0 && rows % detail::kParts<V> == 0;
}

// Any number of rows of which that is true: lane 0 of every row, behind it lane
// 1 of every row, and so on, in as many registers. 12 rows of 16 lanes take 48
// shuffles and 12 stores, where a square takes 64 and 16 that overlap.
template <class V, int kRows>
[[gnu::always_inline]] inline void transpose_without_gaps(V (&rows)[kRows]) {
  static_assert(transposes_without_gaps<V>(kRows));
  constexpr int kPart = detail::kPartLanes<V>;
  constexpr int kParts = detail::kParts<V>;
  detail::transpose_parts(rows);
  // rows[g kPart + j] has lane j of every part of the g-th rows: in the order
  // of the result these follow one another over g, then over j, for each part
  // of a register.
  V parts[kRows / kParts][kParts];
#pragma GCC unroll 32
  for (int i = 0; i < kRows; ++i) {
    constexpr int kGroups = kRows / kPart;
    parts[i / kParts][i % kParts] = rows[i % kGroups * kPart + i / kGroups];
  }
#pragma GCC unroll 32
  for (int run = 0; run < kRows / kParts; ++run) {
    detail::exchange_parts<1>(parts[run]);
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      rows[part * (kRows / kParts) + run] = parts[run][part];
    }
  }
}

// Lanes of the two registers in turns.
template <class V>
[[gnu::always_inline]] inline void interleave(V& first, V& second) {
  constexpr int kLanes = static_cast<int>(sizeof(V) / sizeof(first[0]));
  constexpr auto kSequence = std::make_index_sequence<kLanes>{};
  const V a = first;
  const V b = second;
  first = detail::shuffle<detail::Interleaved<kLanes, kLanes, 1, 0>>(a, b,
                                                                     kSequence);
  second = detail::shuffle<detail::Interleaved<kLanes, kLanes, 1, 1>>(
      a, b, kSequence);
}

// Lanes 2 i and 2 i + 1 exchanged.
template <class V>
[[gnu::always_inline]] inline V swap_neighbours(V value) {
  constexpr int kLanes = static_cast<int>(sizeof(V) / sizeof(value[0]));
  return detail::shuffle<detail::NeighbourOf>(
      value, value, std::make_index_sequence<kLanes>{});
}

// Lane i of the result is what `combine` makes of all lanes of rows[i]: each
// stage combines the halves of two registers and leaves one.
template <int kBit = 1, class V, int kCount, class Combine>
[[gnu::always_inline]] inline V combine_each(const V (&rows)[kCount],
                                             const Combine& combine) {
  constexpr int kLanes = static_cast<int>(sizeof(V) / sizeof(rows[0][0]));
  constexpr auto kSequence = std::make_index_sequence<kLanes>{};
  V halves[kCount / 2];
  for (int i = 0; i < kCount; i += 2) {
    const V a = rows[i];
    const V b = rows[i + 1];
    halves[i / 2] = combine(
        detail::shuffle<detail::Exchanged<kLanes, kBit, 0>>(a, b, kSequence),
        detail::shuffle<detail::Exchanged<kLanes, kBit, 1>>(a, b, kSequence));
  }
  if constexpr (kCount == 2) {
    return halves[0];
  } else {
    return combine_each<kBit * 2>(halves, combine);
  }
}

// Lane i of the result is the sum of rows[i].
template <class V, int kCount>
[[gnu::always_inline]] inline V sum_each(const V (&rows)[kCount]) {
  return combine_each(rows, [](V a, V b) { return a + b; });
}

}  // namespace pkg::simd
