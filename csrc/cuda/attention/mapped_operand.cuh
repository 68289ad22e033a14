// Queries, keys and values as the copy engine takes them
// (device/tensor_map.cuh).
//
// A map has two dimensions for the matrices of a batch. Those of attention are
// merged where they can be: heads of (batch, heads, length, head) with the
// batch, key heads with the queries of a group; where a transposed tensor has
// the heads inside they cannot, and take one dimension each. Broadcast ones
// take none.
//
// Packed sequences follow one another in the lines of a tensor, and what lies
// behind the end of one is another's, but has to come as zeros: a weight of
// zero times its NaN would be NaN. So the end of each is made an end of the
// map (after Triton's triton/tools/ragged_tma.py, which has the addresses wrap
// around where this has the map begin earlier): it has as many lines as the
// longest sequence, and a second dimension with the stride of a line, for the
// token behind the sequence's last. Where that is `end`, line `lines - n` of
// the map is the n-th from the sequence's last on backwards, for the map begins
// `lines` lines before the tensor. A sequence begins at a line of the map of
// its own, nothing before it is ever copied, and beyond its end there are no
// lines.
#pragma once

#include <cstdint>
#include <limits>

#include "cuda/attention/attention.cuh"
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

  // Of a packed tensor, that of the sequence that ends before token `end`.
  __device__ __forceinline__ BoxedMatrix of_sequence(int64_t end) const {
    return {matrix, static_cast<int>(end)};
  }
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

// Of packed sequences `rows` are those of the longest, of `tokens` in all; else
// there are no tokens.
template <class Element>
BoxedOperand<Element> boxed_operand(const MatrixBatch<Element>& matrices,
                                    const BatchSizes& batch, int64_t rows,
                                    int64_t columns, int64_t tokens) {
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
  if (tokens > 0) {
    operand.has_map = operand.has_map && level < 1;
    levels[1] = {tokens + 1, matrices.row_stride};
    operand.tensor.lines_before = rows;
  }
  operand.tensor.matrices = levels[0].size;
  operand.tensor.matrix_stride = levels[0].stride;
  operand.tensor.groups = levels[1].size;
  operand.tensor.group_stride = levels[1].stride;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  operand.has_map = operand.has_map && operand.tensor.has_map() &&
                    levels[0].size <= kMost && levels[1].size <= kMost;
  return operand;
}

// Of the query's lengths, and of the key's.
template <class Element>
BoxedOperand<Element> boxed_queries(const AttentionProblem<Element>& problem,
                                    const MatrixBatch<Element>& matrices,
                                    int64_t columns) {
  return boxed_operand(matrices, problem.batch, problem.rows, columns,
                       problem.packed.total_rows);
}
template <class Element>
BoxedOperand<Element> boxed_keys(const AttentionProblem<Element>& problem,
                                 const MatrixBatch<Element>& matrices,
                                 int64_t columns) {
  return boxed_operand(matrices, problem.batch, problem.columns, columns,
                       problem.packed.total_columns);
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
