// The tiled forward pass. scaled_dot_product_attention_forward.cpp says what it
// computes and why it is shaped as it is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "scaled_dot_product_attention_pack.h"
#include "scaled_dot_product_attention_problem.h"
#include "scaled_dot_product_attention_softmax.h"
#include "scaled_dot_product_attention_tile.h"
#include "workspace.h"

namespace pkg::cpu::attention {

template <class Input>
struct ForwardOutputs {
  using Number = simd::Compute<Input>;
  Input* output;
  AttentionOperand layout;  // its columns are contiguous
  Number* log_sum_exp;      // contiguous: batch, rows

  Input* row(const AttentionShape& shape, int64_t batch, int64_t row) const {
    return output + layout.offset(shape, batch) + row * layout.row_stride;
  }
  Number* log_sum_exp_of(const AttentionShape& shape, int64_t batch,
                         int64_t row) const {
    return log_sum_exp + batch * shape.rows + row;
  }
};

// Where the keys are split among threads, each part leaves its rows' maximum,
// sum and weighted values, to be combined in the order of the keys.
template <class Number>
struct Partials {
  Number* data;
  int64_t splits;
  int64_t value_stride;

  static constexpr int64_t kState = 64 / static_cast<int64_t>(sizeof(Number));

  int64_t row_size() const { return kState + value_stride; }
  int64_t size(int64_t rows) const { return rows * splits * row_size(); }
  Number* at(int64_t flat_row, int64_t split) const {
    return data + (flat_row * splits + split) * row_size();
  }
  void put(int64_t flat_row, int64_t split, const SoftmaxState<Number>& state,
           const Number* values) const {
    Number* to = at(flat_row, split);
    to[0] = state.maximum;
    to[1] = state.sum;
    std::copy_n(values, value_stride, to + kState);
  }
};

// Combines the parts of every row.
template <class Input, class Number>
void combine(const AttentionShape& shape, const Partials<Number>& partials,
             const ForwardOutputs<Input>& outputs) {
  const int64_t grain =
      std::max<int64_t>(1, 16384 / (partials.splits * partials.row_size()));
  parallel_for(
      shape.batch() * shape.rows, grain, [&](int64_t begin, int64_t end) {
        for (int64_t flat = begin; flat < end; ++flat) {
          SoftmaxState<Number> state;
          for (int64_t s = 0; s < partials.splits; ++s) {
            state.maximum = std::max(state.maximum, partials.at(flat, s)[0]);
          }
          Number* values = partials.at(flat, 0) + Partials<Number>::kState;
          for (int64_t s = 0; s < partials.splits; ++s) {
            Number* part = partials.at(flat, s);
            const Number factor = std::exp(part[0] - origin_of(state.maximum));
            state.sum += part[1] * factor;
            Number* from = part + Partials<Number>::kState;
            scale_row(from, partials.value_stride, factor);
            for (int64_t i = 0; s > 0 && i < partials.value_stride; ++i) {
              values[i] += from[i];
            }
          }
          const int64_t batch = flat / shape.rows;
          const int64_t row = flat % shape.rows;
          finish_row(state, values, shape.value_size,
                     outputs.row(shape, batch, row),
                     outputs.log_sum_exp_of(shape, batch, row));
        }
      });
}

// Keys and values of one head, packed: keys as columns of Q K^T, all in one;
// values as columns of P V, block of keys by block of keys.
template <class Input>
struct PackedKeyValue {
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using Lane = typename Arithmetic::Lane;
  int64_t key_depth;     // lanes of a key
  int64_t value_stride;  // columns of the values, filled up
  int64_t key_size;      // lanes of all keys
  int64_t size;          // lanes of both

  explicit PackedKeyValue(const AttentionShape& shape)
      : key_depth(depth_of<Arithmetic>(shape.head_size)),
        value_stride(round_up(shape.value_size, kTileColumns<Arithmetic>)),
        key_size(
            packed_columns_size<Arithmetic>(shape.columns, shape.head_size)),
        size(round_up(
            key_size + value_stride * depth_of<Arithmetic>(shape.columns),
            64)) {}

  const Lane* keys(const Lane* packed, int64_t column) const {
    return packed + column * key_depth;
  }
  const Lane* values(const Lane* packed, int64_t column) const {
    return packed + key_size + column / Arithmetic::kDepth * value_stride;
  }

  void pack_block(const Problem<Input>& problem, int64_t key_head,
                  int64_t column, Lane* packed) const {
    const AttentionShape& shape = problem.shape;
    const int64_t batch = key_head * shape.group;
    const int64_t count = std::min(kKeyBlock, shape.columns - column);
    pack_columns<Arithmetic>(
        problem.key.at(shape, batch).from(column, 0).transposed(), count,
        shape.head_size, const_cast<Lane*>(keys(packed, column)));
    pack_columns<Arithmetic>(problem.value.at(shape, batch).from(column, 0),
                             shape.value_size, count,
                             const_cast<Lane*>(values(packed, column)));
  }
};

// A block of rows against a range of keys.
struct ForwardTask {
  int64_t batch;
  int64_t row;
  int64_t rows;
  int64_t column;
  int64_t column_end;
};

template <class Input>
class ForwardBlock {
 public:
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using Lane = typename Arithmetic::Lane;
  using Number = simd::Compute<Input>;

