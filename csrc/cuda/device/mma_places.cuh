// Where the elements of a small product lie in the lanes of a warp (PTX ISA,
// "Matrix Fragments for mma").
//
// An operand is 32-bit words; a word holds 4 / sizeof(Element) elements that
// are neighbours in the summed dimension. The emulated instruction, the code
// around it and a test against the manual's tables all take it from here.
#pragma once

#include "cuda/device/device.cuh"

namespace pkg::cuda {

// The row and the column of an element in the operand's matrix.
struct MatrixPlace {
  int row;
  int column;
};

// Elements of `kSize` bytes, 4 of TF32; sums are 16 x 8, the summed dimension
// is 32 bytes.
template <int kSize>
struct MmaPlaces {
  static constexpr int kInWord = 4 / kSize;
  static constexpr int kRows = 16;
  static constexpr int kColumns = 8;
  static constexpr int kDepth = 8 * kInWord;

  // Word 0 to 3, element 0 to kInWord - 1 of it.
  __host__ __device__ static constexpr MatrixPlace a(int lane, int word,
                                                     int element) {
    return {lane / 4 + word % 2 * 8,
            lane % 4 * kInWord + element + word / 2 * 4 * kInWord};
  }
  // Word 0 or 1.
  __host__ __device__ static constexpr MatrixPlace b(int lane, int word,
                                                     int element) {
    return {lane % 4 * kInWord + element + word * 4 * kInWord, lane / 4};
  }
  // Sum 0 to 3.
  __host__ __device__ static constexpr MatrixPlace sum(int lane, int index) {
    return {lane / 4 + index / 2 * 8, lane % 4 * 2 + index % 2};
  }
};

// The same of m8n8k4, the only shape of float64 on every such device.
struct MmaPlacesFloat64 {
  static constexpr int kRows = 8;
  static constexpr int kColumns = 8;
  static constexpr int kDepth = 4;

  __host__ __device__ static constexpr MatrixPlace a(int lane) {
    return {lane / 4, lane % 4};
  }
  __host__ __device__ static constexpr MatrixPlace b(int lane) {
    return {lane % 4, lane / 4};
  }
  __host__ __device__ static constexpr MatrixPlace sum(int lane, int index) {
    return {lane / 4, lane % 4 * 2 + index};
  }
};

}  // namespace pkg::cuda
