// What the gradients of attention by products of warpgroups share; for compute
// capability 9.0 alone.
//
// Two warpgroups have 64 rows each of the block's tile of a gradient and of all
// that is added to it, a warp of a third has the copies made, by the copy
// engine and in stages. Heads are padded with zeros to 64 or 128 columns by
// the copies.
#pragma once

#include <cstdint>

#include "cuda/attention/attention.cuh"
#include "cuda/attention/gradients.cuh"
#include "cuda/attention/mapped_operand.cuh"
#include "cuda/attention/tile_turn.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/tensor_map.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/device/words.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// Lines of a box of queries where they come in turns, as the tiles of
// grad_key_value_mma.cuh have them.
constexpr int kQueryBoxLines = 32;

// Of a pair of operands two warps copy one each. They have few registers:
// what both do is there once, and places are counted in 32 bits.
template <class Call>
struct MappedGradients {
  MappedOperand queries[2];  // the query and the gradient of the output
  MappedOperand keys[2];     // the key and the value
  Call call;
};

// Of a launch; 384 threads begin with 168 registers each, of which those that
// copy give to the others.
template <int kRegisters>
struct GradientWarpgroups {
  static constexpr int kConsumers = 2 * kWarpgroup;
  static constexpr int kThreads = kConsumers + kWarpgroup;
  static constexpr int kConsumerWarps = kConsumers / kWarp;
  static constexpr int kConsumerRegisters = kRegisters;
  static constexpr int kProducerRegisters = 3 * 168 - 2 * kRegisters;
};

// Calls compute() by the two warpgroups, copy(0) and copy(1) by a warp of the
// third each.
template <class Launch, class Compute, class Copy>
__device__ __forceinline__ void divide_warpgroups(Compute&& compute,
                                                  Copy&& copy) {
  if (warpgroup_of_thread() < Launch::kConsumers / kWarpgroup) {
    take_registers<Launch::kConsumerRegisters>();
    compute();
  } else {
    give_registers<Launch::kProducerRegisters>();
    const int warp =
        __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0) -
        Launch::kConsumerWarps;
    if (warp < 2) {
      copy(warp);
    }
  }
}

// By whole warps, of which one lane arrives: what all of them have read may be
// written.
__device__ __forceinline__ void release(const Mbarriers& barriers,
                                        int barrier) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) {
    barriers.arrive(barrier);
  }
}

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
    return WarpgroupOperand(memory, index + column * kLines, kSliceBytes);
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

// extent() of matrices of one length, without the code for others.
template <class Element>
__device__ __forceinline__ AttentionExtent
extent_of_one_length(const AttentionProblem<Element>& problem, int64_t index) {
  return {problem.rows,
          problem.columns,
          0,
          0,
          attention_key_limits(problem.rows, problem.columns, problem.is_causal,
                               problem.variant.window_left,
                               problem.variant.window_right),
          index * problem.rows};
}

// batch_offset() where a batch has fewer than 2^32 matrices: its divisions take
// a third of the registers.
__device__ __forceinline__ int64_t batch_place(const BatchSizes& batch,
                                               const BatchStrides& steps,
                                               uint32_t index) {
  int64_t place = 0;
  PKG_UNROLL_BY(1)
  for (int dimension = batch.count - 1; dimension >= 0; --dimension) {
    const auto size = static_cast<uint32_t>(batch.sizes[dimension]);
    place += index % size * steps.strides[dimension];
    index /= size;
  }
  return place;
}

// Which matrix of the batch it is that shares an owned one.
__device__ __forceinline__ uint32_t batch_index(const BatchPartition& partition,
                                                uint32_t owned,
                                                uint32_t shared) {
  return static_cast<uint32_t>(
      batch_place(partition.owned, partition.owned_steps, owned) +
      batch_place(partition.shared, partition.shared_steps, shared));
}

__device__ __forceinline__ BoxedMatrix matrix_of(const MappedOperand& operand,
                                                 const BatchSizes& batch,
                                                 uint32_t index) {
  const int64_t place = batch_place(batch, operand.steps, index);
  return {static_cast<int>(place & 0xFFFFFFFF), static_cast<int>(place >> 32)};
}

// Whether both heads fit, and all that is counted does in 32 bits: then only
// the operands' strides decide.
template <class Element>
bool suits_warpgroups(const AttentionProblem<Element>& problem) {
  constexpr int64_t kMostHead = 128;
  constexpr int kTile = 128;
  return problem.packed.rows.data == nullptr &&
         problem.head_size <= kMostHead && problem.value_size <= kMostHead &&
         problem.rows < kMostTiledLength &&
         problem.columns < kMostTiledLength &&
         problem.batch_count < kMostTiledLength &&
         problem.batch_count * tiles_of(problem.rows, kTile) <
             kMostTiledLength &&
         problem.batch_count * tiles_of(problem.columns, kTile) <
             kMostTiledLength;
}

}  // namespace pkg::cuda
