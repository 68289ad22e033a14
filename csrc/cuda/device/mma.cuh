// Products of small matrices by the tensor cores: c += a b, by a warp whose
// lanes each hold the part of every operand that mma_places.cuh says.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/device.cuh"
#include "cuda/device/mma_places.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/tf32.cuh"
#include "cuda/device/words.cuh"

#ifndef __CUDACC__
#include "emulated_mma.h"
#endif

namespace pkg::cuda {

constexpr unsigned kWholeWarp = 0xffffffffu;

#ifdef __CUDACC__

// There is no other way than this instruction: setup.py builds for no device
// that lacks it.
template <class Element, class Sum>
__device__ __forceinline__ void multiply_add(Sum& c0, Sum& c1, Sum& c2, Sum& c3,
                                             const uint32_t (&a)[4],
                                             const uint32_t* b) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<Element, bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else if constexpr (std::is_same_v<Element, float16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else if constexpr (std::is_same_v<Element, Tf32>) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    static_assert(std::is_same_v<Element, int8_t>);
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c0), "+r"(c1), "+r"(c2), "+r"(c3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#else
  __trap();
#endif
}

__device__ __forceinline__ void multiply_add(double& c0, double& c1, double a,
                                             double b) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 "
      "{%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(c0), "+d"(c1)
      : "d"(a), "d"(b));
#else
  __trap();
#endif
}

#else

using emulation::multiply_add;

#endif

// 16 x 8 sums of float64 by four steps: products of m8n8k4 by two matrices of
// A, the second below the first. From compute capability 9.0 on there is an
// instruction of that size. An H200 does 64 TFLOP/s by it, with eight warps of
// four chains; 58 by that of eight steps, 45 by that of 16, 32 by m8n8k4.
__device__ __forceinline__ void multiply_add(double& c0, double& c1, double& c2,
                                             double& c3, double upper,
                                             double lower, double b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+d"(c0), "+d"(c1), "+d"(c2), "+d"(c3)
      : "d"(upper), "d"(lower), "d"(b));
#else
  multiply_add(c0, c1, upper, b);
  multiply_add(c2, c3, lower, b);
#endif
}

}  // namespace pkg::cuda
