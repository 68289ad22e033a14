// P and dS of a micro-tile, 32 rows against 32 keys, split into parts and put
// where the products that follow want them:
//
//   P   columns for dV^T    words of rows i and i + 16 of a key
//   dS  columns for dK^T    likewise
//       rows for dQ         words of keys j and j + 16 of a row
//
// Both are scaled by kProbabilityScale. What is summed of them for the
// compensation of dQ is too.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/attention/backward_problem.h"
#include "cpu/attention/grad_query.h"
#include "cpu/attention/probabilities.h"
#include "cpu/attention/row_compensation.h"
#include "cpu/attention/score_gradients.h"
#include "cpu/attention/tile_operands.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/transpose.h"
#include "cpu/tiles/pack_tiles.h"
#include "cpu/tiles/scheme.h"
#include "cpu/tiles/split.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::attention {

// Where a micro-tile's parts go: each a unit of a packed strip.
struct PackedScores {
  std::byte* probability_columns;
  std::byte* grad_score_columns;
  std::byte* grad_score_rows;
};

// Of a strip of rows against a block of keys.
template <class Input>
class TileScoreGradients {
 public:
  using Weights = typename TileSchemes<Input>::Probabilities;
  using Arithmetic = typename ArithmeticOf<Input>::type;
  // A piece is two micro-tiles.
  using Pieces = KeyPieces<Arithmetic, 2 * tiles::kStrip>;
  static constexpr float kScale = TileSchemes<Input>::kProbabilityScale;

  // Begins a strip of which so many rows exist. make() is for whole ones.
  void begin(const RowStatistics<float>* statistics, int used, float scale) {
    scale_ = scale;
    std::copy_n(statistics, used, rows_);
    std::fill_n(&sums_[0][0], tiles::kStrip * (Pieces::kCount + 1), Vector{});
  }

  // Of unscaled scores and of dO V^T, 32 numbers a row, both.
  void make(const float* scores, const float* grad_probabilities, int64_t key,
            const PackedScores& packed) {
    for (int row = 0; row < kPair; ++row) {
      Vector probabilities[4];
      Vector gradients[4];
      load(scores, row, tiles::kSumsStride, probabilities);
      load(grad_probabilities, row, tiles::kSumsStride, gradients);
      differentiate(row, probabilities, gradients);
      put(row, key, probabilities, gradients, packed);
    }
  }
  // Of P and dS as they are, in rows of kScoreStride.
  void take(const float* probabilities, const float* grad_scores, int64_t key,
            const PackedScores& packed) {
    for (int row = 0; row < kPair; ++row) {
      Vector of_probabilities[4];
      Vector gradients[4];
      load(probabilities, row, kScoreStride, of_probabilities);
      load(grad_scores, row, kScoreStride, gradients);
      for (int i = 0; i < 4; ++i) {
        of_probabilities[i] *= kScale;
        gradients[i] *= kScale;
      }
      put(row, key, of_probabilities, gradients, packed);
    }
  }

  // Adds what was summed of the strip's rows, from `row` of the matrix on, to
  // what they are compensated by.
  void add_to_compensation(const GradQuerySums<Input>& layout, int64_t row,
                           int used, const float* key_means,
                           float* grad_query_sums) const {
    alignas(64) float of_pieces[Pieces::kCount][tiles::kStrip];
    for (int64_t piece = 0; piece < Pieces::kCount; ++piece) {
      for (int first = 0; first < tiles::kStrip; first += kLanes) {
        Vector of_rows[kLanes];
        std::copy_n(sums_[1 + piece] + first, kLanes, of_rows);
        simd::store(of_pieces[piece] + first,
                    simd::sum_each(of_rows) * (1 / kScale));
      }
    }
    for (int i = 0; i < used; ++i) {
      const auto to = layout.row_compensation(grad_query_sums, row + i);
      simd::store(to.sums, simd::load(to.sums) + sums_[0][i] * (1 / kScale));
      float of_row[Pieces::kCount];
      for (int64_t piece = 0; piece < Pieces::kCount; ++piece) {
        of_row[piece] = of_pieces[piece][i];
      }
      to.add_means(of_row, key_means, layout.stride);
    }
  }

