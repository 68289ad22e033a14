// rowwise_scaled_linear_s8s4 and _s4s4: rows of int8 or int4 times a matrix of
// packed int4, in int32, scaled by row and by column while the sums are in
// registers. It takes any strides; where CUTLASS is built in, it is left what
// tensor cores cannot take.
//
// Algorithm: the blocked product of cuda/gemm/matmul.cuh, on words of four
// values that DP4A multiplies and adds. Packed bytes hold even columns in their
// low and odd ones in their high halves: a word of them becomes a word of each
// by a few bit operations, and left words are put in that order, so nothing is
// shuffled.
//
// Tiles: 128 x 128, where a thread's 8 x 8 sums need 16 reads of shared memory
// for 64 DP4A, by 32 values, of which a thread loads 16 of a row and 16 of a
// column. Panels are double-buffered in 17 KiB of shared memory.
//
// 2 m n k operations; global memory is read m n k (1 + 1/2) / 128 bytes.
#pragma once

#include <cstdint>

#include "cuda/device/batch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/element_type.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

constexpr int kRowwiseTile = 128;
constexpr int kRowwiseThreads = 256;
// Bytes of packed values, and words of unpacked ones, that a thread loads at a
// time; two threads load a line of the panel.
constexpr int kRowwiseBytes = 8;
constexpr int kRowwiseWords = 4;
constexpr int kRowwisePanelWords = 2 * kRowwiseWords;
constexpr int kRowwiseDepth = 2 * 2 * kRowwiseBytes;
constexpr int kRowwisePadding = 4;

// A tensor of any floating type.
struct FloatingValues {
  const void* data;  // null where there is none
  ElementType type;
};

// kPacked: whether the left operand is int4 too.
template <bool kPacked>
struct RowwiseScaledProblem {
  const int8_t* input;
  int64_t input_stride;  // along a row
  BatchSizes rows_of;    // the dimensions that rows lie in
  BatchStrides input_strides;
  BatchStrides scale_strides;
  FloatingValues input_scale;
  const int8_t* weight;
  int64_t weight_column_stride;
  int64_t weight_stride;  // along a column's bytes
  FloatingValues weight_scale;
  int64_t weight_scale_stride;
  FloatingValues bias;
  int64_t bias_stride;
  void* output;  // contiguous
  ElementType output_type;
  bool in_double;
  int64_t rows;
  int64_t columns;
  int64_t bytes;  // of packed values in a column

  __host__ __device__ int64_t column_tiles() const {
    return tiles_of(columns, kRowwiseTile);
  }
  __host__ __device__ int64_t tile_count() const {
    return tiles_of(rows, kRowwiseTile) * column_tiles();
  }
};

// The sum and four products of signed bytes.
__device__ __forceinline__ int32_t dot_bytes(uint32_t a, uint32_t b,
                                             int32_t sum) {
#if defined(__CUDA_ARCH__)
  return __dp4a(static_cast<int32_t>(a), static_cast<int32_t>(b), sum);
#else
  for (int byte = 0; byte < 4; ++byte) {
    sum +=
        static_cast<int8_t>(a >> 8 * byte) * static_cast<int8_t>(b >> 8 * byte);
  }
  return sum;
#endif
}

// Four int4 in the low halves of bytes, as int8: bits 4 to 7 become bit 3.
__device__ __forceinline__ uint32_t extend_signs(uint32_t halves) {
  return halves | (halves & 0x08080808u) * 0x1Eu;
}

__device__ __forceinline__ uint32_t even_values(uint32_t bytes) {
  return extend_signs(bytes & 0x0F0F0F0Fu);
}

__device__ __forceinline__ uint32_t odd_values(uint32_t bytes) {
  return extend_signs(bytes >> 4 & 0x0F0F0F0Fu);
}

// The bytes 0 and 2 of both words.
__device__ __forceinline__ uint32_t every_other_byte(uint32_t first,
                                                     uint32_t second) {
  return (first & 0xFFu) | (first >> 8 & 0xFF00u) | (second & 0xFFu) << 16 |
         (second << 8 & 0xFF000000u);
}

// `kCount` words of a line from byte `at` on, zeros beyond its end.
template <int kCount>
__device__ __forceinline__ void load_bytes(const int8_t* line, int64_t stride,
                                           int64_t bytes, int64_t at,
                                           uint32_t (&words)[kCount]) {
  using Bytes = Packet<uint32_t, kCount>;
  const int8_t* from = line + at * stride;
  if (stride == 1 && at + 4 * kCount <= bytes &&
      reinterpret_cast<uintptr_t>(from) % sizeof(Bytes) == 0) {
    const Bytes packet = *reinterpret_cast<const Bytes*>(from);
    PKG_UNROLL
    for (int i = 0; i < kCount; ++i) {
      words[i] = packet.values[i];
    }
    return;
  }
  PKG_UNROLL
  for (int i = 0; i < kCount; ++i) {
    words[i] = 0;
    PKG_UNROLL
    for (int byte = 0; byte < 4; ++byte) {
      const int64_t place = 4 * i + byte;
      if (at + place < bytes) {
        words[i] |=
            static_cast<uint32_t>(static_cast<uint8_t>(from[place * stride]))
            << 8 * byte;
      }
    }
  }
}

