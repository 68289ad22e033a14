// Where P and dS of a pair of blocks are held: 96 rows x 192 keys.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "cpu/attention/backward_problem.h"
#include "cpu/attention/blocking.h"
#include "cpu/attention/probabilities.h"
#include "cpu/attention/scratch.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu::attention {

// P and dS of a pair of blocks, written strip by strip, as left operands: dS by
// rows for dQ, both transposed for dK and dV. For numbers that multiply as they
// are, one layout serves both.
template <class Arithmetic>
struct ScoreBlock {
  using Number = typename Arithmetic::Accumulator;
  static constexpr int kDepth = Arithmetic::kKGroupSize;
  Number* probabilities;
  Number* grad_scores;

  static constexpr int64_t kCount = kRowBlock * kScoreStride;
  static int64_t bytes() { return 2 * Scratch<Number>{kCount}.size(); }
  explicit ScoreBlock(std::byte*& memory)
      : probabilities(Scratch<Number>{kCount}.take(memory)),
        grad_scores(Scratch<Number>{kCount}.take(memory)) {}

  Number* strip_probabilities(int64_t row) {
    return probabilities + row * kScoreStride;
  }
  Number* strip_grad_scores(int64_t row) {
    return grad_scores + row * kScoreStride;
  }
  void finish_strip(int64_t, int, int64_t) {}

  const Number* grad_scores_by_rows(int64_t row) const {
    return grad_scores + row * kScoreStride;
  }
  const Number* probabilities_transposed(int64_t row, int64_t key) const {
    return probabilities + row * kScoreStride + key;
  }
  const Number* grad_scores_transposed(int64_t row, int64_t key) const {
    return grad_scores + row * kScoreStride + key;
  }
};

#if defined(PKG_HAS_BFLOAT16_DOT)
// Rounded to bfloat16 pairs, when a strip is done: neighbours in a row, or the
// same key of two rows.
template <>
struct ScoreBlock<Bfloat16Dot> {
  float* probabilities;
  float* grad_scores;
  uint16_t* grad_score_rows;
  uint32_t* probability_pairs;
  uint32_t* grad_score_pairs;

  static constexpr int64_t kStrip = kStripRows * kScoreStride;
  static constexpr int64_t kCount = kRowBlock * kScoreStride;
  static int64_t bytes() {
    return 2 * Scratch<float>{kStrip}.size() +
           Scratch<uint16_t>{kCount}.size() +
           2 * Scratch<uint32_t>{kCount / 2}.size();
  }
  explicit ScoreBlock(std::byte*& memory)
      : probabilities(Scratch<float>{kStrip}.take(memory)),
        grad_scores(Scratch<float>{kStrip}.take(memory)),
        grad_score_rows(Scratch<uint16_t>{kCount}.take(memory)),
        probability_pairs(Scratch<uint32_t>{kCount / 2}.take(memory)),
        grad_score_pairs(Scratch<uint32_t>{kCount / 2}.take(memory)) {}

  float* strip_probabilities(int64_t) { return probabilities; }
  float* strip_grad_scores(int64_t) { return grad_scores; }

  // The numbers of one row in the low halves, those of the next in the high.
  static void store_pairs(const float* first, uint32_t* to) {
    const auto bits = [](const float* from) {
      return simd::detail::widen(simd::bfloat16_of_normals(simd::load(from)));
    };
    simd::store(to, bits(first) | bits(first + kScoreStride) << 16);
  }
  void finish_strip(int64_t row, int height, int64_t count) {
    constexpr int kLanes = simd::kLanes<float>;
    for (int i = 0; i < height; ++i) {
      for (int64_t j = 0; j < count; j += kLanes) {
        ProbabilityFormat<Bfloat16Dot>::store(
            grad_score_rows + (row + i) * kScoreStride + j,
            simd::load(grad_scores + i * kScoreStride + j));
      }
    }
    for (int i = 0; i < height; i += 2) {
      for (int64_t j = 0; j < count; j += kLanes) {
        const int64_t from = i * kScoreStride + j;
        const int64_t to = (row + i) / 2 * kScoreStride + j;
        store_pairs(probabilities + from, probability_pairs + to);
        store_pairs(grad_scores + from, grad_score_pairs + to);
      }
    }
  }

  const uint32_t* grad_scores_by_rows(int64_t row) const {
    return reinterpret_cast<const uint32_t*>(grad_score_rows +
                                             row * kScoreStride);
  }
  const uint32_t* probabilities_transposed(int64_t row, int64_t key) const {
    return probability_pairs + row / 2 * kScoreStride + key;
  }
  const uint32_t* grad_scores_transposed(int64_t row, int64_t key) const {
    return grad_score_pairs + row / 2 * kScoreStride + key;
  }
};
#endif

}  // namespace pkg::cpu::attention
