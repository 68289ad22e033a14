// One call of attention as the host describes it to the kernels, forward and
// backward: lengths, operands, and which keys a query sees.
#pragma once

#include <cstdint>

#include "attention_key_limits.h"
#include "cuda/device/batch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/gemm/panel.cuh"
#include "host/philox.h"

namespace pkg::cuda {

// The tile of queries by keys of which a block holds the scores: square, since
// the backward pass takes it from both sides. (AttentionGrid's may be wider.)
constexpr int kAttentionTile = 64;

// The queries, or keys, that a block of single warps with tensor cores owns,
// and those of one that lacks shared memory for as many wide heads.
constexpr int kMmaLines = 128;
constexpr int kFewMmaLines = 64;

// A batch of matrices, of any strides.
template <class Element>
struct MatrixBatch {
  const Element* data;
  BatchStrides batch_strides;
  int64_t row_stride;
  int64_t column_stride;

  // Its rows from `first_row` on as the operand of a product whose outer
  // dimension is the rows and whose summed dimension is the columns.
  __device__ __forceinline__ PanelSource<Element> by_row(
      const BatchSizes& batch, int64_t index, int64_t first_row, int64_t rows,
      int64_t columns) const {
    return {row(batch, index, first_row), rows, columns, row_stride,
            column_stride};
  }
  __device__ __forceinline__ PanelSource<Element> by_column(
      const BatchSizes& batch, int64_t index, int64_t first_row, int64_t rows,
      int64_t columns) const {
    return {row(batch, index, first_row), columns, rows, column_stride,
            row_stride};
  }
  __device__ __forceinline__ const Element* row(const BatchSizes& batch,
                                                int64_t index,
                                                int64_t row) const {
    return data + batch_offset(batch, batch_strides, index) + row * row_stride;
  }
};

// A batch of matrices that is written; the columns are neighbours.
template <class Element>
struct ResultBatch {
  Element* data;
  BatchStrides batch_strides;
  int64_t row_stride;

  __device__ __forceinline__ Element* row(const BatchSizes& batch,
                                          int64_t index, int64_t row) const {
    return data + batch_offset(batch, batch_strides, index) + row * row_stride;
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

  bool has_numbers() const {
    return type == MaskType::element || type == MaskType::single;
  }
};

// ALiBi's slopes, one for each matrix of the batch.
struct AttentionSlopes {
  const void* data;  // null without
  bool is_single;    // float32, else of the queries' type
  BatchStrides batch_strides;
};

// What flash-attn has beyond PyTorch's attention.
struct AttentionVariant {
  AttentionSlopes slopes = {};
  int64_t window_left = -1;
  int64_t window_right = -1;
  double softcap = 0;  // 0 without
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

// Where the sequences of a packed batch begin, and behind the last of them its
// end: int32 or int64, of any stride.
struct SequenceOffsets {
  const void* data;  // null where every matrix of the batch is of one length
  bool is_wide;
  int64_t stride;

  __device__ __forceinline__ int64_t operator[](int64_t index) const {
    return is_wide ? static_cast<const int64_t*>(data)[index * stride]
                   : static_cast<const int32_t*>(data)[index * stride];
  }
};

struct SequenceRange {
  int64_t begin;
  int64_t count;
};

// Part `index` of `total` tokens, of at most `most` tokens; whatever the
// offsets are, it lies within them.
__device__ __forceinline__ SequenceRange
sequence_range(const SequenceOffsets& offsets, int64_t index, int64_t total,
               int64_t most) {
  const auto within = [](int64_t value, int64_t low, int64_t high) {
    return value < low ? low : value > high ? high : value;
  };
  const int64_t begin = within(offsets[index], 0, total);
  const int64_t end = within(offsets[index + 1], begin, total);
  return {begin, end - begin < most ? end - begin : most};
}

// A batch whose first dimension are sequences that follow one another in the
// rows of every operand.
struct PackedSequences {
  SequenceOffsets rows;
  SequenceOffsets columns;
  int64_t heads;  // matrices of the batch for each sequence
  int64_t total_rows;
  int64_t total_columns;
};

// How long the matrices of one index of the batch are, and where they begin.
struct AttentionExtent {
  int64_t rows;
  int64_t columns;
  int64_t first_row;
  int64_t first_column;
  KeyLimits limits;
  int64_t statistics;  // of what is kept for each row, the first one's place
};

// Lengths and operands of one call. Matrices of the batch are counted in row
// order over `batch`; grouped queries are a batch dimension along which key and
// value have stride 0.
template <class Element>
struct AttentionProblem {
  BatchSizes batch;
  int64_t batch_count;
  int64_t rows;       // queries; of packed sequences the most
  int64_t columns;    // keys, likewise
  int64_t head_size;  // of query and key
  int64_t value_size;
  MatrixBatch<Element> query;
  MatrixBatch<Element> key;
  MatrixBatch<Element> value;
  AttentionMask mask;
  AttentionDropout dropout;
  double scale;
  bool is_causal;  // of packed sequences aligned to the last key
  PackedSequences packed;
  AttentionVariant variant;

