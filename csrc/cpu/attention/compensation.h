// What rounding does to the gradient of the queries, by way of what all keys
// have in common.
//
// The gradients dS_j of a row's scores sum to 0, so that its
// dQ = sum_j dS_j K_j is sum_j dS_j (K_j - C) whatever C is. As computed they
// do not quite sum to 0: D comes from an output that was rounded, and bfloat16
// dS are rounded to be multiplied. What they sum to, times what the keys have
// in common, may be larger than dQ: where keys have a mean, or scores rise from
// key to key. It is taken off again. An error of D would be made good by the
// mean of the keys by weight, but that is a sixth product; C is near it.
//
// Where dS is rounded (PairBalance), C is the mean, by weight, of eight keys,
// each the one with the largest weight of every eighth key. Error of dQ beside
// that of PyTorch's math backend, without and with it, bfloat16: scores that
// rise by 20 from first to last of 600 keys 2.6 and 1.2, by 300 33 and 1.2.
//
// Else (RowBalance) it is the sum of what pieces of 48 keys have in common,
// each times the weight of its piece. The sum of dS is so small here that eight
// or sixteen keys stand for all too badly: dQ erred by more where only values
// have a mean. float32, keys and values of mean 1 to 50 and deviation 1: 1.8
// to 4.2 without, 0.01 to 1.0 with it.
//
// Of the backward pass, 1x8x1024x64 on Zen 4, it takes 5 % in bfloat16 and 2 %
// in float32.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <type_traits>

#include "cpu/attention/online_softmax.h"
#include "cpu/attention/problem.h"
#include "cpu/attention/products.h"

namespace pkg::cpu::attention {

// Whether weights and gradients of scores are rounded to be multiplied.
template <class Arithmetic>
inline constexpr bool kRoundsWeights =
    !std::is_same_v<Weight<Arithmetic>, typename Arithmetic::Accumulator>;

// The state of a pair of rows, whose numbers are the bfloat16 halves of 32
// bits. It begins as zeros.
template <class Arithmetic>
struct PairBalance {
  static constexpr int kLanes = simd::kLanes<float>;
  Vector<float> sums[2];       // of the gradients, lane by lane
  Vector<uint16_t> weights;    // the largest: bits, which are ordered as they
  Vector<uint16_t> registers;  // whose these are: key / kLanes

  // `count` keys from `column`, a whole number of registers both. Beyond
  // 2^16 registers a key is taken for another, which is no worse than none.
  void add(const uint32_t* added_weights, const uint32_t* gradients,
           int64_t column, int64_t count) {
    constexpr uint32_t kOne = 0x3F80;
    const auto first = simd::broadcast(kOne);
    const auto second = simd::broadcast(kOne << 16);
    Vector<float> sum[2] = {sums[0], sums[1]};
    auto largest = weights;
    auto of = registers;
    auto at = simd::broadcast(static_cast<uint16_t>(column / kLanes));
    for (int64_t i = 0; i < count; i += kLanes) {
      const auto gradient = simd::load(gradients + i);
      sum[0] = Arithmetic::multiply_add(gradient, first, sum[0]);
      sum[1] = Arithmetic::multiply_add(gradient, second, sum[1]);
      const auto weight =
          std::bit_cast<Vector<uint16_t>>(simd::load(added_weights + i));
      of = weight > largest ? at : of;
      largest = larger(weight, largest);
      at += uint16_t{1};
    }
    *this = {{sum[0], sum[1]}, largest, of};
  }
  // That of other keys of the rows.
  void merge(const PairBalance& other) {
    sums[0] += other.sums[0];
    sums[1] += other.sums[1];
    registers = other.weights > weights ? other.registers : registers;
    weights = larger(other.weights, weights);
  }
};

// A few keys of a row that stand for all, and their weights.
template <class Input>
struct KeySample {
  static constexpr int kKeys = simd::kLanes<float> / 2;
  float weights[kKeys];
  const Input* keys[kKeys];
};

// Of a pair's lanes and those half a register on, the larger ones.
template <class Arithmetic, class Input>
KeySample<Input> sample_keys(const PairBalance<Arithmetic>& pair,
                             int64_t second, const MatrixView<Input>& keys,
                             int64_t columns) {
  constexpr int kLanes = simd::kLanes<float>;
  constexpr int kHalf = KeySample<Input>::kKeys;
  const auto bits = std::bit_cast<Vector<uint32_t>>(pair.weights);
  float weights[kLanes];
  simd::store(weights, std::bit_cast<Vector<float>>(
                           second == 0 ? bits << 16 : bits & 0xFFFF0000U));
  KeySample<Input> sample;
  for (int i = 0; i < kHalf; ++i) {
    const int lane = weights[i] >= weights[i + kHalf] ? i : i + kHalf;
    const int64_t key = pair.registers[2 * lane + second] * kLanes + lane;
    sample.weights[i] = weights[lane];
    sample.keys[i] = keys.at(key < columns ? key : 0, 0);
  }
  return sample;
}

// Takes off a row of dQ, the first or second of its pair, what its gradients
// sum to times the mean of the keys.
template <class Arithmetic, class Input>
void take_off_balance(const PairBalance<Arithmetic>& pair, int64_t second,
                      const MatrixView<Input>& keys, int64_t columns,
                      int64_t head_size, float* grad_query) {
  constexpr int kLanes = simd::kLanes<float>;
  constexpr int kKeys = KeySample<Input>::kKeys;
  const auto sample = sample_keys(pair, second, keys, columns);
  const float factor =
      -simd::reduce_add(pair.sums[second]) /
      std::accumulate(sample.weights, sample.weights + kKeys, 0.0F);
  if (!std::isfinite(factor)) {
    return;  // no key has a weight, or the row is not finite as it is
  }
  int64_t i = 0;
  for (; keys.column_stride == 1 && i + kLanes <= head_size; i += kLanes) {
    Vector<float> sum{};
#pragma GCC unroll 8
    for (int k = 0; k < kKeys; ++k) {
      sum += simd::load(sample.keys[k] + i) * sample.weights[k];
    }
    simd::store(grad_query + i, simd::load(grad_query + i) + factor * sum);
  }
  for (; i < head_size; ++i) {
    float sum = 0;
    for (int k = 0; k < kKeys; ++k) {
      sum += static_cast<float>(sample.keys[k][i * keys.column_stride]) *
             sample.weights[k];
    }
    grad_query[i] += factor * sum;
  }
}

// Pieces of a block of keys, and what the keys of each have in common: of the
// means of every third key the middle one, if the three are about the same, and
// else nothing. So keys without a mean have none by chance either, and one key
// of another order of magnitude, which may have no weight, does not make one.
template <class Arithmetic>
struct KeyPieces {
  using Number = typename Arithmetic::Accumulator;
  static constexpr int64_t kKeys = 48;
  static constexpr int64_t kCount = kKeyBlock / kKeys;
  static_assert(kKeyBlock % kKeys == 0 && kKeys % simd::kLanes<Number> == 0);
  static constexpr int64_t kColumns = kTileColumns<Arithmetic>;