  ForwardBlock(const Problem<Input>& problem,
               const PackedKeyValue<Input>& packing, int64_t block_rows)
      : problem_(problem), packing_(packing) {
    const int64_t rows = padded_rows(block_rows);
    const Part<Lane> query{rows * packing.key_depth};
    const Part<Number> values{rows * packing.value_stride};
    const Part<Number> scores{kStripRows * kScoreStride};
    const Part<Weight<Arithmetic>> weights{kStripRows * kScoreStride};
    const Part<Number> factors{kScoreStride};
    const Part<SoftmaxState<Number>> states{rows};
    std::byte* memory = Workspace::of_this_thread<3>().request<std::byte>(
        query.size() + values.size() + scores.size() + weights.size() +
        factors.size() + states.size());
    query_ = query.take(memory);
    values_ = values.take(memory);
    scores_ = scores.take(memory);
    weights_ = weights.take(memory);
    factors_ = factors.take(memory);
    states_ = states.take(memory);
    if constexpr (std::is_same_v<Weight<Arithmetic>, Number>) {
      weights_ = scores_;
    }
  }

  // Runs the task; the rows' states and values stay here until the next one.
  void run(const ForwardTask& task, const Lane* packed) {
    const AttentionShape& shape = problem_.shape;
    pack_strips<Arithmetic>(
        problem_.query.at(shape, task.batch).from(task.row, 0), task.rows,
        shape.head_size, query_);
    std::fill_n(values_, padded_rows(task.rows) * packing_.value_stride,
                Number{0});
    std::fill_n(states_, padded_rows(task.rows), SoftmaxState<Number>{});
    mask_offset_ = problem_.mask.offset(shape, task.batch);

    const int64_t column_end =
        task.column + problem_.columns_seen(task.row + task.rows, task.column,
                                            task.column_end - task.column);
    for (int64_t column = task.column; column < column_end;
         column += kKeyBlock) {
      const int64_t count = std::min(kKeyBlock, column_end - column);
      for_each_strip(task.rows, [&](int64_t row, int used, auto height) {
        const int64_t seen =
            problem_.columns_seen(task.row + row + used, column, count);
        if (seen > 0) {
          run_strip<height()>(task, packed, row, used, column, seen);
        }
      });
    }
  }

  const SoftmaxState<Number>& state(int64_t row) const { return states_[row]; }
  const Number* values(int64_t row) const {
    return values_ + row * packing_.value_stride;
  }

 private:
  template <int kRows>
  void run_strip(const ForwardTask& task, const Lane* packed, int64_t row,
                 int used, int64_t column, int64_t count) {
    const AttentionShape& shape = problem_.shape;
    constexpr int64_t kColumns = kTileColumns<Arithmetic>;
    constexpr int kDepth = Arithmetic::kDepth;
    multiply_strip<Arithmetic, PackedLeft, kRows>(
        query_ + row * packing_.key_depth, packing_.keys(packed, column),
        kColumns * packing_.key_depth, packing_.key_depth, count,
        StoreScaled<Number>{scores_, kScoreStride,
                            static_cast<Number>(shape.scale)});
    for (int i = 0; i < used; ++i) {
      make_weights(task.batch, task.row + row + i, column, count,
                   scores_ + i * kScoreStride, weights_ + i * kScoreStride,
                   row + i);
    }
    const int64_t block = std::min(kKeyBlock, shape.columns - column);
    multiply_strip<Arithmetic, LeftByRows<kScoreStride / kDepth>, kRows>(
        reinterpret_cast<const Lane*>(weights_),
        packing_.values(packed, column), kColumns * depth_of<Arithmetic>(block),
        depth_of<Arithmetic>(count), shape.value_size,
        AddTo<Number>{values_ + row * packing_.value_stride,
                      packing_.value_stride});
  }

  void make_weights(int64_t batch, int64_t row, int64_t column, int64_t count,
                    Number* scores, Weight<Arithmetic>* weights,
                    int64_t local_row) {
    problem_.mask_scores(scores, mask_offset_, row, column, count);
    SoftmaxState<Number>& state = states_[local_row];
    const int64_t padded = round_up(count, simd::kLanes<Number>);
    Number correction;
    if (problem_.dropout) {
      problem_.dropout.factors(factors_, batch, row, column, padded);
      correction =
          softmax_row<Arithmetic>(scores, padded, state, weights, factors_);
    } else {
      correction = softmax_row<Arithmetic>(scores, padded, state, weights);
    }
    if (correction != Number{1}) {
      scale_row(values_ + local_row * packing_.value_stride,
                packing_.value_stride, correction);
    }
  }

