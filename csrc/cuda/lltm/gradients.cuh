// lltm backward on the device.
//
// The pass over a step's elements: a block owns 32 hidden units and walks over
// the rows, eight at a time, so that each thread sums the bias's gradient of
// its unit in registers; the eight sums of a unit are added in shared memory in
// one order. 9 elements are moved for each of the B H states.
//
// The products are those of cuda/gemm/block_product.cuh with an operand in two
// parts, since the states that the steps of a sequence began with lie in two
// tensors. Those of few tiles are divided along the summed dimension, as
// matmul's are: the weights' gradient is one of 3H x H and one of 3H x F tiles,
// over all rows of all steps.
#pragma once

#include <cstdint>

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/divisor.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/activation.cuh"
#include "cuda/gemm/block_product.cuh"
#include "cuda/gemm/panel.cuh"
#include "cuda/gemm/tile.cuh"
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
  wait_for_kernel_before();
  let_next_kernel_begin();
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

  // The panels of both summed dimensions, those of the first before those of
  // the second, may be divided: then c holds the sums of so many each,
  // (splits, rows, columns), which lltm_sum_kernel adds up.
  int64_t splits = 1;
  int64_t split_panels = 0;

  // Not as many as 2^31: c would take terabytes.
  int64_t pieces = 0;
  FastDivisor tiles{};
  FastDivisor column_tiles{};

  // Of one part.
  int64_t tile_count() const {
    return tiles_of(a[0].outer_size, Shape::kRows) *
           tiles_of(b[0].outer_size, Shape::kColumns);
  }
  __host__ __device__ int64_t panels_of(int part) const {
    return tiles_of(a[part].depth_size, Shape::kDepth);
  }
  int64_t panel_count() const { return panels_of(0) + panels_of(1); }

  // To be called when all else is known, and not empty.
  void divide(int64_t panels_of_split) {
    split_panels = panels_of_split;
    const int64_t panels = panel_count();
    splits = panels > split_panels ? (panels - 1) / split_panels + 1 : 1;
    pieces = tile_count() * splits;
    tiles = FastDivisor(tile_count());
    column_tiles = FastDivisor(tiles_of(b[0].outer_size, Shape::kColumns));
  }

  // What the index-th piece of work is: a tile, and which of the parts.
  __device__ __forceinline__ int64_t row_begin(uint32_t index) const {
    const uint32_t tile = tiles.divide(index).remainder;
    return int64_t{column_tiles.divide(tile).quotient} * Shape::kRows;
  }
  __device__ __forceinline__ int64_t column_begin(uint32_t index) const {
    const uint32_t tile = tiles.divide(index).remainder;
    return int64_t{column_tiles.divide(tile).remainder} * Shape::kColumns;
  }
  __device__ __forceinline__ int64_t split(uint32_t index) const {
    return tiles.divide(index).quotient;
  }

  // What it has of an operand, from a row or column on: its steps, of which
  // there may be none.
  __device__ __forceinline__ PanelSource<Element> from(
      const PanelSource<Element>& operand, int64_t outer_begin, uint32_t index,
      int part) const {
    const int64_t first =
        split(index) * split_panels - (part > 0 ? panels_of(0) : 0);
    const int64_t begin = (first > 0 ? first : 0) * Shape::kDepth;
    const int64_t end = (first + split_panels) * Shape::kDepth;
    return {operand.data + outer_begin * operand.outer_stride +
                begin * operand.depth_stride,
            operand.outer_size - outer_begin,
            (end < operand.depth_size ? end : operand.depth_size) - begin,
            operand.outer_stride, operand.depth_stride};
  }
};

// The same product divided, into `parts`.
template <class Element, class Output, class Number>
LltmProduct<Element, Number> divided(
    const LltmProduct<Element, Output>& product, int64_t split_panels,
    Number* parts) {
  LltmProduct<Element, Number> result = {};
  for (int part = 0; part < 2; ++part) {
    result.a[part] = product.a[part];
    result.b[part] = product.b[part];
  }
  result.c = parts;
  result.c_row_stride = product.b[0].outer_size;
  result.divide(split_panels);
  return result;
}

template <class Element, class Output>
__global__ void __launch_bounds__(BlockProduct<Element>::kThreads,
                                  BlockProduct<Element>::kBlocks)
    lltm_product_kernel(
        const __grid_constant__ LltmProduct<Element, Output> product) {
  wait_for_kernel_before();
  let_next_kernel_begin();
  using Product = BlockProduct<Element>;
  for (int64_t index = blockIdx.x; index < product.pieces; index += gridDim.x) {
    typename Product::Sums sums(0);
    for (int part = 0; part < 2; ++part) {
      const auto piece = static_cast<uint32_t>(computed_here(index));
      const auto a =
          product.from(product.a[part], product.row_begin(piece), piece, part);
      if (a.depth_size > 0) {
        const auto b = product.from(product.b[part],
                                    product.column_begin(piece), piece, part);
        Product::multiply(sums, a, 0, b, 0);
      }
    }
    const auto piece = static_cast<uint32_t>(computed_here(index));
    const int64_t rows = product.a[0].outer_size;
    const int64_t columns = product.b[0].outer_size;
    store_tile(sums, product.c + product.split(piece) * rows * columns, rows,
               columns, product.c_row_stride, product.row_begin(piece),
               product.column_begin(piece));
  }
}

// What a divided product's parts become. Their elements, of few tiles, are
// fewer than 2^31.
template <class Number, class Output>
struct LltmSum {
  const Number* parts;  // (splits, rows, columns)
  int64_t splits;
  int64_t elements;  // of a part
  FastDivisor columns;
  Output* c;
  int64_t c_row_stride;
};

template <class Element, class Output, class Number>
LltmSum<Number, Output> sum_of(const LltmProduct<Element, Output>& product,
                               const LltmProduct<Element, Number>& divided) {
  const int64_t columns = product.b[0].outer_size;
  return {divided.c,
          divided.splits,
          product.a[0].outer_size * columns,
          FastDivisor(columns),
          product.c,
          product.c_row_stride};
}

// c = the sum of the parts, the first first.
template <class Number, class Output>
__global__ void __launch_bounds__(kTileThreads)
    lltm_sum_kernel(const __grid_constant__ LltmSum<Number, Output> sum) {
  wait_for_kernel_before();
  let_next_kernel_begin();
  for (int64_t index = global_thread_index(); index < sum.elements;
       index += global_thread_count()) {
    Number total = 0;
    for (int64_t split = 0; split < sum.splits; ++split) {
      total += sum.parts[split * sum.elements + index];
    }
    const auto place = sum.columns.divide(static_cast<uint32_t>(index));
    sum.c[place.quotient * sum.c_row_stride + place.remainder] =
        convert<Output>(total);
  }
}

}  // namespace pkg::cuda
