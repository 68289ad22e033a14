// A step of lltm forward on the device.
//
// A block computes the three gates of a tile (cuda/lltm/gate_product.cuh), and
// a thread then activates those of its own states and writes cell and state:
// the gates go to memory only where the gradient needs them. In a sequence the
// input's product is made for all steps at once, and a step begins from its
// sums.
//
// A single step whose product is large goes by the kernels of matmul instead
// (run_large, cuda/lltm_forward.cu).
//
// A step of few tiles is divided along the summed dimension, as matmul's
// products are (cuda/gemm/matmul.cuh): the parts' sums go to memory, and a
// second kernel, with a thread for each state, adds them up in one order and
// activates them. The activations alone are a reason to: about 200 instructions
// of each state, which of a tile of 64 x 64 one multiprocessor issues in 6400
// cycles, the time of eight panels of the product.
//
// 2 B 3H (H + F) operations. The blocks read B 3H (H + F) (1/(3 units) +
// 1/rows) elements of global memory, of the units and rows of a tile; of a
// divided step each part's B 3H numbers are written and read besides.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/divisor.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/activation.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/lltm/gate_product.cuh"
#include "cuda/lltm/lltm.cuh"

namespace pkg::cuda {

template <class Element>
struct LltmStep {
  using Number = Accumulator<Element>;
  using Product = GateProduct<Element>;

  GateOperands<Element> operands;  // without x where its product is given
  const Element* bias;
  int64_t bias_stride;
  MatrixOf<Element> old_cell;
  const Number* input_sums;  // (batch, 3 hidden), or null
  // Contiguous; gates are null where they are not kept.
  Element* new_h;
  Element* new_cell;
  Element* gates;

  // The sums of parts of so many panels, (splits, batch, 3 hidden); null where
  // a block has all of them.
  Number* parts = nullptr;
  int64_t splits = 1;
  int64_t split_panels = 0;

  // Not as many as 2^31: the states would take terabytes.
  int64_t pieces = 0;
  FastDivisor tiles{};
  FastDivisor unit_tiles{};

  // Of one part.
  int64_t tile_count() const {
    return tiles_of(operands.batch, Product::kRows) *
           tiles_of(operands.units, Product::kUnits);
  }
  int64_t panel_count() const {
    return operands.panels_of(0, Product::kDepth) +
           operands.panels_of(1, Product::kDepth);
  }

  // To be called when all sizes are known, and the step has states.
  void divide(int64_t panels_of_split) {
    split_panels = panels_of_split;
    splits = tiles_of(panel_count(), static_cast<int>(split_panels));
    pieces = tile_count() * splits;
    tiles = FastDivisor(tile_count());
    unit_tiles = FastDivisor(tiles_of(operands.units, Product::kUnits));
  }

