// The tiled forward pass. scaled_dot_product_attention_forward.cpp says what it
// computes and why it is shaped as it is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/attention/online_softmax.h"
#include "cpu/attention/packing.h"
#include "cpu/attention/problem.h"
#include "cpu/attention/products.h"
#include "cpu/attention/visible_keys.h"
#include "cpu/runtime/workspace.h"

namespace pkg::cpu::attention {

// Of a result that may be left empty.
template <class T>
T* data_or_null(const Tensor& result) {
  return has_elements(result) ? static_cast<T*>(result.mutable_data_ptr())
                              : nullptr;
}

template <class Input>
struct ForwardOutputs {
  using Number = simd::Compute<Input>;
  Input* output;
  Input* residual;          // of the output, or null
  AttentionOperand layout;  // of both; the columns are contiguous
  Number* log_sum_exp;
  int64_t log_sum_exp_stride;  // from one matrix of the batch to the next
  Number* log_sum_exp_rest = nullptr;  // what rounding took off it, or null

  // Of a row, from its state and the sum of its weighted values.
  void store(const AttentionShape& shape, int64_t batch, int64_t row,
             const SoftmaxState<Number>& state, const Number* values) const {
    const int64_t at = layout.offset(shape, batch) + row * layout.row_stride;
    store_output(state, values, shape.value_size, output + at);
    if (residual != nullptr) {
      store_residual(state, values, shape.value_size, output + at,
                     residual + at);
    }
    const int64_t to = batch * log_sum_exp_stride + row;
    const double exact = log_sum_exp_of(state);
    log_sum_exp[to] = static_cast<Number>(exact);
    if (log_sum_exp_rest != nullptr) {
      log_sum_exp_rest[to] =
          static_cast<Number>(exact - static_cast<double>(log_sum_exp[to]));
    }
  }
};

// Merges the parts of every row, which follow one another.
template <class Input, class Number>
void merge_rows(const AttentionShape& shape, const SoftmaxParts<Number>& parts,
                int64_t splits, const ForwardOutputs<Input>& outputs) {
  const int64_t grain = std::max<int64_t>(1, 16384 / (splits * parts.size()));
  parallel_for(shape.batch() * shape.rows, grain,
               [&](int64_t begin, int64_t end) {
                 for (int64_t flat = begin; flat < end; ++flat) {
                   const auto state = parts.merge(flat * splits, splits, 1);
                   outputs.store(shape, flat / shape.rows, flat % shape.rows,
                                 state, parts.values(flat * splits));
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

  // Keys from `column` on, a multiple of a panel's.
  RightPanels<Lane> keys(const Lane* packed, int64_t column) const {
    return packed_panels<Arithmetic>(packed + column * key_depth, key_depth);
  }

  // Values of the keys from `column` + `first` on, of the block from `column`.
  RightPanels<Lane> values(const Problem<Input>& problem, int64_t batch,
                           const Lane* packed, int64_t column,
                           int64_t first) const {
    const AttentionShape& shape = problem.shape;
    if constexpr (std::is_same_v<Input, Lane>) {
      const MatrixView<Input> value = problem.value.at(shape, batch);
      if (reads_in_place(value, shape.value_size)) {
        return {value.at(column + first, 0), value.row_stride,
                kTileColumns<Arithmetic>};
      }
    }
    const int64_t block = std::min(kKeyBlock, shape.columns - column);
    return packed_panels<Arithmetic>(
        packed + key_size + column / Arithmetic::kDepth * value_stride,
        depth_of<Arithmetic>(block), first / Arithmetic::kDepth);
  }

  // Returns whether all of the block is finite, if that is asked for.
  bool pack_block(const Problem<Input>& problem, int64_t key_head,
                  int64_t column, Lane* packed) const {
    const AttentionShape& shape = problem.shape;
    const int64_t batch = key_head * shape.group;
    const int64_t count = std::min(kKeyBlock, shape.columns - column);
    Lane* keys = packed + column * key_depth;
    pack_columns<Arithmetic>(
        problem.key.at(shape, batch).from(column, 0).transposed(), count,
        shape.head_size, keys);
    bool finite = problem.hides_keys() &&
                  all_finite<Arithmetic>(keys, packed_columns_size<Arithmetic>(
                                                   count, shape.head_size));
    const auto value = problem.value.at(shape, batch).from(column, 0);
    if constexpr (std::is_same_v<Input, Lane>) {
      if (reads_in_place(value, shape.value_size)) {
        for (int64_t i = 0; finite && i < count; ++i) {
          finite = all_finite<Arithmetic>(value.at(i, 0), shape.value_size);
        }
        return finite;
      }
    }
    Lane* values =
        packed + key_size + column / Arithmetic::kDepth * value_stride;
    pack_columns<Arithmetic>(value, shape.value_size, count, values);
    return finite && all_finite<Arithmetic>(
                         values, value_stride * depth_of<Arithmetic>(count));
  }

 private:
  // Whether values are as good as packed: whole registers that do not straddle
  // cache lines, of rows that follow one another closely.
  static bool reads_in_place(const MatrixView<Input>& value, int64_t size) {
    constexpr int64_t kLine = 64;
    constexpr int64_t kBytes = sizeof(Input);
    return value.column_stride == 1 && size % simd::kLanes<Lane> == 0 &&
           reinterpret_cast<uintptr_t>(value.data) % kLine == 0 &&
           value.row_stride * kBytes % kLine == 0 && value.row_stride >= size &&
           value.row_stride <= 2 * size && value.row_stride * kBytes <= 1024;
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
               const VisibleKeys<Input>& visible_keys,
               const PackedKeyValue<Input>& packing, int64_t block_rows)
      : problem_(problem), visible_keys_(visible_keys), packing_(packing) {
    const int64_t rows = padded_rows(block_rows);
    const Part<Lane> query{rows * packing.key_depth};
    const Part<Number> values{rows * packing.value_stride};
    const Part<Number> scores{kStripRows * kScoreStride};
    const Part<Weight<Arithmetic>> weights{kStripRows * kScoreStride};
    const Part<Number> factors{kScoreStride + Dropout<Number>::kSpare};
    const Part<Number> maxima{rows};
    const Part<Vector<Number>> sums{rows};
    std::byte* memory = Workspace::of_this_thread<3>().request<std::byte>(
        query.size() + values.size() + scores.size() + weights.size() +
        factors.size() + maxima.size() + sums.size());
    query_ = query.take(memory);
    values_ = values.take(memory);
    scores_ = scores.take(memory);
    weights_ = weights.take(memory);
    factors_ = factors.take(memory);
    states_.maxima = maxima.take(memory);
    states_.sums = sums.take(memory);
    if constexpr (std::is_same_v<Weight<Arithmetic>, Number>) {
      weights_ = scores_;
    }
  }

  // Runs the task; the rows' states and values stay here until the next one.
  // `finite` says it of each block of keys.
  void run(const ForwardTask& task, const Lane* packed, const bool* finite) {
    const TileRegisters<Arithmetic> registers;
    const AttentionShape& shape = problem_.shape;
    pack_strips<Arithmetic>(
        problem_.query.at(shape, task.batch).from(task.row, 0), task.rows,
        shape.head_size, query_);
    std::fill_n(values_, padded_rows(task.rows) * packing_.value_stride,
                Number{0});
    states_.reset(padded_rows(task.rows));
    mask_offset_ = problem_.mask.offset(shape, task.batch);
    const typename VisibleKeys<Input>::OfMatrix visible_keys(visible_keys_,
                                                             task.batch);

    const bool finite_rows =
        problem_.hides_keys() &&
        all_finite<Arithmetic>(query_,
                               padded_rows(task.rows) * packing_.key_depth);
    for (int64_t column = task.column; column < task.column_end;
         column += kKeyBlock) {
      const int64_t count = std::min(kKeyBlock, task.column_end - column);
      const bool all_finite = finite_rows && finite[column / kKeyBlock];
      for_each_strip(task.rows, [&](int64_t row, int used, auto height) {
        const KeyRange seen = visible_keys.of_strip(task.row + row, used,
                                                    column, count, all_finite);
        if (seen.begin < seen.end) {
          run_strip<height()>(task, packed, row, used, column, seen,
                              all_finite);
        }
      });
    }
  }

  SoftmaxState<Number> state(int64_t row) const { return states_.at(row); }
  const Number* values(int64_t row) const {
    return values_ + row * packing_.value_stride;
  }

 private:
  // The keys that are seen of the block from `column`.
  template <int kRows>
  void run_strip(const ForwardTask& task, const Lane* packed, int64_t row,
                 int used, int64_t column, const KeyRange& seen,
                 bool all_finite) {
    const AttentionShape& shape = problem_.shape;
    constexpr int kDepth = Arithmetic::kDepth;
    const int64_t first = column + seen.begin;
    const int64_t count = seen.end - seen.begin;
    const auto keys = packing_.keys(packed, first);
    if (!weigh_as_before<kRows>(task.row + row, row, used, keys, first, count,
                                all_finite)) {
      weigh<kRows>(task, row, used, keys, first, count);
    }
    // Each addition to the sums of all keys rounds off more than one to those
    // of a block: one a block.
    multiply_strip<Arithmetic, kRows>(
        LeftByRows<Lane, kScoreStride / kDepth>{
            reinterpret_cast<const Lane*>(weights_)},
        packing_.values(problem_, task.batch, packed, column, seen.begin),
        depth_of<Arithmetic>(count), shape.value_size,
        add_to(values_ + row * packing_.value_stride, packing_.value_stride),
        kKeyBlock);
  }

  auto queries(int64_t row) const {
    return packed_rows<Arithmetic>(query_ + row * packing_.key_depth,
                                   packing_.key_depth);
  }

  // Makes weights of a strip's scores relative to the maxima so far, if they
  // are known and what hides keys can be had tile by tile. Returns whether that
  // is done.
  template <int kRows>
  bool weigh_as_before(int64_t row_of_all, int64_t row, int used,
                       const RightPanels<Lane>& keys, int64_t first,
                       int64_t count, bool all_finite) {
    if (problem_.dropout || !(problem_.shape.scale > 0.0) ||
        packing_.key_depth > problem_.longest_sum ||
        problem_.hides_last_keys(row_of_all, first, count) ||
        !states_.from(row).are_known(kRows)) {
      return false;
    }
    const ScoreMask<Number>& mask = problem_.mask;
    const auto weigh = [&](const auto& mask_rows) {
      return weigh_with<kRows>(row, keys, count, mask_rows,
                               mask.fetched(mask_offset_, row_of_all, first));
    };
    if (!mask) {
      return weigh(NoMaskRows{});
    }
    if (used < kRows) {
      return false;  // the mask ends
    }
    const int64_t stride = mask.layout().row_stride;
    // A NaN among hidden scores has to stay.
    if (const auto* hides =
            mask.template rows_of<bool>(mask_offset_, row_of_all, first)) {
      return all_finite && weigh(MaskRows<bool>{hides, stride});
    }
    const auto* adds =
        mask.template rows_of<Input>(mask_offset_, row_of_all, first);
    return adds != nullptr && weigh(MaskRows<Input>{adds, stride});
  }

  // The same with a mask of one kind.
  template <int kRows, class Mask>
  bool weigh_with(int64_t row, const RightPanels<Lane>& keys, int64_t count,
                  const Mask& mask, const FetchedRows& fetched) {
    const auto states = states_.from(row);
    Vector<Number> sums[kRows] = {};
    multiply_tiles<Arithmetic, kRows>(
        queries(row), keys, packing_.key_depth, count,
        WeighTile<Arithmetic, kPreciseWeights<Input>, kScoreStride, Number,
                  Mask>{weights_, static_cast<Number>(problem_.shape.scale),
                        states.maxima, sums, mask, fetched});
    Vector<uint32_t> beyond{};
    for (const auto& sum : sums) {
      beyond |= std::bit_cast<Vector<uint32_t>>(
          ~(simd::abs(sum) <= static_cast<Number>(kLargestWeight)));
    }
    if (simd::any_bit(beyond)) {
      return false;
    }
    for (int i = 0; i < kRows; ++i) {
      states.sums[i] += sums[i];
    }
    return true;
  }

  // The same relative to new maxima.
  template <int kRows>
  void weigh(const ForwardTask& task, int64_t row, int used,
             const RightPanels<Lane>& keys, int64_t first, int64_t count) {
    const AttentionShape& shape = problem_.shape;
    // A positive scale is left to the softmax, which has it for nothing; unless
    // sums are made of parts, each of which the backward pass scales.
    const int64_t padded = round_up(count, simd::kLanes<Number>);
    const bool in_parts = packing_.key_depth > problem_.longest_sum;
    Number scale = static_cast<Number>(shape.scale);
    multiply_strip<Arithmetic, kRows>(
        queries(row), keys, packing_.key_depth, count,
        store_scaled(
            scores_, kScoreStride, in_parts ? scale : Number{1},
            problem_.mask.fetched(mask_offset_, task.row + row, first)),
        problem_.longest_sum);
    scale = in_parts ? Number{1} : scale;
    if (!(scale > Number{0}) ||
        problem_.masks_strip(task.row + row, first, count)) {
      problem_.mask_strip(scores_, kScoreStride, scale, mask_offset_,
                          task.row + row, used, first, count);
      scale = Number{1};
    }

    const auto factors_of = [&](int i) -> const Number* {
      if (!problem_.dropout) {
        return nullptr;
      }
      problem_.dropout_factors(factors_, task.batch, task.row + row + i, first,
                               padded);
      return factors_;
    };
    Number corrections[kRows];
    const bool corrects =
        softmax_strip<Arithmetic, kPreciseWeights<Input>, kRows, kScoreStride>(
            scores_, padded, scale, states_.from(row), factors_of, weights_,
            corrections);
    for (int i = 0; corrects && i < used; ++i) {
      if (corrections[i] != Number{1}) {
        scale_row(values_ + (row + i) * packing_.value_stride,
                  packing_.value_stride, corrections[i]);
      }
    }
  }

  const Problem<Input>& problem_;
  const VisibleKeys<Input>& visible_keys_;
  const PackedKeyValue<Input>& packing_;
  int64_t mask_offset_ = 0;
  Lane* query_;
  Number* values_;
  Number* scores_;
  Weight<Arithmetic>* weights_;
  Number* factors_;
  SoftmaxStates<Number> states_;
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
  const VisibleKeys<Input> visible_keys(problem);
  const PackedKeyValue<Input> packing(shape);
  const int64_t key_heads = problem.key_heads();
  const int64_t key_blocks = (shape.columns + kKeyBlock - 1) / kKeyBlock;
  const int64_t heads_at_once = std::clamp<int64_t>(
      ForwardPlan::kPackedBytes /
          std::max<int64_t>(packing.size * int64_t{sizeof(Lane)}, 1),
      1, std::max<int64_t>(key_heads, 1));
  const ForwardPlan plan(shape, heads_at_once * shape.group, problem.threads);

  SoftmaxParts<Number> parts{nullptr, packing.value_stride};
  if (plan.splits > 1) {
    parts.data = Workspace::of_this_thread<5>().request<Number>(
        shape.batch() * shape.rows * plan.splits * parts.size());
  }
  Lane* packed = Workspace::of_this_thread<4>().request<Lane>(heads_at_once *
                                                              packing.size);
  bool* finite =
      Workspace::of_this_thread<6>().request<bool>(heads_at_once * key_blocks);
  for (int64_t first = 0; first < key_heads; first += heads_at_once) {
    const int64_t heads = std::min(heads_at_once, key_heads - first);
    for_each_task(heads * key_blocks, problem.threads, [&](int64_t task) {
      const int64_t head = task / key_blocks;
      finite[task] = packing.pack_block(problem, first + head,
                                        task % key_blocks * kKeyBlock,
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
      ForwardBlock<Input> rows(problem, visible_keys, packing, plan.block_rows);
      rows.run(work, packed + head * packing.size, finite + head * key_blocks);
      for (int64_t i = 0; i < work.rows; ++i) {
        if (plan.splits > 1) {
          const int64_t flat = work.batch * shape.rows + row + i;
          parts.put(flat * plan.splits + split, rows.state(i), rows.values(i));
        } else {
          outputs.store(shape, work.batch, row + i, rows.state(i),
                        rows.values(i));
        }
      }
    });
  }
  if (plan.splits > 1) {
    merge_rows(shape, parts, plan.splits, outputs);
    Workspace::of_this_thread<5>().release_excess();
  }
  Workspace::of_this_thread<4>().release_excess();
}

}  // namespace pkg::cpu::attention
