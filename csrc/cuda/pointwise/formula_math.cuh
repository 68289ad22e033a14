// The functions of a formula (host/formula.h), of one number: as
// cpu/pointwise/formula_math.h has them for vectors.
#pragma once

#include <math.h>

#include "cuda/device/device.cuh"

namespace pkg::cuda::math {

using ::exp;
using ::log;
using ::sqrt;
using ::tanh;

template <class Number>
__device__ __forceinline__ Number abs(Number x) {
  return fabs(x);
}

// exp(x) - 1, without cancellation near zero.
template <class Number>
__device__ __forceinline__ Number expm1_of_nonpositive(Number x) {
  return expm1(x);
}

// The larger value, and NaN where either is NaN.
template <class Number>
__device__ __forceinline__ Number max_or_nan(Number a, Number b) {
  const Number larger = a > b ? a : b;
  return a == a ? larger : a;
}

// From exp(-|x|), so that no digits cancel.
template <class Number>
__device__ __forceinline__ Number sigmoid(Number x) {
  const Number e = exp(-fabs(x));
  return (x < Number(0) ? e : Number(1)) / (e + Number(1));
}

}  // namespace pkg::cuda::math
