// TF32, in which the tensor cores multiply float32: its sign, its exponent and
// the upper ten bits of its fraction. Products are exact in float32, and sums
// are float32.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/words.cuh"

namespace pkg::cuda {

// A float32 in memory whose products are made in TF32, by one for each.
struct Tf32 {
  Tf32() = default;
  __host__ __device__ explicit Tf32(float number) : value(number) {}
  float value;
};

// Half a unit in the last place of a TF32, and the bits of float32 below it.
constexpr uint32_t kTf32HalfUnit = 0x1000;
constexpr uint32_t kBelowTf32 = 0x1FFF;

// A float32 as an operand of mma, rounded to the nearest TF32, ties away from
// zero, as by cvt.rna.tf32.f32, which compiles to twice the instructions. The
// lower 13 bits are left as they come out: the tensor cores do not read them.
// What would round to infinity is left as it is, and so becomes the largest
// TF32; so are infinities and NaNs.
__device__ __forceinline__ uint32_t round_to_tf32(uint32_t bits) {
  constexpr float kHalfwayToInfinity = 0x1.ffep127f;
  return fabsf(float_of_bits(bits)) < kHalfwayToInfinity ? bits + kTf32HalfUnit
                                                         : bits;
}

}  // namespace pkg::cuda
