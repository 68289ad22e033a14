// One call of attention as the CPU kernels see it: typed operands, sizes, and
// the rules between a score and its softmax probability: what modifies it,
// mask, causality, window, dropout.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "cpu/attention/blocking.h"
#include "cpu/attention/dropout.h"
#include "cpu/attention/key_range.h"
#include "cpu/attention/mask.h"
#include "cpu/attention/number.h"
#include "cpu/attention/score_modifiers.h"
#include "cpu/gemm/packing.h"
#include "cpu/runtime/parallel.h"
#include "cpu/simd/simd.h"
#include "host/integer_math.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

// The matrices of one operand.
template <class T>
struct Matrices {
  const T* data;
  AttentionOperand layout;

  MatrixView<T> at(const AttentionShape& shape, int64_t batch) const {
    return {data + layout.offset(shape, batch), layout.row_stride,
            layout.column_stride};
  }
};

template <class T>
Matrices<T> matrices(const AttentionShape& shape, const TensorView& tensor,
                     int64_t group = 1) {
  return {static_cast<const T*>(tensor.const_data_ptr()),
          attention_operand(shape, tensor, group)};
}

// Contiguous matrices of every batch index, or of every key head.
inline AttentionOperand contiguous_operand(const AttentionShape& shape,
                                           int64_t group, int64_t rows,
                                           int64_t columns) {
  AttentionOperand operand{columns, 1, group, {}};
  int64_t stride = rows * columns;
  for (size_t d = shape.lead_dims; d-- > 0;) {
    operand.lead_strides[d] = stride;
    stride *= d + 1 == shape.lead_dims ? shape.lead_sizes[d] / group
                                       : shape.lead_sizes[d];
  }
  return operand;
}

// The accumulation length of a score, or of another product over a head. Where
// a head is too large for one accumulation, parts a sixth as long cost up to 5
// % and halve the gradients' error, which had been twice that of oneMKL, whose
// SIMD accumulators are many and so short.
template <class Input>
int64_t accumulation_length_of(const AttentionShape& shape) {
  constexpr bool kNotices = std::is_same_v<Input, simd::Compute<Input>>;
  return kNotices && std::max(shape.head_size, shape.value_size) >
                         kAccumulationLength
             ? std::min<int64_t>(kAccumulationLength, 32)
             : kAccumulationLength;
}

// A call, but for the operands that only one direction has.
template <class Input>
struct Problem {
  using Number = simd::Compute<Input>;

  AttentionShape shape;
  Matrices<Input> query;
  Matrices<Input> key;
  Matrices<Input> value;
  ScoreMask<Number> mask;
  Dropout<Number> dropout;
  ScoreModifiers<Number> modifiers;
  bool is_causal;  // of `limits` that is the last one, or a part of it
  int64_t threads;
  int64_t first_batch = 0;  // of dropout's counters
  int64_t accumulation_length = accumulation_length_of<Input>(shape);

  // Matrices of the batch that one key head serves follow one another.
  int64_t key_heads() const { return shape.batch() / shape.group; }

  // Of `count` keys from `column`, those that any of the rows from `row` sees
  // by its place.
  KeyRange keys_of_rows(int64_t row, int64_t rows, int64_t column,
                        int64_t count) const {
    return {
        std::clamp<int64_t>(row + shape.limits.first - column, 0, count),
        std::clamp<int64_t>(row + rows + shape.limits.last - column, 0, count)};
  }

  // Of `count` keys from `column`, those that all of the rows from `row` see by
  // their places.
  KeyRange keys_of_each_row(int64_t row, int64_t rows, int64_t column,
                            int64_t count) const {
    return {keys_of_rows(row + rows - 1, 1, column, count).begin,
            keys_of_rows(row, 1, column, count).end};
  }

  bool hides_keys() const { return mask || shape.limits.hide_keys(); }

  // Multiplies the scores of a strip of rows, `stride` elements apart, by
  // `scale`, applies all that holds between them and their probabilities, and
  // fills the rows up to a whole register with keys that do not exist.
  // `cap_slopes` is that of ScoreModifiers.
  void mask_strip(Number* scores, int64_t stride, Number scale, int64_t batch,
                  int64_t mask_offset, int64_t row, int64_t rows,
                  int64_t column, int64_t count,
                  Number* cap_slopes = nullptr) const {
    const int64_t end = round_up(count, simd::kLanes<Number>);
    if (modifiers) {
      modifiers.apply(scores, stride, scale, batch, row, column, rows, count,
                      cap_slopes);
      scale = Number{1};
    }
    if (mask) {
      mask.apply(scores, stride, scale, mask_offset, row, column, rows, count);
    }
    for (int64_t r = 0; r < rows; ++r) {
      Number* of_row = scores + r * stride;
      for (int64_t i = 0; !mask && i < count; i += simd::kLanes<Number>) {
        simd::store(of_row + i, simd::load(of_row + i) * scale);
      }
      const KeyRange seen = keys_of_rows(row + r, 1, column, count);
      for (int64_t i = 0; i < seen.begin; ++i) {
        of_row[i] -= kInfinity<Number>;
      }
      for (int64_t i = std::max(seen.begin, seen.end); i < count; ++i) {
        of_row[i] -= kInfinity<Number>;
      }
      std::fill(of_row + count, of_row + end, -kInfinity<Number>);
    }
  }

  // The same of one row that is scaled already.
  void mask_scores(Number* scores, int64_t batch, int64_t mask_offset,
                   int64_t row, int64_t column, int64_t count) const {
    mask_strip(scores, 0, Number{1}, batch, mask_offset, row, 1, column, count);
  }

  // Whether mask_strip hides keys of some row by its place.
  bool hides_keys_of(int64_t row, int64_t rows, int64_t column,
                     int64_t count) const {
    const KeyRange seen = keys_of_each_row(row, rows, column, count);
    return count % simd::kLanes<Number> != 0 || seen.begin > 0 ||
           seen.end < count;
  }

  // Whether mask_strip does more than to multiply.
  bool masks_strip(int64_t row, int64_t rows, int64_t column,
                   int64_t count) const {
    return mask || modifiers || hides_keys_of(row, rows, column, count);
  }

  void dropout_factors(Number* to, int64_t batch, int64_t row, int64_t column,
                       int64_t count) const {
    dropout.factors(to, first_batch + batch, row, column, count);
  }
};

// One, where another would cost more than it brings.
inline int64_t useful_threads(const AttentionShape& shape) {
  const int64_t scores = shape.batch() * shape.rows * shape.columns;
  return scores * (shape.head_size + shape.value_size) < kMultiplyAddGrain
             ? 1
             : num_threads();
}

template <class Input>
Problem<Input> make_problem(const AttentionShape& shape,
                            const TensorView& query, const TensorView& key,
                            const TensorView& value,
                            const std::optional<TensorView>& attn_mask,
                            const std::optional<TensorView>& dropout_seed,
                            double dropout_p, bool is_causal,
                            const std::optional<TensorView>& alibi_slopes) {
  using Number = simd::Compute<Input>;
  return {
      shape,
      matrices<Input>(shape, query),
      matrices<Input>(shape, key, shape.group),
      matrices<Input>(shape, value, shape.group),
      ScoreMask<Number>(shape, attn_mask),
      Dropout<Number>(dropout_seed, dropout_p),
      ScoreModifiers<Number>(
          shape, alibi_slopes ? alibi_slopes_of<Number>(
                                    shape, *alibi_slopes,
                                    alibi_slopes_operand(shape, *alibi_slopes))
                              : std::vector<Number>{}),
      is_causal,
      useful_threads(shape)};
}

}  // namespace pkg::cpu::attention
