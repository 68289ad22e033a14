// The forward pass for a few rows against many keys, by
// cpu/attention/decode.h.
//
// Rows of all the heads that one key head serves go together, so that the keys
// and values are read once for all of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/attention/blocking.h"
#include "cpu/attention/decode.h"
#include "cpu/attention/decode_elements.h"
#include "cpu/attention/decode_rows.h"
#include "cpu/attention/dropout.h"
#include "cpu/attention/forward_outputs.h"
#include "cpu/attention/key_range.h"
#include "cpu/attention/problem.h"
#include "cpu/attention/softmax_state.h"
#include "cpu/simd/simd.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

// Above this many rows packing the keys pays, and above fewer where the keys
// are few: Zen 4, 48 heads of 64, one thread, 2026-11-24, us by blocks and
// decoding, float32 (bfloat16):
//           1 row               4 rows             8 rows
//   64 keys  80 / 40 (57 / 50)   88 / 74 (59 / 80)  130 / 137 (85 / 156)
//   256     360 / 134 (325 / 113) 406 / 251 (238 / 232) 514 / 500 (361 / 473)
// Where a backward pass may follow, the blocked pass is kept while it costs
// little: it rounds each score as that will. Under causality few rows see few
// keys, and the blocked pass would pack them all.
inline constexpr int64_t kDecodeRows = 8;
template <class Input>
inline constexpr int64_t kDecodeRowsOfAnyColumns =
    std::is_same_v<Input, simd::Compute<Input>> ? 4 : 2;
inline constexpr int64_t kLeastDecodeColumns = 2 * kKeyBlock;

template <class Input>
bool decodes(const Problem<Input>& problem, bool has_backward) {
  const auto contiguous = [](const AttentionOperand& layout, int64_t size) {
    return layout.column_stride == 1 || size <= 1;
  };
  const bool has_many_columns =
      problem.shape.columns >= kLeastDecodeColumns && !problem.is_causal;
  const int64_t most_rows = has_many_columns ? kDecodeRows
                            : has_backward   ? 0
                                             : kDecodeRowsOfAnyColumns<Input>;
  return problem.shape.rows <= most_rows &&
         contiguous(problem.key.layout, problem.shape.head_size) &&
         contiguous(problem.value.layout, problem.shape.value_size);
}

// A call of attention as decode() wants it.
template <class Input>
class AttentionDecoding {
 public:
  using Number = simd::Compute<Input>;

  AttentionDecoding(const Problem<Input>& problem,
                    const ForwardOutputs<Input>& outputs)
      : problem_(problem), outputs_(outputs), seen_(keys_seen(problem)) {}

  int64_t heads() const { return problem_.key_heads(); }
  int64_t rows() const { return problem_.shape.group * problem_.shape.rows; }
  int64_t head_size() const { return problem_.shape.head_size; }
  int64_t value_size() const { return problem_.shape.value_size; }
  double scale() const { return problem_.shape.scale; }
  int64_t threads() const { return problem_.threads; }
  int64_t columns(int64_t) const { return seen_.end - seen_.begin; }

  void load(int64_t head, DecodeRows<Input>& rows) const {
    for (int64_t i = 0; i < rows.rows(); ++i) {
      const auto query = problem_.query.at(problem_.shape, batch_of(head, i))
                             .from(row_of(i), 0);
      rows.set_query(i, query.data, query.column_stride);
    }
  }

  // Keys are counted from the first that any row sees.
  void run(int64_t head, DecodeRows<Input>& rows, int64_t column,
           int64_t column_end) const {
    Place place{problem_.key.at(problem_.shape, batch_of(head, 0)),
                problem_.value.at(problem_.shape, batch_of(head, 0)),
                seen_.end};
    rows.template run<false>(place, Rules{*this, head}, seen_.begin + column,
                             seen_.begin + column_end, 0, rows.rows());
  }

  void finish(int64_t head, int64_t i, const SoftmaxState<Number>& state,
              const Number* output_sums) const {
    outputs_.store(problem_.shape, batch_of(head, i), row_of(i), state,
                   output_sums);
  }

 private:
  // The keys that any row sees by its place, from a whole block on.
  static KeyRange keys_seen(const Problem<Input>& problem) {
    const AttentionShape& shape = problem.shape;
    KeyRange seen = problem.keys_of_rows(0, shape.rows, 0, shape.columns);
    seen.begin = seen.begin / kDecodeKeys * kDecodeKeys;
    return {seen.begin, std::max(seen.begin, seen.end)};
  }

  // Where the keys and values of a head lie.
  struct Place {
    MatrixView<Input> keys;
    MatrixView<Input> values;
    int64_t keys_end;

    int64_t end() const { return keys_end; }
    void find(int64_t column, KeyBlock<Input>& block) const {
      for (int64_t i = 0; i < block.count; ++i) {
        block.keys[i] = keys.at(column + i, 0);
        block.values[i] = values.at(column + i, 0);
      }
    }
    void copy(KeyBlock<Input>&) const {}
  };

  struct Rules {
    const AttentionDecoding& decoding;
    int64_t head;

    void mask(int64_t i, Number* scores, int64_t column, int64_t count) const {
      const Problem<Input>& problem = decoding.problem_;
      const int64_t batch = decoding.batch_of(head, i);
      problem.mask_scores(scores, batch,
                          problem.mask.offset(problem.shape, batch),
                          decoding.row_of(i), column, count);
    }

    void drop(int64_t i, Number* probabilities, int64_t column,
              int64_t count) const {
      const Problem<Input>& problem = decoding.problem_;
      if (problem.dropout) {
        constexpr int kLanes = simd::kLanes<Number>;
        Number factors[kDecodeKeys + Dropout<Number>::kSpare];
        problem.dropout_factors(factors, decoding.batch_of(head, i),
                                decoding.row_of(i), column, count);
        for (int64_t k = 0; k < count; k += kLanes) {
          simd::store(probabilities + k,
                      simd::load(probabilities + k) * simd::load(factors + k));
        }
      }
    }
  };

  int64_t batch_of(int64_t head, int64_t i) const {
    return head * problem_.shape.group + i / problem_.shape.rows;
  }
  int64_t row_of(int64_t i) const { return i % problem_.shape.rows; }

  const Problem<Input>& problem_;
  const ForwardOutputs<Input>& outputs_;
  KeyRange seen_;
};

template <class Input>
void attention_forward_decoding(const Problem<Input>& problem,
                                const ForwardOutputs<Input>& outputs) {
  decode<Input>(AttentionDecoding<Input>(problem, outputs));
}

}  // namespace pkg::cpu::attention
