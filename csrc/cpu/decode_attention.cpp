// decode_attention: a few queries of each sequence against its cache of keys
// and values, contiguous or in pages, by cpu/attention/decode.h.
//
// A row sees the keys up to its own. Those that all rows of a sequence see go
// through the blocks for all rows together; of the last few, each row walks its
// own alone, so that what it does not see is not read on its behalf, be it NaN.
#include "decode_attention.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cpu/attention/blocking.h"
#include "cpu/attention/decode.h"
#include "cpu/attention/decode_elements.h"
#include "cpu/attention/decode_rows.h"
#include "cpu/attention/forward_outputs.h"
#include "cpu/attention/number.h"
#include "cpu/attention/score_modifiers.h"
#include "cpu/attention/softmax_state.h"
#include "cpu/pointwise/pointwise.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/simd.h"
#include "host/namespace.h"

namespace pkg::cpu {
namespace {

using namespace attention;

// int32 or int64 by the same name.
class Indices {
 public:
  explicit Indices(const TensorView& tensor)
      : data_(tensor.const_data_ptr()),
        strides_(strides_of(tensor)),
        is_wide_(dtype_of(tensor) == ScalarType::Long) {}

  int64_t at(int64_t i) const { return element(i * strides_[0]); }
  int64_t at(int64_t i, int64_t j) const {
    return element(i * strides_[0] + j * strides_[1]);
  }

 private:
  int64_t element(int64_t offset) const {
    return is_wide_ ? static_cast<const int64_t*>(data_)[offset]
                    : static_cast<const int32_t*>(data_)[offset];
  }

  const void* data_;
  std::span<const int64_t> strides_;
  bool is_wide_;
};

template <class Input>
struct Cache {
  const Input* data;
  CacheStrides strides;

  explicit Cache(const TensorView& tensor)
      : data(static_cast<const Input*>(tensor.const_data_ptr())),
        strides(CacheStrides::of(tensor)) {}

  bool reads_in_place(int64_t size) const {
    return strides.element == 1 || size <= 1;
  }
  // Whether as much as a key lies between two of them, other heads' mostly.
  bool is_scattered(int64_t size) const { return strides.key >= 2 * size; }
};

// Where the keys and values of one head of one sequence lie. Elements that are
// not contiguous are copied, block by block.
template <class Input>
class Place {
 public:
  Place(const DecodeAttentionPlan& plan, const Cache<Input>& keys,
        const Cache<Input>& values, const Indices* table, int64_t sequence,
        int64_t length, int64_t head)
      : plan_(plan),
        keys_(keys),
        values_(values),
        table_(table),
        sequence_(sequence),
        length_(length),
        head_(head),
        copies_keys_(!keys.reads_in_place(plan.head_size)),
        copies_values_(!values.reads_in_place(plan.value_size)) {
    if (copies_keys_ || copies_values_) {
      copies_ = Workspace::of_this_thread<Slot::CacheCopies>().request<Input>(
          2 * kDecodeKeys * (plan.head_size + plan.value_size));
    }
  }

  int64_t end() const { return length_; }

  void find(int64_t column, KeyBlock<Input>& block) {
    if (table_ == nullptr) {
      set(block.keys, block.count, keys_, sequence_, column);
      set(block.values, block.count, values_, sequence_, column);
      return;
    }
    if (column != next_column_) {
      page_ = column / plan_.page_size;
      on_page_ = column % plan_.page_size;
    }
    next_column_ = column + block.count;
    for (int64_t i = 0; i < block.count;) {
      const int64_t run = std::min(block.count - i, plan_.page_size - on_page_);
      const int64_t page = table_->at(sequence_, page_);
      set(block.keys + i, run, keys_, page, on_page_);
      set(block.values + i, run, values_, page, on_page_);
      i += run;
      on_page_ += run;
      if (on_page_ == plan_.page_size) {
        on_page_ = 0;
        ++page_;
      }
    }
  }

  void copy(KeyBlock<Input>& block) {
    if (copies_ != nullptr) {
      // One block is in use while the next one is placed.
      is_second_ = !is_second_;
      Input* copies = copies_ + (is_second_ ? kDecodeKeys : 0) *
                                    (plan_.head_size + plan_.value_size);
      copy(block.keys, block.count, keys_, plan_.head_size, copies);
      copy(block.values, block.count, values_, plan_.value_size,
           copies + kDecodeKeys * plan_.head_size);
    }
  }

 private:
  void set(const Input** to, int64_t count, const Cache<Input>& cache,
           int64_t batch, int64_t first) const {
    const CacheStrides& strides = cache.strides;
    const Input* from = cache.data + batch * strides.batch +
                        head_ * strides.head + first * strides.key;
    for (int64_t i = 0; i < count; ++i) {
      to[i] = from + i * strides.key;
    }
  }