 private:
  using Vector = simd::Vector<float>;
  using Split = tiles::SplitValues<Weights>;
  static constexpr int kPair = tiles::kStrip / 2;  // rows apart
  static constexpr int kLanes = simd::kLanes<float>;
  static constexpr int64_t kPartBytes = 2 * tiles::kTileBytes;
  template <tiles::Side side>
  static constexpr int64_t kRowBytes = tiles::kTileRowStep<side>;

  // Two registers of a row, then of the row kPair behind it.
  [[gnu::always_inline]] static void load(const float* from, int row,
                                          int64_t stride, Vector (&to)[4]) {
    for (int i = 0; i < 4; ++i) {
      to[i] =
          simd::load(from + (row + i / 2 * kPair) * stride + i % 2 * kLanes);
    }
  }

  // Of S and dP' P and dS.
  [[gnu::always_inline]] void differentiate(int row, Vector (&scores)[4],
                                            Vector (&gradients)[4]) const {
    Vector origins[4];
    Vector residuals[4];
    for (int i = 0; i < 4; ++i) {
      const RowStatistics<float>& of_row = rows_[row + i / 2 * kPair];
      origins[i] = Vector{} + of_row.origin;
      residuals[i] = Vector{} + of_row.origin_residual;
      gradients[i] -= of_row.delta;
      scores[i] *= scale_;
      // Not to be fused with what follows: it is the product that the forward
      // pass rounded.
      __asm__("" : "+v"(scores[i]));
    }
    recompute_probabilities<kPreciseProbabilities<Input>, float>(
        scores, origins, residuals);
    for (int i = 0; i < 4; ++i) {
      scores[i] *= kScale;
      gradients[i] *= scores[i];
    }
  }

  [[gnu::always_inline]] void put(int row, int64_t key,
                                  const Vector (&probabilities)[4],
                                  const Vector (&gradients)[4],
                                  const PackedScores& packed) {
    Vector(&of_piece)[tiles::kStrip] = sums_[1 + key / Pieces::kKeys];
    for (int i = 0; i < 2; ++i) {
      const int of_row = row + i * kPair;
      of_piece[of_row] += probabilities[2 * i] + probabilities[2 * i + 1];
      sums_[0][of_row] += gradients[2 * i] + gradients[2 * i + 1];
    }
    put_columns(row, Split(probabilities[0]), Split(probabilities[2]),
                packed.probability_columns);
    put_columns(row, Split(probabilities[1]), Split(probabilities[3]),
                packed.probability_columns + kLineBytes);
    const Split split[4] = {Split(gradients[0]), Split(gradients[1]),
                            Split(gradients[2]), Split(gradients[3])};
    put_columns(row, split[0], split[2], packed.grad_score_columns);
    put_columns(row, split[1], split[3],
                packed.grad_score_columns + kLineBytes);
    for (int i = 0; i < 2; ++i) {
      put_words(split[2 * i], split[2 * i + 1],
                packed.grad_score_rows +
                    (row + i * kPair) * kRowBytes<tiles::Side::Left>);
    }
  }

  static constexpr int64_t kLineBytes = tiles::kTileStep<tiles::Side::Right>;

  [[gnu::always_inline]] static void put_columns(int row, const Split& low,
                                                 const Split& high,
                                                 std::byte* to) {
    put_words(low, high, to + row * kRowBytes<tiles::Side::Right>);
  }
  [[gnu::always_inline]] static void put_words(const Split& low,
                                               const Split& high,
                                               std::byte* to) {
#pragma GCC unroll 3
    for (int part = 0; part < Weights::kParts; ++part) {
      const auto words = tiles::words_of(low.parts[part], high.parts[part]);
      std::memcpy(to + part * kPartBytes, &words, sizeof(words));
    }
  }

  float scale_ = 1;
  RowStatistics<float> rows_[tiles::kStrip];
  // Of dS, then of P in each piece.
  Vector sums_[1 + Pieces::kCount][tiles::kStrip];
};

}  // namespace pkg::cpu::attention

#endif
