// Products of two operands into a tile by way of panels in shared memory: by
// multiply-adds, and of float64 also by the tensor cores.
//
// Two panels of each operand alternate: while one is multiplied, the next is on
// its way from global memory into registers, and one barrier a panel suffices.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/gemm/panel.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// tile += a_panel^T b_panel over `depth` steps, of a from a_depth_begin on.
template <int kDepth, class Number, int kRows, int kColumns, int kDown,
          int kAcross, int kGroups, class PanelA, class PanelB>
__device__ __forceinline__ void multiply_panel(
    Tile<Number, kRows, kColumns, GridThread<kDown, kAcross, kGroups>>& tile,
    PanelA&& a_panel, int a_depth_begin, PanelB&& b_panel) {
  using Thread = GridThread<kDown, kAcross, kGroups>;
  using TileType = Tile<Number, kRows, kColumns, Thread>;
  const Thread thread;
  // Not further: for more steps at a time, whose operands it loads ahead, the
  // compiler spills where two blocks are to share a multiprocessor.
  PKG_UNROLL_BY(2)
  for (int step = 0; step < kDepth; ++step) {
    Number a[TileType::kThreadRows];
    Number b[TileType::kThreadColumns];
    PKG_UNROLL
    for (int i = 0; i < TileType::kThreadRows; ++i) {
      a[i] = a_panel[a_depth_begin + step][thread.row(i)];
    }
    PKG_UNROLL
    for (int j = 0; j < TileType::kThreadColumns; ++j) {
      b[j] = b_panel[step][thread.column(j)];
    }
    PKG_UNROLL
    for (int i = 0; i < TileType::kThreadRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < TileType::kThreadColumns; ++j) {
        tile.values[i][j] += a[i] * b[j];
      }
    }
  }
}

// The same by tensor cores.
template <int kDepth, int kRows, int kColumns, int kWarpRows, int kWarpColumns,
          class PanelA, class PanelB>
__device__ __forceinline__ void multiply_panel(
    Tile<double, kRows, kColumns,
         MmaThread<kRows, kColumns, kWarpRows, kWarpColumns>>& tile,
    PanelA&& a_panel, int a_depth_begin, PanelB&& b_panel) {
  using Places = MmaPlacesFloat64;
  const MmaThread<kRows, kColumns, kWarpRows, kWarpColumns> thread(
      static_cast<int>(threadIdx.x));
  constexpr int kRowParts = kWarpRows / Places::kRows;
  constexpr int kColumnParts = kWarpColumns / Places::kColumns;
  const MatrixPlace in_a = Places::a(thread.lane);
  const MatrixPlace in_b = Places::b(thread.lane);
  PKG_UNROLL
  for (int step = 0; step < kDepth; step += Places::kDepth) {
    double a[kRowParts];
    double b[kColumnParts];
    PKG_UNROLL
    for (int i = 0; i < kRowParts; ++i) {
      a[i] = a_panel[a_depth_begin + step + in_a.column]
                    [thread.warp_row + i * Places::kRows + in_a.row];
    }
    PKG_UNROLL
    for (int j = 0; j < kColumnParts; ++j) {
      b[j] = b_panel[step + in_b.row]
                    [thread.warp_column + j * Places::kColumns + in_b.column];
    }
    PKG_UNROLL
    for (int i = 0; i < kRowParts; i += 2) {
      auto& top = tile.values[i];
      auto& bottom = tile.values[i + 1];
      PKG_UNROLL
      for (int j = 0; j < kColumnParts; ++j) {
        multiply_add(top[2 * j], top[2 * j + 1], bottom[2 * j],
                     bottom[2 * j + 1], a[i], a[i + 1], b[j]);
      }
    }
  }
}

// tile += A B over the first `depth` of the summed dimension, both operands
// from global memory. On return every thread is done with the panels. Groups of
// a block have operands of their own and the same depth.
template <int kDepth, PanelPlaces kPlaces = PanelPlaces::kept, class Number,
          int kRows, int kColumns, class Thread, class Element, class PanelsA,
          class PanelsB>
__device__ __forceinline__ void multiply_depth(
    Tile<Number, kRows, kColumns, Thread>& tile, int64_t depth,
    const PanelSource<Element>& a, int64_t row_begin,
    const PanelSource<Element>& b, int64_t column_begin, PanelsA&& a_panels,
    PanelsB&& b_panels) {
  PanelStage<Element, kRows, kDepth, kPlaces, Thread::kThreads, Thread::kGroups>
      a_stage;
  PanelStage<Element, kColumns, kDepth, kPlaces, Thread::kThreads,
             Thread::kGroups>
      b_stage;
  a_stage.fetch(a, row_begin, 0);
  b_stage.fetch(b, column_begin, 0);
  a_stage.store(a_panels[0]);
  b_stage.store(b_panels[0]);
  __syncthreads();
  int current = 0;
  const int steps = static_cast<int>(tiles_of(depth, kDepth));
  for (int step = 1; step <= steps; ++step) {
    if (step < steps) {
      a_stage.fetch(a, row_begin, int64_t{step} * kDepth);
      b_stage.fetch(b, column_begin, int64_t{step} * kDepth);
    }
    multiply_panel<kDepth>(tile, a_panels[current], 0, b_panels[current]);
    if (step < steps) {
      a_stage.store(a_panels[1 - current]);
      b_stage.store(b_panels[1 - current]);
    }
    __syncthreads();
    current = 1 - current;
  }
}

// The same over the whole of it.
template <int kDepth, PanelPlaces kPlaces = PanelPlaces::kept, class Number,
          int kRows, int kColumns, class Thread, class Element, class PanelsA,
          class PanelsB>
__device__ __forceinline__ void multiply(
    Tile<Number, kRows, kColumns, Thread>& tile, const PanelSource<Element>& a,
    int64_t row_begin, const PanelSource<Element>& b, int64_t column_begin,
    PanelsA&& a_panels, PanelsB&& b_panels) {
  multiply_depth<kDepth, kPlaces>(tile, a.depth_size, a, row_begin, b,
                                  column_begin, a_panels, b_panels);
}

// tile += A B where A is already in shared memory, a panel of kADepth steps,
// and B's part begins at depth_begin.
template <int kDepth, int kADepth, class Number, int kRows, int kColumns,
          class Thread, class Element, class PanelA, class PanelsB>
__device__ __forceinline__ void multiply_shared(
    Tile<Number, kRows, kColumns, Thread>& tile, PanelA&& a_panel,
    const PanelSource<Element>& b, int64_t column_begin, int64_t depth_begin,
    PanelsB&& b_panels) {
  static_assert(kADepth % kDepth == 0);
  PanelStage<Element, kColumns, kDepth, PanelPlaces::of_product,
             Thread::kThreads, Thread::kGroups>
      b_stage;
  b_stage.fetch(b, column_begin, depth_begin);
  b_stage.store(b_panels[0]);
  __syncthreads();  // also publishes a_panel, written by the caller
  int current = 0;
  for (int begin = 0; begin < kADepth; begin += kDepth) {
    const int next = begin + kDepth;
    if (next < kADepth) {
      b_stage.fetch(b, column_begin, depth_begin + next);
    }
    multiply_panel<kDepth>(tile, a_panel, begin, b_panels[current]);
    if (next < kADepth) {
      b_stage.store(b_panels[1 - current]);
    }
    __syncthreads();
    current = 1 - current;
  }
}

}  // namespace pkg::cuda