// A thread's part of a line of packed int4: words of even and odd columns in
// turn. Null lines are those beyond the operand.
__device__ __forceinline__ void load_int4(const int8_t* line, int64_t stride,
                                          int64_t bytes, int64_t at,
                                          uint32_t (&words)[kRowwiseWords]) {
  uint32_t packed[2] = {0, 0};
  if (line != nullptr) {
    load_bytes(line, stride, bytes, at, packed);
  }
  PKG_UNROLL
  for (int i = 0; i < 2; ++i) {
    words[2 * i] = even_values(packed[i]);
    words[2 * i + 1] = odd_values(packed[i]);
  }
}

// The same of a line of int8.
__device__ __forceinline__ void load_int8(const int8_t* line, int64_t stride,
                                          int64_t bytes, int64_t at,
                                          uint32_t (&words)[kRowwiseWords]) {
  uint32_t plain[4] = {0, 0, 0, 0};
  if (line != nullptr) {
    load_bytes(line, stride, bytes, at, plain);
  }
  PKG_UNROLL
  for (int i = 0; i < 4; i += 2) {
    words[i] = every_other_byte(plain[i], plain[i + 1]);
    words[i + 1] = every_other_byte(plain[i] >> 8, plain[i + 1] >> 8);
  }
}

template <class Number>
__device__ __forceinline__ Number load_floating(const FloatingValues& values,
                                                int64_t index) {
  switch (values.type) {
    case ElementType::float16:
      return convert<Number>(static_cast<const float16*>(values.data)[index]);
    case ElementType::bfloat16:
      return convert<Number>(static_cast<const bfloat16*>(values.data)[index]);
    case ElementType::float64:
      return convert<Number>(static_cast<const double*>(values.data)[index]);
    default:
      return convert<Number>(static_cast<const float*>(values.data)[index]);
  }
}

// What a thread scales its sums with, in the type that is computed in.
template <class Number, int kRows, int kColumns>
struct ThreadScales {
  Number rows[kRows];
  Number columns[kColumns];
  Number biases[kColumns];

  template <class Problem>
  __device__ __forceinline__ ThreadScales(const Problem& problem,
                                          int64_t row_begin,
                                          int64_t column_begin) {
    const TileThread thread;
    PKG_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = row_begin + thread.row(i);
      rows[i] =
          row < problem.rows
              ? load_floating<Number>(
                    problem.input_scale,
                    batch_offset(problem.rows_of, problem.scale_strides, row))
              : Number(0);
    }
    PKG_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      const int64_t column = column_begin + thread.column(j);
      const bool exists = column < problem.columns;
      columns[j] =
          exists ? load_floating<Number>(problem.weight_scale,
                                         column * problem.weight_scale_stride)
                 : Number(0);
      biases[j] = exists && problem.bias.data != nullptr
                      ? load_floating<Number>(problem.bias,
                                              column * problem.bias_stride)
                      : Number(0);
    }
  }
};

template <class Output, class Number, class Problem, class Sums>
__device__ __forceinline__ void store_scaled(
    const Problem& problem, const Sums& tile,
    const ThreadScales<Number, Sums::kThreadRows, Sums::kThreadColumns>& scales,
    int64_t row_begin, int64_t column_begin) {
  const TileThread thread;
  const bool has_bias = problem.bias.data != nullptr;
  PKG_UNROLL
  for (int i = 0; i < Sums::kThreadRows; ++i) {
    const int64_t row = row_begin + thread.row(i);
    if (row >= problem.rows) {
      continue;
    }
    Output* output = static_cast<Output*>(problem.output) +
                     row * problem.columns + column_begin;
    PKG_UNROLL
    for (int j = 0; j < Sums::kThreadColumns; ++j) {
      if (column_begin + thread.column(j) < problem.columns) {
        // Without a bias nothing is added, so that -0 stays.
        const Number value = static_cast<Number>(tile.values[i][j]) *
                             scales.rows[i] * scales.columns[j];
        output[thread.column(j)] =
            convert<Output>(has_bias ? value + scales.biases[j] : value);
      }
    }
  }
}

