// Checks and shape arithmetic of attention over a packed batch of sequences of
// different lengths, for every device.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "scaled_dot_product_attention.h"

namespace pkg {

// The sequences follow one another in the first dimension of every operand.
struct PackedAttentionShape {
  ScalarType type;
  int64_t sequences;
  int64_t total_rows;     // queries of all sequences
  int64_t total_columns;  // keys of all sequences
  int64_t heads;          // of the query
  int64_t key_heads;      // of key and value
  int64_t head_size;
  int64_t value_size;
  int64_t max_rows;  // of a sequence that are computed, and so the keys
  int64_t max_columns;
  double scale;
  double softcap;  // 0 where scores are not capped

  // Query heads that share a key head. Only where there are heads at all.
  int64_t group() const { return heads / key_heads; }
  ScalarType accumulate_type() const {
    return type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  }
  std::array<int64_t, 3> output_sizes() const {
    return {total_rows, heads, value_size};
  }
  std::array<int64_t, 2> log_sum_exp_sizes() const {
    return {heads, total_rows};
  }
};

// The arguments of a call that say how it is to be computed.
struct PackedAttentionOptions {
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;
  double dropout_p;
  std::optional<double> softmax_scale;
  bool causal;
  AttentionExtras extras;

  // Of a sequence. Causality is that of a window whose right side is 0: aligned
  // to the last query and the last key.
  KeyLimits limits(int64_t rows, int64_t columns) const {
    return attention_key_limits(rows, columns, false, extras.window_left,
                                causal ? 0 : extras.window_right);
  }
};

// One side of a sequence: where its rows begin, and how many there are.
struct PackedRange {
  int64_t begin;
  int64_t count;
};

namespace detail {

inline constexpr const char* kVarlen = "scaled_dot_product_attention_varlen";

inline void check_packed_operand(const TensorView& query, const char* name,
                                 const TensorView& tensor) {
  check_floating(kVarlen, name, tensor);
  PKG_CHECK(sizes_of(tensor).size() == 3, kVarlen, ": ", name, " has shape ",
            shape_text(tensor),
            "; it must have three dimensions (tokens of all sequences, heads, "
            "head size)");
  PKG_CHECK(dtype_of(tensor) == dtype_of(query), kVarlen, ": query is ",
            dtype_name(dtype_of(query)), " but ", name, " is ",
            dtype_name(dtype_of(tensor)), "; all must have the same dtype");
  check_same_device(kVarlen, "query", query, name, tensor);
}

inline void check_packed_offsets(const TensorView& query, const char* name,
                                 const TensorView& offsets) {
  const ScalarType type = dtype_of(offsets);
  check_strided(kVarlen, name, offsets);
  PKG_CHECK(type == ScalarType::Int || type == ScalarType::Long, kVarlen, ": ",
            name, " is ", dtype_name(type),
            "; it must be torch.int32 or torch.int64");
  PKG_CHECK(sizes_of(offsets).size() == 1 && sizes_of(offsets)[0] >= 1, kVarlen,
            ": ", name, " has shape ", shape_text(offsets),
            "; it must have one dimension, of one more element than there are "
            "sequences");
  check_same_device(kVarlen, "query", query, name, offsets);
}

inline void check_packed_slopes(const TensorView& query,
                                const TensorView& cu_seqlens_q,
                                const TensorView& slopes) {
  check_alibi_type(kVarlen, query, slopes);
  const auto sizes = sizes_of(slopes);
  const int64_t heads = sizes_of(query)[1];
  const int64_t sequences = sizes_of(cu_seqlens_q)[0] - 1;
  PKG_CHECK(
      (sizes.size() == 1 || (sizes.size() == 2 && sizes[0] == sequences)) &&
          sizes.back() == heads,
      kVarlen, ": alibi_slopes has shape ", shape_text(slopes),
      "; it must be (", heads, ",) or (", sequences, ", ", heads,
      "), one for each head or for each sequence and head");
}

}  // namespace detail

inline PackedAttentionShape plan_packed_attention(
    const TensorView& query, const TensorView& key, const TensorView& value,
    const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k,
    const PackedAttentionOptions& options) {
  const char* op = detail::kVarlen;
  detail::check_packed_operand(query, "query", query);
  detail::check_packed_operand(query, "key", key);
  detail::check_packed_operand(query, "value", value);
  detail::check_packed_offsets(query, "cu_seqlens_q", cu_seqlens_q);
  detail::check_packed_offsets(query, "cu_seqlens_k", cu_seqlens_k);
  PKG_CHECK(sizes_of(cu_seqlens_q)[0] == sizes_of(cu_seqlens_k)[0], op,
            ": cu_seqlens_q has ", sizes_of(cu_seqlens_q)[0],
            " elements but cu_seqlens_k has ", sizes_of(cu_seqlens_k)[0],
            "; both must have one more than there are sequences");
  PKG_CHECK(options.max_seqlen_q >= 0 && options.max_seqlen_k >= 0, op,
            ": max_seqlen_q ", options.max_seqlen_q, " and max_seqlen_k ",
            options.max_seqlen_k, " must not be negative");
  PKG_CHECK(options.dropout_p >= 0.0 && options.dropout_p <= 1.0, op,
            ": dropout_p is ", options.dropout_p,
            "; a probability lies between 0 and 1");

  detail::check_attention_extras(op, options.extras);
  if (options.extras.alibi_slopes) {
    detail::check_packed_slopes(query, cu_seqlens_q,
                                *options.extras.alibi_slopes);
  }

  const auto q = sizes_of(query);
  const auto k = sizes_of(key);
  const auto v = sizes_of(value);
  PKG_CHECK(k[2] == q[2], op, ": query of shape ", shape_text(query),
            " and key of shape ", shape_text(key),
            " must have the same last dimension (head size)");
  PKG_CHECK(v[0] == k[0] && v[1] == k[1], op, ": key of shape ",
            shape_text(key), " and value of shape ", shape_text(value),
            " must have the same tokens and heads, dimensions 0 and 1");
  PKG_CHECK(detail::is_multiple(q[1], k[1]), op, ": query has ", q[1],
            " heads, not a multiple of the ", k[1], " heads of key and value");
  const double size = static_cast<double>(std::max<int64_t>(q[2], 1));
  return {dtype_of(query),
          sizes_of(cu_seqlens_q)[0] - 1,
          q[0],
          k[0],
          q[1],
          k[1],
          q[2],
          v[2],
          options.max_seqlen_q,
          options.max_seqlen_k,
          options.softmax_scale.value_or(1.0 / std::sqrt(size)),
          options.extras.softcap};
}

// The sequences that offsets in memory of the host describe. `operand` is what
// they divide, of `total` tokens. Tokens in front of the first and behind the
// last belong to none, and no more do those of a sequence beyond its first
// `most`: a GPU, whose host does not wait for the offsets, could not refuse
// them.
inline std::vector<PackedRange> read_packed_ranges(const TensorView& offsets,
                                                   const char* name,
                                                   const char* operand,
                                                   int64_t total,
                                                   int64_t most) {
  const char* op = detail::kVarlen;
  const void* data = offsets.const_data_ptr();
  const int64_t stride = strides_of(offsets)[0];
  const auto at = [&](int64_t index) -> int64_t {
    return dtype_of(offsets) == ScalarType::Int
               ? static_cast<const int32_t*>(data)[index * stride]
               : static_cast<const int64_t*>(data)[index * stride];
  };
  const int64_t sequences = sizes_of(offsets)[0] - 1;
  PKG_CHECK(at(0) >= 0, op, ": ", name, " begins with ", at(0),
            "; no sequence begins in front of token 0");
  std::vector<PackedRange> ranges;
  ranges.reserve(static_cast<size_t>(sequences));
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t count = at(i + 1) - at(i);
    PKG_CHECK(count >= 0, op, ": ", name, " decreases from ", at(i), " to ",
              at(i + 1), " at element ", i + 1);
    ranges.push_back({at(i), std::min(count, most)});
  }
  PKG_CHECK(at(sequences) <= total, op, ": ", name, " ends with ",
            at(sequences), " but ", operand, " has ", total, " tokens");
  return ranges;
}

