// The operands of rowwise_scaled_linear on their way to the tensor cores:
// slices of 128 values of the summed dimension in shared memory, as they lie in
// global memory, and the words of mma.m16n8k32 that are made of them.
//
// A byte of packed int4 holds an even value in its low and an odd one in its
// high half, so a word of four bytes becomes an operand's word of four even
// values and one of four odd ones: the summed dimension in another order, which
// is right because the other operand has the same. A word of int8 is put in
// that order by two byte permutations of two words.
//
// Values of four bits stay in the high half of their bytes and so count 16
// times themselves: a mask makes one, and no sign is extended. Sums are 16
// times too large, those of two such operands 256 times, and are shifted back.
//
// Banks: a warp reads packed lines by ldmatrix, 8 lines of 16 bytes a time, and
// int8 by 8 bytes of a lane, 4 lines of 32 bytes a time; either lie in as many
// different banks. Copies write lines of 128 bytes.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/gemm/panel.cuh"

namespace pkg::cuda {

// Of the summed dimension, in values.
constexpr int kRowwiseDepth = 128;
constexpr int kRowwiseStep = 32;

// The values in the low halves of packed bytes, 16 times.
__device__ __forceinline__ uint32_t even_values(uint32_t packed) {
  return packed << 4 & 0xF0F0F0F0u;
}

// Those in the high halves.
__device__ __forceinline__ uint32_t odd_values(uint32_t packed) {
  return packed & 0xF0F0F0F0u;
}

// Bytes 0 and 2 of both words.
__device__ __forceinline__ uint32_t even_bytes(uint32_t first,
                                               uint32_t second) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(first, second, 0x6420);
#else
  return (first & 0xFFu) | (first >> 8 & 0xFF00u) | (second & 0xFFu) << 16 |
         (second << 8 & 0xFF000000u);
#endif
}

// Bytes 1 and 3.
__device__ __forceinline__ uint32_t odd_bytes(uint32_t first, uint32_t second) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(first, second, 0x7531);
#else
  return even_bytes(first >> 8, second >> 8);
#endif
}

// Bytes 0 and 1 of both words, those of one word and the other in turns.
__device__ __forceinline__ uint32_t first_pairs(uint32_t even, uint32_t odd) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(even, odd, 0x5140);
#else
  return (even & 0xFFu) | (odd & 0xFFu) << 8 | (even & 0xFF00u) << 8 |
         (odd & 0xFF00u) << 16;
#endif
}

// Bytes 2 and 3.
__device__ __forceinline__ uint32_t last_pairs(uint32_t even, uint32_t odd) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(even, odd, 0x7362);
#else
  return first_pairs(even >> 16, odd >> 16);
#endif
}

// The low halves of both words, and the high ones.
__device__ __forceinline__ uint32_t low_halves(uint32_t first,
                                               uint32_t second) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(first, second, 0x5410);
#else
  return (first & 0xFFFFu) | second << 16;
#endif
}
__device__ __forceinline__ uint32_t high_halves(uint32_t first,
                                                uint32_t second) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(first, second, 0x7632);
#else
  return low_halves(first >> 16, second >> 16);
#endif
}

// A slice of an operand of bytes in global memory.
struct RowwiseLines {
  int64_t stride;  // along a line
  int64_t bytes;   // of a whole line
  int count;
  bool is_dense;  // 16 bytes at a time
};

// The first `valid` of sixteen bytes of a line, then zeros.
__device__ __forceinline__ Packet<uint32_t, 4> valid_bytes(const int8_t* from,
                                                           int64_t stride,
                                                           int valid) {
  Packet<uint32_t, 4> vector = {};
  if (stride == 1 && valid >= 16 && is_aligned(from, 4)) {
    PKG_UNROLL
    for (int i = 0; i < 4; ++i) {
      vector.values[i] = reinterpret_cast<const uint32_t*>(from)[i];
    }
    return vector;
  }
  PKG_UNROLL
  for (int i = 0; i < 16; ++i) {
    if (i < valid) {
      vector.values[i / 4] |=
          static_cast<uint32_t>(static_cast<uint8_t>(from[i * stride]))
          << 8 * (i % 4);
    }
  }
  return vector;
}

