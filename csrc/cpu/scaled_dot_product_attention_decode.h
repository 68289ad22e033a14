// The forward pass for a few rows against many keys, as when a model generates
// text: nothing is packed, since each key and value is used only a few times.
//
// Algorithm: as the tiled pass, with the keys split among the tasks (Dao and
// others, "Flash-Decoding", 2023): a task is 960 keys of one head and all rows
// that look at them, so that also one row of one head keeps all threads busy;
// the parts are combined in the order of the keys, in the same way whatever the
// number of threads. Within a task, block by block of 192 keys: scores by dot
// products along the head, a register of keys at a time, softmax, and weighted
// sums of the values. The rows after the first find the block in the L2 cache.
//
// Operations: 2 L S (E + Ev) for each head. Bytes: the keys and values once,
// S (E + Ev) elements of each key head. Bound by memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "scaled_dot_product_attention_forward.h"
#include "transpose.h"

namespace pkg::cpu::attention {

// Above this many rows packing the keys pays. With few keys its cost is small,
// and the tiled pass rounds each score as the backward pass will.
inline constexpr int64_t kDecodeRows = 8;
inline constexpr int64_t kLeastDecodeColumns = 2 * kKeyBlock;
inline constexpr int64_t kDecodeColumns = 5 * kKeyBlock;

template <class Input>
bool decodes(const Problem<Input>& problem) {
  const auto contiguous = [](const AttentionOperand& layout, int64_t size) {
    return layout.column_stride == 1 || size <= 1;
  };
  return problem.shape.rows <= kDecodeRows &&
         problem.shape.columns >= kLeastDecodeColumns &&
         contiguous(problem.key.layout, problem.shape.head_size) &&
         contiguous(problem.value.layout, problem.shape.value_size);
}

// Scores of `count` keys; written in whole registers.
template <class Input, class Number>
void score_keys(const Number* query, const MatrixView<Input>& keys,
                int64_t head_size, int64_t count, Number scale,
                Number* scores) {
  constexpr int kLanes = simd::kLanes<Number>;
  const int64_t whole = head_size / kLanes * kLanes;
  const int rest = static_cast<int>(head_size - whole);
  for (int64_t key = 0; key < count; key += kLanes) {
    Vector<Number> sums[kLanes] = {};
    const int used = static_cast<int>(std::min<int64_t>(kLanes, count - key));
    for (int i = 0; i < used; ++i) {
      const Input* row = keys.at(key + i, 0);
      Vector<Number> sum{};
      for (int64_t e = 0; e < whole; e += kLanes) {
        sum += simd::load(query + e) * simd::load(row + e);
      }
      if (rest > 0) {
        sum +=
            simd::load(query + whole) * simd::load_partial(row + whole, rest);
      }
      sums[i] = sum;
    }
    simd::store(scores + key, simd::sum_each(sums) * scale);
  }
}

// values += weights times rows of `matrix`, kVectors registers of columns.
template <int kVectors, class Input, class Number>
[[gnu::always_inline]] inline void add_weighted(const Number* weights,
                                                const MatrixView<Input>& matrix,
                                                int64_t count, Number* values) {
  constexpr int kLanes = simd::kLanes<Number>;
  Vector<Number> sums[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    sums[v] = simd::load(values + v * kLanes);
  }
  for (int64_t key = 0; key < count; ++key) {
    const Vector<Number> weight = simd::broadcast(weights[key]);
    const Input* row = matrix.at(key, 0);
    for (int v = 0; v < kVectors; ++v) {
      sums[v] += weight * simd::load(row + v * kLanes);
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    simd::store(values + v * kLanes, sums[v]);
  }
}

template <class Input, class Number>
void add_weighted_values(const Number* weights, const MatrixView<Input>& matrix,
                         int64_t value_size, int64_t count, Number* values) {
  constexpr int kLanes = simd::kLanes<Number>;
  int64_t column = 0;
  for (; column + 4 * kLanes <= value_size; column += 4 * kLanes) {
    add_weighted<4>(weights, matrix.from(0, column), count, values + column);
  }
  for (; column + kLanes <= value_size; column += kLanes) {
    add_weighted<1>(weights, matrix.from(0, column), count, values + column);
  }
  if (column < value_size) {
    const int rest = static_cast<int>(value_size - column);
    Vector<Number> sum = simd::load(values + column);
    for (int64_t key = 0; key < count; ++key) {
      sum += simd::broadcast(weights[key]) *
             simd::load_partial(matrix.at(key, column), rest);
    }
    simd::store(values + column, sum);
  }
}

// All rows of all the heads that one key head serves against a range of keys.
template <class Input>
class DecodeBlock {
 public:
  using Number = simd::Compute<Input>;

  DecodeBlock(const Problem<Input>& problem, int64_t value_stride)
      : problem_(problem),
        rows_(problem.shape.group * problem.shape.rows),
        query_stride_(round_up(problem.shape.head_size, simd::kLanes<Number>)),
        value_stride_(value_stride) {
    const Part<Number> queries{rows_ * query_stride_};
    const Part<Number> values{rows_ * value_stride_};
    const Part<Number> scores{kScoreStride};
    const Part<Number> factors{kScoreStride};
    const Part<SoftmaxState<Number>> states{rows_};
    std::byte* memory = Workspace::of_this_thread<3>().request<std::byte>(
        queries.size() + values.size() + scores.size() + factors.size() +
        states.size());
    queries_ = queries.take(memory);
    values_ = values.take(memory);
    scores_ = scores.take(memory);
    factors_ = factors.take(memory);
    states_ = states.take(memory);
  }

  void run(int64_t key_head, int64_t column, int64_t column_end) {
    const AttentionShape& shape = problem_.shape;
    const int64_t first = key_head * shape.group;
    load_queries(first);
    std::fill_n(values_, rows_ * value_stride_, Number{0});
    std::fill_n(states_, rows_, SoftmaxState<Number>{});
    const auto keys = problem_.key.at(shape, first);
    const auto values = problem_.value.at(shape, first);
    for (; column < column_end; column += kKeyBlock) {
      const int64_t count = std::min(kKeyBlock, column_end - column);
      for (int64_t i = 0; i < rows_; ++i) {
        const int64_t row = i % shape.rows;
        const int64_t seen = problem_.columns_seen(row + 1, column, count);
        if (seen > 0) {
          run_row(first + i / shape.rows, row, i, column, seen,
                  keys.from(column, 0), values.from(column, 0));
        }
      }
    }
  }

  int64_t rows() const { return rows_; }
  const SoftmaxState<Number>& state(int64_t i) const { return states_[i]; }
  const Number* values(int64_t i) const { return values_ + i * value_stride_; }

 private:
  void load_queries(int64_t first) {
    const AttentionShape& shape = problem_.shape;
    for (int64_t i = 0; i < rows_; ++i) {
      const auto query = problem_.query.at(shape, first + i / shape.rows)
                             .from(i % shape.rows, 0);
      Number* to = queries_ + i * query_stride_;
      for (int64_t e = 0; e < shape.head_size; ++e) {
        to[e] = static_cast<Number>(*query.at(0, e));
      }
      std::fill(to + shape.head_size, to + query_stride_, Number{0});
    }
  }

  void run_row(int64_t batch, int64_t row, int64_t i, int64_t column,
               int64_t count, const MatrixView<Input>& keys,
               const MatrixView<Input>& values) {
    const AttentionShape& shape = problem_.shape;
    score_keys(queries_ + i * query_stride_, keys, shape.head_size, count,
               static_cast<Number>(shape.scale), scores_);
    problem_.mask_scores(scores_, problem_.mask.offset(shape, batch), row,
                         column, count);
    const int64_t padded = round_up(count, simd::kLanes<Number>);
    Number correction;
    if (problem_.dropout) {
      problem_.dropout.factors(factors_, batch, row, column, padded);
      correction = softmax_row<Floating<Number>>(scores_, padded, states_[i],
                                                 scores_, factors_);
    } else {
      correction =
          softmax_row<Floating<Number>>(scores_, padded, states_[i], scores_);
    }
    Number* sums = values_ + i * value_stride_;
    if (correction != Number{1}) {
      scale_row(sums, value_stride_, correction);
    }
    add_weighted_values(scores_, values, shape.value_size, count, sums);
  }

  const Problem<Input>& problem_;
  int64_t rows_;
  int64_t query_stride_;
  int64_t value_stride_;
  Number* queries_;
  Number* values_;
  Number* scores_;
  Number* factors_;
  SoftmaxState<Number>* states_;
};

template <class Input>
void attention_forward_decoding(const Problem<Input>& problem,
                                const ForwardOutputs<Input>& outputs) {
  using Number = simd::Compute<Input>;
  const AttentionShape& shape = problem.shape;
  const int64_t splits = std::max<int64_t>(
      1, (shape.columns + kDecodeColumns - 1) / kDecodeColumns);
  Partials<Number> partials{nullptr, splits,
                            round_up(shape.value_size, simd::kLanes<Number>)};
  if (splits > 1) {
    partials.data = Workspace::of_this_thread<5>().request<Number>(
        partials.size(shape.batch() * shape.rows));
  }
  for_each_task(
      problem.key_heads() * splits, problem.threads, [&](int64_t task) {
        const int64_t head = task / splits;
        const int64_t split = task % splits;
        DecodeBlock<Input> block(problem, partials.value_stride);
        block.run(head, split * kDecodeColumns,
                  std::min((split + 1) * kDecodeColumns, shape.columns));
        const int64_t first = head * shape.group * shape.rows;
        for (int64_t i = 0; i < block.rows(); ++i) {
          if (splits > 1) {
            partials.put(first + i, split, block.state(i), block.values(i));
          } else {
            const int64_t batch = (first + i) / shape.rows;
            const int64_t row = i % shape.rows;
            finish_row(block.state(i), block.values(i), shape.value_size,
                       outputs.row(shape, batch, row),
                       outputs.log_sum_exp_of(shape, batch, row));
          }
        }
      });
  if (splits > 1) {
    combine(shape, partials, outputs);
    Workspace::of_this_thread<5>().release_excess();
  }
}

}  // namespace pkg::cpu::attention