  // The tiles of a part follow one another.
  __device__ __forceinline__ GatePiece piece(uint32_t index) const {
    const auto place = tiles.divide(index);
    const auto tile = unit_tiles.divide(place.remainder);
    const int panels = operands.panels_of(0, Product::kDepth) +
                       operands.panels_of(1, Product::kDepth);
    const int most = static_cast<int>(split_panels);
    const int begin = static_cast<int>(place.quotient) * most;
    return {int64_t{tile.quotient} * Product::kRows,
            int64_t{tile.remainder} * Product::kUnits, begin,
            begin + most < panels ? begin + most : panels};
  }
};

// A gate of a state before its activation, from the sum of its product.
template <class Element, class Number>
__device__ __forceinline__ Number gate_of(const LltmStep<Element>& step,
                                          int gate, int64_t row, int64_t unit,
                                          Number sum) {
  const int64_t column = gate * step.operands.units + unit;
  const Number value =
      sum + convert<Number>(step.bias[column * step.bias_stride]);
  return step.input_sums == nullptr
             ? value
             : value +
                   step.input_sums[row * kGates * step.operands.units + column];
}

template <class Number>
struct LltmState {
  Number cell;
  Number h;
};

template <class Element, class Number>
__device__ __forceinline__ LltmState<Number> state_of(
    const LltmStep<Element>& step, int64_t row, int64_t unit,
    const Number (&gates)[kGates]) {
  const Number cell =
      convert<Number>(step.old_cell.at(row, unit)) +
      EluOf<Number>(gates[2]).value * Gate<Number>(gates[0]).open;
  return {cell, TanhOf<Number>(cell).value * Gate<Number>(gates[1]).open};
}

// Stores a thread's numbers of a row of so many units, sixteen bytes at once
// where it has them side by side.
template <class Thread, class Number, int kColumns, class Element>
__device__ __forceinline__ void store_row(const Number (&values)[kColumns],
                                          Element* row, int64_t unit_begin,
                                          int64_t units) {
  constexpr int kWidest = 16 / sizeof(Element);
  constexpr int kPacket =
      Thread::kNeighbours < kWidest ? Thread::kNeighbours : kWidest;
  const Thread thread;
  PKG_UNROLL
  for (int j = 0; j < kColumns; j += kPacket) {
    const int64_t unit = unit_begin + thread.column(j);
    Packet<Element, kPacket> packet;
    PKG_UNROLL
    for (int k = 0; k < kPacket; ++k) {
      packet.values[k] = convert<Element>(values[j + k]);
    }
    if (unit + kPacket <= units && is_aligned(row + unit, kPacket)) {
      *reinterpret_cast<Packet<Element, kPacket>*>(row + unit) = packet;
    } else {
      PKG_UNROLL
      for (int k = 0; k < kPacket; ++k) {
        if (unit + k < units) {
          row[unit + k] = packet.values[k];
        }
      }
    }
  }
}

// A row of sums becomes its states: cells in place of the first gate's, h in
// place of the second's, two at a time.
template <class Element, class Sums>
__device__ __forceinline__ void finish_states(const LltmStep<Element>& step,
                                              const GatePiece& piece,
                                              int64_t row, bool exists,
                                              Sums (&sums)[kGates]) {
  using Number = typename Sums::Value;
  constexpr int kColumns = Sums::kThreadColumns;
  constexpr int kAtOnce = 2;
  const typename Sums::Thread thread;
  PKG_UNROLL_BY(1)
  for (int j = 0; j < kColumns; j += kAtOnce) {
    LltmState<Number> states[kAtOnce] = {};
    PKG_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t unit = piece.unit_begin + thread.column(j + k);
      if (exists && unit < step.operands.units) {
        states[k] = state_of(
            step, row, unit,
            {sums[0].values[0][k], sums[1].values[0][k], sums[2].values[0][k]});
      }
    }
    PKG_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      auto& values = sums[gate].values[0];
      PKG_UNROLL
      for (int k = kAtOnce; k < kColumns; ++k) {
        values[k - kAtOnce] = values[k];
      }
    }
    PKG_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      sums[0].values[0][kColumns - kAtOnce + k] = states[k].cell;
      sums[1].values[0][kColumns - kAtOnce + k] = states[k].h;
    }
  }
}

// The states of a tile, row by row, two at a time: one copy of the activations
// serves all of a thread. Registers have no index, so the sums move up, and
// cells and states take the place of two gates' until the row is stored: of
// four states side by side the compiler spilled up to six registers (nvcc
// 13.0).
template <class Element, class Sums>
__device__ __forceinline__ void finish_tile(const LltmStep<Element>& step,
                                            const GatePiece& piece,
                                            Sums (&sums)[kGates]) {
  using Thread = typename Sums::Thread;
  constexpr int kColumns = Sums::kThreadColumns;
  const Thread thread;
  const int64_t units = step.operands.units;
  PKG_UNROLL_BY(1)
  for (int i = 0; i < Sums::kThreadRows; ++i) {
    const int64_t row = piece.row_begin + thread.row(i);
    const bool exists = row < step.operands.batch;
    PKG_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      auto& values = sums[gate].values[0];
      PKG_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        const int64_t unit = piece.unit_begin + thread.column(j);
        if (exists && unit < units) {
          values[j] = gate_of(step, gate, row, unit, values[j]);
        }
      }
      if (exists && step.gates != nullptr) {
        store_row<Thread>(values, step.gates + (row * kGates + gate) * units,
                          piece.unit_begin, units);
      }
    }
    finish_states(step, piece, row, exists, sums);
    if (exists) {
      store_row<Thread>(sums[0].values[0], step.new_cell + row * units,
                        piece.unit_begin, units);
      store_row<Thread>(sums[1].values[0], step.new_h + row * units,
                        piece.unit_begin, units);
    }
    PKG_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      auto& values = sums[gate].values;
      PKG_UNROLL
      for (int next = 1; next < Sums::kThreadRows; ++next) {
        PKG_UNROLL
        for (int k = 0; k < kColumns; ++k) {
          values[next - 1][k] = values[next][k];
        }
      }
    }
  }
}

