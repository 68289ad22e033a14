// What becomes of the integer sums of rowwise_scaled_linear: each is scaled by
// its row and by its column, a bias is added, and the result is rounded once.
//
// The kernels that make the sums do that in float32. Where a number is float64,
// or the summed dimension was divided, they leave their sums in memory, and a
// kernel of its own adds up the parts, always in one order, and scales them:
// it reads four bytes of each part for every element that it writes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/batch.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/element_type.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

constexpr int kScaleThreads = 128;
constexpr int kScaleEach = 4;  // columns of a thread
constexpr int kScaleColumns = kScaleEach * kScaleThreads;

// A tensor of any floating type.
struct FloatingValues {
  const void* data;  // null where there is none
  ElementType type;
};

// `Number` is double where any of the values is.
template <class Number>
__device__ __forceinline__ Number load_floating(const FloatingValues& values,
                                                int64_t index) {
  switch (values.type) {
    case ElementType::float16:
      return convert<Number>(static_cast<const float16*>(values.data)[index]);
    case ElementType::bfloat16:
      return convert<Number>(static_cast<const bfloat16*>(values.data)[index]);
    case ElementType::float64:
      if constexpr (std::is_same_v<Number, double>) {
        return static_cast<const double*>(values.data)[index];
      }
      return Number(0);
    default:
      return convert<Number>(static_cast<const float*>(values.data)[index]);
  }
}

template <class Number>
__device__ __forceinline__ void store_floating(void* data, ElementType type,
                                               int64_t index, Number value) {
  switch (type) {
    case ElementType::float16:
      static_cast<float16*>(data)[index] = convert<float16>(value);
      return;
    case ElementType::bfloat16:
      static_cast<bfloat16*>(data)[index] = convert<bfloat16>(value);
      return;
    case ElementType::float64:
      if constexpr (std::is_same_v<Number, double>) {
        static_cast<double*>(data)[index] = value;
      }
      return;
    default:
      static_cast<float*>(data)[index] = convert<float>(value);
  }
}

// Rounded after each step, so that every kernel makes the same bits.
template <class Number>
__device__ __forceinline__ Number scaled_sum(int32_t sum, Number row_scale,
                                             Number column_scale, Number bias) {
  const Number scaled = static_cast<Number>(sum) * row_scale * column_scale;
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<Number, double>) {
    return __dadd_rn(scaled, bias);
  } else {
    return __fadd_rn(scaled, bias);
  }
#else
  return scaled + bias;
#endif
}

// The result of rowwise_scaled_linear, and how it comes of the sums.
struct RowwiseScaling {
  BatchSizes rows_of;  // the dimensions that rows lie in
  BatchStrides scale_strides;
  FloatingValues input_scale;
  FloatingValues weight_scale;
  int64_t weight_scale_stride;
  FloatingValues bias;
  int64_t bias_stride;
  void* output;  // contiguous
  ElementType output_type;
  bool in_double;
  int64_t rows;
  int64_t columns;
  // Where the kernels leave their sums, or null where they scale them:
  // contiguous: splits, rows, columns.
  int32_t* parts = nullptr;
  int64_t splits = 1;

  // Of rowwise_scale_kernel.
  __host__ __device__ int64_t pieces() const {
    return rows * tiles_of(columns, kScaleColumns);
  }

  template <class Number>
  __device__ __forceinline__ Number row_scale(int64_t row) const {
    return load_floating<Number>(input_scale,
                                 batch_offset(rows_of, scale_strides, row));
  }
  template <class Number>
  __device__ __forceinline__ Number column_scale(int64_t column) const {
    return load_floating<Number>(weight_scale, column * weight_scale_stride);
  }
  // Without a bias -0, which leaves every number that it is added to, -0 too.
  template <class Number>
  __device__ __forceinline__ Number bias_of(int64_t column) const {
    return bias.data == nullptr
               ? Number(-0.0)
               : load_floating<Number>(bias, column * bias_stride);
  }
};

template <class Number>
__global__ void __launch_bounds__(kScaleThreads)
    rowwise_scale_kernel(const __grid_constant__ RowwiseScaling scaling) {
  wait_for_kernel_before();
  const int64_t blocks = tiles_of(scaling.columns, kScaleColumns);
  for (int64_t index = blockIdx.x; index < scaling.pieces();
       index += gridDim.x) {
    const int64_t row = index / blocks;
    const auto row_scale = scaling.row_scale<Number>(row);
    PKG_UNROLL
    for (int i = 0; i < kScaleEach; ++i) {
      const int64_t column =
          index % blocks * kScaleColumns + i * kScaleThreads + threadIdx.x;
      if (column < scaling.columns) {
        const int64_t place = row * scaling.columns + column;
        int32_t sum = 0;
        for (int64_t split = 0; split < scaling.splits; ++split) {
          sum += scaling.parts[split * scaling.rows * scaling.columns + place];
        }
        store_floating<Number>(
            scaling.output, scaling.output_type, place,
            scaled_sum(sum, row_scale, scaling.column_scale<Number>(column),
                       scaling.bias_of<Number>(column)));
      }
    }
  }
}

}  // namespace pkg::cuda
