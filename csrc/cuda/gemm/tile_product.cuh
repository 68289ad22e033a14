// Products of two operands into a tile, by way of panels in shared memory.
//
// Two panels of each operand alternate: while one is multiplied, the next is on
// its way from global memory into registers, and one barrier a panel suffices.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/gemm/panel.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// tile += a_panel^T b_panel over `depth` steps, of a from a_depth_begin on.
template <int kDepth, class Number, int kRows, int kColumns, class PanelA,
          class PanelB>
__device__ __forceinline__ void multiply_panel(
    Tile<Number, kRows, kColumns>& tile, PanelA&& a_panel, int a_depth_begin,
    PanelB&& b_panel) {
  using TileType = Tile<Number, kRows, kColumns>;
  const TileThread thread;
  // Not wholly: 16 steps would be a thousand instructions in each of a dozen
  // products, for a loop's worth of overhead.
  PKG_UNROLL_BY_4
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

// tile += A B over the whole summed dimension, both operands from global
// memory. On return every thread is done with the panels.
template <int kDepth, class Number, int kRows, int kColumns, class Element,
          class PanelsA, class PanelsB>
__device__ __forceinline__ void multiply(
    Tile<Number, kRows, kColumns>& tile, const PanelSource<Element>& a,
    int64_t row_begin, const PanelSource<Element>& b, int64_t column_begin,
    PanelsA&& a_panels, PanelsB&& b_panels) {
  PanelStage<Element, kRows, kDepth> a_stage;
  PanelStage<Element, kColumns, kDepth> b_stage;
  a_stage.fetch(a, row_begin, 0);
  b_stage.fetch(b, column_begin, 0);
  a_stage.store(a_panels[0]);
  b_stage.store(b_panels[0]);
  __syncthreads();
  int current = 0;
  for (int64_t begin = 0; begin < a.depth_size; begin += kDepth) {
    const int64_t next = begin + kDepth;
    if (next < a.depth_size) {
      a_stage.fetch(a, row_begin, next);
      b_stage.fetch(b, column_begin, next);
    }
    multiply_panel<kDepth>(tile, a_panels[current], 0, b_panels[current]);
    if (next < a.depth_size) {
      a_stage.store(a_panels[1 - current]);
      b_stage.store(b_panels[1 - current]);
    }
    __syncthreads();
    current = 1 - current;
  }
}

// tile += A B where A is already in shared memory, a panel of kADepth steps,
// and B's part begins at depth_begin.
template <int kDepth, int kADepth, class Number, int kRows, int kColumns,
          class Element, class PanelA, class PanelsB>
__device__ __forceinline__ void multiply_shared(
    Tile<Number, kRows, kColumns>& tile, PanelA&& a_panel,
    const PanelSource<Element>& b, int64_t column_begin, int64_t depth_begin,
    PanelsB&& b_panels) {
  static_assert(kADepth % kDepth == 0);
  PanelStage<Element, kColumns, kDepth> b_stage;
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
