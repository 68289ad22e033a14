// Products of float32 and float64 whose operands pass through shared memory by
// asynchronous copies in stages (cuda/gemm/copied_panel.cuh): by large tiles,
// where there are enough of them and one block has a multiprocessor, and by
// small ones, where there would else be fewer blocks than multiprocessors, or
// tiles of which most is beyond the matrix. Which, and when those of
// block_product.cuh: plan_panels().
//
// float32: multiply-adds, 256 x 128 sums of 256 threads, 16 x 8 of each. A step
// is 128 multiplications of 24 numbers from shared memory: six loads of 16
// bytes, whose registers take 24 of the 32 cycles that the multiply-adds of a
// warp and its three neighbours take; of 8 x 8 sums, as in block_product.cuh,
// it is all of them. Of a panel's 16 steps by the machine code for 9.0: 2048
// multiply-adds, 96 loads and some 200 others, with the copies of the next
// panel: 87 %, of 8 x 8 sums 70 %.
//
// float64: tensor cores, 128 x 128 sums of eight warps, 64 x 32 of each. Four
// steps of a warp are 16 products of 16 x 8 x 4, 16384 operations, and 12 loads
// of a number a lane, 3 KiB: 5.3 operations a byte, where 290 operations a
// cycle (67 TFLOP/s, 132 multiprocessors at 1.75 GHz) need 54 of the 128 bytes
// that shared memory gives. By 32 x 16 sums, as in block_product.cuh, they need
// 109, and of the L2 cache 8 operations a byte, 8.4 TB/s at that rate. Numbers
// of four steps are loaded while those of the four before are multiplied.
//
// Small tiles: 32 x 64 sums of 128 threads (float32), 4 x 4 of each, and 32 x
// 32 of four warps (float64), in four stages of 16 steps.
//
// (An H100 ran the tiles of block_product.cuh at 38 and 23 TFLOP/s, n = 4096,
// of 67 and 67, large ones at 40 and 35; those of float64 then by products of
// m8n8k4, and of 16 x 8 x 8 whose numbers were loaded ahead of each step.)
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda/device/device.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/gemm/block_product.cuh"
#include "cuda/gemm/copied_panel.cuh"
#include "cuda/gemm/matmul.cuh"
#include "cuda/gemm/stages.cuh"
#include "cuda/gemm/tile.cuh"
#include "host/integer_math.h"

namespace pkg::cuda {

// Whether there are such products of an element.
template <class Element>
constexpr bool kHasLargeProduct =
    std::is_same_v<Element, float> || std::is_same_v<Element, double>;

// A thread's numbers of a step, which follow one another by fours.
template <int kCount, class Place>
__device__ __forceinline__ void load_fragments(const SharedSpan<float>& panel,
                                               float (&numbers)[kCount],
                                               Place&& place) {
  using Four = Packet<float, kFragment>;
  PKG_UNROLL
  for (int i = 0; i < kCount; i += kFragment) {
    const Four four = panel.template load<Four>(place(i));
    PKG_UNROLL
    for (int j = 0; j < kFragment; ++j) {
      numbers[i + j] = four.values[j];
    }
  }
}

// sums += A B of a panel of each operand, by multiply-adds. Numbers of a step
// are loaded while those of the one before are multiplied.
template <int kDepth, class PanelA, class PanelB, int kRows, int kColumns,
          class Thread>
__device__ __forceinline__ void multiply_copied(
    Tile<float, kRows, kColumns, Thread>& sums, const SharedSpan<float>& a_from,
    const SharedSpan<float>& b_from) {
  using Sums = Tile<float, kRows, kColumns, Thread>;
  const Thread thread(static_cast<int>(threadIdx.x));
  float a[2][Sums::kThreadRows];
  float b[2][Sums::kThreadColumns];
  const auto load = [&](int step, int to) {
    load_fragments(a_from, a[to],
                   [&](int i) { return PanelA::index(step, thread.row(i)); });
    load_fragments(b_from, b[to], [&](int j) {
      return PanelB::index(step, thread.column(j));
    });
  };
  const auto add = [&](int from) {
    PKG_UNROLL
    for (int i = 0; i < Sums::kThreadRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < Sums::kThreadColumns; ++j) {
        sums.values[i][j] += a[from][i] * b[from][j];
      }
    }
  };
  constexpr int kTurn = 4;  // steps; of more the loop is long to fetch
  static_assert(kDepth % kTurn == 0 && kTurn % 2 == 0);
  load(0, 0);
  PKG_UNROLL_BY(1)
  for (int begin = 0; begin < kDepth; begin += kTurn) {
    PKG_UNROLL
    for (int step = 0; step < kTurn; ++step) {
      if (begin + step + 1 < kDepth) {
        load(begin + step + 1, (step + 1) % 2);
      }
      add(step % 2);
    }
  }
}

