// What happens to a scaled score before masks: the cap of its size, and the
// linear bias by distance.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cpu/gemm/arithmetic.h"
#include "cpu/lltm/gates.h"
#include "cpu/simd/simd.h"
#include "host/integer_math.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

// ALiBi's slopes of the matrices of the batch, `first` elements behind the
// tensor's first one.
template <class Number>
std::vector<Number> alibi_slopes_of(const AttentionShape& shape,
                                    const TensorView& slopes,
                                    const AttentionOperand& layout,
                                    int64_t first = 0) {
  std::vector<Number> result;
  result.reserve(static_cast<size_t>(shape.batch()));
  const auto read = [&]<class Element>(Element) {
    const auto* from =
        static_cast<const Element*>(slopes.const_data_ptr()) + first;
    for (int64_t b = 0; b < shape.batch(); ++b) {
      result.push_back(static_cast<Number>(from[layout.offset(shape, b)]));
    }
  };
  switch (dtype_of(slopes)) {
    case ScalarType::Double:
      read(double{});
      break;
    case ScalarType::Float:
      read(float{});
      break;
    case ScalarType::Half:
      read(Half{});
      break;
    default:
      read(BFloat16{});
  }
  return result;
}

// softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118, section 2), then
// -slope * |row + columns - rows - column| is added (ALiBi, arXiv 2108.12409):
// flash-attn's order and meaning.
template <class Number>
class ScoreModifiers {
 public:
  // `slopes` are those of each matrix of the batch, or none.
  ScoreModifiers(const AttentionShape& shape, std::vector<Number> slopes)
      : softcap_(static_cast<Number>(shape.softcap)),
        shift_(shape.columns - shape.rows),
        slopes_(std::move(slopes)) {}

  explicit operator bool() const { return caps() || !slopes_.empty(); }
  bool caps() const { return softcap_ > Number{0}; }

  // Multiplies the scores of rows x count keys, whole registers, by `scale` and
  // applies both. `slopes`, if the scores are capped and it is given, becomes
  // the derivatives of the capped scores by the scaled ones, and 0 behind the
  // last key.
  void apply(Number* scores, int64_t stride, Number scale, int64_t batch,
             int64_t row, int64_t column, int64_t rows, int64_t count,
             Number* slopes = nullptr) const {
    for (int64_t r = 0; r < rows; ++r) {
      apply_to_row(
          scores + r * stride, scale,
          slopes_.empty() ? Number{0} : slopes_[static_cast<size_t>(batch)],
          row + r + shift_ - column, count,
          slopes == nullptr ? nullptr : slopes + r * stride);
    }
  }

  // The same of one row, whose own key lies `distance` behind the first.
  void apply_to_row(Number* scores, Number scale, Number slope,
                    int64_t distance, int64_t count,
                    Number* cap_slopes = nullptr) const {
    if (caps()) {
      cap_row(scores, scale, count, cap_slopes);
    } else {
      for (int64_t i = 0; i < count; i += kLanes) {
        simd::store(scores + i, simd::load(scores + i) * scale);
      }
    }
    if (slope != Number{0}) {
      add_bias(scores, slope, distance, count);
    }
  }

 private:
  static constexpr int kLanes = simd::kLanes<Number>;

  void cap_row(Number* scores, Number scale, int64_t count,
               Number* slopes) const {
    for (int64_t i = 0; i < count; i += kLanes) {
      const Tanh<Vector<Number>> share(simd::load(scores + i) * scale /
                                       softcap_);
      simd::store(scores + i, share.value * softcap_);
      if (slopes != nullptr) {
        simd::store(slopes + i, share.slope);
      }
    }
    if (slopes != nullptr) {
      std::fill(slopes + count, slopes + round_up(count, kLanes), Number{0});
    }
  }

  // `distance` is that of the first key. Whole numbers are exact up to 2^24.
  static void add_bias(Number* scores, Number slope, int64_t distance,
                       int64_t count) {
    Vector<Number> lanes;
    for (int i = 0; i < kLanes; ++i) {
      lanes[i] = static_cast<Number>(i);
    }
    for (int64_t i = 0; i < count; i += kLanes) {
      const auto from = static_cast<Number>(distance - i);
      simd::store(scores + i,
                  simd::load(scores + i) - simd::abs(from - lanes) * slope);
    }
  }

  Number softcap_;
  int64_t shift_;
  std::vector<Number> slopes_;  // of each matrix of the batch, if there are any
};

}  // namespace pkg::cpu::attention
