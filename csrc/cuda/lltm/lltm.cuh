// What lltm's kernels share: the gates of a state and their functions.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"

namespace pkg::cuda {

constexpr int kGates = 3;

// Rows of elements; null where there are none.
template <class Element>
struct MatrixOf {
  const Element* data;
  int64_t row_stride;
  int64_t column_stride;

  __device__ __forceinline__ Element at(int64_t row, int64_t column) const {
    return data[row * row_stride + column * column_stride];
  }
};

// tanh and its derivative, and those of elu, of one element.
template <class Number>
struct TanhOf {
  Number value;
  Number slope;

  __device__ __forceinline__ explicit TanhOf(Number x) {
    const Number less = expm1(Number(-2) * fabs(x));
    const Number inverse = Number(1) / (less + Number(2));
    value = x < Number(0) ? less * inverse : -less * inverse;
    slope = Number(4) * (less + Number(1)) * inverse * inverse;
  }
};

template <class Number>
struct EluOf {
  Number value;
  Number slope;

  __device__ __forceinline__ explicit EluOf(Number x) {
    const Number below = expm1(x > Number(0) ? Number(0) : x);
    value = x > Number(0) ? x : below;
    slope = below + Number(1);
  }
};

}  // namespace pkg::cuda
