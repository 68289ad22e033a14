// Dropout of the softmax probabilities. Its bits are a function of the seed and
// the place (host/philox.h), drawn again wherever they are needed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/philox.h"
#include "cpu/simd/simd.h"
#include "host/philox.h"
#include "host/tensor.h"

namespace pkg::cpu::attention {

// Multiplies probabilities by 0 where dropout drops them and by 1 / (1 - p)
// else.
template <class Score>
class Dropout {
 public:
  Dropout(const std::optional<TensorView>& seed, double probability)
      : active_(seed && probability > 0.0),
        keys_(active_ ? *static_cast<const int64_t*>(seed->const_data_ptr())
                      : 0),
        threshold_(static_cast<uint32_t>(std::min<uint64_t>(
            dropout_keep_threshold(probability), ~uint32_t{0}))),
        scale_(probability < 1.0 ? static_cast<Score>(1.0 / (1.0 - probability))
                                 : Score{0}) {}

  explicit operator bool() const { return active_; }

  // The factors of `count` keys from `column`, a multiple of 4. Writes up to
  // kSpare more than `count`.
  void factors(Score* to, int64_t batch, int64_t row, int64_t column,
               int64_t count) const {
    for (int64_t i = 0; i < count; i += kColumns) {
      Vector<uint32_t> words[kRegisters][2];
      simd::dropout_words(keys_, batch, row, (column + i) / 4, words);
      for (int r = 0; r < 2 * kRegisters; ++r) {
        store_factors(to + i + r * simd::kLanes<uint32_t>, words[r / 2][r % 2]);
      }
    }
  }

 private:
  static constexpr int kRegisters = 3;  // of counters, side by side
  static constexpr int kColumns = kRegisters * 4 * simd::kPhiloxQuads;

  void store_factors(Score* to, Vector<uint32_t> words) const {
    const auto keeps = words >= threshold_;
    if constexpr (std::is_same_v<Score, float>) {
      simd::store(to, keeps ? Vector<float>{} + scale_ : Vector<float>{});
    } else {
      for (int i = 0; i < simd::kLanes<uint32_t>; ++i) {
        to[i] = keeps[i] ? scale_ : Score{0};
      }
    }
  }

  bool active_;
  simd::PhiloxKeys keys_;
  uint32_t threshold_;  // of a probability of 1 too, whose scale is 0
  Score scale_;

 public:
  static constexpr int kSpare = kColumns;
};

}  // namespace pkg::cpu::attention
