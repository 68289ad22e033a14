// The steps between the products that the gradients of attention by tensor
// cores share: of tiles of scores, whose rows are queries or keys.
#pragma once

#include <cstdint>

#include "cuda/attention/gradients.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/fast_math.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// Log-sum-exp or D of the queries that are a thread's, the i-th of which is
// row_of(i): the rows of its tiles, or the columns of transposed ones. They are
// in registers before the product whose results they are subtracted from.
template <class Scores, bool kTransposed>
struct QueryNumbers {
  static constexpr bool kOfTransposed = kTransposed;
  static constexpr int kCount =
      kTransposed ? Scores::kThreadColumns : Scores::kThreadRows;
  float values[kCount];

  template <class RowOf>
  __device__ __forceinline__ QueryNumbers(const float* numbers,
                                          const AttentionExtent& extent,
                                          RowOf&& row_of) {
    PKG_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const int64_t row = row_of(i);
      values[i] = row < extent.rows ? numbers[extent.statistics + row] : 0.0f;
    }
  }

  // That of a value of the thread's tile.
  __device__ __forceinline__ float of(int i, int j) const {
    return values[kTransposed ? j : i];
  }
};

// A row without any key has weights of zero, not exp(-inf + inf).
__device__ __forceinline__ float attention_weight(float score,
                                                  float log_sum_exp) {
  const FastExponential exponential;
  return zero_where_equal(score, -INFINITY, exponential(score - log_sum_exp));
}

// The gradient of a score, from that of its weight after dropout. A weight of
// zero passes nothing on, whatever its value holds.
__device__ __forceinline__ float attention_grad_score(float weight,
                                                      float grad_weight,
                                                      float delta) {
  return zero_where_equal(weight, 0.0f, weight * (grad_weight - delta));
}

// The same of a product of a query and a key that is not yet scaled: scale is
// of a score in units of log(2).
__device__ __forceinline__ float attention_weight(float product, float scale,
                                                  float log_sum_exp) {
  const float origin = log_sum_exp * FastExponential::kLog2OfE;
  return zero_where_equal(
      product, -INFINITY,
      FastExponential::of_base_2(fmaf(product, scale, -origin)));
}

// Replaces products of queries and keys by weights.
template <class Attention, class Scores, class Numbers>
__device__ __forceinline__ void weigh(const Attention& attention, Scores& tile,
                                      int64_t row_begin, int64_t column_begin,
                                      const Numbers& log_sum_exp) {
  if constexpr (Numbers::kOfTransposed) {
    TransposedTile<Scores> scores{tile};
    attention.score_tile(scores, row_begin, column_begin);
  } else {
    attention.score_tile(tile, row_begin, column_begin);
  }
  PKG_UNROLL
  for (int j = 0; j < Scores::kThreadColumns; ++j) {
    PKG_UNROLL
    for (int i = 0; i < Scores::kThreadRows; ++i) {
      float& value = tile.values[i][j];
      if constexpr (Attention::kScalesExponents) {
        value = attention_weight(value, attention.scale_of_exponents(),
                                 log_sum_exp.of(i, j));
      } else {
        value = attention_weight(value, log_sum_exp.of(i, j));
      }
    }
  }
}

// Replaces the gradients of the weights by those of the scores.
template <class Scores, class Numbers>
__device__ __forceinline__ void differentiate(const Scores& weights,
                                              Scores& gradients,
                                              const Numbers& delta) {
  PKG_UNROLL
  for (int j = 0; j < Scores::kThreadColumns; ++j) {
    PKG_UNROLL
    for (int i = 0; i < Scores::kThreadRows; ++i) {
      gradients.values[i][j] = attention_grad_score(
          weights.values[i][j], gradients.values[i][j], delta.of(i, j));
    }
  }
}

// A bit for each of a thread's weights that dropout leaves, of a tile whose
// rows are keys, and by what it grows.
template <class Weights>
struct TransposedDropout {
  uint32_t kept;
  float scale;

  template <class Attention>
  __device__ __forceinline__ TransposedDropout(const Attention& attention,
                                               int64_t row_begin,
                                               int64_t column_begin)
      : kept(attention.template kept_of_transposed<Weights>(row_begin,
                                                            column_begin)),
        scale(attention.keep_scale()) {}

  __device__ __forceinline__ Weights dropped(Weights tile) const {
    PKG_UNROLL
    for (int i = 0; i < Weights::kThreadRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < Weights::kThreadColumns; ++j) {
        const bool is_kept =
            (kept >> (i * Weights::kThreadColumns + j) & 1) != 0;
        tile.values[i][j] *= is_kept ? scale : 0.0f;
      }
    }
    return tile;
  }
};

// Where scores are capped, their gradients become those of the scores before
// the cap. score(tile) adds up the products of queries and keys again.
template <class Attention, class Scores, class Score>
__device__ __forceinline__ void multiply_by_cap_slopes(
    const Attention& attention, Scores& gradients, Score&& score) {
  if (!attention.caps()) {
    return;
  }
  Scores products(0);
  score(products);
  PKG_UNROLL
  for (int i = 0; i < Scores::kThreadRows; ++i) {
    PKG_UNROLL
    for (int j = 0; j < Scores::kThreadColumns; ++j) {
      gradients.values[i][j] *= attention.cap_slope(products.values[i][j]);
    }
  }
}

}  // namespace pkg::cuda
