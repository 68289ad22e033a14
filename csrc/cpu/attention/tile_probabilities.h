// The probabilities of a strip as the left operand of tile products.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/attention/blocking.h"
#include "cpu/attention/probabilities.h"
#include "cpu/attention/scratch.h"
#include "cpu/attention/tile_operands.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/plain_kernel.h"
#include "cpu/tiles/scheme.h"
#include "cpu/tiles/split.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::attention {

// Split into parts: the softmax leaves them in place of the scores, from where
// they are packed.
template <class Input>
class SplitProbabilities {
 public:
  using Scheme = typename TileSchemes<Input>::Probabilities;
  using Element = float;
  static constexpr int64_t kStride = kScoreStride;
  static constexpr tiles::LeftLayout kLayout{};

  static Scratch<std::byte> scratch() {
    return {tiles::packed_bytes<Scheme>(tiles::kStrip,
                                        kKeyBlock / Scheme::kValues)};
  }
  SplitProbabilities(std::byte* scratch, float* scores)
      : packed_(scratch), scores_(scores) {}

  // Where the softmax leaves them.
  Element* elements() const { return scores_; }
  const std::byte* packed() const { return packed_; }

  // As ProbabilityRows of a softmax that packs them at once, two registers of
  // a row: a row of a tile. What there is no register of are zeros.
  template <int kVectors>
  [[gnu::always_inline]] Vector<float> store_row(
      int64_t row, int64_t column, const Vector<float>* probabilities,
      Vector<float> sum) const {
    static_assert(kVectors <= 2 && Scheme::kValues == 2 * kLanes);
    constexpr float kScale = TileSchemes<Input>::kProbabilityScale;
    Vector<float> halves[2] = {};
    for (int v = 0; v < kVectors; ++v) {
      sum += probabilities[v];
      halves[v] = probabilities[v] * kScale;
    }
    const tiles::SplitValues<Scheme> low(halves[0]);
    const tiles::SplitValues<Scheme> high(halves[1]);
    std::byte* to = packed_ +
                    column / Scheme::kValues * tiles::kUnitBytes<Scheme> +
                    row * kLayout.row;
#pragma GCC unroll 3
    for (int part = 0; part < Scheme::kParts; ++part) {
      simd::store(reinterpret_cast<uint32_t*>(to + part * kLayout.unit),
                  tiles::words_of(low.parts[part], high.parts[part]));
    }
    return sum;
  }

  // Of so many rows and keys they are elements now, up to a whole register:
  // packs them.
  void pack(int rows, int64_t count) const {
    for (int i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < count; j += Scheme::kValues) {
        const float* const from = scores_ + i * kStride + j;
        const Vector<float> halves[2] = {simd::load(from),
                                         simd::load(from + kLanes)};
        count - j > kLanes ? store_row<2>(i, j, halves, Vector<float>{})
                           : store_row<1>(i, j, halves, Vector<float>{});
      }
    }
  }

 private:
  static constexpr int kLanes = simd::kLanes<float>;

  std::byte* packed_;
  float* scores_;
};

// Rounded to bfloat16 by the softmax: rows of a tile as they are.
class RoundedProbabilities {
 public:
  using Scheme = tiles::Bfloat16By1;
  using Arithmetic = ArithmeticOf<simd::BFloat16>::type;
  using Element = Probability<Arithmetic>;
  // An odd number of cache lines: rows of a tile lie in different sets.
  static constexpr int64_t kStride = kKeyBlock + 32;
  static constexpr tiles::LeftLayout kLayout{
      kStride * sizeof(Element), tiles::kTileRows * kStride * sizeof(Element),
      Scheme::kValues * sizeof(Element)};

  static Scratch<std::byte> scratch() {
    return {tiles::kStrip * kStride * int64_t{sizeof(Element)}};
  }
  RoundedProbabilities(std::byte* scratch, float* /*scores*/)
      : elements_(reinterpret_cast<Element*>(scratch)) {}

  Element* elements() const { return elements_; }
  const std::byte* packed() const {
    return reinterpret_cast<const std::byte*>(elements_);
  }

  template <int kVectors>
  [[gnu::always_inline]] Vector<float> store_row(
      int64_t row, int64_t column, const Vector<float>* probabilities,
      Vector<float> sum) const {
    Element* const to = elements_ + row * kStride + column;
    if constexpr (kVectors == 1) {
      std::fill_n(to + kLanes, kLanes, Element{0});
    }
    return ProbabilityFormat<Arithmetic>::template store_row<kVectors>(
        to, probabilities, sum);
  }

  // Fills the last unit up with zeros.
  void pack(int rows, int64_t count) const {
    static_assert(Scheme::kValues == 2 * kLanes);
    const int64_t end = round_up(count, kLanes);
    for (int i = 0; end % Scheme::kValues != 0 && i < rows; ++i) {
      std::fill_n(elements_ + i * kStride + end, kLanes, Element{0});
    }
  }

 private:
  static constexpr int64_t kLanes = simd::kLanes<float>;

  Element* elements_;
};

template <class Input>
struct TileProbabilitiesOf {
  using type = SplitProbabilities<Input>;
};
template <>
struct TileProbabilitiesOf<simd::BFloat16> {
  using type = RoundedProbabilities;
};

}  // namespace pkg::cpu::attention

#endif
