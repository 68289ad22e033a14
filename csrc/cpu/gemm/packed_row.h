// One row times an operand that was packed beforehand, which is bound by
// reading it: several micro-panels side by side.
//
// A processor's prefetchers end at pages of 4 KiB, and a panel is one run of
// them, so that memory is waited for at each. Of several panels others go on
// meanwhile. Intel Xeon (AMX), one thread, 4096 x 14336 in float32, sums of the
// values alone, GB/s from 1 / 2 / 4 / 8 panels: 11.4 / 13.5 / 15.2 / 15.0; with
// prefetches 1 to 16 KiB ahead one has 12.6 to 13.7, four 14.0 to 15.5. A Zen 4
// reads pages of 2 MiB, which these operands have there, as fast from one
// (docs/tuning/gemm.md).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/gemm/gemm.h"
#include "cpu/gemm/gemv.h"
#include "cpu/gemm/packing.h"
#include "cpu/runtime/workspace.h"

namespace pkg::cpu::detail {

// Where it is the way.
inline constexpr bool kReadsPanelsTogether =
    kInstructionSet == InstructionSet::Amx;
inline constexpr int kPanelsOfRow = 4;

// The sums of a row's k-groups and of kPanels panels, each behind the one
// before; in parts of so few terms that they err no more than several sums of
// each column side by side, which one panel has.
template <class Arithmetic, int kPanels, class RightKGroup>
[[gnu::noinline]] void row_times_panels(
    const typename Arithmetic::KGroup* row, int64_t depth,
    const RightKGroup* panels, int64_t panel_stride,
    typename Arithmetic::Accumulator* sums) {
  using KGroup = typename Arithmetic::KGroup;
  using V = Vector<typename Arithmetic::Accumulator>;
  constexpr int kVectors = kMicroTileVectors<Arithmetic>;
  constexpr int64_t kLanes = simd::kLanes<KGroup>;
  constexpr int64_t kColumns = kNR<Arithmetic>;
  constexpr int kAccumulators = std::max(8 / (kPanels * kVectors), 1);
  constexpr int64_t kPart = 64;
  const auto* right = k_groups_of(panels);
  V totals[kPanels][kVectors];
  for_each_register<kPanels, kVectors>(
      [&](int p, int v) { totals[p][v] = V{}; });
  const auto multiply_next =
      [&](V(&to)[kPanels][kVectors]) __attribute__((always_inline)) {
        const Vector<KGroup> a = simd::broadcast(*row);
        for_each_register<kPanels, kVectors>([&](int p, int v) {
          const Vector<KGroup> b =
              simd::load(right + p * panel_stride + v * kLanes);
          to[p][v] = Arithmetic::multiply_add(a, b, to[p][v]);
        });
        ++row;
        right += kColumns;
      };
  for_each_block(depth, kPart, [&](int64_t /*k*/, int64_t count) {
    V parts[kAccumulators][kPanels][kVectors];
    clear_sums(parts);
    sum_depth(count, multiply_next, parts);
    add_sums(parts[0], totals);
  });
  for_each_register<kPanels, kVectors>([&](int p, int v) {
    simd::store(sums + p * kColumns + v * kLanes, totals[p][v]);
  });
}

// A row's k-groups side by side: where they lie, or copied.
template <class Arithmetic, class Input>
const typename Arithmetic::KGroup* k_groups_of_row(
    const MatrixView<Input>& left, int64_t inner) {
  using KGroup = typename Arithmetic::KGroup;
  if constexpr (std::is_same_v<Input, KGroup>) {
    if (left.column_stride == 1) {
      return left.data;
    }
  }
  KGroup* row =
      Workspace::of_this_thread<Slot::PackedLeft>().template request<KGroup>(
          depth_of<Arithmetic>(inner));
  pack_rows<Arithmetic>(left, 1, inner, row);
  return row;
}

// Multiplies the one row of a product; panels of NR columns are `panel_stride`
// apart.
template <class Arithmetic, class Input, class RightKGroup, class Output,
          class Epilogue>
void multiply_packed_row(const Product<Input, Output>& product,
                         const RightKGroup* panels, int64_t panel_stride,
                         int64_t first_column, const Epilogue& epilogue) {
  using Accumulator = typename Arithmetic::Accumulator;
  constexpr int64_t kColumns = kNR<Arithmetic>;
  const int64_t depth = depth_of<Arithmetic>(product.inner);
  const auto* row = k_groups_of_row<Arithmetic>(product.left, product.inner);
  const EpilogueFrom<Epilogue> place{epilogue, 0, first_column};
  alignas(kCacheLine) Accumulator sums[kPanelsOfRow * kColumns];
  const auto multiply = [&]<int kPanels>(int64_t column) {
    row_times_panels<Arithmetic, kPanels>(
        row, depth, panels + column / kColumns * panel_stride, panel_stride,
        sums);
    const int64_t count =
        std::min(kPanels * kColumns, product.columns - column);
    store_finished(sums, column, count, product.output, place);
    return column + count;
  };
  int64_t column = 0;
  while (product.columns - column > (kPanelsOfRow - 1) * kColumns) {
    column = multiply.template operator()<kPanelsOfRow>(column);
  }
  while (column < product.columns) {
    column = multiply.template operator()<1>(column);
  }
}

}  // namespace pkg::cpu::detail
