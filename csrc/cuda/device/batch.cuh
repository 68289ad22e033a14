// Batch dimensions: how the index of a matrix in a broadcast batch becomes an
// offset into each operand.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/device.cuh"
#include "cuda/device/divisor.cuh"

namespace pkg::cuda {

// PyTorch's own kernels stop at as many dimensions.
constexpr int kMaxBatchDims = 25;

struct BatchSizes {
  int count = 0;
  WideDivisor sizes[kMaxBatchDims];

  bool operator==(const BatchSizes&) const = default;
};

// Elements to step for each batch dimension; 0 where an operand is broadcast.
struct BatchStrides {
  int64_t strides[kMaxBatchDims] = {};

  bool operator==(const BatchStrides&) const = default;
};

__device__ __forceinline__ int64_t batch_offset(const BatchSizes& batch,
                                                const BatchStrides& strides,
                                                int64_t index) {
  int64_t offset = 0;
  PKG_UNROLL_BY(1)
  for (int dimension = batch.count - 1; dimension >= 0; --dimension) {
    const auto divided = batch.sizes[dimension].divide(index);
    offset += divided.remainder * strides.strides[dimension];
    index = divided.quotient;
  }
  return offset;
}

// The same where a batch has fewer than 2^32 matrices: its divisions take a
// third of the registers.
__device__ __forceinline__ int64_t batch_offset(const BatchSizes& batch,
                                                const BatchStrides& strides,
                                                uint32_t index) {
  int64_t offset = 0;
  PKG_UNROLL_BY(1)
  for (int dimension = batch.count - 1; dimension >= 0; --dimension) {
    const auto size = static_cast<uint32_t>(int64_t{batch.sizes[dimension]});
    offset += index % size * strides.strides[dimension];
    index /= size;
  }
  return offset;
}

// The batch as one operand sees it: `owned` dimensions, in which it has a
// matrix for each index, and `shared` ones, along which it is broadcast. The
// gradient of an owned matrix is the sum over all that share it.
struct BatchPartition {
  BatchSizes owned;
  BatchStrides owned_steps;  // in the index over the whole batch
  int64_t owned_count = 1;
  BatchSizes shared;
  BatchStrides shared_steps;
  int64_t shared_count = 1;

  bool operator==(const BatchPartition&) const = default;

  // Counted in 64 bits or in 32, as batch_offset().
  template <class Index>
  __device__ __forceinline__ Index batch_index(
      Index owned_index, std::type_identity_t<Index> shared_index) const {
    return static_cast<Index>(batch_offset(owned, owned_steps, owned_index) +
                              batch_offset(shared, shared_steps, shared_index));
  }
};

// Divides the batch for an operand that owns the dimensions for which
// `is_owned` holds.
inline BatchPartition partition_batch(const BatchSizes& batch,
                                      const bool (&is_owned)[kMaxBatchDims]) {
  BatchPartition partition;
  int64_t steps[kMaxBatchDims];
  int64_t step = 1;
  for (int dimension = batch.count - 1; dimension >= 0; --dimension) {
    steps[dimension] = step;
    step *= batch.sizes[dimension];
  }
  for (int dimension = 0; dimension < batch.count; ++dimension) {
    const bool owned = is_owned[dimension];
    BatchSizes& part = owned ? partition.owned : partition.shared;
    BatchStrides& part_steps =
        owned ? partition.owned_steps : partition.shared_steps;
    int64_t& part_count =
        owned ? partition.owned_count : partition.shared_count;
    part_steps.strides[part.count] = steps[dimension];
    part.sizes[part.count++] = batch.sizes[dimension];
    part_count *= batch.sizes[dimension];
  }
  return partition;
}

}  // namespace pkg::cuda
