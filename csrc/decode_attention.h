// Checks and shape arithmetic of attention against a cache of keys and values,
// for every device.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <optional>

#include "host/tensor.h"
#include "scaled_dot_product_attention.h"

namespace pkg {

// A cache (batch or pages, key heads, keys, size): strides in elements.
struct CacheStrides {
  int64_t batch;  // from one sequence, or page, to the next
  int64_t head;
  int64_t key;
  int64_t element;

  static CacheStrides of(const TensorView& cache) {
    const auto strides = strides_of(cache);
    return {strides[0], strides[1], strides[2], strides[3]};
  }
};

// Attention of `rows` queries of each of `batch` sequences, the last of its
// keys being the last query's own.
struct DecodeAttentionPlan {
  ScalarType type;
  int64_t batch;
  int64_t key_heads;
  int64_t group;  // query heads that share a key head
  int64_t rows;
  int64_t head_size;
  int64_t value_size;
  int64_t capacity;     // keys that a sequence may have at the most
  int64_t page_size;    // paged: keys of a page
  int64_t pages;        // paged: how many there are
  int64_t table_pages;  // paged: entries of the table for a sequence
  double scale;
  int64_t window_left;  // -1 for no limit
  double softcap;       // 0 where scores are not capped

  int64_t query_heads() const { return key_heads * group; }

  // How many of a sequence's `length` keys row `row` sees.
  int64_t seen(int64_t length, int64_t row) const {
    const int64_t keys = length - rows + row + 1;
    return keys < 0 ? 0 : keys;
  }