  // Of `count` keys that are packed as columns of dS K, of which `stride` are
  // whole tiles.
  static void find_common(const Number* packed, int64_t count, int64_t stride,
                          Number* means) {
    for (int64_t e = 0; e < stride; e += simd::kLanes<Number>) {
      const Number* column =
          packed + e / kColumns * count * kColumns + e % kColumns;
      for (int64_t piece = 0; piece < kCount; ++piece) {
        const int64_t first = std::min(piece * kKeys, count);
        const int64_t last = std::min(first + kKeys, count);
        simd::store(means + piece * stride + e,
                    common(mean_of_third(column, first, last),
                           mean_of_third(column, first + 1, last),
                           mean_of_third(column, first + 2, last)));
      }
    }
  }

 private:
  static Vector<Number> mean_of_third(const Number* column, int64_t first,
                                      int64_t last) {
    Vector<Number> sum{};
    for (int64_t key = first; key < last; key += 3) {
      sum += simd::load(column + key * kColumns);
    }
    return sum /
           static_cast<Number>(std::max<int64_t>((last - first + 2) / 3, 1));
  }
  static Vector<Number> common(Vector<Number> a, Vector<Number> b,
                               Vector<Number> c) {
    const Vector<Number> higher = larger(a, b);
    const Vector<Number> lower = a > b ? b : a;
    const Vector<Number> most = larger(higher, c);
    const Vector<Number> least = c > lower ? lower : c;
    const Vector<Number> middle = larger(lower, c > higher ? higher : c);
    return (2 * least > most) | (2 * most < least) ? middle : Vector<Number>{};
  }
};

// Of one row, as numbers that begin as zeros and are added where keys are
// split.
template <class Arithmetic>
struct RowBalance {
  using Number = typename Arithmetic::Accumulator;
  using Pieces = KeyPieces<Arithmetic>;
  static constexpr int kLanes = simd::kLanes<Number>;
  Number* sums;  // of the gradients, lane by lane
  Number* mean;  // of the keys by weight

  // `count` keys of a whole block, a whole number of registers.
  void add(const Number* weights, const Number* gradients, int64_t count,
           const Number* means, int64_t stride) const {
    Number of_pieces[Pieces::kCount];
    Vector<Number> sum = simd::load(sums);
    for (int64_t piece = 0; piece < Pieces::kCount; ++piece) {
      const int64_t last = std::min((piece + 1) * Pieces::kKeys, count);
      Vector<Number> weight{};
      for (int64_t i = piece * Pieces::kKeys; i < last; i += kLanes) {
        weight += simd::load(weights + i);
        sum += simd::load(gradients + i);
      }
      of_pieces[piece] = simd::reduce_add(weight);
    }
    simd::store(sums, sum);
    for (int64_t e = 0; e < stride; e += kLanes) {
      Vector<Number> total = simd::load(mean + e);
#pragma GCC unroll 4
      for (int64_t piece = 0; piece < Pieces::kCount; ++piece) {
        total += simd::load(means + piece * stride + e) * of_pieces[piece];
      }
      simd::store(mean + e, total);
    }
  }

  // That of other keys of the row.
  void merge(const RowBalance& other, int64_t stride) const {
    simd::store(sums, simd::load(sums) + simd::load(other.sums));
    for (int64_t e = 0; e < stride; e += kLanes) {
      simd::store(mean + e, simd::load(mean + e) + simd::load(other.mean + e));
    }
  }

  void take_off(int64_t stride, Number* grad_query) const {
    const Number sum = simd::reduce_add(simd::load(sums));
    for (int64_t e = 0; e < stride; e += kLanes) {
      const Vector<Number> taken = sum * simd::load(mean + e);
      // The mean of keys that are finite need not be so.
      simd::store(grad_query + e,
                  simd::load(grad_query + e) -
                      (taken - taken == Number{0} ? taken : Vector<Number>{}));
    }
  }
};

}  // namespace pkg::cpu::attention