// The same by tensor cores, four steps at a time.
template <int kDepth, class PanelA, class PanelB, int kRows, int kColumns,
          int kWarpRows, int kWarpColumns>
__device__ __forceinline__ void multiply_copied(
    Tile<double, kRows, kColumns,
         MmaThread<kRows, kColumns, kWarpRows, kWarpColumns>>& sums,
    const SharedSpan<double>& a_from, const SharedSpan<double>& b_from) {
  using Places = MmaPlacesFloat64;
  const MmaThread<kRows, kColumns, kWarpRows, kWarpColumns> thread(
      static_cast<int>(threadIdx.x));
  const MatrixPlace in_a = Places::a(thread.lane);
  const MatrixPlace in_b = Places::b(thread.lane);
  constexpr int kRowParts = kWarpRows / Places::kRows;
  constexpr int kColumnParts = kWarpColumns / Places::kColumns;
  double a[2][kRowParts];
  double b[2][kColumnParts];
  const auto load = [&](int step) {
    const int to = step / Places::kDepth % 2;
    PKG_UNROLL
    for (int i = 0; i < kRowParts; ++i) {
      a[to][i] = a_from[PanelA::index(
          step + in_a.column, thread.warp_row + i * Places::kRows + in_a.row)];
    }
    PKG_UNROLL
    for (int j = 0; j < kColumnParts; ++j) {
      b[to][j] = b_from[PanelB::index(
          step + in_b.row,
          thread.warp_column + j * Places::kColumns + in_b.column)];
    }
  };
  load(0);
  PKG_UNROLL
  for (int step = 0; step < kDepth; step += Places::kDepth) {
    if (step + Places::kDepth < kDepth) {
      load(step + Places::kDepth);
    }
    const int from = step / Places::kDepth % 2;
    PKG_UNROLL
    for (int j = 0; j < kColumnParts; ++j) {
      PKG_UNROLL
      for (int i = 0; i < kRowParts; i += 2) {
        auto& top = sums.values[i];
        auto& bottom = sums.values[i + 1];
        multiply_add(top[2 * j], top[2 * j + 1], bottom[2 * j],
                     bottom[2 * j + 1], a[from][i], a[from][i + 1], b[from][j]);
      }
    }
  }
}

template <class Element, int kTileRows, int kTileColumns, class Owner,
          int kStageCount, int kBlockCount>
struct CopiedProduct {
  static constexpr int kRows = kTileRows;
  static constexpr int kColumns = kTileColumns;
  static constexpr int kDepth = 16;
  static constexpr int kStages = kStageCount;
  static constexpr int kThreads = Owner::kThreads;
  static constexpr int kBlocks = kBlockCount;  // in a multiprocessor
  using Sums = Tile<Element, kRows, kColumns, Owner>;
  using PanelA = CopiedPanel<Element, kRows, kDepth, kThreads>;
  using PanelB = CopiedPanel<Element, kColumns, kDepth, kThreads>;
  static constexpr int kStageElements = PanelA::kElements + PanelB::kElements;
  static constexpr int kSharedBytes =
      kStages * kStageElements * static_cast<int>(sizeof(Element));

  // sums += A B over the whole summed dimension. On return every thread is done
  // with the memory.
  __device__ __forceinline__ static void multiply(Sums& sums,
                                                  const PanelSource<Element>& a,
                                                  int64_t row_begin,
                                                  const PanelSource<Element>& b,
                                                  int64_t column_begin) {
    const SharedSpan<Element> memory = dynamic_shared<Element>();
    const PanelA a_panel(a, row_begin);
    const PanelB b_panel(b, column_begin);
    const auto a_part = [&](int stage) {
      return memory.part(stage * kStageElements, PanelA::kElements);
    };
    const auto b_part = [&](int stage) {
      return memory.part(stage * kStageElements + PanelA::kElements,
                         PanelB::kElements);
    };
    const int panels = static_cast<int>(tiles_of(a.depth_size, kDepth));
    pass_through_stages<kStages>(
        0, panels,
        [&](int panel, int stage) {
          a_panel.load(a_part(stage), int64_t{panel} * kDepth);
          b_panel.load(b_part(stage), int64_t{panel} * kDepth);
        },
        [&](int, int stage) {
          multiply_copied<kDepth, PanelA, PanelB>(sums, a_part(stage),
                                                  b_part(stage));
        });
  }
};

template <class Element>
struct LargeProduct;
template <>
struct LargeProduct<float>
    : CopiedProduct<float, 256, 128, WarpGridThread<16, 16>, 3, 1> {};
