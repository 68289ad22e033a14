// int4_linear: the weight is read once for 16 rows of activations, in words of
// eight values of four bits, and becomes an operand in registers.
//
// Half precision: tensor cores. The layout is that of mma.m16n8k16's operand B,
// so a word gives its lane's parts of two products by shifts. The operand holds
// the whole numbers q - 8, exactly; when a group of columns is done, its sums
// are scaled in float32, and the zero times the sum of the activations is
// added, so nothing of the weight is rounded. A block takes 16 rows by 32
// columns of the result, a warp 8 columns; its activations pass through shared
// memory, 128 columns at a time.
//
// float32 and float64: a warp takes 8 rows by 8 columns; a lane multiplies the
// values of its words, scaled, with each row, and four lanes add up their sums.
//
// Operations: 2 M N K. Bytes: K N / 2 of the weight for 16 (8) rows of
// activations. 4096 columns of the result are 128 blocks, about one for each
// multiprocessor of a large GPU.
#pragma once

#include <cstdint>

#include "cuda/device/batch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/numeric.cuh"

namespace pkg::cuda {

constexpr int kInt4Threads = 128;
constexpr int kInt4Warps = kInt4Threads / 32;
constexpr int kInt4TileColumns = 8;
constexpr int kInt4BlockColumns = kInt4Warps * kInt4TileColumns;

template <class Element>
struct Int4LinearProblem {
  const Element* input;
  const uint32_t* words;
  const bfloat16* scales_and_zeros;  // (groups, columns, 2)
  const Element* bias;               // null without one
  Element* output;                   // contiguous: batch, rows, columns
  int64_t rows;
  int64_t columns;
  int64_t depth;
  int64_t group_size;
  int64_t row_stride;
  int64_t depth_stride;
  int64_t bias_stride;
  int64_t batch_count;
  BatchSizes batch;
  BatchStrides batch_strides;

  // Half precision goes by 16 rows, the others by 8.
  static constexpr int kRows = sizeof(Element) == 2 ? 16 : 8;

  __host__ __device__ int64_t row_tiles() const {
    return (rows + kRows - 1) / kRows;
  }
  __host__ __device__ int64_t column_blocks() const {
    return (columns + kInt4BlockColumns - 1) / kInt4BlockColumns;
  }
  __host__ __device__ int64_t pieces() const {
    return batch_count * row_tiles() * column_blocks();
  }
};

// Where a piece of work is.
struct Int4Place {
  int64_t batch;
  int64_t row;
  int64_t column;  // of the warp

  template <class Element>
  __device__ __forceinline__
  Int4Place(const Int4LinearProblem<Element>& problem, int64_t index) {
    const int64_t blocks = problem.column_blocks();
    batch = index / blocks / problem.row_tiles();
    row = index / blocks % problem.row_tiles() * problem.kRows;
    column = index % blocks * kInt4BlockColumns +
             static_cast<int64_t>(threadIdx.x) / 32 * kInt4TileColumns;
  }
};

// The word of this lane for a block of 32 columns of the tile at `column`.
template <int kInnerTiles>
__device__ __forceinline__ uint32_t int4_word(const uint32_t* words,
                                              int64_t depth, int64_t column,
                                              int64_t block) {
  constexpr int kWords = kInnerTiles / 2;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return words[column / 8 * depth + (block / kWords * 32 + lane) * kWords +
               block % kWords];
}

constexpr int kInt4Depth = 128;
constexpr int kInt4Pairs = kInt4Depth / 2;
// Four words more, so that the eight rows that a warp reads lie in different
// banks.
constexpr int kInt4Pitch = kInt4Pairs + 4;

// Activations of 16 rows on their way into shared memory, in pairs; zero beyond
// the matrix.
template <class Element, class Tile>
__device__ __forceinline__ void load_activations(
    const Int4LinearProblem<Element>& problem, const Element* input,
    int64_t row, int64_t begin, Tile&& tile) {
  for (int index = static_cast<int>(threadIdx.x); index < 16 * kInt4Pairs;
       index += kInt4Threads) {
    const int64_t r = row + index / kInt4Pairs;
    const int64_t k = begin + index % kInt4Pairs * 2;
    uint32_t pair = 0;
    if (r < problem.rows && k < problem.depth) {
      const Element* from =
          input + r * problem.row_stride + k * problem.depth_stride;
      uint16_t first;
      uint16_t second;
      memcpy(&first, from, sizeof(first));
      memcpy(&second, from + problem.depth_stride, sizeof(second));
      pair = first | static_cast<uint32_t>(second) << 16;
    }
    tile[index / kInt4Pairs][index % kInt4Pairs] = pair;
  }
}

// Scales the sums of a group, and empties them.
template <class Element>
__device__ __forceinline__ void add_group(
    const Int4LinearProblem<Element>& problem, int64_t group, int64_t column,
    float (&totals)[4], float (&sums)[4], float (&row_sums)[2]) {
  PKG_UNROLL
  for (int half = 0; half < 2; ++half) {
    float row_sum = row_sums[half];
    row_sum += __shfl_xor_sync(kWholeWarp, row_sum, 1);
    row_sum += __shfl_xor_sync(kWholeWarp, row_sum, 2);
    PKG_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int64_t n = column + threadIdx.x % 4 * 2 + i;
      const bfloat16* pair =
          problem.scales_and_zeros + (group * problem.columns + n) * 2;
      totals[2 * half + i] += sums[2 * half + i] * convert<float>(pair[0]) +
                              row_sum * convert<float>(pair[1]);
      sums[2 * half + i] = 0;
    }
    row_sums[half] = 0;
  }
}

