// Products of two operands into a tile by the tensor cores.
//
// The operands pass through shared memory in stages (stages.cuh). A warp loads
// the words of a step of 32 bytes while it multiplies those of the step before.
// Places are counted in 32 bits: without spills this leaves few of 255
// registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/device.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/tf32.cuh"
#include "cuda/device/words.cuh"
#include "cuda/gemm/operand_tile.cuh"
#include "cuda/gemm/stages.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// The warp's sums += A B for 32 bytes of the summed dimension: the words of all
// its rows by those of 16 columns, the `part`-th.
template <class Element, int kRowParts, class Sums>
__device__ __forceinline__ void multiply_columns(
    Sums& sums, const uint32_t (&a)[kRowParts][4], const uint32_t (&b)[4],
    int part) {
  PKG_UNROLL
  for (int i = 0; i < kRowParts; ++i) {
    auto& top = sums.values[2 * i];
    auto& bottom = sums.values[2 * i + 1];
    PKG_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int j = part * 4 + half * 2;
      multiply_add<Element>(top[j], top[j + 1], bottom[j], bottom[j + 1], a[i],
                            &b[2 * half]);
    }
  }
}

// Words of an operand as its element's mma takes them.
template <class Element>
__device__ __forceinline__ void round_operand(uint32_t (&words)[4]) {
  if constexpr (std::is_same_v<Element, Tf32>) {
    PKG_UNROLL
    for (uint32_t& word : words) {
      word = round_to_tf32(word);
    }
  }
}

// The warp's sums += A B of slices of both operands in shared memory.
//
// Columns are taken 16 at a time, so that of B only two parts have to be in
// registers, this one and the next; of A, which they all are multiplied by,
// two steps.
template <class Element, int kWarpRows, int kWarpColumns, class Sums,
          class OperandA, class OperandB>
__device__ __forceinline__ void multiply_slices(
    Sums& sums, const OperandA& a_tile, const SharedSpan<Element>& a_memory,
    const OperandB& b_tile, const SharedSpan<Element>& b_memory) {
  constexpr int kSteps = OperandA::kDepth / OperandA::kStep;
  constexpr int kRowParts = kWarpRows / 16;
  constexpr int kColumnParts = kWarpColumns / 16;
  uint32_t a[2][kRowParts][4];
  uint32_t b[2][4];
  const auto load_a = [&](int step) {
    PKG_UNROLL
    for (int i = 0; i < kRowParts; ++i) {
      a_tile.fragments(a_memory, i, step, a[step % 2][i]);
    }
  };
  const auto load_b = [&](int part) {
    b_tile.fragments(b_memory, part % kColumnParts, part / kColumnParts,
                     b[part % 2]);
  };
  load_a(0);
  load_b(0);
  PKG_UNROLL
  for (int part = 0; part < kSteps * kColumnParts; ++part) {
    const int step = part / kColumnParts;
    if (part + 1 < kSteps * kColumnParts) {
      load_b(part + 1);
    }
    if (part % kColumnParts == 0 && step + 1 < kSteps) {
      load_a(step + 1);
    }
    if (part % kColumnParts == 0) {
      PKG_UNROLL
      for (int i = 0; i < kRowParts; ++i) {
        round_operand<Element>(a[step % 2][i]);
      }
    }
    round_operand<Element>(b[part % 2]);
    multiply_columns<Element>(sums, a[step % 2], b[part % 2],
                              part % kColumnParts);
  }
}

// The same of as many slices, which follow one another.
template <class Element, int kWarpRows, int kWarpColumns, class Sums,
          class OperandA, class OperandB>
__device__ __forceinline__ void multiply_all_slices(
    Sums& sums, const OperandA& a_tile, const SharedSpan<Element>& a_memory,
    const OperandB& b_tile, const SharedSpan<Element>& b_memory, int count) {
  PKG_UNROLL_BY(1)
  for (int slice = 0; slice < count; ++slice) {
    multiply_slices<Element, kWarpRows, kWarpColumns>(
        sums, a_tile,
        a_memory.part(slice * OperandA::kElements, OperandA::kElements), b_tile,
        b_memory.part(slice * OperandB::kElements, OperandB::kElements));
  }
}

// The warp's sums += A B where A is a tile that its lanes hold, rounded to
// elements, and B is in shared memory: where two tiles of 8 columns of sums lie
// is where operand A of 16 columns does.
template <class Element, class Sums, class Left, class OperandB>
__device__ __forceinline__ void multiply_from_registers(
    Sums& sums, const Left& left, const OperandB& b_tile,
    const SharedSpan<Element>& b_memory) {
  constexpr int kRowParts = Left::kThreadRows / 2;
  constexpr int kSteps = Left::kThreadColumns / 4;
  constexpr int kParts = Sums::kThreadColumns / 4;
  PKG_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    uint32_t a[kRowParts][4];
    PKG_UNROLL
    for (int i = 0; i < kRowParts; ++i) {
      PKG_UNROLL
      for (int word = 0; word < 4; ++word) {
        const auto& row = left.values[2 * i + word % 2];
        const int j = 4 * step + word / 2 * 2;
        a[i][word] = pair_of<Element>(row[j], row[j + 1]);
      }
    }
    PKG_UNROLL
    for (int part = 0; part < kParts; ++part) {
      uint32_t b[4];
      b_tile.fragments(b_memory, part, step, b);
      multiply_columns<Element>(sums, a, b, part);
    }
  }
}

template <class Element, int kRows, int kColumns, int kWarpRows,
          int kWarpColumns, int kStages>
struct MmaProduct {
  using Thread = MmaThread<kRows, kColumns, kWarpRows, kWarpColumns>;
  using Sums = Tile<Accumulator<Element>, kRows, kColumns, Thread>;
  static constexpr int kThreads = Thread::kThreads;
  using OperandA = OperandTile<Element, kRows, kThreads>;
  using OperandB = OperandTile<Element, kColumns, kThreads>;
  static constexpr int kDepth = OperandA::kDepth;
  static constexpr int kStageElements =
      OperandA::kElements + OperandB::kElements;
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
    // Else what follows from it would be kept for all tiles of a block.
    const int index = computed_here(static_cast<int>(threadIdx.x));
    const Thread thread(index);
    const OperandA a_tile(a, row_begin, thread.warp_row, true, index);
    const OperandB b_tile(b, column_begin, thread.warp_column, false, index);
    const int steps = static_cast<int>(tiles_of(a.depth_size, kDepth));
    pass_through_stages<kStages>(
        0, steps,
        [&](int step, int stage) {
          const SharedSpan<Element> to = stage_of(memory, stage);
          a_tile.load(a_part(to), int64_t{step} * kDepth);
          b_tile.load(b_part(to), int64_t{step} * kDepth);
        },
        [&](int, int stage) {
          const SharedSpan<Element> from = stage_of(memory, stage);
          multiply_slices<Element, kWarpRows, kWarpColumns>(
              sums, a_tile, a_part(from), b_tile, b_part(from));
        });
  }

 private:
  __device__ __forceinline__ static SharedSpan<Element> stage_of(
      const SharedSpan<Element>& memory, int stage) {
    return memory.part(stage * kStageElements, kStageElements);
  }
  __device__ __forceinline__ static SharedSpan<Element> a_part(
      const SharedSpan<Element>& stage) {
    return stage.part(0, OperandA::kElements);
  }
  __device__ __forceinline__ static SharedSpan<Element> b_part(
      const SharedSpan<Element>& stage) {
    return stage.part(OperandA::kElements, OperandB::kElements);
  }
};

}  // namespace pkg::cuda
