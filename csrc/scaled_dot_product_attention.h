// Checks and shape arithmetic of attention, for every device.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>

#include "attention_key_limits.h"
#include "host/tensor.h"

namespace pkg {

// What flash-attn has beyond PyTorch's attention.
struct AttentionExtras {
  std::optional<TensorView> alibi_slopes;
  int64_t window_left = -1;
  int64_t window_right = -1;
  double softcap = 0.0;
};

// Attention over `batch` pairs of a query matrix (rows x head_size) and a key
// matrix (columns x head_size) with a value matrix (columns x value_size). The
// leading dimensions of the inputs are broadcast and flattened, the last of
// them being the query's heads; a batch index is decoded with `lead_sizes`.
struct AttentionShape {
  ScalarType type;
  int64_t rows;        // L: length of the query
  int64_t columns;     // S: length of the key and value
  int64_t head_size;   // E: of query and key
  int64_t value_size;  // Ev: of value and output
  int64_t group;       // query heads that share a key head
  double scale;
  double softcap;  // 0 where scores are not capped
  KeyLimits limits;
  size_t lead_dims;
  std::array<int64_t, kMaxDims> lead_sizes;

  int64_t batch() const { return product({lead_sizes.data(), lead_dims}); }
  std::span<const int64_t> lead() const {
    return {lead_sizes.data(), lead_dims};
  }
};

// Where one operand's matrices lie: strides in elements, 0 where it is
// broadcast. `group` query heads share one matrix.
struct AttentionOperand {
  int64_t row_stride;
  int64_t column_stride;
  int64_t group;
  std::array<int64_t, kMaxDims> lead_strides;