template <class Element, int kInnerTiles>
__global__ void __launch_bounds__(kInt4Threads) int4_linear_half_kernel(
    const __grid_constant__ Int4LinearProblem<Element> problem) {
  PKG_SHARED(uint32_t, activations, [16][kInt4Pitch]);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t index = blockIdx.x; index < problem.pieces();
       index += gridDim.x) {
    const Int4Place at(problem, index);
    const Element* input =
        problem.input +
        batch_offset(problem.batch, problem.batch_strides, at.batch);
    const bool has_columns = at.column < problem.columns;
    float totals[4] = {};
    float sums[4] = {};
    float row_sums[2] = {};
    for (int64_t begin = 0; begin < problem.depth; begin += kInt4Depth) {
      load_activations(problem, input, at.row, begin, activations);
      __syncthreads();
      for (int block = 0; block < kInt4Depth / 32; ++block) {
        const int64_t depth = begin + block * 32;
        // The same for all lanes of a warp.
        if (!has_columns || depth >= problem.depth) {
          break;
        }
        const uint32_t word = int4_word<kInnerTiles>(
            problem.words, problem.depth, at.column, depth / 32);
        PKG_UNROLL
        for (int tile = 0; tile < 2; ++tile) {
          const int pair = block * 16 + tile * 8 + lane % 4;
          const uint32_t a[4] = {activations[lane / 4][pair],
                                 activations[lane / 4 + 8][pair],
                                 activations[lane / 4][pair + 4],
                                 activations[lane / 4 + 8][pair + 4]};
          const uint32_t b[2] = {whole_pair<Element>(word >> (8 * tile)),
                                 whole_pair<Element>(word >> (8 * tile + 4))};
          multiply_add<Element>(sums[0], sums[1], sums[2], sums[3], a, b);
          PKG_UNROLL
          for (int i = 0; i < 4; ++i) {
            row_sums[i % 2] += element_of_pair<Element>(a[i], 0) +
                               element_of_pair<Element>(a[i], 1);
          }
        }
        if ((depth + 32) % problem.group_size == 0) {
          add_group(problem, depth / problem.group_size, at.column, totals,
                    sums, row_sums);
        }
      }
      __syncthreads();
    }
    PKG_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int64_t row = at.row + lane / 4 + i / 2 * 8;
      const int64_t column = at.column + lane % 4 * 2 + i % 2;
      if (has_columns && row < problem.rows) {
        const float bias =
            problem.bias
                ? convert<float>(problem.bias[column * problem.bias_stride])
                : 0.0f;
        problem.output[(at.batch * problem.rows + row) * problem.columns +
                       column] = convert<Element>(totals[i] + bias);
      }
    }
  }
}

// `Number` is float or double.
template <class Number, int kInnerTiles>
__global__ void __launch_bounds__(kInt4Threads) int4_linear_wide_kernel(
    const __grid_constant__ Int4LinearProblem<Number> problem) {
  constexpr int kRows = Int4LinearProblem<Number>::kRows;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t index = blockIdx.x; index < problem.pieces();
       index += gridDim.x) {
    const Int4Place at(problem, index);
    if (at.column >= problem.columns) {
      continue;  // the whole warp
    }
    const Number* input =
        problem.input +
        batch_offset(problem.batch, problem.batch_strides, at.batch);
    const int64_t column = at.column + lane / 4;
    Number sums[kRows] = {};
    for (int64_t block = 0; block < problem.depth / 32; ++block) {
      const uint32_t word = int4_word<kInnerTiles>(problem.words, problem.depth,
                                                   at.column, block);
      const bfloat16* pair =
          problem.scales_and_zeros +
          (block * 32 / problem.group_size * problem.columns + column) * 2;
      const auto scale = convert<Number>(pair[0]);
      const auto zero = convert<Number>(pair[1]);
      PKG_UNROLL
      for (int place = 0; place < 8; ++place) {
        const int shift = place / 2 * 4 + place % 2 * 16;
        const int q = static_cast<int>(word >> shift & 15U);
        const Number weight = static_cast<Number>(q - 8) * scale + zero;
        const int64_t k = block * 32 + place / 2 * 8 + lane % 4 * 2 + place % 2;
        PKG_UNROLL
        for (int i = 0; i < kRows; ++i) {
          if (at.row + i < problem.rows) {
            sums[i] += input[(at.row + i) * problem.row_stride +
                             k * problem.depth_stride] *
                       weight;
          }
        }
      }
    }
    PKG_UNROLL
    for (int i = 0; i < kRows; ++i) {
      sums[i] += __shfl_xor_sync(kWholeWarp, sums[i], 1);
      sums[i] += __shfl_xor_sync(kWholeWarp, sums[i], 2);
      if (lane % 4 == 0 && at.row + i < problem.rows) {
        const Number bias = problem.bias
                                ? problem.bias[column * problem.bias_stride]
                                : Number(0);
        problem
            .output[(at.batch * problem.rows + at.row + i) * problem.columns +
                    column] = sums[i] + bias;
      }
    }
  }
}

}  // namespace pkg::cuda
