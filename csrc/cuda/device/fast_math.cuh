// Exponentials: to the last bits, and as fast as the processor has them.
#pragma once

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
  __device__ __forceinline__ float operator()(float x) const {
    constexpr float kLog2OfE = 1.44269504088896341f;
#ifdef __CUDACC__
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * kLog2OfE));
    return result;
#else
    return exp2f(x * kLog2OfE);
#endif
  }
};

}  // namespace pkg::cuda
