// lltm backward on the device.
//
// The pass over a step's elements: a block owns 32 hidden units and walks over
// the rows, eight at a time, so that each thread sums the bias's gradient of
// its unit in registers; the eight sums of a unit are added in shared memory in
// one order. 9 elements are moved for each of the B H states.
//
// The products are those of cuda/gemm/block_product.cuh with an operand in two
// parts, since the states that the steps of a sequence began with lie in two
// tensors.
#pragma once

#include <cstdint>

#include "cuda/gemm/block_product.cuh"
#include "cuda/lltm/lltm.cuh"

namespace pkg::cuda {

struct LltmGradientTile {
  static constexpr int kUnits = 32;
  static constexpr int kRows = kTileThreads / kUnits;
  // Rows of a thread that are summed one after the other; longer sums are made
  // of such parts.
  static constexpr int kRun = 32;
};

template <class Element>
struct LltmGradientStep {
  using Number = Accumulator<Element>;

  int64_t batch;
  int64_t hidden;
  // Of the step's results; null where there are none.
  MatrixOf<Element> grad_hidden;
  MatrixOf<Element> grad_cells;
  MatrixOf<Element> grad_gates;
  MatrixOf<Element> gates;
  MatrixOf<Element> cells;
  const Number* carried_h;  // from the step after this one; null for the last
  Number* carried_cell;     // (batch, hidden), read where carried_h is
  Element* grad_sums;       // of the gates, contiguous
  Number* bias_sums;        // added to
  // Written by the first step, null for the others.
  Element* grad_old_cell;
  Element* grad_bias;

  __host__ __device__ int64_t tile_count() const {
    return tiles_of(hidden, LltmGradientTile::kUnits);
  }
};

template <class Element, class Number>
__device__ __forceinline__ Number value_or_zero(const MatrixOf<Element>& matrix,
                                                int64_t row, int64_t column) {
  return matrix.data != nullptr ? convert<Number>(matrix.at(row, column))
                                : Number(0);
}

// One element: writes the gradients of its gates and of the cell before.
template <class Element, class Number>
__device__ __forceinline__ void differentiate_state(
    const LltmGradientStep<Element>& step, int64_t row, int64_t unit,
    Number (&gradients)[kGates]) {
  const int64_t hidden = step.hidden;
  const int64_t place = row * hidden + unit;
  Number grad_h = value_or_zero<Element, Number>(step.grad_hidden, row, unit);
  Number grad_cell = value_or_zero<Element, Number>(step.grad_cells, row, unit);
  if (step.carried_h != nullptr) {
    grad_h += step.carried_h[place];
    grad_cell += step.carried_cell[place];
  }
  const auto gate = [&](int index) {
    return convert<Number>(step.gates.at(row, index * hidden + unit));
  };
  const Gate<Number> in(gate(0));
  const Gate<Number> out(gate(1));
  const EluOf<Number> candidate(gate(2));
  const TanhOf<Number> squashed(convert<Number>(step.cells.at(row, unit)));
  grad_cell += grad_h * out.open * squashed.slope;
  gradients[0] = grad_cell * candidate.value * (in.open * in.closed);
  gradients[1] = grad_h * squashed.value * (out.open * out.closed);
  gradients[2] = grad_cell * in.open * candidate.slope;
  PKG_UNROLL
  for (int index = 0; index < kGates; ++index) {
    gradients[index] += value_or_zero<Element, Number>(step.grad_gates, row,
                                                       index * hidden + unit);
    step.grad_sums[(row * kGates + index) * hidden + unit] =
        convert<Element>(gradients[index]);
  }
  if (step.grad_old_cell != nullptr) {
    step.grad_old_cell[place] = convert<Element>(grad_cell);
  } else {
    step.carried_cell[place] = grad_cell;
  }
}

template <class Element>
__global__ void __launch_bounds__(kTileThreads) lltm_gradient_kernel(
    const __grid_constant__ LltmGradientStep<Element> step) {
  using Number = Accumulator<Element>;
  using Shape = LltmGradientTile;
  PKG_SHARED(Number, sums, [kGates][Shape::kRows][Shape::kUnits]);
  const int lane = static_cast<int>(threadIdx.x) % Shape::kUnits;
  const int row_lane = static_cast<int>(threadIdx.x) / Shape::kUnits;
  const int64_t tiles_in_all = step.tile_count();
  for (int64_t index = blockIdx.x; index < tiles_in_all; index += gridDim.x) {
    const int64_t unit = index * Shape::kUnits + lane;
    Number totals[kGates] = {};
    Number run[kGates] = {};
    int in_run = 0;
    for (int64_t row = row_lane; unit < step.hidden && row < step.batch;
         row += Shape::kRows) {
      Number gradients[kGates];
      differentiate_state(step, row, unit, gradients);
      const bool ends = ++in_run == Shape::kRun;
      PKG_UNROLL
      for (int gate = 0; gate < kGates; ++gate) {
        run[gate] += gradients[gate];
        totals[gate] += ends ? run[gate] : Number(0);
        run[gate] = ends ? Number(0) : run[gate];
      }
      in_run = ends ? 0 : in_run;
    }
    PKG_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      sums[gate][row_lane][lane] = totals[gate] + run[gate];
    }
    __syncthreads();
    if (row_lane < kGates && unit < step.hidden) {
      Number total = 0;
      for (int row = 0; row < Shape::kRows; ++row) {
        total += sums[row_lane][row][lane];
      }
      const int64_t place = row_lane * step.hidden + unit;
      total += step.bias_sums[place];
      step.bias_sums[place] = total;
      if (step.grad_bias != nullptr) {
        step.grad_bias[place] = convert<Element>(total);
      }
    }
    __syncthreads();
  }
}

// c = a[0] b[0] + a[1] b[1], with contiguous columns of c.
template <class Element, class Output>
struct LltmProduct {
  using Shape = BlockProduct<Element>;

  PanelSource<Element> a[2];
  PanelSource<Element> b[2];
  Output* c;
  int64_t c_row_stride;

  int64_t column_tiles = 0;
  int64_t tiles = 0;

  int64_t count_tiles() {
    column_tiles = tiles_of(b[0].outer_size, Shape::kColumns);
    tiles = tiles_of(a[0].outer_size, Shape::kRows) * column_tiles;
    return tiles;
  }
};

template <class Element, class Output>
__global__ void __launch_bounds__(BlockProduct<Element>::kThreads,
                                  BlockProduct<Element>::kBlocks)
    lltm_product_kernel(
        const __grid_constant__ LltmProduct<Element, Output> product) {
  using Product = BlockProduct<Element>;
  for (int64_t index = blockIdx.x; index < product.tiles; index += gridDim.x) {
    const int64_t row_begin = index / product.column_tiles * Product::kRows;
    const int64_t column_begin =
        index % product.column_tiles * Product::kColumns;
    typename Product::Sums sums(0);
    for (int part = 0; part < 2; ++part) {
      if (product.a[part].depth_size > 0) {
        Product::multiply(sums, product.a[part], row_begin, product.b[part],
                          column_begin);
      }
    }
    store_tile(sums, product.c, product.a[0].outer_size,
               product.b[0].outer_size, product.c_row_stride, row_begin,
               column_begin);
  }
}

}  // namespace pkg::cuda
