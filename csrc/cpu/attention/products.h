// The products of attention: the micro-kernel of cpu/gemm/micro_kernel.h over
// one strip of rows at a time. What differs from a matrix product is the left
// operand: P and dS are multiplied from where the softmax left them, by rows or
// transposed, and never packed; and what becomes of the sums.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/attention/blocking.h"
#include "cpu/attention/prefetch.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/gemm/micro_kernel.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/tile_registers.h"
#include "cpu/simd/transpose.h"

namespace pkg::cpu::attention {

// Left operands in place: rows of kStride k-groups, or the transpose of such.
// The micro-kernel gets the k-group of a row by k_group().
template <class KGroup, int64_t kStride>
struct LeftByRows {
  const KGroup* data;

  static constexpr int64_t row_bytes = kStride * int64_t{sizeof(KGroup)};
  template <int kRows>
  const KGroup* strip(int64_t row, int64_t /*depth*/) const {
    return data + row * kStride;
  }
  template <int kRows>
  KGroup k_group(const KGroup* at, int row) const {
    return at[row * kStride];
  }
  template <int kRows>
  static constexpr int64_t kStep = 1;
};
template <class KGroup, int64_t kStride>
struct LeftTransposed {
  const KGroup* data;

  template <int kRows>
  const KGroup* strip(int64_t row, int64_t /*depth*/) const {
    return data + row;
  }
  template <int kRows>
  KGroup k_group(const KGroup* at, int row) const {
    return at[row];
  }
  template <int kRows>
  static constexpr int64_t kStep = kStride;
};

// The transpose of kRows columns of `depth` rows of kStride k-groups, kDepth at
// the most, as left operand: in place, or for tile registers by rows in
// `memory`.
template <class Arithmetic, int kRows, int64_t kStride, int64_t kDepth>
auto transposed_left(
    const KGroupOf<Arithmetic>* data, [[maybe_unused]] int64_t depth,
    [[maybe_unused]] KGroupOf<Arithmetic> (&memory)[kRows * kDepth]) {
  using KGroup = KGroupOf<Arithmetic>;
  if constexpr (kUsesTileRegisters<Arithmetic>) {
    constexpr int kLanes = simd::kLanes<KGroup>;
    static_assert(kRows <= kLanes && kDepth % kLanes == 0);
    for (int64_t step = 0; step < depth; step += kLanes) {
      Vector<KGroup> square[kLanes] = {};
      for (int i = 0; i < kLanes; ++i) {
        if (step + i < depth) {
          square[i] = simd::load(data + (step + i) * kStride);
        }
      }
      simd::transpose(square);
      for (int i = 0; i < kRows; ++i) {
        simd::store(memory + i * kDepth + step, square[i]);
      }
    }
    return LeftByRows<KGroup, kDepth>{memory};
  } else {
    return LeftTransposed<KGroup, kStride>{data};
  }
}

// The epilogue of a tile: its sums are stored, or added to what is there, after
// transform(sums). Rows are as wide as whole tiles, so that the last register
// of a row may reach beyond its columns.
template <class Accumulator, class Transform>
struct StoreTile {
  Accumulator* to;
  int64_t row_stride;
  Transform transform;
  bool adds;
  PrefetchRows to_prefetch;

  static constexpr bool kInOrder = true;  // as compute_row_statistics adds them

  template <int kRows, int kVectors>
  [[gnu::always_inline]] void prefetch(int64_t row, int64_t column) const {
    to_prefetch.prefetch<kRows>(row, column,
                                kVectors * simd::kLanes<Accumulator>);
  }

  // Unrolled, or else the compiler keeps the sums in memory.
  template <int kRows, int kVectors>
  [[gnu::always_inline]] void operator()(
      int64_t row, int64_t column, Vector<Accumulator> (&sums)[kRows][kVectors],
      int /*tail*/) const {
    const auto for_each = [&](const auto& body) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          body(to + (row + r) * row_stride + column +
                   v * simd::kLanes<Accumulator>,
               transform(sums[r][v]));
        }
      }
    };
    if (adds) {
      for_each([](Accumulator* at, Vector<Accumulator> value) {
        simd::store(at, simd::load(at) + value);
      });
    } else {
      for_each([](Accumulator* at, Vector<Accumulator> value) {
        simd::store(at, value);
      });
    }
  }
};

struct KeepTile {
  template <class V>
  V operator()(V sums) const {
    return sums;
  }
};
template <class Accumulator>
struct ScaleTile {
  Accumulator scale;
  Vector<Accumulator> operator()(Vector<Accumulator> sums) const {
    return sums * scale;
  }
};

template <class Accumulator>
auto store_to(Accumulator* to, int64_t row_stride,
              const PrefetchRows& to_prefetch = {}) {
  return StoreTile<Accumulator, KeepTile>{
      to, row_stride, {}, false, to_prefetch};
}
template <class Accumulator>
auto store_scaled(Accumulator* to, int64_t row_stride, Accumulator scale,
                  const PrefetchRows& to_prefetch = {}) {
  return StoreTile<Accumulator, ScaleTile<Accumulator>>{
      to, row_stride, {scale}, false, to_prefetch};
}
template <class Accumulator>
auto add_to(Accumulator* to, int64_t row_stride) {
  return StoreTile<Accumulator, KeepTile>{to, row_stride, {}, true, {}};
}

// Multiplies the strip of kRows rows at the beginning of `left` by the columns
// of a right operand, over `depth` k-groups one after the other.
template <class Arithmetic, int kRows, class Left, class Store>
void multiply_tiles(const Left& left,
                    const RightPanels<KGroupOf<Arithmetic>>& right,
                    int64_t depth, int64_t columns, const Store& store) {
  constexpr int kColumns = kNR<Arithmetic>;
  const auto* panel = right.data;
  int64_t column = 0;
  for (; column + kColumns / 2 < columns; column += kColumns) {
    cpu::detail::micro_kernel<Arithmetic, kRows, kNRVectors>(
        depth, left, panel, right.step_stride, 0, column, kColumns, store);
    panel += right.panel_stride;
  }
  if (column < columns) {
    cpu::detail::micro_kernel<Arithmetic, kRows, 1>(
        depth, left, panel, right.step_stride, 0, column, kColumns / 2, store);
  }
}

// The same, with sums of at most `accumulation_length` k-groups each.
template <class Arithmetic, int kRows, class Left, class Store>
void multiply_strip(Left left, RightPanels<KGroupOf<Arithmetic>> right,
                    int64_t depth, int64_t columns, Store store,
                    int64_t accumulation_length = kAccumulationLength) {
  for (;;) {
    const int64_t groups = std::min(depth, accumulation_length);
    multiply_tiles<Arithmetic, kRows>(left, right, groups, columns, store);
    depth -= groups;
    if (depth == 0) {
      return;
    }
    left.data += groups * Left::template kStep<kRows>;
    right.data += groups * right.step_stride;
    store.adds = true;
    store.to_prefetch = {};
  }
}

// The micro-panels of a packed right operand of `depth` k-groups, from its
// `first` on.
template <class Arithmetic>
RightPanels<KGroupOf<Arithmetic>> packed_panels(
    const KGroupOf<Arithmetic>* packed, int64_t depth, int64_t first = 0) {
  constexpr int64_t kColumns = kNR<Arithmetic>;
  return {packed + first * kColumns, kColumns, depth * kColumns};
}

}  // namespace pkg::cpu::attention
