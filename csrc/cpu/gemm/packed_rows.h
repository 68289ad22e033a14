// A few rows times an operand that was packed beforehand, which is bound by
// reading it: several micro-panels side by side.
//
// A processor's prefetchers end at pages of 4 KiB, and a panel is one run of
// them, so that memory is waited for at each. Of several panels others go on
// meanwhile. Intel Xeon (AMX), one thread, 4096 x 14336 in float32, sums of the
// values alone, GB/s from 1 / 2 / 4 / 8 panels: 11.4 / 13.5 / 15.2 / 15.0; with
// prefetches 1 to 16 KiB ahead one has 12.6 to 13.7, four 14.0 to 15.5. A Zen 4
// reads pages of 2 MiB, which these operands have there, as fast from one.
// With AVX2 up to three rows gain too, and from the caches as much: the
// micro-kernel has strips of 1, 2, 4 and 6, so that three rows read the panels
// twice. A Zen 3, 4096 x 4096, one row, before and so: float32 11.6 and 16.8
// GB/s, bfloat16 10.6 and 15.7 (docs/tuning/gemm.md).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/gemm/gemm.h"
#include "cpu/gemm/gemv.h"
#include "cpu/gemm/packing.h"
#include "cpu/runtime/workspace.h"

namespace pkg::cpu::detail {

// Rows up to which it is the way, and panels side by side, whose sums and those
// of a part fill the registers.
inline constexpr int kMostRowsOfPanels =
    kInstructionSet == InstructionSet::Amx    ? 6
    : kInstructionSet == InstructionSet::Avx2 ? 3
                                              : 0;
template <class Arithmetic>
constexpr int panels_together(int rows) {
  constexpr int kSums = kMR * kNRVectors;
  constexpr int kMost = 4;
  return std::clamp(kSums / (rows * kMicroTileVectors<Arithmetic>), 1, kMost);
}

// The sums of rows' k-groups, `depth` apart, and of kPanels panels, in rows of
// kPanels NR: in parts of so few terms that they err no more than several sums
// of each column side by side would.
template <class Arithmetic, int kRows, int kPanels, class RightKGroup>
[[gnu::noinline]] void rows_times_panels(
    const typename Arithmetic::KGroup* rows, int64_t depth,
    const RightKGroup* panels, int64_t panel_stride,
    typename Arithmetic::Accumulator* sums) {
  using KGroup = typename Arithmetic::KGroup;
  using V = Vector<typename Arithmetic::Accumulator>;
  constexpr int kPanelVectors = kMicroTileVectors<Arithmetic>;
  constexpr int kVectors = kPanels * kPanelVectors;
  constexpr int64_t kLanes = simd::kLanes<KGroup>;
  // Whatever the panels, so that rounding is the same for every division of
  // columns among threads. Sixteen registers hold no two of four panels.
  constexpr int kAccumulators =
      kRows == 1 && simd::kVectorRegisters >= 32 ? 2 : 1;
  constexpr int64_t kPart = 64;
  const auto* right = k_groups_of(panels);
  for_each_register<kRows, kVectors>([&](int r, int v) {
    simd::store(sums + (r * kVectors + v) * kLanes, V{});
  });
  const auto multiply_next =
      [&](V(&to)[kRows][kVectors]) __attribute__((always_inline)) {
        Vector<KGroup> a[kRows];
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
          a[r] = simd::broadcast(rows[r * depth]);
        }
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
          const Vector<KGroup> b =
              simd::load(right + v / kPanelVectors * panel_stride +
                         v % kPanelVectors * kLanes);
#pragma GCC unroll 6
          for (int r = 0; r < kRows; ++r) {
            to[r][v] = Arithmetic::multiply_add(a[r], b, to[r][v]);
          }
        }
        ++rows;
        right += kNR<Arithmetic>;
      };
  for_each_block(depth, kPart, [&](int64_t /*k*/, int64_t count) {
    V parts[kAccumulators][kRows][kVectors];
    clear_sums(parts);
    sum_depth(count, multiply_next, parts);
    for_each_register<kRows, kVectors>([&](int r, int v) {
      auto* const at = sums + (r * kVectors + v) * kLanes;
      simd::store(at, simd::load(at) + parts[0][r][v]);
    });
  });
}

// Rows' k-groups side by side: where a single one's lie, or copied.
template <class Arithmetic, class Input>
const typename Arithmetic::KGroup* k_groups_of_rows(
    const MatrixView<Input>& left, int64_t rows, int64_t inner) {
  using KGroup = typename Arithmetic::KGroup;
  if constexpr (std::is_same_v<Input, KGroup>) {
    if (rows == 1 && left.column_stride == 1) {
      return left.data;
    }
  }
  const int64_t depth = depth_of<Arithmetic>(inner);
  KGroup* packed =
      Workspace::of_this_thread<Slot::PackedLeft>().template request<KGroup>(
          rows * depth);
  for (int64_t row = 0; row < rows; ++row) {
    pack_rows<Arithmetic>(left.from(row, 0), 1, inner, packed + row * depth);
  }
  return packed;
}

// Multiplies the few rows of a product; panels of NR columns are `panel_stride`
// apart.
template <class Arithmetic, class Input, class RightKGroup, class Output,
          class Epilogue>
void multiply_packed_rows(const Product<Input, Output>& product,
                          const RightKGroup* panels, int64_t panel_stride,
                          int64_t first_row, int64_t first_column,
                          const Epilogue& epilogue) {
  using Accumulator = typename Arithmetic::Accumulator;
  constexpr int64_t kColumns = kNR<Arithmetic>;
  const int64_t depth = depth_of<Arithmetic>(product.inner);
  const auto* left =
      k_groups_of_rows<Arithmetic>(product.left, product.rows, product.inner);
  const auto multiply = [&]<int kRows, int kPanels>(int64_t column) {
    alignas(kCacheLine) Accumulator sums[kRows * kPanels * kColumns];
    rows_times_panels<Arithmetic, kRows, kPanels>(
        left, depth, panels + column / kColumns * panel_stride, panel_stride,
        sums);
    const int64_t count =
        std::min(kPanels * kColumns, product.columns - column);
    for (int64_t row = 0; row < kRows; ++row) {
      store_finished(
          sums + row * kPanels * kColumns, column, count,
          product.output + row * product.output_stride,
          EpilogueFrom<Epilogue>{epilogue, first_row + row, first_column});
    }
    return column + count;
  };
  with_count<kMostRowsOfPanels>(static_cast<int>(product.rows), [&](auto rows) {
    constexpr int kRows = decltype(rows)::value;
    constexpr int kPanels = panels_together<Arithmetic>(kRows);
    int64_t column = 0;
    while (product.columns - column > (kPanels - 1) * kColumns) {
      column = multiply.template operator()<kRows, kPanels>(column);
    }
    while (column < product.columns) {
      column = multiply.template operator()<kRows, 1>(column);
    }
  });
}

}  // namespace pkg::cpu::detail
