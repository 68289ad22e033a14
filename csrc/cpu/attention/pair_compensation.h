// Compensation where score gradients are rounded to be multiplied: what is
// summed of each pair of rows beside dQ. compensation.h says why.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>

#include "cpu/attention/number.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/gemm/packing.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu::attention {

// The state of a pair of rows, whose numbers are the bfloat16 halves of 32
// bits. It begins as zeros.
template <class Arithmetic>
struct PairCompensation {
  static constexpr int kLanes = simd::kLanes<float>;
  Vector<float> sums[2];       // of the score gradients: SIMD accumulators
  Vector<uint16_t> largest;    // probabilities: bits, which are ordered as they
  Vector<uint16_t> registers;  // whose these are: key / kLanes

  // `count` keys from `column`, a whole number of registers both. Beyond
  // 2^16 registers a key is taken for another, which is no worse than none.
  void add(const uint32_t* probabilities, const uint32_t* grad_scores,
           int64_t column, int64_t count) {
    constexpr uint32_t kOne = 0x3F80;
    const auto first = simd::broadcast(kOne);
    const auto second = simd::broadcast(kOne << 16);
    Vector<float> sum[2] = {sums[0], sums[1]};
    auto most = largest;
    auto of = registers;
    auto at = simd::broadcast(static_cast<uint16_t>(column / kLanes));
    for (int64_t i = 0; i < count; i += kLanes) {
      const auto gradient = simd::load(grad_scores + i);
      sum[0] = Arithmetic::multiply_add(gradient, first, sum[0]);
      sum[1] = Arithmetic::multiply_add(gradient, second, sum[1]);
      const auto probability =
          std::bit_cast<Vector<uint16_t>>(simd::load(probabilities + i));
      of = probability > most ? at : of;
      most = larger(probability, most);
      at += uint16_t{1};
    }
    *this = {{sum[0], sum[1]}, most, of};
  }
  // Adds that of other keys of the rows.
  void merge(const PairCompensation& other) {
    sums[0] += other.sums[0];
    sums[1] += other.sums[1];
    registers = other.largest > largest ? other.registers : registers;
    largest = larger(other.largest, largest);
  }
};

// A few keys of a row that stand for all, and their probabilities.
template <class Input>
struct KeySample {
  static constexpr int kKeys = simd::kLanes<float> / 2;
  float probabilities[kKeys];
  const Input* keys[kKeys];
};

// Of a pair's lanes and those half a register on, the ones with the larger
// probabilities.
template <class Arithmetic, class Input>
KeySample<Input> sample_keys(const PairCompensation<Arithmetic>& pair,
                             int64_t second, const MatrixView<Input>& keys,
                             int64_t columns) {
  constexpr int kLanes = simd::kLanes<float>;
  constexpr int kHalf = KeySample<Input>::kKeys;
  const auto bits = std::bit_cast<Vector<uint32_t>>(pair.largest);
  float probabilities[kLanes];
  simd::store(probabilities,
              std::bit_cast<Vector<float>>(second == 0 ? bits << 16
                                                       : bits & 0xFFFF0000U));
  KeySample<Input> sample;
  for (int i = 0; i < kHalf; ++i) {
    const int lane =
        probabilities[i] >= probabilities[i + kHalf] ? i : i + kHalf;
    const int64_t key = pair.registers[2 * lane + second] * kLanes + lane;
    sample.probabilities[i] = probabilities[lane];
    sample.keys[i] = keys.at(key < columns ? key : 0, 0);
  }
  return sample;
}

// Takes off a row of dQ, the first or second of its pair, what its score
// gradients sum to times the mean of the keys.
template <class Arithmetic, class Input>
void compensate(const PairCompensation<Arithmetic>& pair, int64_t second,
                const MatrixView<Input>& keys, int64_t columns,
                int64_t head_size, float* grad_query) {
  constexpr int kLanes = simd::kLanes<float>;
  constexpr int kKeys = KeySample<Input>::kKeys;
  const auto sample = sample_keys(pair, second, keys, columns);
  const float factor =
      -simd::reduce_add(pair.sums[second]) /
      std::accumulate(sample.probabilities, sample.probabilities + kKeys, 0.0F);
  if (!std::isfinite(factor)) {
    return;  // no key has a probability, or the row is not finite as it is
  }
  int64_t i = 0;
  for (; keys.column_stride == 1 && i + kLanes <= head_size; i += kLanes) {
    Vector<float> sum{};
#pragma GCC unroll 8
    for (int k = 0; k < kKeys; ++k) {
      sum += simd::load(sample.keys[k] + i) * sample.probabilities[k];
    }
    simd::store(grad_query + i, simd::load(grad_query + i) + factor * sum);
  }
  for (; i < head_size; ++i) {
    float sum = 0;
    for (int k = 0; k < kKeys; ++k) {
      sum += static_cast<float>(sample.keys[k][i * keys.column_stride]) *
             sample.probabilities[k];
    }
    grad_query[i] += factor * sum;
  }
}

}  // namespace pkg::cpu::attention
