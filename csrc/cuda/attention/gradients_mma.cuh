// The steps between the products that the gradients of attention by tensor
// cores share: of tiles of scores, whose rows are queries or keys.
#pragma once

#include <cstdint>

#include "cuda/attention/gradients.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/fast_math.cuh"

namespace pkg::cuda {

// Log-sum-exp and D of the queries that are a thread's, the i-th of which is
// row_of(i). They are in registers before the products whose results they are
// subtracted from.
template <int kCount>
struct QueryStatistics {
  float log_sum_exp[kCount];
  float delta[kCount];

  template <class Element, class RowOf>
  __device__ __forceinline__
  QueryStatistics(const AttentionBackward<Element>& call,
                  const AttentionExtent& extent, RowOf&& row_of) {
    PKG_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const int64_t row = row_of(i);
      const bool is_there = row < extent.rows;
      log_sum_exp[i] =
          is_there ? call.log_sum_exp[extent.statistics + row] : 0.0f;
      delta[i] = is_there ? call.delta[extent.statistics + row] : 0.0f;
    }
  }
};

// A row without any key has weights of zero, not exp(-inf + inf).
__device__ __forceinline__ float attention_weight(float score,
                                                  float log_sum_exp) {
  const FastExponential exponential;
  return score == -INFINITY ? 0.0f : exponential(score - log_sum_exp);
}

// The gradient of a score, from that of its weight after dropout. A weight of
// zero passes nothing on, whatever its value holds.
__device__ __forceinline__ float attention_grad_score(float weight,
                                                      float grad_weight,
                                                      float delta) {
  return weight == 0.0f ? 0.0f : weight * (grad_weight - delta);
}

// Replaces the gradients of the weights by those of the scores.
template <class Scores>
__device__ __forceinline__ void differentiate(
    const Scores& scores, Scores& gradients,
    const QueryStatistics<Scores::kThreadRows>& queries) {
  PKG_UNROLL
  for (int i = 0; i < Scores::kThreadRows; ++i) {
    PKG_UNROLL
    for (int j = 0; j < Scores::kThreadColumns; ++j) {
      const float weight =
          attention_weight(scores.values[i][j], queries.log_sum_exp[i]);
      gradients.values[i][j] = attention_grad_score(
          weight, gradients.values[i][j], queries.delta[i]);
    }
  }
}

// The gradients of capped scores become those of the scores before their cap,
// whose products are given.
template <class Attention, class Scores>
__device__ __forceinline__ void multiply_by_cap_slopes(
    const Attention& attention, Scores& gradients, const Scores& products) {
  PKG_UNROLL
  for (int i = 0; i < Scores::kThreadRows; ++i) {
    PKG_UNROLL
    for (int j = 0; j < Scores::kThreadColumns; ++j) {
      gradients.values[i][j] *= attention.cap_slope(products.values[i][j]);
    }
  }
}

}  // namespace pkg::cuda