template <class Number, class Problem, class Sums>
__device__ __forceinline__ void store_scaled_in(const Problem& problem,
                                                const Sums& tile, int64_t row,
                                                int64_t column) {
  const ThreadScales<Number, Sums::kThreadRows, Sums::kThreadColumns> scales(
      problem, row, column);
  switch (problem.output_type) {
    case ElementType::float16:
      return store_scaled<float16>(problem, tile, scales, row, column);
    case ElementType::bfloat16:
      return store_scaled<bfloat16>(problem, tile, scales, row, column);
    case ElementType::float64:
      if constexpr (sizeof(Number) == sizeof(double)) {
        store_scaled<double>(problem, tile, scales, row, column);
      }
      return;
    default:
      return store_scaled<float>(problem, tile, scales, row, column);
  }
}

template <bool kPacked>
__global__ void __launch_bounds__(kRowwiseThreads) rowwise_scaled_linear_kernel(
    const __grid_constant__ RowwiseScaledProblem<kPacked> problem) {
  PKG_SHARED(
      uint32_t,
      left_panels, [2][kRowwisePanelWords][kRowwiseTile + kRowwisePadding]);
  PKG_SHARED(
      uint32_t,
      right_panels, [2][kRowwisePanelWords][kRowwiseTile + kRowwisePadding]);
  const int line = static_cast<int>(threadIdx.x) / 2;
  const int half = static_cast<int>(threadIdx.x) % 2;
  const TileThread thread;
  const int64_t steps = tiles_of(2 * problem.bytes, kRowwiseDepth);

  for (int64_t index = blockIdx.x; index < problem.tile_count();
       index += gridDim.x) {
    const int64_t row_begin = index / problem.column_tiles() * kRowwiseTile;
    const int64_t column_begin = index % problem.column_tiles() * kRowwiseTile;
    const int8_t* left =
        row_begin + line < problem.rows
            ? problem.input + batch_offset(problem.rows_of,
                                           problem.input_strides,
                                           row_begin + line)
            : nullptr;
    const int8_t* right =
        column_begin + line < problem.columns
            ? problem.weight +
                  (column_begin + line) * problem.weight_column_stride
            : nullptr;
    uint32_t left_words[kRowwiseWords];
    uint32_t right_words[kRowwiseWords];
    const auto load = [&](int64_t step) {
      const int64_t at = step * 2 * kRowwiseBytes + half * kRowwiseBytes;
      if constexpr (kPacked) {
        load_int4(left, problem.input_stride, problem.bytes, at, left_words);
      } else {
        load_int8(left, problem.input_stride, 2 * problem.bytes, 2 * at,
                  left_words);
      }
      load_int4(right, problem.weight_stride, problem.bytes, at, right_words);
    };
    const auto store = [&](int buffer) {
      PKG_UNROLL
      for (int i = 0; i < kRowwiseWords; ++i) {
        left_panels[buffer][half * kRowwiseWords + i][line] = left_words[i];
        right_panels[buffer][half * kRowwiseWords + i][line] = right_words[i];
      }
    };

    Tile<int32_t, kRowwiseTile, kRowwiseTile> tile(0);
    constexpr int kRows =
        Tile<int32_t, kRowwiseTile, kRowwiseTile>::kThreadRows;
    constexpr int kColumns =
        Tile<int32_t, kRowwiseTile, kRowwiseTile>::kThreadColumns;
    if (steps > 0) {
      load(0);
      store(0);
    }
    __syncthreads();
    for (int64_t step = 0; step < steps; ++step) {
      const int buffer = static_cast<int>(step % 2);
      if (step + 1 < steps) {
        load(step + 1);
      }
      PKG_UNROLL
      for (int word = 0; word < kRowwisePanelWords; ++word) {
        uint32_t a[kRows];
        uint32_t b[kColumns];
        PKG_UNROLL
        for (int i = 0; i < kRows; ++i) {
          a[i] = left_panels[buffer][word][thread.row(i)];
        }
        PKG_UNROLL
        for (int j = 0; j < kColumns; ++j) {
          b[j] = right_panels[buffer][word][thread.column(j)];
        }
        PKG_UNROLL
        for (int i = 0; i < kRows; ++i) {
          PKG_UNROLL
          for (int j = 0; j < kColumns; ++j) {
            tile.values[i][j] = dot_bytes(a[i], b[j], tile.values[i][j]);
          }
        }
      }
      if (step + 1 < steps) {
        store(1 - buffer);
      }
      __syncthreads();
    }
    if (problem.in_double) {
      store_scaled_in<double>(problem, tile, row_begin, column_begin);
    } else {
      store_scaled_in<float>(problem, tile, row_begin, column_begin);
    }
  }
}

}  // namespace pkg::cuda