template <class Element>
__global__ void __launch_bounds__(GateProduct<Element>::kThreads,
                                  GateProduct<Element>::kBlocks)
    lltm_step_kernel(const __grid_constant__ LltmStep<Element> step) {
  wait_for_kernel_before();
  let_next_kernel_begin();
  using Product = GateProduct<Element>;
  using Sums = typename Product::Sums;
  for (int64_t index = blockIdx.x; index < step.pieces; index += gridDim.x) {
    const GatePiece piece = step.piece(static_cast<uint32_t>(index));
    Sums sums[kGates] = {Sums(0), Sums(0), Sums(0)};
    Product::multiply(sums, step.operands, piece);
    if (step.parts == nullptr) {
      finish_tile(step, piece, sums);
      continue;
    }
    const int64_t batch = step.operands.batch;
    const int64_t hidden = step.operands.units;
    const int64_t split =
        step.tiles.divide(static_cast<uint32_t>(index)).quotient;
    auto* to = step.parts + split * batch * kGates * hidden;
    PKG_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      store_tile(sums[gate], to + gate * hidden, batch, hidden, kGates * hidden,
                 piece.row_begin, piece.unit_begin);
    }
  }
}

// The states of a divided step, whose parts are added up, the first first.
// `Divisor` is FastDivisor where there are fewer than 2^31 of them. With the
// other nvcc 13.0 spilled two registers for 8.0, to fit eight blocks in a
// multiprocessor.
template <class Element, class Divisor>
__global__ void __launch_bounds__(kTileThreads,
                                  std::is_same_v<Divisor, FastDivisor> ? 0 : 4)
    lltm_finish_kernel(const __grid_constant__ LltmStep<Element> step,
                       const __grid_constant__ Divisor units) {
  wait_for_kernel_before();
  let_next_kernel_begin();
  using Number = Accumulator<Element>;
  using Index = decltype(units.divide(0).quotient);
  const int64_t hidden = step.operands.units;
  const int64_t states = step.operands.batch * hidden;
  for (int64_t index = global_thread_index(); index < states;
       index += global_thread_count()) {
    const auto place = units.divide(static_cast<Index>(index));
    const int64_t row = place.quotient;
    const int64_t unit = place.remainder;
    const Number* part = step.parts + row * kGates * hidden + unit;
    Number gates[kGates] = {};
    for (int64_t split = 0; split < step.splits; ++split) {
      PKG_UNROLL
      for (int gate = 0; gate < kGates; ++gate) {
        gates[gate] += part[gate * hidden];
      }
      part += kGates * states;
    }
    PKG_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      gates[gate] = gate_of(step, gate, row, unit, gates[gate]);
      if (step.gates != nullptr) {
        step.gates[(row * kGates + gate) * hidden + unit] =
            convert<Element>(gates[gate]);
      }
    }
    const LltmState<Number> state = state_of(step, row, unit, gates);
    step.new_cell[index] = convert<Element>(state.cell);
    step.new_h[index] = convert<Element>(state.h);
  }
}

// Calls function(kernel, units) with the kernel for so many states and what
// divides them into rows. A step that is divided has few of them, but one whose
// product matmul makes may have any number.
template <class Element, class Function>
void with_finish_kernel(const LltmStep<Element>& step, Function&& function) {
  const int64_t units = step.operands.units;
  if (step.operands.batch * units > INT32_MAX) {
    function(lltm_finish_kernel<Element, WideDivisor>, WideDivisor(units));
  } else {
    function(lltm_finish_kernel<Element, FastDivisor>, FastDivisor(units));
  }
}

}  // namespace pkg::cuda
