// A matrix of float32 as the sum of three of bfloat16: x = h + m + l, each the
// rounding of what those before it leave. 3 x 8 bits and their signs hold
// float32's 24, so that nothing is left of most numbers. What is left of some
// is told to who asked: of infinities, of NaN, of what rounds to an infinite
// bfloat16, and of numbers below 2^-110 with many bits, whose last part would
// be smaller than any bfloat16.
//
// Bytes: 4 read and 6 written for each element. A thread has eight neighbours:
// two loads and three stores of 16 bytes where the matrix allows it.
#pragma once

#include <cstdint>

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/divisor.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/device/words.cuh"

namespace pkg::cuda {

constexpr int kSplitNeighbours = 8;
constexpr int kSplitThreads = 256;

// The matrices of an operand and where its parts go: first the largest ones of
// all matrices, then the next. Lines of parts are whole vectors of eight, which
// zeros fill up.
struct SplitOperand {
  const float* data;
  bfloat16* parts;
  int64_t width;  // of a line
  int64_t width_stride;
  int64_t line_stride;
  int64_t matrix_stride;
  int64_t matrices;
  WideDivisor lines;    // of a matrix
  WideDivisor vectors;  // of a line

  __host__ __device__ int64_t pitch() const {
    return vectors * kSplitNeighbours;
  }
  __host__ __device__ int64_t vector_count() const {
    return matrices * lines * vectors;
  }
  __host__ __device__ int64_t elements_of_part() const {
    return vector_count() * kSplitNeighbours;
  }
};

struct SplitProblem {
  SplitOperand a;
  SplitOperand b;
  int32_t* inexact;  // becomes 1 where something is left of a number
};

// Eight neighbours of a line, zeros behind its end.
__device__ __forceinline__ void load_neighbours(
    const float* line, int64_t begin, int64_t width, int64_t stride,
    float (&values)[kSplitNeighbours]) {
  using Four = Packet<float, 4>;
  const float* const from = line + begin * stride;
  if (stride == 1 && begin + kSplitNeighbours <= width && is_aligned(from, 4)) {
    PKG_UNROLL
    for (int i = 0; i < kSplitNeighbours; i += 4) {
      const Four four = *reinterpret_cast<const Four*>(from + i);
      PKG_UNROLL
      for (int j = 0; j < 4; ++j) {
        values[i + j] = four.values[j];
      }
    }
    return;
  }
  PKG_UNROLL
  for (int i = 0; i < kSplitNeighbours; ++i) {
    values[i] = begin + i < width ? from[i * stride] : 0.0F;
  }
}

// Splits one vector; whether something is left.
template <int kParts>
__device__ __forceinline__ bool split_vector(const SplitOperand& operand,
                                             int64_t index) {
  const auto [line, vector] = operand.vectors.divide(index);
  const auto [matrix, line_of_matrix] = operand.lines.divide(line);
  float rest[kSplitNeighbours];
  load_neighbours(operand.data + matrix * operand.matrix_stride +
                      line_of_matrix * operand.line_stride,
                  vector * kSplitNeighbours, operand.width,
                  operand.width_stride, rest);
  PKG_UNROLL
  for (int part = 0; part < kParts; ++part) {
    uint32_t words[kSplitNeighbours / 2];
    PKG_UNROLL
    for (int i = 0; i < kSplitNeighbours / 2; ++i) {
      words[i] = pair_of<bfloat16>(rest[2 * i], rest[2 * i + 1]);
      rest[2 * i] -= element_of_pair<bfloat16>(words[i], 0);
      rest[2 * i + 1] -= element_of_pair<bfloat16>(words[i], 1);
    }
    store_words(operand.parts + part * operand.elements_of_part() +
                    index * kSplitNeighbours,
                words);
  }
  bool is_inexact = false;
  PKG_UNROLL
  for (int i = 0; i < kSplitNeighbours; ++i) {
    is_inexact |= !(rest[i] == 0.0F);
  }
  return is_inexact;
}

template <int kParts>
__global__ void __launch_bounds__(kSplitThreads)
    split_into_bfloat16_kernel(const __grid_constant__ SplitProblem problem) {
  let_next_kernel_begin();
  const int64_t of_a = problem.a.vector_count();
  const int64_t count = of_a + problem.b.vector_count();
  bool is_inexact = false;
  for (int64_t index = global_thread_index(); index < count;
       index += global_thread_count()) {
    is_inexact |= index < of_a ? split_vector<kParts>(problem.a, index)
                               : split_vector<kParts>(problem.b, index - of_a);
  }
  if (__any_sync(0xffffffffu, is_inexact) && threadIdx.x % kWarp == 0) {
    atomicMax(problem.inexact, 1);
  }
}

}  // namespace pkg::cuda
