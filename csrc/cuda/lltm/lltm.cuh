// lltm on the device: a step forward, the pass from the gradients of a step's
// results to those of its gates, and the products with these.
//
// A step forward: a block computes the three gates of a tile of 64 rows by 64
// hidden units, three tiles of sums in registers over panels of [h, x] and of
// W's three parts in shared memory. h and x are two operands, one after the
// other. A thread then holds the three gates of its own 16 elements, activates
// them and writes cell and state: the gates go to memory only where the
// gradient needs them. In a sequence the input's product is made for all steps
// at once, and a step begins from its sums.
//
// 2 B 3H (H + F) operations. The blocks read 2 B 3H (H + F) (1/192 + 1/64)
// elements of global memory.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/activation.cuh"
#include "cuda/gemm/panel.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/tile_product.cuh"

namespace pkg::cuda {

constexpr int kGates = 3;

// Rows of elements; null where there are none.
template <class Element>
struct MatrixOf {
  const Element* data;
  int64_t row_stride;
  int64_t column_stride;

  __device__ __forceinline__ Element at(int64_t row, int64_t column) const {
    return data[row * row_stride + column * column_stride];
  }
};

struct LltmTile {
  static constexpr int kRows = 64;
  static constexpr int kUnits = 64;
  static constexpr int kDepth = 8;
};

template <class Element>
struct LltmStep {
  using Number = Accumulator<Element>;

  int64_t batch;
  int64_t features;  // 0 where the input's product is given
  int64_t hidden;
  MatrixOf<Element> input;
  MatrixOf<Element> weights;
  const Element* bias;
  int64_t bias_stride;
  MatrixOf<Element> old_h;
  MatrixOf<Element> old_cell;
  const Number* input_sums;  // (batch, 3 hidden), or null
  // Contiguous; gates are null where they are not kept.
  Element* new_h;
  Element* new_cell;
  Element* gates;

  __host__ __device__ int64_t unit_tiles() const {
    return tiles_of(hidden, LltmTile::kUnits);
  }
  __host__ __device__ int64_t tile_count() const {
    return tiles_of(batch, LltmTile::kRows) * unit_tiles();
  }
};

// tanh and its derivative, and those of elu, of one element.
template <class Number>
struct TanhOf {
  Number value;
  Number slope;

  __device__ __forceinline__ explicit TanhOf(Number x) {
    const Number less = expm1(Number(-2) * fabs(x));
    const Number inverse = Number(1) / (less + Number(2));
    value = x < Number(0) ? less * inverse : -less * inverse;
    slope = Number(4) * (less + Number(1)) * inverse * inverse;
  }
};

template <class Number>
struct EluOf {
  Number value;
  Number slope;

  __device__ __forceinline__ explicit EluOf(Number x) {
    const Number below = expm1(x > Number(0) ? Number(0) : x);
    value = x > Number(0) ? x : below;
    slope = below + Number(1);
  }
};

// tiles[gate] += rows times the columns of W that belong to it, from
// first_inner on.
template <class Element, class Tiles, class PanelsA, class PanelsB>
__device__ __forceinline__ void add_gates(const LltmStep<Element>& step,
                                          const MatrixOf<Element>& rows,
                                          int64_t first_inner, int64_t inner,
                                          int64_t row_begin, int64_t unit_begin,
                                          Tiles& tiles, PanelsA&& a_panels,
                                          PanelsB&& b_panels) {
  constexpr int kDepth = LltmTile::kDepth;
  const PanelSource<Element> a = {rows.data, step.batch, inner, rows.row_stride,
                                  rows.column_stride};
  PanelStage<Element, LltmTile::kRows, kDepth> a_stage;
  PanelStage<Element, LltmTile::kUnits, kDepth> b_stages[kGates];
  const auto fetch = [&](int64_t begin) {
    a_stage.fetch(a, row_begin, begin);
    PKG_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      const PanelSource<Element> b = {
          step.weights.data + gate * step.hidden * step.weights.row_stride +
              first_inner * step.weights.column_stride,
          step.hidden, inner, step.weights.row_stride,
          step.weights.column_stride};
      b_stages[gate].fetch(b, unit_begin, begin);
    }
  };
  const auto store = [&](int to) {
    a_stage.store(a_panels[to]);
    PKG_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      b_stages[gate].store(b_panels[to][gate]);
    }
  };
  fetch(0);
  store(0);
  __syncthreads();
  int current = 0;
  for (int64_t begin = 0; begin < inner; begin += kDepth) {
    const int64_t next = begin + kDepth;
    if (next < inner) {
      fetch(next);
    }
    PKG_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      multiply_panel<kDepth>(tiles[gate], a_panels[current], 0,
                             b_panels[current][gate]);
    }
    if (next < inner) {
      store(1 - current);
    }
    __syncthreads();
    current = 1 - current;
  }
}