  __host__ __device__ bool is_packed() const {
    return packed.rows.data != nullptr;
  }

  // Of a scale below it there is no normal number of float32 in other units.
  static constexpr double kLeastPlainScale = 1e-30;

  // Whether a score is a product and a positive scale, where a key is seen, and
  // a weight nothing but the softmax of scores.
  __host__ __device__ bool is_plain() const {
    return scale >= kLeastPlainScale && mask.type == MaskType::none &&
           dropout.seed == nullptr && variant.slopes.data == nullptr &&
           variant.softcap == 0;
  }

  // Whether all tiles of queries, or of keys, are as much work.
  bool has_equal_tiles() const {
    return !is_packed() && !is_causal && variant.window_left < 0 &&
           variant.window_right < 0;
  }

  // Where the matrices are of one length, without the code for others.
  __device__ __forceinline__ AttentionExtent
  extent_of_one_length(int64_t index) const {
    return {rows, columns, 0, 0, limits_of_one_length(), index * rows};
  }

  __device__ __forceinline__ AttentionExtent extent(int64_t index) const {
    if (!is_packed()) {
      return extent_of_one_length(index);
    }
    const int64_t sequence = index / packed.heads;
    const SequenceRange row =
        sequence_range(packed.rows, sequence, packed.total_rows, rows);
    const SequenceRange column =
        sequence_range(packed.columns, sequence, packed.total_columns, columns);
    return {row.count,
            column.count,
            row.begin,
            column.begin,
            limits_of_sequence(row.count, column.count),
            index % packed.heads * packed.total_rows + row.begin};
  }

  // Of the longest matrices.
  KeyLimits longest_limits() const {
    return is_packed() ? limits_of_sequence(rows, columns)
                       : limits_of_one_length();
  }

  // Behind the last key that a row before `row_end` sees.
  __device__ __forceinline__ int64_t column_end(const AttentionExtent& extent,
                                                int64_t row_end) const {
    const int64_t seen = row_end + extent.limits.last;
    return seen < extent.columns ? seen : extent.columns;
  }

  // The first of the tiles of keys that the rows from `row` on see.
  __device__ __forceinline__ int64_t first_column(const AttentionExtent& extent,
                                                  int64_t row) const {
    const int64_t column = row + extent.limits.first;
    return column > 0 ? column / kAttentionTile * kAttentionTile : 0;
  }

  // The first of the tiles of rows that see a key from `column` on.
  __device__ __forceinline__ int64_t first_row(const AttentionExtent& extent,
                                               int64_t column) const {
    const int64_t row = column - extent.limits.last;
    return row > 0 ? row / kAttentionTile * kAttentionTile : 0;
  }

  // Behind the last row that sees a key before `column_end`.
  __device__ __forceinline__ int64_t row_end(const AttentionExtent& extent,
                                             int64_t column_end) const {
    const int64_t end = column_end - extent.limits.first;
    return end < extent.rows ? end : extent.rows;
  }

 private:
  __host__ __device__ KeyLimits limits_of_one_length() const {
    return attention_key_limits(rows, columns, is_causal, variant.window_left,
                                variant.window_right);
  }
  __host__ __device__ KeyLimits limits_of_sequence(int64_t own_rows,
                                                   int64_t own_columns) const {
    return attention_key_limits(own_rows, own_columns, false,
                                variant.window_left,
                                is_causal ? 0 : variant.window_right);
  }
};

}  // namespace pkg::cuda
