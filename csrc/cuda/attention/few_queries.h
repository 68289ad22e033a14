// Attention of a few queries by the kernels of decode_attention: the kernels of
// the forward pass give a block 64 or 128 queries and all keys, so that one
// query of each head keeps few multiprocessors busy, and those with a hundredth
// of what they compute.
#pragma once

#include <optional>

#include "cuda/attention/attention_host.h"
#include "cuda/attention/decode_host.h"
#include "cuda/attention/problem.cuh"

namespace pkg::cuda {

// Which of the leading dimensions are sequences and which are heads, where no
// other has more than one matrix.
struct FewQueriesBatch {
  std::optional<size_t> sequences;
  std::optional<size_t> heads;
};

inline std::optional<FewQueriesBatch> few_queries_batch(
    const AttentionShape& shape) {
  FewQueriesBatch batch;
  for (size_t lead = shape.lead_dims; lead-- > 0;) {
    // Groups of query heads are of the last one, whatever its size.
    if (shape.lead_sizes[lead] == 1 && lead + 1 != shape.lead_dims) {
      continue;
    }
    if (!batch.heads) {
      batch.heads = lead;
    } else if (!batch.sequences) {
      batch.sequences = lead;
    } else {
      return std::nullopt;
    }
  }
  return batch;
}

// Strides (sequences, heads, rows, columns).
inline std::array<int64_t, 4> few_queries_strides(
    const FewQueriesBatch& batch, const AttentionOperand& operand) {
  return {batch.sequences ? operand.lead_strides[*batch.sequences] : 0,
          batch.heads ? operand.lead_strides[*batch.heads] : 0,
          operand.row_stride, operand.column_stride};
}

// Rows that share a key head and fit one product of the tensor cores.
constexpr int64_t kMostFewQueries = 16;

// What the limits let the queries see, as decode_attention knows it; false
// where it does not.
template <class Element>
bool takes_limits(const AttentionShape& shape, DecodeAttention<Element>& call) {
  const KeyLimits& limits = shape.limits;
  const int64_t own = shape.columns - shape.rows;  // key of the first query
  call.rows_see_all = limits.last >= shape.columns - 1;
  if (!call.rows_see_all && limits.last != own) {
    return false;
  }
  // A window is counted from a query's own key.
  if (limits.first > -KeyLimits::kUnlimited) {
    call.window_left = own - limits.first;
  }
  const bool knows_own_keys = !call.rows_see_all || shape.rows == 1;
  return knows_own_keys || call.window_left < 0;
}

// Query heads that share a key head.
inline int64_t few_queries_group(const AttentionShape& shape, int64_t heads,
                                 bool key_heads_are_one) {
  const bool shares =
      key_heads_are_one &&
      (shape.rows == 1 || heads * shape.rows <= kMostFewQueries);
  return shares ? heads : shape.group;
}

// The call as decode_attention's, where its kernels compute it, without
// operands and results.
template <class Element>
std::optional<DecodeAttention<Element>> few_queries_problem(
    const AttentionShape& shape, const FewQueriesBatch& batch,
    bool key_heads_are_one) {
  DecodeAttention<Element> call = {};
  const int64_t heads = batch.heads ? shape.lead_sizes[*batch.heads] : 1;
  call.batch = batch.sequences ? shape.lead_sizes[*batch.sequences] : 1;
  call.group = few_queries_group(shape, heads, key_heads_are_one);
  call.key_heads = heads / call.group;
  call.rows = shape.rows;
  call.head_size = shape.head_size;
  call.value_size = shape.value_size;
  call.capacity = shape.columns;
  call.scale = shape.scale;
  call.softcap = static_cast<Accumulator<Element>>(shape.softcap);
  const bool is_few = shape.rows == 1 || call.shared_rows() <= kMostFewQueries;
  if (!is_few || !takes_limits(shape, call)) {
    return std::nullopt;
  }
  return call;
}

// The same with operands and output, but without what else is kept for
// gradients; nothing where the kernels of the forward pass have to do it.
template <class Element>
std::optional<DecodeAttention<Element>> as_few_queries(
    const AttentionShape& shape, const Tensor& query, const Tensor& key,
    const Tensor& value, const std::optional<Tensor>& attn_mask,
    double dropout_p, const AttentionExtras& extras, const Tensor& output) {
  const bool is_empty = shape.batch() == 0 || shape.rows == 0 ||
                        shape.columns == 0 || shape.head_size == 0 ||
                        shape.value_size == 0;
  const std::optional<FewQueriesBatch> batch = few_queries_batch(shape);
  if (is_empty || !batch || dropout_p > 0.0 ||
      is_turned_off("PKG_CUDA_FEW_QUERIES")) {
    return std::nullopt;
  }
  const auto strides = [&](const AttentionOperand& operand) {
    return few_queries_strides(*batch, operand);
  };
  const auto keys = strides(attention_operand(shape, key, shape.group));
  const auto values = strides(attention_operand(shape, value, shape.group));
  auto call = few_queries_problem<Element>(
      shape, *batch, shape.group == 1 && keys[1] == 0 && values[1] == 0);
  // Their slopes are of the distance from a query's own key.
  if (!call || (extras.alibi_slopes && call->rows_see_all && shape.rows > 1)) {
    return std::nullopt;
  }
  const auto set = [](auto& operand, auto* data,
                      const std::array<int64_t, 4>& from) {
    operand.data = static_cast<decltype(operand.data)>(data);
    std::ranges::copy(from, operand.strides);
  };
  set(call->query, query.const_data_ptr(),
      strides(attention_operand(shape, query, 1)));
  set(call->key, key.const_data_ptr(), keys);
  set(call->value, value.const_data_ptr(), values);
  set(call->output, output.mutable_data_ptr(),
      strides(attention_operand(shape, output, 1)));
  if (attn_mask) {
    set(call->mask, attn_mask->const_data_ptr(),
        strides(attention_mask_operand(shape, *attn_mask)));
    call->mask.type = mask_type(shape, *attn_mask);
  }
  if (extras.alibi_slopes) {
    const auto from =
        strides(alibi_slopes_operand(shape, *extras.alibi_slopes));
    call->slopes = {extras.alibi_slopes->const_data_ptr(),
                    {from[0], from[1]},
                    dtype_of(*extras.alibi_slopes) == ScalarType::Float};
  }
  return call;
}

}  // namespace pkg::cuda