  const Problem<Input>& problem_;
  const PackedKeyValue<Input>& packing_;
  int64_t mask_offset_ = 0;
  Lane* query_;
  Number* values_;
  Number* scores_;
  Weight<Arithmetic>* weights_;
  Number* factors_;
  SoftmaxState<Number>* states_;
};

// How the work is cut. A block of kBlockRows rows keeps its queries, values and
// a block of keys in half of a 1 MiB L2 cache at a head size of 64 to 128; with
// few rows in all, blocks shrink until each thread has some, and then the keys
// are split. Packed keys and values of as many heads as fit kPackedBytes are
// held at a time: a share of an L3 cache.
struct ForwardPlan {
  static constexpr int64_t kBlockRows = 16 * kStripRows;
  static constexpr int64_t kLeastRows = 4 * kStripRows;
  static constexpr int64_t kPackedBytes = int64_t{16} << 20;

  int64_t block_rows;
  int64_t row_blocks;
  int64_t splits;
  int64_t split_columns;

  // `batch` is how many matrices of the batch are at hand at a time.
  ForwardPlan(const AttentionShape& shape, int64_t batch, int64_t threads) {
    const int64_t wanted = threads > 1 ? 4 * threads : 1;
    const int64_t most = std::max<int64_t>(1, shape.rows / kLeastRows);
    row_blocks =
        std::max<int64_t>((shape.rows + kBlockRows - 1) / kBlockRows,
                          std::min((wanted + batch - 1) / batch, most));
    block_rows =
        round_up((shape.rows + row_blocks - 1) / row_blocks, kStripRows);
    row_blocks = (shape.rows + block_rows - 1) / block_rows;
    const int64_t key_blocks = (shape.columns + kKeyBlock - 1) / kKeyBlock;
    splits =
        batch * row_blocks >= threads
            ? 1
            : std::min((wanted + batch * row_blocks - 1) / (batch * row_blocks),
                       std::max<int64_t>(key_blocks, 1));
    split_columns = (key_blocks + splits - 1) / splits * kKeyBlock;
    splits = std::max<int64_t>(
        1, split_columns == 0
               ? 1
               : (shape.columns + split_columns - 1) / split_columns);
  }
};

template <class Input>
void attention_forward_tiled(const Problem<Input>& problem,
                             const ForwardOutputs<Input>& outputs) {
  using Number = simd::Compute<Input>;
  using Lane = typename PackedKeyValue<Input>::Lane;
  const AttentionShape& shape = problem.shape;
  const PackedKeyValue<Input> packing(shape);
  const int64_t key_heads = problem.key_heads();
  const int64_t key_blocks = (shape.columns + kKeyBlock - 1) / kKeyBlock;
  const int64_t heads_at_once = std::clamp<int64_t>(
      ForwardPlan::kPackedBytes /
          std::max<int64_t>(packing.size * int64_t{sizeof(Lane)}, 1),
      1, key_heads);
  const ForwardPlan plan(shape, heads_at_once * shape.group, problem.threads);

  Partials<Number> partials{nullptr, plan.splits, packing.value_stride};
  if (plan.splits > 1) {
    partials.data = Workspace::of_this_thread<5>().request<Number>(
        partials.size(shape.batch() * shape.rows));
  }
  Lane* packed = Workspace::of_this_thread<4>().request<Lane>(heads_at_once *
                                                              packing.size);
  for (int64_t first = 0; first < key_heads; first += heads_at_once) {
    const int64_t heads = std::min(heads_at_once, key_heads - first);
    for_each_task(heads * key_blocks, problem.threads, [&](int64_t task) {
      const int64_t head = task / key_blocks;
      packing.pack_block(problem, first + head, task % key_blocks * kKeyBlock,
                         packed + head * packing.size);
    });
    const int64_t tasks_per_head = shape.group * plan.row_blocks * plan.splits;
    for_each_task(heads * tasks_per_head, problem.threads, [&](int64_t task) {
      const int64_t head = task / tasks_per_head;
      int64_t inside = task % tasks_per_head;
      const int64_t split = inside % plan.splits;
      inside /= plan.splits;
      // The last rows first: they see most keys if causal.
      const int64_t block = plan.row_blocks - 1 - inside % plan.row_blocks;
      const int64_t row = block * plan.block_rows;
      const ForwardTask work{
          (first + head) * shape.group + inside / plan.row_blocks, row,
          std::min(plan.block_rows, shape.rows - row),
          split * plan.split_columns,
          std::min((split + 1) * plan.split_columns, shape.columns)};
      ForwardBlock<Input> rows(problem, packing, plan.block_rows);
      rows.run(work, packed + head * packing.size);
      for (int64_t i = 0; i < work.rows; ++i) {
        if (plan.splits > 1) {
          partials.put(work.batch * shape.rows + row + i, split, rows.state(i),
                       rows.values(i));
        } else {
          finish_row(rows.state(i), rows.values(i), shape.value_size,
                     outputs.row(shape, work.batch, row + i),
                     outputs.log_sum_exp_of(shape, work.batch, row + i));
        }
      }
    });
  }
  if (plan.splits > 1) {
    combine(shape, partials, outputs);
    Workspace::of_this_thread<5>().release_excess();
  }
  Workspace::of_this_thread<4>().release_excess();
}

}  // namespace pkg::cpu::attention