  static void copy(const Input** rows, int64_t count, const Cache<Input>& cache,
                   int64_t size, Input* to) {
    if (cache.reads_in_place(size)) {
      return;
    }
    for (int64_t i = 0; i < count; ++i, to += size) {
      for (int64_t e = 0; e < size; ++e) {
        to[e] = rows[i][e * cache.strides.element];
      }
      rows[i] = to;
    }
  }

  const DecodeAttentionPlan& plan_;
  const Cache<Input>& keys_;
  const Cache<Input>& values_;
  const Indices* table_;
  int64_t sequence_;
  int64_t length_;
  int64_t head_;
  // Where the next block begins, if it follows: no division is needed then.
  int64_t next_column_ = -1;
  int64_t page_ = 0;
  int64_t on_page_ = 0;
  bool copies_keys_;
  bool copies_values_;
  Input* copies_ = nullptr;
  bool is_second_ = false;
};

// All that a row must not see is left out of its range. own_key(i) is the place
// of row i's own key, slope(i) that of its head.
template <class Number, class OwnKey, class Slope>
struct Rules {
  const ScoreModifiers<Number>& modifiers;
  bool has_slopes;
  OwnKey own_key;
  Slope slope;

  void mask(int64_t i, Number* scores, int64_t column, int64_t count) const {
    if (has_slopes || modifiers) {
      modifiers.apply_to_row(scores, Number{1}, slope(i), own_key(i) - column,
                             count);
    }
    std::fill(scores + count, scores + round_up(count, simd::kLanes<Number>),
              -kInfinity<Number>);
  }
  void drop(int64_t, Number*, int64_t, int64_t) const {}
};

// A call as decode() wants it: its heads are the key heads of all sequences.
template <class Input>
class CacheDecoding {
 public:
  using Number = simd::Compute<Input>;

  CacheDecoding(const DecodeAttentionPlan& plan, const TensorView& query,
                const TensorView& key_cache, const TensorView& value_cache,
                const Indices& lengths, const Indices* table,
                const std::optional<TensorView>& alibi_slopes,
                const Tensor& output)
      : plan_(plan),
        query_(query),
        keys_(key_cache),
        values_(value_cache),
        lengths_(lengths),
        table_(table),
        is_scattered_(table != nullptr || keys_.is_scattered(plan.head_size) ||
                      values_.is_scattered(plan.value_size)),
        modifiers_(shape_of(plan), {}),
        slopes_(slopes_of(plan, alibi_slopes)),
        output_(static_cast<Input*>(output.mutable_data_ptr())),
        output_strides_(CacheStrides::of(output)) {}

  int64_t heads() const { return plan_.batch * plan_.key_heads; }
  int64_t rows() const { return plan_.group * plan_.rows; }
  int64_t head_size() const { return plan_.head_size; }
  int64_t value_size() const { return plan_.value_size; }
  double scale() const { return plan_.scale; }
  int64_t columns(int64_t head) const {
    const int64_t length = lengths_.at(sequence_of(head));
    return length - first_column(length);
  }

  // One, where another would cost more than it brings.
  int64_t threads() const {
    int64_t keys = 0;
    for (int64_t b = 0; b < plan_.batch; ++b) {
      keys += lengths_.at(b) - first_column(lengths_.at(b));
    }
    const int64_t scores = keys * plan_.query_heads() * plan_.rows;
    return scores * (plan_.head_size + plan_.value_size) < kMultiplyAddGrain
               ? 1
               : num_threads();
  }

  void load(int64_t head, DecodeRows<Input>& rows) const {
    const CacheStrides& strides = query_.strides;
    for (int64_t i = 0; i < rows.rows(); ++i) {
      rows.set_query(i, query_.data + offset(strides, head, i),
                     strides.element);
    }
  }

  // Keys are counted from the first that any row sees. Those that all rows see
  // lie between what the window hides from the last row and what the first does
  // not see yet; where there are such, all rows walk them together.
  void run(int64_t head, DecodeRows<Input>& rows, int64_t column,
           int64_t column_end) const {
    const int64_t length = lengths_.at(sequence_of(head));
    column += first_column(length);
    column_end += first_column(length);
    const auto own_key = [&](int64_t i) {
      return length - plan_.rows + i % plan_.rows;
    };
    const auto slope = [&](int64_t i) {
      return slopes_.empty() ? Number{0}
                             : slopes_[static_cast<size_t>(head * plan_.group +
                                                           i / plan_.rows)];
    };
    const Rules<Number, decltype(own_key), decltype(slope)> rules{
        modifiers_, !slopes_.empty(), own_key, slope};
    const auto walk = [&](int64_t begin, int64_t end, int64_t from,
                          int64_t to) {
      Place<Input> place(plan_, keys_, values_, table_, sequence_of(head),
                         length, head % plan_.key_heads);
      if (is_scattered_) {
        rows.template run<true>(place, rules, from, to, begin, end);
      } else {
        rows.template run<false>(place, rules, from, to, begin, end);
      }
    };
    const int64_t common_begin =
        std::max(column, plan_.first_seen(length, plan_.rows - 1));
    const int64_t common =
        std::max(common_begin, std::min(column_end, plan_.seen(length, 0)));
    for (int64_t i = 0; plan_.window_left >= 0 && i < rows.rows(); ++i) {
      walk(i, i + 1, std::max(column, plan_.first_seen(length, i % plan_.rows)),
           std::min(
               {common_begin, column_end, plan_.seen(length, i % plan_.rows)}));
    }
    walk(0, rows.rows(), common_begin, std::min(common, column_end));
    for (int64_t i = 0; i < rows.rows(); ++i) {
      walk(i, i + 1, std::max(column, common),
           std::min(column_end, plan_.seen(length, i % plan_.rows)));
    }
  }

