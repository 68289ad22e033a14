// Division by a number that the host knows, for indices.
//
// There is no instruction that divides integers: the compiler makes it of up to
// 20 others in 32 bits (CUDA C++ Programming Guide, arithmetic instructions),
// and in 64 of a function that is called. These multiply by a rounded
// reciprocal instead and shift (Granlund and Montgomery, "Division by Invariant
// Integers using Multiplication", 1994, section 4): with N bits,
// 2^(s-1) < d <= 2^s and m = floor(2^N (2^s - d) / d) + 1,
//
//   floor(n / d) = (floor(m n / 2^N) + n) >> s,
//
// and for n below 2^(N-1) the sum stays in N bits, since floor(m n / 2^N) <= n.
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

// Divides any number that is not negative. The divisor is a size, for which it
// may stand; none but a positive one divides.
class WideDivisor {
 public:
  WideDivisor() = default;
  __host__ __device__ WideDivisor(int64_t by) : divisor_(by) {
    const auto divisor = static_cast<uint64_t>(by);
    while (by > 0 && uint64_t{1} << shift_ < divisor) {
      ++shift_;
    }
    // floor(2^64 excess / divisor), bit by bit: the excess is the smaller.
    uint64_t excess = (uint64_t{1} << shift_) - divisor;
    multiplier_ = 0;
    for (int bit = 63; by > 0 && excess != 0 && bit >= 0; --bit) {
      excess *= 2;
      if (excess >= divisor) {
        excess -= divisor;
        multiplier_ |= uint64_t{1} << bit;
      }
    }
    ++multiplier_;
  }

  __host__ __device__ operator int64_t() const { return divisor_; }

  __device__ __forceinline__ Quotient<int64_t> divide(int64_t number) const {
    const auto dividend = static_cast<uint64_t>(number);
    const auto quotient = static_cast<int64_t>(
        (__umul64hi(multiplier_, dividend) + dividend) >> shift_);
    return {quotient, number - quotient * divisor_};
  }

 private:
  int64_t divisor_ = 1;
  uint64_t multiplier_ = 1;
  int shift_ = 0;
};

}  // namespace pkg::cuda
