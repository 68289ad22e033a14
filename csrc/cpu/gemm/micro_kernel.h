// The micro-kernel: the sums of a micro-tile of MR x NR, accumulated in
// registers over a block of K, and the two innermost loops around it. For each
// k-group it loads kVectors registers of B's micro-panel and broadcasts the
// k-groups of A's rows, one after the other. cpu/gemm/contract.h says what it
// is given and owes; tile sizes are in cpu/gemm/blocking.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu/gemm/arithmetic.h"
#include "cpu/gemm/blocking.h"
#include "cpu/gemm/contract.h"
#include "cpu/gemm/operands.h"
#include "cpu/gemm/store_sums.h"
#include "cpu/runtime/cache.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/tile_registers.h"
#include "host/integer_math.h"

namespace pkg::cpu {

namespace detail {

// Calls body(row, vector) for each register of a micro-tile. Unrolled, or else
// the compiler keeps the registers in memory: it then fills that with zeros for
// each micro-tile, by an instruction that takes as long as 4 k-groups.
template <int kRows, int kVectors, class Body>
[[gnu::always_inline]] inline void for_each_register(const Body& body) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      body(r, v);
    }
  }
}

template <class V, int kRows, int kVectors>
[[gnu::always_inline]] inline void add_sums(const V (&sums)[kRows][kVectors],
                                            V (&to)[kRows][kVectors]) {
  for_each_register<kRows, kVectors>(
      [&](int r, int v) { to[r][v] += sums[r][v]; });
}

template <class V, int kAccumulators, int kRows, int kVectors>
[[gnu::always_inline]] inline void clear_sums(
    V (&sums)[kAccumulators][kRows][kVectors]) {
#pragma GCC unroll 8
  for (int i = 0; i < kAccumulators; ++i) {
    for_each_register<kRows, kVectors>(
        [&](int r, int v) { sums[i][r][v] = V{}; });
  }
}

// Whether k-groups of A are multiplied where they lie in a register, each by
// its lane, as NEON's instructions can: of dot products GCC does not see that
// it need not broadcast them. Of packed strips a register has the k-groups of
// kLanes rows.
template <class Arithmetic>
inline constexpr bool kMultipliesByLane =
    requires(Vector<typename Arithmetic::KGroup> k_groups,
             Vector<typename Arithmetic::Accumulator> sum) {
      Arithmetic::template multiply_add_lane<0>(k_groups, k_groups, sum);
    };

// Whether each multiplication broadcasts the k-group of A from memory, where
// the micro-panel's are converted as they are loaded: on Zen 4 conversions and
// the instruction that broadcasts once for a row go badly together. Cycles of
// two k-groups of 2 rows by 32 columns of float16, in registers but for what is
// loaded: 13 with a broadcast for each row, 9 so; of float32 8 with it and 8.5
// so.
template <class Arithmetic, class RightKGroup>
inline constexpr bool kMultipliesFromMemory =
    sizeof(RightKGroup) < sizeof(typename Arithmetic::KGroup) &&
    requires(const typename Arithmetic::KGroup* a,
             Vector<typename Arithmetic::KGroup> b,
             Vector<typename Arithmetic::Accumulator> sum) {
      Arithmetic::multiply_add_from(a, b, sum);
    };

template <class Arithmetic, class KGroups, class V, int kRows, int kVectors,
          int... kLane>
[[gnu::always_inline]] inline void multiply_lanes(
    KGroups a, const KGroups (&b)[kVectors], V (&sums)[kRows][kVectors],
    int row, std::integer_sequence<int, kLane...>) {
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    ((sums[row + kLane][v] = Arithmetic::template multiply_add_lane<kLane>(
          a, b[v], sums[row + kLane][v])),
     ...);
  }
}

// Multiplies one k-group of the rows at `strip` and of kVectors registers at
// `right`.
template <class Arithmetic, bool kPrefetches, int kRows, int kVectors,
          class Left, class Cursor, class RightKGroup>