  void finish(int64_t head, int64_t i, const SoftmaxState<Number>& state,
              const Number* output_sums) const {
    store_output(state, output_sums, plan_.value_size,
                 output_ + offset(output_strides_, head, i));
  }

 private:
  static AttentionShape shape_of(const DecodeAttentionPlan& plan) {
    AttentionShape shape{};
    shape.softcap = plan.softcap;
    return shape;
  }

  // Of each query head of each sequence.
  static std::vector<Number> slopes_of(
      const DecodeAttentionPlan& plan,
      const std::optional<TensorView>& slopes) {
    if (!slopes) {
      return {};
    }
    AttentionShape shape{};
    shape.lead_dims = 2;
    shape.lead_sizes[0] = plan.batch;
    shape.lead_sizes[1] = plan.query_heads();
    const DecodeSlopeStrides strides = decode_slope_strides(*slopes);
    AttentionOperand layout{};
    layout.group = 1;
    layout.lead_strides[0] = strides.sequence;
    layout.lead_strides[1] = strides.head;
    return alibi_slopes_of<Number>(shape, *slopes, layout);
  }

  // Of a sequence of that many keys, the first that any row sees.
  int64_t first_column(int64_t length) const {
    return std::min(plan_.first_seen(length, 0), length);
  }
  int64_t sequence_of(int64_t head) const { return head / plan_.key_heads; }

  // Of row i of a key head in a tensor that is shaped as the query is.
  int64_t offset(const CacheStrides& strides, int64_t head, int64_t i) const {
    return sequence_of(head) * strides.batch +
           (head % plan_.key_heads * plan_.group + i / plan_.rows) *
               strides.head +
           i % plan_.rows * strides.key;
  }

  const DecodeAttentionPlan& plan_;
  Cache<Input> query_;
  Cache<Input> keys_;
  Cache<Input> values_;
  const Indices& lengths_;
  const Indices* table_;
  bool is_scattered_;
  ScoreModifiers<Number> modifiers_;
  std::vector<Number> slopes_;
  Input* output_;
  CacheStrides output_strides_;
};

void check_contents(const DecodeAttentionPlan& plan, const Indices& lengths,
                    const std::optional<Indices>& table) {
  for (int64_t b = 0; b < plan.batch; ++b) {
    const int64_t length = lengths.at(b);
    check_cache_length(plan, b, length);
    const int64_t first =
        table ? std::min(plan.first_seen(length, 0), length) / plan.page_size
              : 0;
    for (int64_t i = first; table && i * plan.page_size < length; ++i) {
      check_page(plan, b, i, table->at(b, i));
    }
  }
}

Tensor decode_attention(const TensorView& query, const TensorView& key_cache,
                        const TensorView& value_cache,
                        const TensorView& cache_lengths,
                        const std::optional<TensorView>& block_table,
                        std::optional<double> scale, int64_t window_left,
                        double softcap,
                        const std::optional<TensorView>& alibi_slopes) {
  const DecodeAttentionPlan plan = plan_decode_attention(
      query, key_cache, value_cache, cache_lengths, block_table, scale,
      {alibi_slopes, window_left, -1, softcap});
  const Indices lengths(cache_lengths);
  std::optional<Indices> table;
  if (block_table) {
    table.emplace(*block_table);
  }
  check_contents(plan, lengths, table);
  const Tensor output = allocate_decode_output(plan, query);
  if (plan.batch * plan.key_heads * plan.group * plan.rows == 0) {
    return output;
  }
  with_floating_type(plan.type, [&](auto example) {
    using Input = decltype(example);
    decode<Input>(CacheDecoding<Input>(plan, query, key_cache, value_cache,
                                       lengths, table ? &*table : nullptr,
                                       alibi_slopes, output));
  });
  return output;
}

PKG_IMPLEMENT(CPU, library) {
  library.impl<&decode_attention>("decode_attention");
}

}  // namespace
}  // namespace pkg::cpu
