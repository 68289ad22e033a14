// Products of float32 in TF32 by warpgroups, where the user allows it. The copy
// engine rounds to TF32 what it brings to shared memory, and the kernel is that
// of cuda/gemm/warpgroup_matmul.cuh: a stage of 128 bytes is 32 steps.
//
// These products take operands whose neighbours are steps of the summed
// dimension alone. One whose neighbours are rows or columns is transposed
// first; what is dense in neither way, or not aligned, is left to warps
// (cuda/gemm/block_product.cuh).
//
// A stage takes the tensor cores as long as one of bfloat16, which has twice
// the steps: half that rate, 495 TFLOP/s of an H100 or H200. A transposed
// operand moves 8 bytes of memory for each element. (An H100 made n = 4096 in
// 369 us, as cuBLAS did, and in 420 and 521 with one operand and with both to
// transpose; by warps it took 996. The kernel alone took 354 us, a transpose of
// 67 MB 61, 2.2 TB/s read and written.)
#pragma once

#include <cstdint>
#include <optional>

#include "cuda/device/tf32.cuh"
#include "cuda/gemm/transpose.cuh"
#include "cuda/gemm/warpgroup_matmul.cuh"

namespace pkg::cuda {

constexpr int kTf32OfVector = 16 / sizeof(Tf32);

// An operand as the copy engine is to see it. Where it is transposed before,
// `tensor` is the result, whose memory is not there yet.
struct Tf32Operand {
  MappedTensor<Tf32> tensor;
  bool is_transposed = false;
  TransposeProblem<uint32_t> transpose{};

  int64_t transposed_elements() const {
    return is_transposed ? tensor.matrices * tensor.lines * tensor.line_stride
                         : 0;
  }
  void set_transposed(Tf32* memory) {
    tensor.data = memory;
    transpose.to = reinterpret_cast<uint32_t*>(memory);
  }
  BulkOperand<Tf32> bulk() const { return {tensor, Major::depth}; }
};

// Nothing where the copy engine takes neither it nor its transpose.
inline std::optional<Tf32Operand> tf32_operand(
    const PanelSource<Tf32>& operand, int64_t batch_count,
    std::optional<int64_t> batch_step) {
  if (const auto as_it_is = bulk_operand(operand, batch_count, batch_step)) {
    return Tf32Operand{.tensor = as_it_is->tensor};
  }
  const int64_t outer = operand.outer_size;
  const int64_t depth = operand.depth_size;
  if (!batch_step || depth == 0 || operand.outer_stride != 1 ||
      !fits_bulk_copies(outer, depth, batch_count)) {
    return std::nullopt;
  }
  const int64_t matrices = *batch_step == 0 ? 1 : batch_count;
  const int64_t pitch = tiles_of(depth, kTf32OfVector) * kTf32OfVector;
  Tf32Operand result = {};
  result.is_transposed = true;
  result.tensor = {.data = nullptr,
                   .width = depth,
                   .lines = outer,
                   .matrices = matrices,
                   .line_stride = pitch,
                   .matrix_stride = outer * pitch,
                   .box_lines = kBulkBoxLines};
  result.transpose = {.from = reinterpret_cast<const uint32_t*>(operand.data),
                      .to = nullptr,
                      .rows = depth,
                      .columns = outer,
                      .row_stride = operand.depth_stride,
                      .column_stride = operand.outer_stride,
                      .pitch = pitch,
                      .matrices = matrices,
                      .matrix_stride = *batch_step};
  result.transpose.count_tiles();
  return result;
}

struct Tf32Operands {
  Tf32Operand a;
  Tf32Operand b;

  int64_t transposed_elements() const {
    return a.transposed_elements() + b.transposed_elements();
  }

  // Where the transposes go, one after the other: calls transpose(problem) for
  // each that there is.
  template <class Transpose>
  void transpose_into(Tf32* memory, Transpose&& transpose) {
    for (Tf32Operand* const operand : {&a, &b}) {
      if (operand->is_transposed) {
        operand->set_transposed(memory);
        memory += operand->transposed_elements();
        transpose(operand->transpose);
      }
    }
  }
};

inline std::optional<Tf32Operands> tf32_operands(
    const MatmulProblem<Tf32, float>& problem) {
  const auto both = both_operands(problem, tf32_operand);
  if (!both) {
    return std::nullopt;
  }
  return Tf32Operands{both->first, both->second};
}

// What transposing so many elements takes: the bytes, and a kernel for each
// operand.
inline int64_t cycles_of_transposing(int64_t elements) {
  constexpr int64_t kLaunches = 5000;
  return elements == 0 ? 0 : kLaunches + 8 * elements / kMemoryBytesOfCycle;
}

// What products by warps take, shared out evenly: an H100 made n = 4096 in 927
// us, 330 multiply-adds a cycle of each multiprocessor, but n = 256, 512 and
// 1024 in 14, 18 and 36.
inline int64_t cycles_of_warps(int64_t batch_count, int64_t rows,
                               int64_t columns, int64_t depth,
                               int64_t multiprocessors) {
  constexpr int64_t kTile = 128;
  constexpr int64_t kACycle = 330;
  constexpr int64_t kLeast = 20000;
  return kLeast + batch_count * tiles_of(rows, kTile) *
                      tiles_of(columns, kTile) * (kTile * kTile) /
                      multiprocessors * depth / kACycle;
}

}  // namespace pkg::cuda