// One element of a step, from the sums of its gates.
template <class Element, class Number>
__device__ __forceinline__ void finish_state(const LltmStep<Element>& step,
                                             int64_t row, int64_t unit,
                                             Number (&gates)[kGates]) {
  const int64_t first = row * kGates * step.hidden + unit;
  PKG_UNROLL
  for (int gate = 0; gate < kGates; ++gate) {
    const int64_t column = gate * step.hidden;
    gates[gate] +=
        convert<Number>(step.bias[(column + unit) * step.bias_stride]);
    if (step.input_sums != nullptr) {
      gates[gate] += step.input_sums[first + column];
    }
    if (step.gates != nullptr) {
      step.gates[first + column] = convert<Element>(gates[gate]);
    }
  }
  const Number cell =
      convert<Number>(step.old_cell.at(row, unit)) +
      EluOf<Number>(gates[2]).value * Gate<Number>(gates[0]).open;
  const int64_t place = row * step.hidden + unit;
  step.new_cell[place] = convert<Element>(cell);
  step.new_h[place] = convert<Element>(TanhOf<Number>(cell).value *
                                       Gate<Number>(gates[1]).open);
}

template <class Element>
__global__ void __launch_bounds__(kTileThreads)
    lltm_step_kernel(const __grid_constant__ LltmStep<Element> step) {
  using Number = Accumulator<Element>;
  using TileType = Tile<Number, LltmTile::kRows, LltmTile::kUnits>;
  constexpr int kDepth = LltmTile::kDepth;
  PKG_SHARED(Number, a_panels, [2][kDepth][LltmTile::kRows + kPanelPadding]);
  PKG_SHARED(Number,
             b_panels, [2][kGates][kDepth][LltmTile::kUnits + kPanelPadding]);
  const int64_t unit_tiles = step.unit_tiles();
  const int64_t tiles_in_all = step.tile_count();
  for (int64_t index = blockIdx.x; index < tiles_in_all; index += gridDim.x) {
    const int64_t row_begin = index / unit_tiles * LltmTile::kRows;
    const int64_t unit_begin = index % unit_tiles * LltmTile::kUnits;
    TileType tiles[kGates] = {TileType(0), TileType(0), TileType(0)};
    add_gates(step, step.old_h, 0, step.hidden, row_begin, unit_begin, tiles,
              a_panels, b_panels);
    if (step.features > 0) {
      add_gates(step, step.input, step.hidden, step.features, row_begin,
                unit_begin, tiles, a_panels, b_panels);
    }
    const TileThread thread;
    PKG_UNROLL
    for (int i = 0; i < TileType::kThreadRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < TileType::kThreadColumns; ++j) {
        const int64_t row = row_begin + thread.row(i);
        const int64_t unit = unit_begin + thread.column(j);
        if (row < step.batch && unit < step.hidden) {
          Number gates[kGates] = {tiles[0].values[i][j], tiles[1].values[i][j],
                                  tiles[2].values[i][j]};
          finish_state(step, row, unit, gates);
        }
      }
    }
  }
}

}  // namespace pkg::cuda
