// What the forward and backward kernels of attention share: the problem as the
// host describes it, and the score of a query against a key.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../philox.h"
#include "batch.cuh"
#include "device.cuh"
#include "numeric.cuh"
#include "panel.cuh"

namespace pkg::cuda {

// The tile of queries by keys of which a block holds the scores: square, since
// the backward pass takes it from both sides.
constexpr int kAttentionTile = 64;

// Steps of a panel. In float32 two panels of each operand and one tile of
// weights take 43 KiB of shared memory; float64 fits the 48 KiB that a block
// has without asking by taking a quarter of the steps.
template <class Element>
constexpr int kAttentionDepth = std::is_same_v<Element, double> ? 4 : 16;

// A batch of matrices, of any strides.
template <class Element>
struct MatrixBatch {
  const Element* data;
  BatchStrides batch_strides;
  int64_t row_stride;
  int64_t column_stride;

  // The matrix as the operand of a product whose outer dimension is its rows
  // and whose summed dimension is its columns.
  __device__ __forceinline__ PanelSource<Element> by_row(
      const BatchSizes& batch, int64_t index, int64_t rows,
      int64_t columns) const {
    return {data + batch_offset(batch, batch_strides, index), rows, columns,
            row_stride, column_stride};
  }
  __device__ __forceinline__ PanelSource<Element> by_column(
      const BatchSizes& batch, int64_t index, int64_t rows,
      int64_t columns) const {
    return {data + batch_offset(batch, batch_strides, index), columns, rows,
            column_stride, row_stride};
  }
};

enum class MaskType : int32_t {
  none,
  boolean,  // a byte, not 0 where the key takes part
  element,  // of the queries' type, added to the scaled score
  single,   // float32, added likewise
};

struct AttentionMask {
  const void* data;
  MaskType type;
  BatchStrides batch_strides;
  int64_t row_stride;
  int64_t column_stride;
};

struct AttentionDropout {
  const int64_t* seed;  // null without dropout
  uint64_t keep_threshold;
  double keep_scale;  // 1 / (1 - p), or 0 where everything is dropped
};

inline AttentionDropout attention_dropout(const int64_t* seed,
                                          double probability) {
  return {probability > 0 ? seed : nullptr, dropout_keep_threshold(probability),
          probability < 1 ? 1 / (1 - probability) : 0};
}

// Lengths and operands of one call. Matrices of the batch are counted in row
// order over `batch`; grouped queries are a batch dimension along which key and
// value have stride 0.
template <class Element>
struct AttentionProblem {
  BatchSizes batch;
  int64_t batch_count;
  int64_t rows;       // queries
  int64_t columns;    // keys
  int64_t head_size;  // of query and key
  int64_t value_size;
  MatrixBatch<Element> query;
  MatrixBatch<Element> key;
  MatrixBatch<Element> value;
  AttentionMask mask;
  AttentionDropout dropout;
  double scale;
  bool is_causal;  // key <= query, both counted from the first
};

// Turns products of queries and keys into scores and decides on dropout, for
// one matrix of the batch.
template <class Element>
class AttentionScores {
 public:
  using Number = Accumulator<Element>;

  __device__ __forceinline__
  AttentionScores(const AttentionProblem<Element>& problem, int64_t batch)
      : problem_(problem),
        batch_(batch),
        mask_offset_(
            batch_offset(problem.batch, problem.mask.batch_strides, batch)),
        seed_(problem.dropout.seed == nullptr ? 0 : *problem.dropout.seed) {}

  // Minus infinity where the key takes no part, which is not computed from the
  // product: keys that are masked out may hold NaN.
  __device__ __forceinline__ Number score(int64_t row, int64_t column,
                                          Number product) const {
    if (row >= problem_.rows || column >= problem_.columns ||
        (problem_.is_causal && column > row)) {
      return -Number(INFINITY);
    }
    const Number scaled = product * static_cast<Number>(problem_.scale);
    const int64_t offset = mask_offset_ + row * problem_.mask.row_stride +
                           column * problem_.mask.column_stride;
    switch (problem_.mask.type) {
      case MaskType::none:
        break;
      case MaskType::boolean:
        return static_cast<const uint8_t*>(problem_.mask.data)[offset] != 0
                   ? scaled
                   : -Number(INFINITY);
      case MaskType::element:
        return scaled + convert<Number>(static_cast<const Element*>(
                            problem_.mask.data)[offset]);
      case MaskType::single:
        return scaled + convert<Number>(static_cast<const float*>(
                            problem_.mask.data)[offset]);
    }
    return scaled;
  }

  // What dropout does to the weights of four neighbouring keys, from a multiple
  // of four on: 0 drops one, the others grow to keep the sum's expectation.
  __device__ __forceinline__ void dropout_factors(int64_t row, int64_t column,
                                                  Number (&factors)[4]) const {
    if (problem_.dropout.seed == nullptr) {
      factors[0] = factors[1] = factors[2] = factors[3] = 1;
      return;
    }
    const Number keep_scale = static_cast<Number>(problem_.dropout.keep_scale);
    const PhiloxCounter words = dropout_words(seed_, batch_, row, column / 4);
    PKG_UNROLL
    for (int i = 0; i < 4; ++i) {
      const bool keeps =
          dropout_keeps(words.words[i], problem_.dropout.keep_threshold);
      factors[i] = keeps ? keep_scale : Number(0);
    }
  }

 private:
  const AttentionProblem<Element>& problem_;
  int64_t batch_;
  int64_t mask_offset_;
  int64_t seed_;
};

}  // namespace pkg::cuda
