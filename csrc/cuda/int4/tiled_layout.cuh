// The tensor-core tiled layout on the device: packing, unpacking, dequantising.
//
// A thread a word of eight values; the four lanes of a row's block are
// neighbours, and read or write whole sectors of the matrix.
//
// The kernels are templates so that several files may include them.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "host/integer_math.h"

namespace pkg::cuda {

constexpr int kTiledThreads = 256;

// As in csrc/tensor_core_tiled_layout.h: a block is 32 columns, of which lane c
// of four holds, in the four bits from 4 j + 16 h on, column 8 j + 2 c + h.
struct TiledWords {
  int64_t rows;
  int64_t columns;
  int64_t inner_k_tiles;

  __host__ __device__ int64_t words() const { return rows * columns / 8; }
  __host__ __device__ int64_t pieces() const {
    return ceil_div(words(), kTiledThreads);
  }
};

// Where the values of a word are: its row, and the column of its first one.
struct WordPlace {
  int64_t row;
  int64_t column;

  __device__ __forceinline__ WordPlace(const TiledWords& layout,
                                       int64_t index) {
    const int64_t words_of_lane = layout.inner_k_tiles / 2;
    const int64_t word = index % words_of_lane;
    const int64_t lane = index / words_of_lane % 32;
    const int64_t tile = index / words_of_lane / 32;
    const int64_t supertiles = layout.columns / (16 * layout.inner_k_tiles);
    row = tile / supertiles * 8 + lane / 4;
    column = (tile % supertiles * words_of_lane + word) * 32 + lane % 4 * 2;
  }
};

// The four bits of value `place` of a word, which is in column 8 (place / 2) +
// place % 2 from the word's first.
__device__ __forceinline__ int word_shift(int place) {
  return place / 2 * 4 + place % 2 * 16;
}
__device__ __forceinline__ int word_column(int place) {
  return place / 2 * 8 + place % 2;
}

// The values of columns c and c + 1 in bits 0 to 3 and 16 to 19, of which an
// int32 holds one and a byte both, c in its high four bits.
__device__ __forceinline__ uint32_t two_values(const int32_t* row,
                                               int64_t column, int64_t stride) {
  const auto first = static_cast<uint32_t>(row[column * stride]);
  const auto second = static_cast<uint32_t>(row[(column + 1) * stride]);
  return (first & 15U) | (second & 15U) << 16;
}
__device__ __forceinline__ uint32_t two_values(const uint8_t* row,
                                               int64_t column, int64_t stride) {
  const uint32_t both = row[column / 2 * stride];
  return both >> 4 | (both & 15U) << 16;
}

// `Value` is int32_t or uint8_t. Rows beyond `rows` are zero.
template <class Value>
struct PackTiled {
  TiledWords layout;
  const Value* values;
  int64_t rows;
  int64_t row_stride;
  int64_t column_stride;
  uint32_t* words;
};

template <class Call>
__global__ void __launch_bounds__(kTiledThreads) pack_tiled_kernel(Call call) {
  for (int64_t index = global_thread_index(); index < call.layout.words();
       index += global_thread_count()) {
    const WordPlace at(call.layout, index);
    uint32_t word = 0;
    if (at.row < call.rows) {
      const auto* from = call.values + at.row * call.row_stride;
      PKG_UNROLL
      for (int place = 0; place < 8; place += 2) {
        word |=
            two_values(from, at.column + word_column(place), call.column_stride)
            << word_shift(place);
      }
    }
    call.words[index] = word;
  }
}

struct UnpackTiled {
  TiledWords layout;
  const uint32_t* words;
  int32_t* values;  // contiguous
};

template <class Call>
__global__ void __launch_bounds__(kTiledThreads)
    unpack_tiled_kernel(Call call) {
  for (int64_t index = global_thread_index(); index < call.layout.words();
       index += global_thread_count()) {
    const WordPlace at(call.layout, index);
    int32_t* to = call.values + at.row * call.layout.columns + at.column;
    const uint32_t word = call.words[index];
    PKG_UNROLL
    for (int place = 0; place < 8; ++place) {
      to[word_column(place)] =
          static_cast<int32_t>(word >> word_shift(place) & 15U);
    }
  }
}

// whole * scale + zero, rounded once to bfloat16 as a fused multiply-add rounds
// it, for |whole| <= 8; see csrc/cpu/dequantize_tensor_core_tiled_layout.cpp.
// Not by that instruction, which older devices lack.
__device__ __forceinline__ bfloat16 multiply_add(int whole, float scale,
                                                 float zero) {
  constexpr float kDown = 0x1p-4f;
  const float product = static_cast<float>(whole) * (scale * kDown);
  const float addend = zero * kDown;
  float sum = product + addend;
  const float part = sum - product;
  const float rest = (product - (sum - part)) + (addend - part);
  if (rest > 0 || rest < 0) {
    uint32_t bits;
    memcpy(&bits, &sum, sizeof(bits));
    if (bits % 2 == 0) {
      bits += (rest > 0) == (sum > 0) ? 1U : ~0U;
    }
    memcpy(&sum, &bits, sizeof(bits));
  }
  return convert<bfloat16>(sum / kDown);
}

template <class Element>
struct DequantizeTiled {
  TiledWords layout;
  int64_t group_size;
  const uint32_t* words;
  const bfloat16* scales_and_zeros;
  Element* values;  // contiguous
};

// The weight that a value stands for. The product is exact in float32 and
// float64 (4 and 8 significant bits), so that the sum alone is rounded.
template <class Element>
__device__ __forceinline__ Element weight_of(int whole, bfloat16 scale,
                                             bfloat16 zero) {
  if constexpr (std::is_same_v<Element, bfloat16>) {
    return multiply_add(whole, convert<float>(scale), convert<float>(zero));
  } else {
    static_assert(std::is_floating_point_v<Element>);
    return static_cast<Element>(whole) * convert<Element>(scale) +
           convert<Element>(zero);
  }
}

// `Call` is a DequantizeTiled. Neighbouring columns are written together.
template <class Call>
__global__ void __launch_bounds__(kTiledThreads)
    dequantize_tiled_kernel(Call call) {
  using Element = std::remove_pointer_t<decltype(call.values)>;
  for (int64_t index = global_thread_index(); index < call.layout.words();
       index += global_thread_count()) {
    const WordPlace at(call.layout, index);
    const bfloat16* pair =
        call.scales_and_zeros +
        (at.column / call.group_size * call.layout.rows + at.row) * 2;
    const bfloat16 scale = pair[0];
    const bfloat16 zero = pair[1];
    Element* to = call.values + at.row * call.layout.columns + at.column;
    const uint32_t word = call.words[index];
    PKG_UNROLL
    for (int place = 0; place < 8; place += 2) {
      Packet<Element, 2> two;
      PKG_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int q = static_cast<int>(word >> word_shift(place + i) & 15U);
        two.values[i] = weight_of<Element>(q - 8, scale, zero);
      }
      *reinterpret_cast<Packet<Element, 2>*>(to + word_column(place)) = two;
    }
  }
}

}  // namespace pkg::cuda
