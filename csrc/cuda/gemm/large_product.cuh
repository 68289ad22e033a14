// Products of float32 and float64 whose tiles are large, for where there are
// enough of them: operands pass through shared memory by asynchronous copies in
// stages (cuda/gemm/copied_panel.cuh), and one block has a multiprocessor.
//
// float32: multiply-adds, 256 x 128 sums of 256 threads, 16 x 8 of each. A step
// is 128 multiplications of 24 numbers from shared memory: six loads of 16
// bytes, whose registers take 24 of the 32 cycles that the multiply-adds of a
// warp and its three neighbours take; of 8 x 8 sums, as in block_product.cuh,
// it is all of them. Of a panel's 16 steps by the machine code for 9.0: 2048
// multiply-adds, 96 loads and some 200 others, with the copies of the next
// panel: 87 %, of 8 x 8 sums 70 %.
//
// float64: tensor cores, 128 x 128 sums of eight warps, 64 x 32 of each. Eight
// steps of a warp are 16 products of 16 x 8 x 8, 32768 operations, and 24 loads
// of a number a lane, 6 KiB: 5.3 operations a byte, where 290 operations a
// cycle (67 TFLOP/s, 132 multiprocessors at 1.75 GHz) need 54 of the 128 bytes
// that shared memory gives. By 32 x 16 sums, as in block_product.cuh, they need
// 109, and of the L2 cache 8 operations a byte, 8.4 TB/s at that rate.
//
// (An H100 ran the small tiles at 38 and 23 TFLOP/s, n = 4096, of 67 and 67,
// these at 40 and 35.)
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/gemm/block_product.cuh"
#include "cuda/gemm/copied_panel.cuh"
#include "cuda/gemm/stages.cuh"
#include "cuda/gemm/tile.cuh"

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

// The same by tensor cores, eight steps at a time.
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
  constexpr int kRowParts = kWarpRows / 16;
  constexpr int kColumnParts = kWarpColumns / 8;
  PKG_UNROLL_BY(1)
  for (int step = 0; step < kDepth; step += 8) {
    double a[kRowParts][4];
    PKG_UNROLL
    for (int i = 0; i < kRowParts; ++i) {
      PKG_UNROLL
      for (int k = 0; k < 4; ++k) {
        a[i][k] = a_from[PanelA::index(
            step + k / 2 * Places::kDepth + in_a.column,
            thread.warp_row + i * 16 + k % 2 * Places::kRows + in_a.row)];
      }
    }
    PKG_UNROLL
    for (int j = 0; j < kColumnParts; ++j) {
      double b[2];
      PKG_UNROLL
      for (int k = 0; k < 2; ++k) {
        b[k] = b_from[PanelB::index(
            step + k * Places::kDepth + in_b.row,
            thread.warp_column + j * Places::kColumns + in_b.column)];
      }
      PKG_UNROLL
      for (int i = 0; i < kRowParts; ++i) {
        auto& top = sums.values[2 * i];
        auto& bottom = sums.values[2 * i + 1];
        multiply_add(top[2 * j], top[2 * j + 1], bottom[2 * j],
                     bottom[2 * j + 1], a[i], b);
      }
    }
  }
}

template <class Element, int kTileRows, int kTileColumns, class Owner>
struct CopiedProduct {
  static constexpr int kRows = kTileRows;
  static constexpr int kColumns = kTileColumns;
  static constexpr int kDepth = 16;
  static constexpr int kStages = 3;
  static constexpr int kThreads = Owner::kThreads;
  static constexpr int kBlocks = 1;
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
    : CopiedProduct<float, 256, 128, WarpGridThread<16, 16>> {};
template <>
struct LargeProduct<double>
    : CopiedProduct<double, 128, 128, MmaThread<128, 128, 64, 32>> {};

// Whether large tiles take less time than those of BlockProduct: by the tiles
// of the busiest multiprocessor, whose blocks share it, and by the rates that
// the loops allow, of which these are shares.
template <class Element>
bool pays_large_product(int64_t batch_count, int64_t rows, int64_t columns,
                        int64_t multiprocessors) {
  const auto time = [&]<class Product>(int64_t percent) {
    const int64_t tiles = batch_count * tiles_of(rows, Product::kRows) *
                          tiles_of(columns, Product::kColumns);
    return (tiles + multiprocessors - 1) / multiprocessors * Product::kRows *
           Product::kColumns * 100 / percent;
  };
  // Of float32 the multiply-adds among a panel's instructions; of float64 what
  // shared memory and the L2 cache leave.
  constexpr int64_t kLarge = sizeof(Element) == 4 ? 87 : 90;
  constexpr int64_t kSmall = sizeof(Element) == 4 ? 70 : 50;
  return time.template operator()<LargeProduct<Element>>(kLarge) <
         time.template operator()<BlockProduct<Element>>(kSmall);
}

}  // namespace pkg::cuda