[[gnu::always_inline]] inline void multiply_k_group(
    const Left& left, const Cursor& strip, const RightKGroup* right,
    Vector<typename Arithmetic::Accumulator> (&sums)[kRows][kVectors]) {
  using KGroup = typename Arithmetic::KGroup;
  constexpr int kLanes = simd::kLanes<KGroup>;
  if constexpr (kPrefetches) {
    prefetch_bytes<PrefetchTo::L1>(
        reinterpret_cast<const std::byte*>(right) + kStreamingBytes,
        kVectors * kLanes * int64_t{sizeof(RightKGroup)});
  }
  Vector<KGroup> b[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    b[v] = simd::load(right + v * kLanes);
  }
  if constexpr (kMultipliesFromMemory<Arithmetic, RightKGroup>) {
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = Arithmetic::multiply_add_from(left.k_groups(strip, r),
                                                   b[v], sums[r][v]);
      }
    }
  } else if constexpr (!kMultipliesByLane<Arithmetic>) {
    for (int r = 0; r < kRows; ++r) {
      const Vector<KGroup> a =
          simd::broadcast(left.template k_group<kRows>(strip, r));
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = Arithmetic::multiply_add(a, b[v], sums[r][v]);
      }
    }
  } else if constexpr (kRows % kLanes == 0 &&
                       requires { left.k_groups(strip, 0); }) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r += kLanes) {
      multiply_lanes<Arithmetic>(simd::load(left.k_groups(strip, r)), b, sums,
                                 r, std::make_integer_sequence<int, kLanes>{});
    }
  } else {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const KGroup a = left.template k_group<kRows>(strip, r);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = Arithmetic::multiply_add(a, b[v], sums[r][v]);
      }
    }
  }
}

// Calls multiply_next(accumulators) for `depth` k-groups, with each of the
// independent accumulators in turn, and adds these up in the first.
template <class V, int kAccumulators, int kRows, int kVectors, class Multiply>
[[gnu::always_inline]] inline void sum_depth(
    int64_t depth, const Multiply& multiply_next,
    V (&sums)[kAccumulators][kRows][kVectors]) {
  int64_t k = 0;
#pragma GCC unroll 4
  for (; k + kAccumulators <= depth; k += kAccumulators) {
    for (int i = 0; i < kAccumulators; ++i) {
      multiply_next(sums[i]);
    }
  }
  for (; k < depth; ++k) {
    multiply_next(sums[0]);
  }
  for (int i = 1; i < kAccumulators; ++i) {
    add_sums(sums[i], sums[0]);
  }
}

// The same in parts of kAccumulationLength k-groups, whose sums are added.
template <class V, int kAccumulators, int kRows, int kVectors, class Multiply>
[[gnu::always_inline]] inline void sum_depth_in_parts(
    int64_t depth, const Multiply& multiply_next,
    V (&sums)[kAccumulators][kRows][kVectors]) {
  if (depth <= kAccumulationLength) {
    return sum_depth(depth, multiply_next, sums);
  }
  V totals[1][kRows][kVectors];
  clear_sums(totals);
  for (; depth > kAccumulationLength; depth -= kAccumulationLength) {
    sum_depth(kAccumulationLength, multiply_next, sums);
    add_sums(sums[0], totals[0]);
    clear_sums(sums);
  }
  sum_depth(depth, multiply_next, sums);
  add_sums(totals[0], sums[0]);
}

// The micro-tile at (row, column), of a strip of kRows rows and kVectors
// registers of columns, of which `columns` columns exist.
template <ProductArithmetic Arithmetic, int kRows, int kVectors,
          LeftMicroPanels<typename Arithmetic::KGroup> Left, class RightKGroup,
          MicroTileStore<typename Arithmetic::Accumulator> Store>
[[gnu::noinline]] void micro_kernel(int64_t depth, const Left& left,
                                    const RightKGroup* panel,
                                    int64_t step_stride, int64_t row,
                                    int64_t column, int columns,
                                    const Store& store) {
  using Accumulator = typename Arithmetic::Accumulator;
  constexpr int kLanes = simd::kLanes<Accumulator>;
  store.template prefetch<kRows, kVectors>(row, column);
  constexpr bool kPrefetches = kPrefetchesStream<RightKGroup, kRows>;
  auto strip = left.template strip<kRows>(row, depth);
  auto right = k_groups_of(panel);
  // With few sums in a micro-tile, several k-groups go on side by side.
  constexpr int kAccumulators =
      Store::kInOrder ? 1 : std::max(8 / (kRows * kVectors), 1);
  Vector<Accumulator> sums[kAccumulators][kRows][kVectors];
  clear_sums(sums);
  if constexpr (Arithmetic::kCompensated) {
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        sums[0][r][v] = simd::broadcast(store.compensation[row + r]);
      }
    }
  }
