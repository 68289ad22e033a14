// Tiles of queries, keys and values in shared memory, and the products of them
// that warpgroups make; for compute capability 9.0 alone.
#pragma once

#include <cstdint>

#include "cuda/attention/mapped_operand.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/tensor_map.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/device/words.cuh"

namespace pkg::cuda {

// Lines of a matrix in shared memory, kWidth columns wide: 64 columns of all
// lines after 64.
template <class Element, int kLines, int kWidth>
struct WarpgroupLines {
  static constexpr int kLine = 128 / sizeof(Element);
  static constexpr int kSlices = kWidth / kLine;
  static constexpr int kSliceBytes = kLines * 128;
  static constexpr int kElements = kLines * kWidth;
  static constexpr int kBytes = kSlices * kSliceBytes;

  // Begins to copy them, from `line` on, to where `index` is; boxes that begin
  // at `end` or later become zeros. By one thread, which arrives at the
  // barrier.
  template <int kBoxLinesOfMap>
  __device__ __forceinline__ static void copy(const SharedSpan<Element>& memory,
                                              int index, const TensorMap& map,
                                              const BoxedMatrix& matrix,
                                              int line, int end,
                                              const Mbarriers& barriers,
                                              int barrier) {
    constexpr int kBeyond = 0x7fffff00;  // no tensor has such lines
    barriers.arrive_and_expect(barrier, kBytes);
    PKG_UNROLL
    for (int first = 0; first < kLines; first += kBoxLinesOfMap) {
      const int from = line + first < end ? line + first : kBeyond;
      PKG_UNROLL
      for (int slice = 0; slice < kSlices; ++slice) {
        copy_box(memory, index + (slice * kLines + first) * kLine, map,
                 slice * kLine, from, matrix.matrix, matrix.group, barriers,
                 barrier);
      }
    }
  }

  // The 64 lines from `line` on as rows, or all as columns, of a product that
  // sums over a line.
  __device__ __forceinline__ static WarpgroupOperand by_line(
      const SharedSpan<Element>& memory, int index, int line = 0) {
    return WarpgroupOperand(memory, index + line * kLine);
  }

  // From a column on, as operand B of a product that sums over the lines.
  __device__ __forceinline__ static WarpgroupOperand by_column(
      const SharedSpan<Element>& memory, int index, int column = 0) {
    const int slice = column / kLine;
    return WarpgroupOperand(
        memory, index + slice * kLines * kLine + column % kLine, kSliceBytes);
  }
};

// Begins tile = A B^T, the sums over a head: a group of products of its own.
template <class Element, class LinesA, class LinesB, class TileType>
__device__ __forceinline__ void begin_scores(TileType& tile,
                                             const WarpgroupOperand& a,
                                             const WarpgroupOperand& b) {
  constexpr int kSteps = 4;  // of 32 bytes, in a line
  static_assert(LinesA::kSlices == LinesB::kSlices);
  hold_sums(tile.values);
  order_registers();
  PKG_UNROLL
  for (int step = 0; step < LinesA::kSlices * kSteps; ++step) {
    const int slice = step / kSteps;
    const int place = step % kSteps * 32;
    begin_product<Element, Major::depth, Major::depth>(
        tile.values, a.at(slice * LinesA::kSliceBytes + place),
        b.at(slice * LinesB::kSliceBytes + place), step > 0);
  }
  commit_products();
}

// Begins sums += A B, where A is words of 16 lines of B each; likewise a group.
template <class Element, class TileType, int kSteps>
__device__ __forceinline__ void begin_sums(TileType& sums,
                                           uint32_t (&words)[kSteps][4],
                                           const WarpgroupOperand& lines) {
  constexpr int kStepBytes = 16 * 128;
  hold_sums(sums.values);
  hold_words(words);
  order_registers();
  PKG_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    begin_product<Element, Major::outer>(sums.values, words[step],
                                         lines.at(step * kStepBytes));
  }
  commit_products();
}

// A tile as operand A, of 16 columns each: where two tiles of 8 columns of sums
// lie is where it does.
template <class Element, class TileType, int kSteps>
__device__ __forceinline__ void round_tile(const TileType& tile,
                                           uint32_t (&words)[kSteps][4]) {
  static_assert(16 * kSteps == TileType::kTileColumns);
  PKG_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    PKG_UNROLL
    for (int word = 0; word < 4; ++word) {
      const auto& row = tile.values[word % 2];
      const int j = 4 * step + word / 2 * 2;
      words[step][word] = pair_of<Element>(row[j], row[j + 1]);
    }
  }
}

}  // namespace pkg::cuda
