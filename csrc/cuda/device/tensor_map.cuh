// Copies of boxes of a matrix to shared memory by one instruction, that the
// device's copy engine carries out. (PTX ISA, "cp.async.bulk.tensor": TMA; from
// compute capability 9.0 on.)
//
// A map says where the tensor lies, how large it is and how large a box: four
// dimensions, those of a matrix and two for the matrices of a batch. A line of
// a box has 128 bytes, whose vectors of 16 are swapped as SwizzledTile
// (device/shared.cuh) does; what lies beyond the tensor becomes zeros.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/shared.cuh"

#ifdef __CUDACC__
#include <cuda.h>  // the type of a map, nothing to link
#endif

namespace pkg::cuda {

// The tensor of a map, in elements: neighbours are those of a line. Boxes are
// 128 bytes wide and `box_lines` high.
template <class Element>
struct MappedTensor {
  const Element* data;
  int64_t width;
  int64_t lines;
  int64_t matrices;
  int64_t line_stride;
  int64_t matrix_stride;
  int box_lines;
  int64_t groups = 1;  // of so many matrices
  int64_t group_stride = 0;

  static constexpr int kBoxWidth = 128 / sizeof(Element);

  // Whether the copy engine takes it: addresses and strides are multiples of 16
  // bytes, sizes have 32 bits, strides 40.
  bool has_map() const {
    constexpr int64_t kMostElements = int64_t{1} << 32;
    constexpr int64_t kMostBytes = int64_t{1} << 40;
    const auto fits = [](int64_t size) {
      return size > 0 && size <= kMostElements;
    };
    const auto steps = [](int64_t stride) {
      const int64_t bytes = stride * static_cast<int64_t>(sizeof(Element));
      return bytes > 0 && bytes % 16 == 0 && bytes < kMostBytes;
    };
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && fits(width) &&
           fits(lines) && fits(matrices) && fits(groups) &&
           (lines == 1 || steps(line_stride)) &&
           (matrices == 1 || steps(matrix_stride)) &&
           (groups == 1 || steps(group_stride));
  }
};

#ifdef __CUDACC__

// A parameter of the kernel, __grid_constant__: its address goes to the copy
// engine.
using TensorMap = CUtensorMap;

// Begins to copy the box that begins at element (along the line, line) of a
// matrix of a group to where `index` is, at a multiple of 1024 bytes. The bytes
// of the whole box count for the barrier, also those beyond the tensor. By one
// thread.
template <class Element>
__device__ __forceinline__ void copy_box(const SharedSpan<Element>& to,
                                         int index, const TensorMap& map,
                                         int place, int line, int matrix,
                                         int group, const Mbarriers& barriers,
                                         int barrier) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile"
      ".mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
          to.address(index)),
      "l"(&map), "r"(place), "r"(line), "r"(matrix), "r"(group),
      "r"(barriers.address(barrier))
      : "memory");
#else
  __trap();
#endif
}

// The same of a tensor of one group.
template <class Element>
__device__ __forceinline__ void copy_box(const SharedSpan<Element>& to,
                                         int index, const TensorMap& map,
                                         int place, int line, int matrix,
                                         const Mbarriers& barriers,
                                         int barrier) {
  copy_box(to, index, map, place, line, matrix, 0, barriers, barrier);
}

#endif

}  // namespace pkg::cuda

#ifndef __CUDACC__

#include "emulated_tensor_map.h"

namespace pkg::cuda {

using emulation::copy_box;
using emulation::encode_tensor_map;
using emulation::TensorMap;

}  // namespace pkg::cuda

#endif
