// attention_dropout_mask: which attention weights dropout keeps, as the forward
// and backward kernels of attention draw it.
//
// A thread draws four neighbouring columns at once, the words of one Philox
// counter (csrc/host/philox.h): some 70 integer operations for 4 bytes written.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "host/integer_math.h"
#include "host/philox.h"

namespace pkg::cuda {

constexpr int kDropoutThreads = 256;

struct DropoutMask {
  uint8_t* kept;  // contiguous: batch, rows, columns
  const int64_t* seed;
  uint64_t keep_threshold;
  int64_t batch;
  int64_t rows;
  int64_t columns;

  __host__ __device__ int64_t quads_per_row() const {
    return ceil_div(columns, 4);
  }
  __host__ __device__ int64_t quad_count() const {
    return batch * rows * quads_per_row();
  }
};

static __global__ void __launch_bounds__(kDropoutThreads)
    attention_dropout_mask_kernel(const __grid_constant__ DropoutMask mask) {
  const int64_t quads_per_row = mask.quads_per_row();
  const int64_t quads = mask.quad_count();
  const int64_t threads = global_thread_count();
  const int64_t seed = *mask.seed;
  for (int64_t index = global_thread_index(); index < quads; index += threads) {
    const int64_t quad = index % quads_per_row;
    const int64_t row = index / quads_per_row;  // over the whole batch
    const PhiloxCounter words =
        dropout_words(seed, row / mask.rows, row % mask.rows, quad);
    PKG_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int64_t column = quad * 4 + i;
      if (column < mask.columns) {
        mask.kept[row * mask.columns + column] =
            dropout_keeps(words.words[i], mask.keep_threshold);
      }
    }
  }
}

}  // namespace pkg::cuda