  // The first of these.
  int64_t first_seen(int64_t length, int64_t row) const {
    const int64_t own = length - rows + row;
    return window_left < 0 || own <= window_left ? 0 : own - window_left;
  }
};

namespace detail {

inline void check_cache(const char* op, const char* name,
                        const TensorView& query, const TensorView& cache,
                        const char* shape) {
  check_floating(op, name, cache);
  PKG_CHECK(sizes_of(cache).size() == 4, op, ": ", name, " has shape ",
            shape_text(cache), "; it must have shape ", shape);
  PKG_CHECK(dtype_of(cache) == dtype_of(query), op, ": query is ",
            dtype_name(dtype_of(query)), " but ", name, " is ",
            dtype_name(dtype_of(cache)), "; all must have the same dtype");
  check_same_device(op, "query", query, name, cache);
}

inline void check_indices(const char* op, const char* name,
                          const TensorView& query, const TensorView& tensor) {
  check_strided(op, name, tensor);
  const ScalarType type = dtype_of(tensor);
  PKG_CHECK(type == ScalarType::Int || type == ScalarType::Long, op, ": ", name,
            " is ", dtype_name(type), "; it must be torch.int32 or int64");
  check_same_device(op, "query", query, name, tensor);
}

inline void check_decode_operands(const char* op, const TensorView& query,
                                  const TensorView& key_cache,
                                  const TensorView& value_cache,
                                  const TensorView& cache_lengths,
                                  bool is_paged) {
  check_floating(op, "query", query);
  const auto q = sizes_of(query);
  PKG_CHECK(q.size() == 4, op, ": query has shape ", shape_text(query),
            "; it must have shape (batch, heads, length, head size)");
  const char* shape = is_paged ? "(pages, heads, page size, size)"
                               : "(batch, heads, keys, size)";
  check_cache(op, "key_cache", query, key_cache, shape);
  check_cache(op, "value_cache", query, value_cache, shape);
  check_indices(op, "cache_lengths", query, cache_lengths);
  const auto k = sizes_of(key_cache);
  const auto v = sizes_of(value_cache);
  PKG_CHECK(k[3] == q[3], op, ": query of shape ", shape_text(query),
            " and key_cache of shape ", shape_text(key_cache),
            " must have the same last dimension (head size)");
  PKG_CHECK(v[0] == k[0] && v[1] == k[1] && v[2] == k[2], op,
            ": key_cache of shape ", shape_text(key_cache),
            " and value_cache of shape ", shape_text(value_cache),
            " must have the same sizes in all dimensions but the last");
  PKG_CHECK(k[1] == 0 ? q[1] == 0 : q[1] % k[1] == 0, op, ": query has ", q[1],
            " heads, not a multiple of the ", k[1], " heads of the caches");
  const auto lengths = sizes_of(cache_lengths);
  PKG_CHECK(lengths.size() == 1 && lengths[0] == q[0], op,
            ": cache_lengths has shape ", shape_text(cache_lengths),
            "; for a query of shape ", shape_text(query), " it must be (", q[0],
            ",)");
}

inline void check_block_table(const char* op, const TensorView& query,
                              const TensorView& key_cache,
                              const TensorView& block_table) {
  check_indices(op, "block_table", query, block_table);
  const auto table = sizes_of(block_table);
  const int64_t batch = sizes_of(query)[0];
  PKG_CHECK(table.size() == 2 && table[0] == batch, op,
            ": block_table has shape ", shape_text(block_table),
            "; for a query of shape ", shape_text(query), " it must be (",
            batch, ", pages of a sequence)");
  PKG_CHECK(sizes_of(key_cache)[2] > 0, op, ": key_cache has shape ",
            shape_text(key_cache),
            "; with a block_table its pages must hold at least one key");
}

inline void check_decode_slopes(const char* op, const TensorView& query,
                                const TensorView& slopes) {
  check_alibi_type(op, query, slopes);
  const auto q = sizes_of(query);
  const auto sizes = sizes_of(slopes);
  PKG_CHECK((sizes.size() == 1 || (sizes.size() == 2 && sizes[0] == q[0])) &&
                sizes.back() == q[1],
            op, ": alibi_slopes has shape ", shape_text(slopes),
            "; it must be (", q[1], ",) or (", q[0], ", ", q[1],
            "), one for each head or for each sequence and head");
}

}  // namespace detail

inline DecodeAttentionPlan plan_decode_attention(
    const TensorView& query, const TensorView& key_cache,
    const TensorView& value_cache, const TensorView& cache_lengths,
    const std::optional<TensorView>& block_table, std::optional<double> scale,
    const AttentionExtras& extras) {
  constexpr const char* kOp = "decode_attention";
  detail::check_decode_operands(kOp, query, key_cache, value_cache,
                                cache_lengths, block_table.has_value());
  const auto q = sizes_of(query);
  const auto k = sizes_of(key_cache);
  detail::check_attention_extras(kOp, extras);
  if (extras.alibi_slopes) {
    detail::check_decode_slopes(kOp, query, *extras.alibi_slopes);
  }
  DecodeAttentionPlan plan = {};
  plan.window_left = extras.window_left;
  plan.softcap = extras.softcap;
  plan.type = dtype_of(query);
  plan.batch = q[0];
  plan.key_heads = k[1];
  plan.group = k[1] == 0 ? 1 : q[1] / k[1];
  plan.rows = q[2];
  plan.head_size = q[3];
  plan.value_size = sizes_of(value_cache)[3];
  plan.scale = scale.value_or(
      q[3] == 0 ? 1.0 : 1.0 / std::sqrt(static_cast<double>(q[3])));
  if (block_table) {
    detail::check_block_table(kOp, query, key_cache, *block_table);
    plan.page_size = k[2];
    plan.pages = k[0];
    plan.table_pages = sizes_of(*block_table)[1];
    plan.capacity = plan.table_pages * plan.page_size;
  } else {
    PKG_CHECK(k[0] >= q[0], kOp, ": key_cache of shape ", shape_text(key_cache),
              " holds ", k[0], " sequences, fewer than the ", q[0],
              " of query");
    plan.capacity = k[2];
  }
  return plan;
}

// Slopes (heads) or (batch, heads): strides in elements.
struct DecodeSlopeStrides {
  int64_t sequence;
  int64_t head;
};

inline DecodeSlopeStrides decode_slope_strides(const TensorView& slopes) {
  const auto strides = strides_of(slopes);
  return {strides.size() == 2 ? strides[0] : 0, strides.back()};
}

inline void check_cache_length(const DecodeAttentionPlan& plan, int64_t b,
                               int64_t length) {
  PKG_CHECK(length >= 0 && length <= plan.capacity,
            "decode_attention: cache_lengths[", b, "] is ", length,
            "; it must lie between 0 and ", plan.capacity,
            ", the keys that there is room for");
}

inline void check_page(const DecodeAttentionPlan& plan, int64_t b,
                       int64_t index, int64_t page) {
  PKG_CHECK(page >= 0 && page < plan.pages, "decode_attention: block_table[", b,
            ", ", index, "] is ", page, "; it must lie between 0 and ",
            plan.pages - 1, ", since there are ", plan.pages, " pages");
}

// The output (batch, query heads, rows, value size), laid out as that of
// scaled_dot_product_attention is.
inline Tensor allocate_decode_output(const DecodeAttentionPlan& plan,
                                     const TensorView& query) {
  AttentionShape shape = {};
  shape.type = plan.type;
  shape.rows = plan.rows;
  shape.value_size = plan.value_size;
  shape.lead_dims = 2;
  shape.lead_sizes[0] = plan.batch;
  shape.lead_sizes[1] = plan.query_heads();
  return allocate_attention_output(shape, query);
}

}  // namespace pkg
