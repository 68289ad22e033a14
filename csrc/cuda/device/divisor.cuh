// Division by a number that the host knows, for indices.
//
// There is no instruction that divides integers: the compiler makes it of up to
// 20 others (CUDA C++ Programming Guide, arithmetic instructions). FastDivisor
// multiplies by a rounded reciprocal instead and shifts (Granlund and
// Montgomery, "Division by Invariant Integers using Multiplication", 1994,
// section 4): with 2^(s-1) < d <= 2^s and m = floor(2^32 (2^s - d) / d) + 1,
//
//   floor(n / d) = (floor(m n / 2^32) + n) >> s,
//
// and for n below 2^31 the sum stays in 32 bits, since floor(m n / 2^32) <= n.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"

namespace pkg::cuda {

template <class Index>
struct Quotient {
  Index quotient;
  Index remainder;
};

// Divides 0 to 2^31 - 1 by a divisor between 1 and 2^31 - 1.
struct FastDivisor {
  uint32_t divisor = 1;
  uint32_t multiplier = 1;
  uint32_t shift = 0;

  FastDivisor() = default;
  explicit FastDivisor(int64_t by) : divisor(static_cast<uint32_t>(by)) {
    while (uint64_t{1} << shift < divisor) {
      ++shift;
    }
    const uint64_t excess = (uint64_t{1} << shift) - divisor;
    multiplier = static_cast<uint32_t>((excess << 32) / divisor + 1);
  }

  __device__ __forceinline__ Quotient<uint32_t> divide(uint32_t number) const {
    const auto high =
        static_cast<uint32_t>(uint64_t{multiplier} * number >> 32);
    const uint32_t quotient = (high + number) >> shift;
    return {quotient, number - quotient * divisor};
  }
};

// The same for any number that is not negative.
struct WideDivisor {
  int64_t divisor = 1;

  WideDivisor() = default;
  explicit WideDivisor(int64_t by) : divisor(by) {}

  __device__ __forceinline__ Quotient<int64_t> divide(int64_t number) const {
    const int64_t quotient = number / divisor;
    return {quotient, number - quotient * divisor};
  }
};

}  // namespace pkg::cuda