template <>
struct LargeProduct<double>
    : CopiedProduct<double, 128, 128, MmaThread<128, 128, 64, 32>, 3, 1> {};

template <class Element>
struct SmallProduct;
template <>
struct SmallProduct<float>
    : CopiedProduct<float, 32, 64, WarpGridThread<8, 16>, 4, 4> {};
template <>
struct SmallProduct<double>
    : CopiedProduct<double, 32, 32, MmaThread<32, 32, 16, 16>, 4, 4> {};

// The tiles of a product.
enum class PanelTiles { large, block, small };

struct PanelPlan {
  PanelTiles tiles;
  int64_t panels_each;  // of a part of the summed dimension
  int64_t cycles;
};

// What is known of the blocks of a product: of 100 multiply-adds that a
// multiprocessor could do, those that it does where blocks share it, and where
// it has one block; and the cycles that a panel takes that block at the least,
// until the next one has come.
struct PanelRate {
  int64_t shared;
  int64_t alone;
  int64_t least_cycles;
};

// Of so many parts of the summed dimension, by the multiply-adds of the busiest
// multiprocessor, 128 a cycle of either type.
template <class Product>
int64_t cycles_of_panels(int64_t tiles, int64_t panels, int64_t each,
                         int64_t elements, int64_t multiprocessors,
                         const PanelRate& rate) {
  const int64_t parts = panels == 0 ? 1 : ceil_div(panels, each);
  const int64_t rounds = ceil_div(tiles * parts, multiprocessors);
  constexpr int64_t kProducts =
      int64_t{Product::kRows} * Product::kColumns * Product::kDepth;
  const int64_t of_panel =
      rounds > 1
          ? kProducts * 100 / 128 / rate.shared
          : std::max(kProducts * 100 / 128 / rate.alone, rate.least_cycles);
  using Number = typename Product::Sums::Value;
  return rounds * each * of_panel +
         cycles_of_parts(parts, elements * static_cast<int64_t>(sizeof(Number) /
                                                                sizeof(float)));
}

// The tiles, and parts of the summed dimension, that take the fewest cycles.
// The rates are shares that the loops allow: of float32 the multiply-adds among
// a panel's instructions, of float64 what is expected of products of 16 x 8
// x 4. Of block_product.cuh, which loads one panel ahead, an H200 took 13 us
// for eight panels of n = 256 of float32, without their sum, and 10 of float64.
// The shares of small tiles, which no GPU has run, are two thirds of those
// expected.
template <class Element>
PanelPlan plan_panels(int64_t batch_count, int64_t rows, int64_t columns,
                      int64_t depth, int64_t multiprocessors,
                      int most_shared_bytes, bool may_be_divided = true) {
  constexpr bool kIsSingle = sizeof(Element) == sizeof(float);
  PanelPlan best = {PanelTiles::block, 0, std::numeric_limits<int64_t>::max()};
  const auto consider = [&]<class Product>(PanelTiles kind,
                                           const PanelRate& rate) {
    if (Product::kSharedBytes > most_shared_bytes) {
      return;
    }
    const int64_t tiles = batch_count * tiles_of(rows, Product::kRows) *
                          tiles_of(columns, Product::kColumns);
    const int64_t panels = tiles_of(depth, Product::kDepth);
    const bool is_divided = may_be_divided && kind != PanelTiles::large;
    for (const int64_t each :
         {panels, is_divided
                      ? panels_of_split(tiles, panels,
                                        multiprocessors * Product::kBlocks)
                      : panels}) {
      const int64_t cycles = cycles_of_panels<Product>(
          tiles, panels, each, batch_count * rows * columns, multiprocessors,
          rate);
      if (cycles < best.cycles) {
        best = {kind, each, cycles};
      }
    }
  };
  constexpr int64_t kLarge = kIsSingle ? 87 : 85;
  consider.template operator()<BlockProduct<Element>>(PanelTiles::block,
                                                      {70, 40, 800});
  consider.template operator()<LargeProduct<Element>>(PanelTiles::large,
                                                      {kLarge, kLarge, 400});
  consider.template operator()<SmallProduct<Element>>(PanelTiles::small,
                                                      {30, 17, 270});
  return best;
}

// Whether they would be large, of a product that is not divided.
template <class Element>
bool pays_large_product(int64_t batch_count, int64_t rows, int64_t columns,
                        int64_t multiprocessors, int most_shared_bytes) {
  constexpr int64_t kDepth = 4096;
  return plan_panels<Element>(batch_count, rows, columns, kDepth,
                              multiprocessors, most_shared_bytes, false)
             .tiles == PanelTiles::large;
}

}  // namespace pkg::cuda