#if defined(PKG_HAS_TILES)
  if constexpr (kUsesTileRegisters<Arithmetic> && kRowsOfTiles<kRows>) {
    const int64_t by_tiles = depth / kTileLanes * kTileLanes;
    if (by_tiles > 0) {
      multiply_by_tiles<Arithmetic>(by_tiles, strip, left.row_bytes, right,
                                    step_stride, sums[0]);
      strip += by_tiles * Left::template kStep<kRows>;
      right += by_tiles * step_stride;
      depth -= by_tiles;
    }
  }
#endif
  // Called in three places, it is otherwise a function now and then, as the
  // size of the whole source will have it, and the sums lie in memory.
  const auto multiply_next = [&](auto& accumulators)
                                 __attribute__((always_inline)) {
                                   multiply_k_group<Arithmetic, kPrefetches>(
                                       left, strip, right, accumulators);
                                   strip += Left::template kStep<kRows>;
                                   right += step_stride;
                                 };
  if constexpr (kSumsInParts<Arithmetic> &&
                !(kFusesMultiplyAdd && Store::kInOrder)) {
    sum_depth_in_parts(depth, multiply_next, sums);
  } else {
    sum_depth(depth, multiply_next, sums);
  }
  store(row, column, sums[0], columns - (kVectors - 1) * kLanes);
}

}  // namespace detail

// The micro-kernel for a strip's height and up to kMicroTileVectors
// registers of columns. Compiled in cpu/gemm/micro_kernels_*.cpp, for the
// operands that are listed there.
template <ProductArithmetic Arithmetic,
          LeftMicroPanels<typename Arithmetic::KGroup> Left, class RightKGroup>
void any_micro_kernel(
    int height, int vectors, int64_t depth, const Left& left,
    const RightKGroup* right, int64_t step_stride, int64_t row,
    const MicroTileSums<typename Arithmetic::Accumulator>& sums);

// The micro-tile of `height` rows and up to NR `columns` at (row, column) of a
// product, stored.
template <ProductArithmetic Arithmetic,
          LeftMicroPanels<typename Arithmetic::KGroup> Left, class RightKGroup,
          ProductStore Store>
void multiply_micro_tile(int height, int columns, int64_t depth,
                         const Left& left, const RightKGroup* right,
                         int64_t step_stride, int64_t row, int64_t column,
                         const Store& store) {
  constexpr int kLanes = simd::kLanes<typename Arithmetic::Accumulator>;
  typename Store::EdgeTile scratch;
  const int vectors = ceil_div(columns, kLanes);
  const int tail = columns - (vectors - 1) * kLanes;
  const auto sums =
      store.place(row, column, height, vectors, tail, depth, scratch);
  any_micro_kernel<Arithmetic>(height, vectors, depth, left, right, step_stride,
                               row, sums);
  if (sums.to == reinterpret_cast<const void*>(scratch)) {
    store.finish(row, column, height, vectors, tail, scratch);
  }
}

// Loops 2 and 1: rows by columns over one block of K. A micro-panel of B serves
// all strips of rows, which come from the L2 cache; but where all micro-panels
// fit that cache too, a strip goes over them one after the other, so that the
// result is written along its rows.
template <ProductArithmetic Arithmetic,
          LeftMicroPanels<typename Arithmetic::KGroup> Left, class RightKGroup,
          ProductStore Store>
void multiply_panels(int64_t rows, int64_t columns, int64_t depth,
                     const Left& left, const RightPanels<RightKGroup>& right,
                     const Store& store) {
  constexpr int64_t kColumns = kNR<Arithmetic>;
  constexpr int64_t kSmall =
      kInstructionSet == InstructionSet::Amx ? kLargeL2Bytes / 2 : 131072;
  const auto multiply = [&](int64_t row, int height, int64_t column) {
    multiply_micro_tile<Arithmetic>(
        height, static_cast<int>(std::min(kColumns, columns - column)), depth,
        left, right.data + column / kColumns * right.panel_stride,
        right.step_stride, row, column, store);
  };
  if (depth * columns * static_cast<int64_t>(sizeof(RightKGroup)) <= kSmall) {
    for_each_strip<kMicroTileRows<Arithmetic>>(
        rows, [&](int64_t row, int height) {
          for (int64_t column = 0; column < columns; column += kColumns) {
            multiply(row, height, column);
          }
        });
    return;
  }
  for (int64_t column = 0; column < columns; column += kColumns) {
    for_each_strip<kMicroTileRows<Arithmetic>>(
        rows, [&](int64_t row, int height) { multiply(row, height, column); });
  }
}

}  // namespace pkg::cpu
