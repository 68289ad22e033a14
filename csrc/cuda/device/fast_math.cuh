// Exponentials: to the last bits, and as fast as the processor has them; and a
// choice that is no branch.
#pragma once

#include <type_traits>

#include "cuda/device/device.cuh"

namespace pkg::cuda {

struct Exponential {
  template <class Number>
  __device__ __forceinline__ Number operator()(Number x) const {
    return exp(x);
  }
};

// By the special function unit, with a relative error of 2^-22 and that of x
// rounded to x log2(e): for what is rounded to half precision afterwards.
// (PTX ISA, "ex2"; results below the normal numbers are 0.)
struct FastExponential {
  static constexpr float kLog2OfE = 1.44269504088896341f;

  __device__ __forceinline__ float operator()(float x) const {
    return of_base_2(x * kLog2OfE);
  }

  // 2^x, whose error is that of the unit alone.
  __device__ __forceinline__ static float of_base_2(float x) {
#ifdef __CUDACC__
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return exp2f(x);
#endif
  }
};

// e^x as well, with results below the normal numbers.
__device__ __forceinline__ float quick_exponential(float x) {
#ifdef __CUDACC__
  float result;
  asm("ex2.approx.f32 %0, %1;"
      : "=f"(result)
      : "f"(x * FastExponential::kLog2OfE));
  return result;
#else
  return exp2f(x * FastExponential::kLog2OfE);
#endif
}

// 1 / x with a relative error of 2^-23 (PTX ISA, "rcp"), for normal x below
// 2^126.
__device__ __forceinline__ float quick_reciprocal(float x) {
#ifdef __CUDACC__
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return 1.0f / x;
#endif
}

// 0 where x is the marker, else the value. Of a conditional expression the
// compiler may make a branch around all that the value takes; with one around
// each exponential, and the number that it is of loaded within, the gradients
// of attention's keys took a multiprocessor of an H100 6100 cycles a tile where
// its tensor cores need 2048 (nvcc 13.0).
template <class Number>
__device__ __forceinline__ Number zero_where_equal(Number x, Number marker,
                                                   Number value) {
#ifdef __CUDACC__
  Number result;
  if constexpr (std::is_same_v<Number, double>) {
    asm("{\n\t.reg .pred p;\n\tsetp.eq.f64 p, %1, %2;\n\t"
        "selp.f64 %0, 0d0000000000000000, %3, p;\n\t}"
        : "=d"(result)
        : "d"(x), "d"(marker), "d"(value));
  } else {
    asm("{\n\t.reg .pred p;\n\tsetp.eq.f32 p, %1, %2;\n\t"
        "selp.f32 %0, 0f00000000, %3, p;\n\t}"
        : "=f"(result)
        : "f"(x), "f"(marker), "f"(value));
  }
  return result;
#else
  return x == marker ? Number(0) : value;
#endif
}

}  // namespace pkg::cuda
