// Queries, keys and values as the copy engine takes them
// (device/tensor_map.cuh).
//
// A map has two dimensions for the matrices of a batch. Those of attention are
// merged where they can be: heads of (batch, heads, length, head) with the
// batch, key heads with the queries of a group; where a transposed tensor has
// the heads inside they cannot, and take one dimension each. Broadcast ones
// take none.
//
// Packed sequences follow one another in the lines of a tensor, whose map knows
// nothing of where they end: a box that goes beyond an end has lines of the
// next sequence, which are nobody's to use. (Before, a map began before its
// tensor, so that the end of each sequence was an end of the map. Nothing in
// front of the tensor was copied, but an H100 reported illegal accesses in some
// processes, and none of the same calls with maps of the tensor.)
#pragma once

#include <cstdint>
#include <limits>

#include "cuda/attention/problem.cuh"
#include "cuda/attention/tile_limits.cuh"
#include "cuda/device/batch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/tensor_map.cuh"

namespace pkg::cuda {

constexpr int kBoxLines = 64;

// A tensor with a map, and how far a step along each dimension of the batch
// moves a box: the matrix in the lower half of a number, the group in the
// upper.
template <class Element>
struct BoxedOperand {
  MappedTensor<Element> tensor;
  BatchStrides steps;
  bool has_map;
};

struct BoxedMatrix {
  int matrix;
  int group;
};

struct MappedOperand {
  TensorMap map;
  BatchStrides steps;

  // The index is counted in 64 bits or in 32, as batch_offset().
  template <class Index>
  __device__ __forceinline__ BoxedMatrix matrix(const BatchSizes& batch,
                                                Index index) const {
    const int64_t place = batch_offset(batch, steps, index);
    return {static_cast<int>(place & 0xFFFFFFFF),
            static_cast<int>(place >> 32)};
  }
};

// Rows of packed sequences are those of all.
template <class Element>
BoxedOperand<Element> boxed_operand(const MatrixBatch<Element>& matrices,
                                    const BatchSizes& batch, int64_t rows,
                                    int64_t columns) {
  BoxedOperand<Element> operand{.tensor = {matrices.data, columns, rows, 1,
                                           matrices.row_stride, 0, kBoxLines},
                                .steps = {},
                                .has_map = matrices.column_stride == 1};
  struct Level {
    int64_t size = 1;
    int64_t stride = 0;
  };
  Level levels[2];
  int level = -1;
  for (int d = batch.count - 1; d >= 0; --d) {
    const int64_t size = batch.sizes[d];
    const int64_t stride = matrices.batch_strides.strides[d];
    if (size == 1 || stride == 0) {
      continue;
    }
    const bool merges =
        level >= 0 && stride == levels[level].size * levels[level].stride;
    if (!merges && ++level == 2) {
      operand.has_map = false;
      return operand;
    }
    if (!merges) {
      levels[level].stride = stride;
    }
    operand.steps.strides[d] = levels[level].size << (level == 0 ? 0 : 32);
    levels[level].size *= size;
  }
  operand.tensor.matrices = levels[0].size;
  operand.tensor.matrix_stride = levels[0].stride;
  operand.tensor.groups = levels[1].size;
  operand.tensor.group_stride = levels[1].stride;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  operand.has_map = operand.has_map && operand.tensor.has_map() &&
                    levels[0].size <= kMost && levels[1].size <= kMost &&
                    rows < kMostTiledLength;
  return operand;
}

// Of the query's lengths, and of the key's.
template <class Element>
BoxedOperand<Element> boxed_queries(const AttentionProblem<Element>& problem,
                                    const MatrixBatch<Element>& matrices,
                                    int64_t columns) {
  return boxed_operand(
      matrices, problem.batch,
      problem.is_packed() ? problem.packed.total_rows : problem.rows, columns);
}
template <class Element>
BoxedOperand<Element> boxed_keys(const AttentionProblem<Element>& problem,
                                 const MatrixBatch<Element>& matrices,
                                 int64_t columns) {
  return boxed_operand(
      matrices, problem.batch,
      problem.is_packed() ? problem.packed.total_columns : problem.columns,
      columns);
}

// encode_tensor_map is the host's (host/tensor_map.h) or the emulator's,
// whichever is known where this is instantiated.
template <class Element>
MappedOperand mapped_operand(const BoxedOperand<Element>& operand) {
  return {encode_tensor_map(operand.tensor), operand.steps};
}

// Whether kernels of warpgroups that have heads up to so wide take a problem:
// all that they count fits 32 bits. Then only the operands' strides decide.
template <class Element>
bool suits_warpgroups(const AttentionProblem<Element>& problem,
                      int64_t most_head) {
  constexpr int kTile = 128;
  return problem.head_size <= most_head && problem.value_size <= most_head &&
         problem.rows < kMostTiledLength &&
         problem.columns < kMostTiledLength &&
         problem.batch_count < kMostTiledLength &&
         problem.batch_count * tiles_of(problem.rows, kTile) <
             kMostTiledLength &&
         problem.batch_count * tiles_of(problem.columns, kTile) <
             kMostTiledLength;
}

}  // namespace pkg::cuda