  // Offset in elements of the matrix that batch index `b` uses.
  int64_t offset(const AttentionShape& shape, int64_t b) const {
    int64_t result = 0;
    for (size_t d = shape.lead_dims; d-- > 0;) {
      int64_t index = b % shape.lead_sizes[d];
      b /= shape.lead_sizes[d];
      if (d + 1 == shape.lead_dims) {
        index /= group;
      }
      result += index * lead_strides[d];
    }
    return result;
  }
};

namespace detail {

inline void check_attention_operand(const TensorView& query, const char* name,
                                    const TensorView& tensor) {
  const char* op = "scaled_dot_product_attention";
  check_floating(op, name, tensor);
  PKG_CHECK(sizes_of(tensor).size() >= 2, op, ": ", name, " has shape ",
            shape_text(tensor),
            "; it needs at least two dimensions (..., length, head size)");
  PKG_CHECK(sizes_of(tensor).size() <= kMaxDims, op, ": ", name,
            " has more than ", kMaxDims, " dimensions");
  PKG_CHECK(dtype_of(tensor) == dtype_of(query), op, ": query is ",
            dtype_name(dtype_of(query)), " but ", name, " is ",
            dtype_name(dtype_of(tensor)), "; all must have the same dtype");
  check_same_device(op, "query", query, name, tensor);
}

inline int64_t lead_size(const TensorView& tensor, size_t from_last) {
  const auto sizes = sizes_of(tensor);
  const size_t lead = sizes.size() - 2;
  return from_last < lead ? sizes[lead - 1 - from_last] : 1;
}

// Whether query heads fall evenly to key heads: none do to none, and to any.
inline bool is_multiple(int64_t query_heads, int64_t key_heads) {
  return key_heads > 0 ? query_heads % key_heads == 0 : query_heads == 0;
}

inline int64_t lead_stride(const TensorView& tensor, size_t from_last) {
  const size_t lead = sizes_of(tensor).size() - 2;
  return from_last < lead ? strides_of(tensor)[lead - 1 - from_last] : 0;
}

inline void check_attention_sizes(const TensorView& query,
                                  const TensorView& key,
                                  const TensorView& value) {
  const char* op = "scaled_dot_product_attention";
  const auto k = sizes_of(key);
  const auto v = sizes_of(value);
  PKG_CHECK(k.back() == sizes_of(query).back(), op, ": query of shape ",
            shape_text(query), " and key of shape ", shape_text(key),
            " must have the same last dimension (head size)");
  PKG_CHECK(v[v.size() - 2] == k[k.size() - 2], op, ": key of shape ",
            shape_text(key), " and value of shape ", shape_text(value),
            " must have the same length in dimension -2");
}

// Query heads that share a key head under enable_gqa.
inline int64_t attention_group(const TensorView& query, const TensorView& key,
                               const TensorView& value) {
  const char* op = "scaled_dot_product_attention";
  PKG_CHECK(sizes_of(query).size() >= 3 && sizes_of(key).size() >= 3 &&
                sizes_of(value).size() >= 3,
            op, ": enable_gqa needs a dimension of heads, but query has shape ",
            shape_text(query), ", key ", shape_text(key), " and value ",
            shape_text(value));
  const int64_t query_heads = lead_size(query, 0);
  const int64_t key_heads = lead_size(key, 0);
  PKG_CHECK(lead_size(value, 0) == key_heads, op, ": key has ", key_heads,
            " heads but value has ", lead_size(value, 0),
            "; with enable_gqa they must be equal");
  PKG_CHECK(is_multiple(query_heads, key_heads), op, ": query has ",
            query_heads, " heads, not a multiple of the ", key_heads,
            " heads of key and value");
  // Without query heads there are no matrices to make groups of.
  return query_heads > 0 ? query_heads / key_heads : 1;
}

// Sets the leading dimensions that the operands' broadcast to. Under enable_gqa
// the heads are the query's.
inline void broadcast_lead_sizes(AttentionShape& shape, const TensorView& query,
                                 const TensorView& key, const TensorView& value,
                                 bool enable_gqa) {
  const char* op = "scaled_dot_product_attention";
  shape.lead_dims = std::max({sizes_of(query).size(), sizes_of(key).size(),
                              sizes_of(value).size()}) -
                    2;
  for (size_t i = 0; i < shape.lead_dims; ++i) {
    int64_t size = lead_size(query, i);
    for (const TensorView* other : {&key, &value}) {
      const int64_t other_size =
          lead_size(enable_gqa && i == 0 ? query : *other, i);
      const bool may_share =
          i == 0 && !enable_gqa && other_size > 0 && size % other_size == 0;
      PKG_CHECK(
          size == other_size || size == 1 || other_size == 1, op,
          ": the leading dimensions of query ", shape_text(query), ", key ",
          shape_text(key), " and value ", shape_text(value),
          " do not broadcast",
          may_share ? "; pass enable_gqa=True where heads share keys" : "");
      size = size == 1 ? other_size : size;
    }
    shape.lead_sizes[shape.lead_dims - 1 - i] = size;
  }
}

inline void check_attention_mask(const AttentionShape& shape,
                                 const TensorView& query,
                                 const TensorView& attn_mask, bool is_causal) {
  const char* op = "scaled_dot_product_attention";
  check_strided(op, "attn_mask", attn_mask);
  const auto mask = sizes_of(attn_mask);
  const ScalarType mask_type = dtype_of(attn_mask);
  PKG_CHECK(!is_causal, op,
            ": attn_mask and is_causal=True exclude each other; put the "
            "causal mask into attn_mask");
  PKG_CHECK(
      mask_type == ScalarType::Bool || mask_type == shape.type ||
          (mask_type == ScalarType::Float && is_half_precision(shape.type)),
      op, ": attn_mask is ", dtype_name(mask_type),
      "; it must be torch.bool, query's dtype ", dtype_name(shape.type),
      " or, for half precision, torch.float32");
  check_same_device(op, "query", query, "attn_mask", attn_mask);
  bool fits = mask.size() <= shape.lead_dims + 2;
  for (size_t i = 0; fits && i < mask.size(); ++i) {
    const int64_t full = i == 0   ? shape.columns
                         : i == 1 ? shape.rows
                                  : shape.lead_sizes[shape.lead_dims + 1 - i];
    const int64_t size = mask[mask.size() - 1 - i];
    fits = size == 1 || size == full;
  }
  PKG_CHECK(fits, op, ": attn_mask of shape ", shape_text(attn_mask),
            " does not broadcast to the scores: leading dimensions ",
            shape_text(shape.lead()), ", ", shape.rows, " rows, ",
            shape.columns, " columns");
}

// Of any operator of attention.
inline void check_attention_extras(const char* op,
                                   const AttentionExtras& extras) {
  PKG_CHECK(extras.window_left >= -1, op, ": window_left is ",
            extras.window_left,
            "; it must be a number of keys, or -1 for no limit");
  PKG_CHECK(extras.window_right >= -1, op, ": window_right is ",
            extras.window_right,
            "; it must be a number of keys, or -1 for no limit");
  PKG_CHECK(extras.softcap >= 0.0 && std::isfinite(extras.softcap), op,
            ": softcap is ", extras.softcap,
            "; it must be positive, or 0 for no cap");
}

inline void check_alibi_type(const char* op, const TensorView& query,
                             const TensorView& slopes) {
  check_strided(op, "alibi_slopes", slopes);
  const ScalarType type = dtype_of(slopes);
  PKG_CHECK(type == ScalarType::Float || type == dtype_of(query), op,
            ": alibi_slopes is ", dtype_name(type),
            "; it must be torch.float32 or query's dtype ",
            dtype_name(dtype_of(query)));
  check_same_device(op, "query", query, "alibi_slopes", slopes);
}

inline void check_alibi_slopes(const AttentionShape& shape,
                               const TensorView& query,
                               const TensorView& slopes) {
  const char* op = "scaled_dot_product_attention";
  check_alibi_type(op, query, slopes);
  const auto sizes = sizes_of(slopes);
  bool fits = sizes.size() <= shape.lead_dims;
  for (size_t i = 0; fits && i < sizes.size(); ++i) {
    const int64_t size = sizes[sizes.size() - 1 - i];
    fits = size == 1 || size == shape.lead_sizes[shape.lead_dims - 1 - i];
  }
  PKG_CHECK(fits, op, ": alibi_slopes of shape ", shape_text(slopes),
            " does not broadcast to the leading dimensions ",
            shape_text(shape.lead()),
            "; it must be (heads,) or (batch, heads)");
}

}  // namespace detail

inline AttentionShape plan_attention(
    const TensorView& query, const TensorView& key, const TensorView& value,
    const std::optional<TensorView>& attn_mask, double dropout_p,
    bool is_causal, std::optional<double> scale, bool enable_gqa,
    const AttentionExtras& extras) {
  const char* op = "scaled_dot_product_attention";
  detail::check_attention_operand(query, "query", query);
  detail::check_attention_operand(query, "key", key);
  detail::check_attention_operand(query, "value", value);
  PKG_CHECK(dropout_p >= 0.0 && dropout_p <= 1.0, op, ": dropout_p is ",
            dropout_p, "; a probability lies between 0 and 1");
  detail::check_attention_extras(op, extras);
  detail::check_attention_sizes(query, key, value);

  AttentionShape shape;
  shape.type = dtype_of(query);
  shape.rows = sizes_of(query)[sizes_of(query).size() - 2];
  shape.head_size = sizes_of(query).back();
  shape.columns = sizes_of(key)[sizes_of(key).size() - 2];
  shape.value_size = sizes_of(value).back();
  shape.scale = scale.value_or(
      shape.head_size == 0
          ? 1.0
          : 1.0 / std::sqrt(static_cast<double>(shape.head_size)));
  shape.softcap = extras.softcap;
  shape.limits = attention_key_limits(shape.rows, shape.columns, is_causal,
                                      extras.window_left, extras.window_right);
  shape.group = enable_gqa ? detail::attention_group(query, key, value) : 1;
  detail::broadcast_lead_sizes(shape, query, key, value, enable_gqa);
  if (attn_mask) {
    detail::check_attention_mask(shape, query, *attn_mask, is_causal);
  }
  if (extras.alibi_slopes) {
    detail::check_alibi_slopes(shape, query, *extras.alibi_slopes);
  }
  return shape;
}

// `group` > 1 for key and value under enable_gqa.
inline AttentionOperand attention_operand(const AttentionShape& shape,
                                          const TensorView& tensor,
                                          int64_t group) {
  AttentionOperand operand;
  const auto strides = strides_of(tensor);
  operand.row_stride = strides[strides.size() - 2];
  operand.column_stride = strides.back();
  operand.group = group;
  for (size_t i = 0; i < shape.lead_dims; ++i) {
    operand.lead_strides[shape.lead_dims - 1 - i] =
        detail::lead_size(tensor, i) == 1 ? 0 : detail::lead_stride(tensor, i);
  }
  return operand;
}

// A mask may have fewer than two dimensions, and is broadcast in each.
inline AttentionOperand attention_mask_operand(const AttentionShape& shape,
                                               const TensorView& mask) {
  AttentionOperand operand;
  const auto sizes = sizes_of(mask);
  const auto strides = strides_of(mask);
  const auto stride = [&](size_t from_last) {
    return from_last < sizes.size() && sizes[sizes.size() - 1 - from_last] != 1
               ? strides[sizes.size() - 1 - from_last]
               : int64_t{0};
  };
  operand.column_stride = stride(0);
  operand.row_stride = stride(1);
  operand.group = 1;
  for (size_t i = 0; i < shape.lead_dims; ++i) {
    operand.lead_strides[shape.lead_dims - 1 - i] = stride(i + 2);
  }
  return operand;
}

// Slopes have the leading dimensions alone, and are broadcast in each.
inline AttentionOperand alibi_slopes_operand(const AttentionShape& shape,
                                             const TensorView& slopes) {
  AttentionOperand operand{};
  operand.group = 1;
  const auto sizes = sizes_of(slopes);
  const auto strides = strides_of(slopes);
  for (size_t i = 0; i < sizes.size(); ++i) {
    const size_t from = sizes.size() - 1 - i;
    operand.lead_strides[shape.lead_dims - 1 - i] =
        sizes[from] == 1 ? 0 : strides[from];
  }
  return operand;
}

namespace detail {

inline void check_seed(const char* op, const char* name,
                       const TensorView& seed) {
  check_strided(op, name, seed);
  PKG_CHECK(dtype_of(seed) == ScalarType::Long && product(sizes_of(seed)) == 1,
            op, ": ", name, " is ", dtype_name(dtype_of(seed)), " of shape ",
            shape_text(seed), "; it must be torch.int64 with one element");
}

// With dropout there must be a seed: one int64 on the query's device.
inline void check_dropout_seed(const char* op, const TensorView& query,
                               const std::optional<TensorView>& seed,
                               double dropout_p) {
  PKG_CHECK(seed || dropout_p == 0.0, op, ": dropout_p is ", dropout_p,
            " but there is no dropout_seed");
  if (seed) {
    check_seed(op, "dropout_seed", *seed);
    check_same_device(op, "query", query, "dropout_seed", *seed);
  }
}

}  // namespace detail

inline void check_dropout_seed(const TensorView& query,
                               const std::optional<TensorView>& seed,
                               double dropout_p) {
  detail::check_dropout_seed("scaled_dot_product_attention", query, seed,
                             dropout_p);
}

inline void check_dropout_mask(const TensorView& seed, int64_t batch,
                               int64_t rows, int64_t columns,
                               double dropout_p) {
  const char* op = "attention_dropout_mask";
  detail::check_seed(op, "seed", seed);
  PKG_CHECK(batch >= 0 && rows >= 0 && columns >= 0, op, ": batch ", batch,
            ", rows ", rows, " and columns ", columns, " must not be negative");
  PKG_CHECK(dropout_p >= 0.0 && dropout_p <= 1.0, op, ": dropout_p is ",
            dropout_p, "; a probability lies between 0 and 1");
}

// The type that sums over one call's inputs are held in.
inline ScalarType attention_accumulate_type(const AttentionShape& shape) {
  return shape.type == ScalarType::Double ? ScalarType::Double
                                          : ScalarType::Float;
}

// The output (..., L, Ev). Where the query is a transposed view of (..., L,
// heads, E), as most models have it, the output is one too, so that what a
// model does next, transposing it back and joining the heads, copies nothing.
// Of every device, since a tensor of the meta device may stand for one of any.
// The fake kernel in Python knows this rule.
inline Tensor allocate_attention_output(const AttentionShape& shape,
                                        const TensorView& query) {
  std::array<int64_t, kMaxDims> sizes = shape.lead_sizes;
  const size_t dims = shape.lead_dims + 2;
  sizes[dims - 2] = shape.rows;
  sizes[dims - 1] = shape.value_size;
  const auto q = sizes_of(query);
  const auto q_strides = strides_of(query);
  const DeviceId device = device_of(query);
  const bool transposed = dims >= 3 && q.size() == dims && q[dims - 3] > 1 &&
                          q[dims - 2] > 1 &&
                          q_strides[dims - 3] < q_strides[dims - 2];
  if (!transposed) {
    return empty_contiguous({sizes.data(), dims}, shape.type, device);
  }
  std::array<int64_t, kMaxDims> strides{};
  const auto at_least_one = [](int64_t size) { return size > 0 ? size : 1; };
  strides[dims - 1] = 1;
  strides[dims - 3] = at_least_one(shape.value_size);
  strides[dims - 2] = strides[dims - 3] * at_least_one(sizes[dims - 3]);
  int64_t stride = strides[dims - 2] * at_least_one(shape.rows);
  for (size_t i = dims - 3; i-- > 0;) {
    strides[i] = stride;
    stride *= at_least_one(sizes[i]);
  }
  return empty_strided({sizes.data(), dims}, {strides.data(), dims}, shape.type,
                       device);
}

// The log-sum-exp of the scores of each row (..., L), contiguous.
inline Tensor allocate_log_sum_exp(const AttentionShape& shape,
                                   const TensorView& query) {
  std::array<int64_t, kMaxDims> sizes = shape.lead_sizes;
  sizes[shape.lead_dims] = shape.rows;
  return empty_contiguous({sizes.data(), shape.lead_dims + 1},
                          attention_accumulate_type(shape), device_of(query));
}

// Whether an operand that may be left empty is there.
inline bool has_elements(const TensorView& tensor) {
  return product(sizes_of(tensor)) != 0;
}

// What rounding took off the output, in the output's type and layout. The
// backward pass sums the output times its gradient, of which little may be left
// against the other sums: of the rounded output, the error would be the largest
// of the gradients in half precision. Empty where it is not to be kept, or
// nothing is rounded.
inline Tensor allocate_output_residual(const AttentionShape& shape,
                                       const TensorView& query,
                                       bool keeps_residual) {
  return keeps_residual && is_half_precision(shape.type)
             ? allocate_attention_output(shape, query)
             : empty_contiguous(std::array<int64_t, 1>{0}, shape.type,
                                device_of(query));
}

// Memory for a tensor's gradient. Where there is no query, no matrix of scores
// has a part in it, and it is zero.
inline Tensor allocate_attention_gradient(const TensorView& tensor,
                                          bool is_zero) {
  Tensor gradient =
      empty_contiguous(sizes_of(tensor), dtype_of(tensor), device_of(tensor));
  return is_zero ? torch::stable::zero_(gradient) : gradient;
}

// What the backward pass gets from the forward pass besides its inputs. The
// residual of the output may be empty.
inline void check_attention_backward(
    const AttentionShape& shape, const TensorView& query,
    const TensorView& grad_output, const TensorView& output,
    const TensorView& log_sum_exp, const TensorView& output_residual,
    const std::optional<TensorView>& attn_mask, bool needs_mask_grad) {
  const char* op = "scaled_dot_product_attention_backward";
  std::array<int64_t, kMaxDims> sizes = shape.lead_sizes;
  sizes[shape.lead_dims] = shape.rows;
  sizes[shape.lead_dims + 1] = shape.value_size;
  const auto check = [&](const char* name, const TensorView& tensor,
                         size_t dims, ScalarType type) {
    check_strided(op, name, tensor);
    check_same_device(op, "query", query, name, tensor);
    PKG_CHECK(dtype_of(tensor) == type, op, ": ", name, " is ",
              dtype_name(dtype_of(tensor)), "; it must be ", dtype_name(type));
    const std::span<const int64_t> expected(sizes.data(), dims);
    PKG_CHECK(std::ranges::equal(sizes_of(tensor), expected), op, ": ", name,
              " has shape ", shape_text(tensor), "; it must be ",
              shape_text(expected));
  };
  check("grad_output", grad_output, shape.lead_dims + 2, shape.type);
  check("output", output, shape.lead_dims + 2, shape.type);
  check("log_sum_exp", log_sum_exp, shape.lead_dims + 1,
        attention_accumulate_type(shape));
  check_same_device(op, "query", query, "output_residual", output_residual);
  if (has_elements(output_residual)) {
    check("output_residual", output_residual, shape.lead_dims + 2, shape.type);
  }
  PKG_CHECK(
      !needs_mask_grad || (attn_mask && is_floating(dtype_of(*attn_mask))), op,
      ": needs_mask_grad is set, but attn_mask is ",
      attn_mask ? dtype_name(dtype_of(*attn_mask)) : "absent",
      "; only a mask of numbers has a gradient");
}

}  // namespace pkg