inline std::vector<PackedRange> read_packed_rows(
    const PackedAttentionShape& shape, const TensorView& cu_seqlens_q) {
  return read_packed_ranges(cu_seqlens_q, "cu_seqlens_q", "query",
                            shape.total_rows, shape.max_rows);
}

inline std::vector<PackedRange> read_packed_columns(
    const PackedAttentionShape& shape, const TensorView& cu_seqlens_k) {
  return read_packed_ranges(cu_seqlens_k, "cu_seqlens_k", "key",
                            shape.total_columns, shape.max_columns);
}

// Slopes (heads) or (sequences, heads): strides in elements.
struct PackedSlopeStrides {
  int64_t sequence;
  int64_t head;
};

inline PackedSlopeStrides packed_slope_strides(const TensorView& slopes) {
  const auto strides = strides_of(slopes);
  return {strides.size() == 2 ? strides[0] : 0, strides.back()};
}

inline void check_packed_dropout_seed(const TensorView& query,
                                      const std::optional<TensorView>& seed,
                                      double dropout_p) {
  detail::check_dropout_seed(detail::kVarlen, query, seed, dropout_p);
}

// As allocate_output_residual.
inline Tensor allocate_packed_residual(const PackedAttentionShape& shape,
                                       const TensorView& query,
                                       bool keeps_residual) {
  const DeviceId device = device_of(query);
  return keeps_residual && is_half_precision(shape.type)
             ? empty_contiguous(shape.output_sizes(), shape.type, device)
             : empty_contiguous(std::array<int64_t, 1>{0}, shape.type, device);
}

// What the backward pass gets from the forward pass besides its inputs. The
// residual of the output may be empty.
inline void check_packed_attention_backward(const PackedAttentionShape& shape,
                                            const TensorView& query,
                                            const TensorView& grad_output,
                                            const TensorView& output,
                                            const TensorView& log_sum_exp,
                                            const TensorView& output_residual) {
  const char* op = "scaled_dot_product_attention_varlen_backward";
  const auto check = [&](const char* name, const TensorView& tensor,
                         std::span<const int64_t> sizes, ScalarType type) {
    check_strided(op, name, tensor);
    check_same_device(op, "query", query, name, tensor);
    PKG_CHECK(dtype_of(tensor) == type, op, ": ", name, " is ",
              dtype_name(dtype_of(tensor)), "; it must be ", dtype_name(type));
    PKG_CHECK(std::ranges::equal(sizes_of(tensor), sizes), op, ": ", name,
              " has shape ", shape_text(tensor), "; it must be ",
              shape_text(sizes));
  };
  check("grad_output", grad_output, shape.output_sizes(), shape.type);
  check("output", output, shape.output_sizes(), shape.type);
  check("log_sum_exp", log_sum_exp, shape.log_sum_exp_sizes(),
        shape.accumulate_type());
  check_same_device(op, "query", query, "output_residual", output_residual);
  if (has_elements(output_residual)) {
    check("output_residual", output_residual, shape.output_sizes(), shape.type);
  }
}

}  // namespace pkg
