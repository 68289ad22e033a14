// A packed batch of sequences as the CPU kernels of attention see it: the
// problem that each of them is.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cpu/attention/dropout.h"
#include "cpu/attention/mask.h"
#include "cpu/attention/problem.h"
#include "cpu/attention/varlen_schedule.h"
#include "cpu/simd/simd.h"
#include "scaled_dot_product_attention.h"
#include "scaled_dot_product_attention_varlen.h"

namespace pkg::cpu::attention {

// The tokens of one sequence in a tensor (tokens, heads, size), from `head` on.
inline AttentionOperand packed_operand(std::span<const int64_t> strides,
                                       int64_t group) {
  AttentionOperand operand{};
  operand.row_stride = strides[0];
  operand.column_stride = strides[2];
  operand.group = group;
  operand.lead_strides[0] = strides[1];
  return operand;
}

template <class T>
Matrices<T> packed_matrices(const TensorView& tensor, int64_t first_token,
                            int64_t first_head, int64_t group = 1) {
  const auto strides = strides_of(tensor);
  return {static_cast<const T*>(tensor.const_data_ptr()) +
              first_token * strides[0] + first_head * strides[1],
          packed_operand(strides, group)};
}

// Consecutive key heads of one sequence, with the query heads that share them.
struct PackedHeads {
  const PackedSequence& sequence;
  int64_t key_head;
  int64_t key_heads;
  int64_t threads;
};

struct PackedInputs {
  const PackedAttentionShape& shape;
  const TensorView& query;
  const TensorView& key;
  const TensorView& value;
  const std::optional<TensorView>& dropout_seed;
  const PackedAttentionOptions& options;
};

inline AttentionShape shape_of(const PackedAttentionShape& packed,
                               const PackedHeads& heads,
                               const PackedAttentionOptions& options) {
  AttentionShape shape{};
  shape.type = packed.type;
  shape.rows = heads.sequence.rows.count;
  shape.columns = heads.sequence.columns.count;
  shape.head_size = packed.head_size;
  shape.value_size = packed.value_size;
  shape.group = packed.group();
  shape.scale = packed.scale;
  shape.softcap = packed.softcap;
  shape.limits = options.limits(shape.rows, shape.columns);
  shape.lead_dims = 1;
  shape.lead_sizes[0] = heads.key_heads * packed.group();
  return shape;
}

// Of the query heads of one sequence from `head` on.
template <class Number>
std::vector<Number> packed_slopes(const AttentionShape& shape,
                                  const PackedAttentionOptions& options,
                                  const PackedSequence& sequence,
                                  int64_t head) {
  if (!options.extras.alibi_slopes) {
    return {};
  }
  const TensorView& slopes = *options.extras.alibi_slopes;
  const PackedSlopeStrides strides = packed_slope_strides(slopes);
  AttentionOperand layout{};
  layout.group = 1;
  layout.lead_strides[0] = strides.head;
  return alibi_slopes_of<Number>(
      shape, slopes, layout,
      sequence.index * strides.sequence + head * strides.head);
}

template <class Input>
Problem<Input> packed_problem(const PackedInputs& inputs,
                              const PackedHeads& heads) {
  using Number = simd::Compute<Input>;
  const PackedAttentionShape& packed = inputs.shape;
  const PackedSequence& sequence = heads.sequence;
  const int64_t group = packed.group();
  const AttentionShape shape = shape_of(packed, heads, inputs.options);
  Problem<Input> problem{
      shape,
      packed_matrices<Input>(inputs.query, sequence.rows.begin,
                             heads.key_head * group),
      packed_matrices<Input>(inputs.key, sequence.columns.begin, heads.key_head,
                             group),
      packed_matrices<Input>(inputs.value, sequence.columns.begin,
                             heads.key_head, group),
      ScoreMask<Number>(shape, std::nullopt),
      Dropout<Number>(inputs.dropout_seed, inputs.options.dropout_p),
      ScoreModifiers<Number>(
          shape, packed_slopes<Number>(shape, inputs.options, sequence,
                                       heads.key_head * group)),
      // The last row sees every key: alone it is none the worse without.
      inputs.options.causal && shape.rows > 1,
      heads.threads > 1 ? useful_threads(shape) : 1};
  problem.first_batch = sequence.index * packed.heads + heads.key_head * group;
  return problem;
}

}  // namespace pkg::cpu::attention