// Begins to copy the slice that begins with byte `begin` of each line of the
// tile, zeros beyond the operand; `lines` says where they begin.
template <class Slice, int kThreads, class Lines>
__device__ __forceinline__ void copy_slice(const SharedSpan<int8_t>& to,
                                           Lines&& lines,
                                           const RowwiseLines& from,
                                           int64_t begin) {
  constexpr int kInLine = Slice::kWidth / 16;
  const int width = at_most<Slice::kWidth>(from.bytes - begin);
  if (from.is_dense) {
    constexpr int kAtATime = kThreads / kInLine;
    const int line = static_cast<int>(threadIdx.x) / kInLine;
    const int place = static_cast<int>(threadIdx.x) % kInLine * 16;
    const int left = width - place;
    const int valid = left < 0 ? 0 : left < 16 ? left : 16;
    const int index = Slice::index(line, place);
    PKG_UNROLL
    for (int i = 0; i < Slice::kLines / kAtATime; ++i) {
      const int8_t* vector = lines[line + i * kAtATime];
      to.copy_async(index + i * kAtATime * Slice::kWidth,
                    vector + (begin + place),
                    line + i * kAtATime < from.count ? valid : 0);
    }
    return;
  }
  // Through registers, by words or bytes. Neighbouring threads read
  // neighbouring bytes, where there are such.
  const bool along_line = from.stride == 1;
  PKG_UNROLL_BY(1)
  for (int index = static_cast<int>(threadIdx.x);
       index < Slice::kLines * kInLine; index += kThreads) {
    const int line = along_line ? index / kInLine : index % Slice::kLines;
    const int place =
        16 * (along_line ? index % kInLine : index / Slice::kLines);
    const int valid = line < from.count ? width - place : 0;
    const int8_t* first = lines[line];
    const Packet<uint32_t, 4> vector =
        valid_bytes(first + (begin + place) * from.stride, from.stride, valid);
    to.store(Slice::index(line, place), vector);
  }
}

// A slice of int8: lines of 128 bytes, in which pairs of the vectors of 16 lie
// in another order in each of four lines.
template <int kTileLines>
class Int8Slice {
 public:
  static constexpr int kLines = kTileLines;
  static constexpr int kWidth = kRowwiseDepth;
  static constexpr int kBytes = kLines * kWidth;
  static constexpr int kShift = 0;  // of the values in the operand's words
  // Registers of a lane for 64 lines of a step.
  static constexpr int kWords = 16;

  __device__ __forceinline__ static constexpr int index(int line, int byte) {
    return line * kWidth + ((byte / 16 ^ line % 4 * 2) * 16) + byte % 16;
  }

  // Where the lines of the calling warp begin, a multiple of 64.
  __device__ __forceinline__ explicit Int8Slice(int warp_line) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    lane_index_ = index(warp_line + lane / 4, lane % 4 * 8);
  }

  // What the warp needs for a step: of each eight lines two words.
  __device__ __forceinline__ void load(const SharedSpan<int8_t>& from, int step,
                                       uint32_t (&words)[kWords]) const {
    PKG_UNROLL
    for (int i = 0; i < kWords / 2; ++i) {
      const auto pair = from.template load<Packet<uint32_t, 2>>(
          (lane_index_ ^ step * kRowwiseStep) + i * 8 * kWidth);
      words[2 * i] = pair.values[0];
      words[2 * i + 1] = pair.values[1];
    }
  }

  // Operand A of the `part`-th 16 lines.
  __device__ __forceinline__ static void operand(
      const uint32_t (&words)[kWords], int part, uint32_t (&a)[4]) {
    PKG_UNROLL
    for (int half = 0; half < 2; ++half) {
      const uint32_t* pair = &words[4 * part + 2 * half];
      a[half] = even_bytes(pair[0], pair[1]);
      a[half + 2] = odd_bytes(pair[0], pair[1]);
    }
  }

 private:
  int lane_index_;
};

// A slice of packed int4: lines of 64 bytes, two to a line of SwizzledTile.
template <int kTileLines>
class PackedSlice {
 public:
  static constexpr int kLines = kTileLines;
  static constexpr int kWidth = kRowwiseDepth / 2;
  static constexpr int kBytes = kLines * kWidth;
  static constexpr int kShift = 4;
  static constexpr int kWords = 8;

  __device__ __forceinline__ static constexpr int index(int line, int byte) {
    return SwizzledTile<int8_t, kLines / 2, 2 * kWidth>::index(
        line / 2, line % 2 * kWidth + byte);
  }

  __device__ __forceinline__ explicit PackedSlice(int warp_line)
      : lane_index_(index(warp_line + static_cast<int>(threadIdx.x) % 32, 0)) {}

  // Of each eight lines a word.
  __device__ __forceinline__ void load(const SharedSpan<int8_t>& from, int step,
                                       uint32_t (&words)[kWords]) const {
    PKG_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t matrices[4];
      from.load_matrices(
          (lane_index_ ^ step * kRowwiseStep / 2) + half * 32 * kWidth, false,
          matrices);
      PKG_UNROLL
      for (int i = 0; i < 4; ++i) {
        words[4 * half + i] = matrices[i];
      }
    }
  }

  __device__ __forceinline__ static void operand(
      const uint32_t (&words)[kWords], int part, uint32_t (&a)[4]) {
    PKG_UNROLL
    for (int half = 0; half < 2; ++half) {
      a[half] = even_values(words[2 * part + half]);
      a[half + 2] = odd_values(words[2 * part + half]);
    }
  }

  // Operand B of the same lines, twice eight columns.
  __device__ __forceinline__ static void operand_b(
      const uint32_t (&words)[kWords], int part, uint32_t (&b)[4]) {
    PKG_UNROLL
    for (int half = 0; half < 2; ++half) {
      b[2 * half] = even_values(words[2 * part + half]);
      b[2 * half + 1] = odd_values(words[2 * part + half]);
    }
  }

 private:
  int lane_index_;
};

}  // namespace pkg::cuda
