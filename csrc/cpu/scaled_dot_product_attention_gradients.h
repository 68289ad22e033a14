// The gradients of query, key and value: the loops over pairs of blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "scaled_dot_product_attention_backward.h"

namespace pkg::cpu::attention {

// Everything of one head's queries that meets each of its keys, packed once:
// left operands (PackedQueries), and queries and output gradients again as
// right operands, of which the rows are the inner dimension.
template <class Input>
struct PackedHead {
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using Lane = typename Arithmetic::Lane;
  static constexpr int64_t kColumns = kTileColumns<Arithmetic>;
  PackedQueries<Input> left;
  int64_t key_stride;    // columns of the head size, filled up
  int64_t value_stride;  // columns of the value size, filled up
  int64_t block_size;    // lanes of a block of rows
  int64_t size;          // lanes of all

  explicit PackedHead(const AttentionShape& shape)
      : left(shape),
        key_stride(round_up(shape.head_size, kColumns)),
        value_stride(round_up(shape.value_size, kColumns)),
        block_size(round_up(
            left.size(kGradientRows) + (key_stride + value_stride) *
                                           depth_of<Arithmetic>(kGradientRows),
            16)),
        size((shape.rows + kGradientRows - 1) / kGradientRows * block_size) {}

  Lane* queries(Lane* block) const { return left.queries(block); }
  Lane* grad_outputs(Lane* block, int64_t rows) const {
    return left.gradients(block, rows);
  }
  Lane* query_columns(Lane* block) const {
    return block + left.size(kGradientRows);
  }
  Lane* grad_output_columns(Lane* block) const {
    return query_columns(block) +
           key_stride * depth_of<Arithmetic>(kGradientRows);
  }
  void pack(const BackwardProblem<Input>& problem, int64_t batch, int64_t row,
            Lane* block) const {
    const AttentionShape& shape = problem.shape();
    const int64_t rows = std::min(kGradientRows, shape.rows - row);
    left.pack(problem, batch, row, rows, block);
    pack_columns<Arithmetic>(
        problem.forward.query.at(shape, batch).from(row, 0), shape.head_size,
        rows, query_columns(block));
    pack_columns<Arithmetic>(problem.grad_output.at(shape, batch).from(row, 0),
                             shape.value_size, rows,
                             grad_output_columns(block));
  }
};

// A block of keys of one head against all rows of all the heads it serves.
template <class Input>
class GradientBlock {
 public:
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using Lane = typename Arithmetic::Lane;
  using Number = simd::Compute<Input>;

  GradientBlock(const BackwardProblem<Input>& problem,
                const PackedHead<Input>& packing)
      : problem_(problem),
        packing_(packing),
        keys_(problem.shape()),
        memory_(Workspace::of_this_thread<3>().request<std::byte>(
            BlockGradients<Arithmetic>::bytes() + key_operands().size() +
            key_columns().size() + key_sums().size() + value_sums().size())),
        block_(memory_),
        key_operands_(key_operands().take(memory_)),
        key_columns_(key_columns().take(memory_)),
        key_sums_(key_sums().take(memory_)),
        value_sums_(value_sums().take(memory_)) {}

  // `packed` holds the heads that the key head serves, one after the other, and
  // `query_sums` the sums for their gradients, of `query_sums_size` each.
  void run(int64_t key_head, int64_t column, Lane* packed, Number* query_sums,
           int64_t query_sums_size, const GradientTarget<Input>& grad_key,
           const GradientTarget<Input>& grad_value) {
    const AttentionShape& shape = problem_.shape();
    column_ = column;
    count_ = std::min(kKeyBlock, shape.columns - column);
    const int64_t batch = key_head * shape.group;
    keys_.pack(problem_.forward, batch, column, count_, key_operands_);
    pack_columns<Arithmetic>(
        problem_.forward.key.at(shape, batch).from(column, 0), shape.head_size,
        count_, key_columns_);
    std::fill_n(key_sums_, key_sums().count, Number{0});
    std::fill_n(value_sums_, value_sums().count, Number{0});

    const int64_t first_row =
        problem_.forward.is_causal ? column / kGradientRows * kGradientRows : 0;
    for (int64_t g = 0; g < shape.group; ++g) {
      mask_offset_ = problem_.forward.mask.offset(shape, batch + g);
      for (int64_t row = first_row; row < shape.rows; row += kGradientRows) {
        run_rows(batch + g, row,
                 packed + g * packing_.size +
                     row / kGradientRows * packing_.block_size,
                 query_sums + g * query_sums_size + row * packing_.key_stride);
      }
    }
    const int64_t first = key_head * shape.columns + column;
    for (int64_t i = 0; i < count_; ++i) {
      grad_key.store(key_sums_ + i * packing_.key_stride, shape.head_size,
                     static_cast<Number>(shape.scale),
                     (first + i) * shape.head_size);
      grad_value.store(value_sums_ + i * packing_.value_stride,
                       shape.value_size, Number{1},
                       (first + i) * shape.value_size);
    }
  }

 private:
  static constexpr int kDepth = Arithmetic::kDepth;
  static constexpr int64_t kColumns = kTileColumns<Arithmetic>;

  Part<Lane> key_operands() const { return {keys_.size()}; }
  Part<Lane> key_columns() const {
    return {packing_.key_stride * depth_of<Arithmetic>(kKeyBlock)};
  }
  Part<Number> key_sums() const { return {kKeyBlock * packing_.key_stride}; }
  Part<Number> value_sums() const {
    return {kKeyBlock * packing_.value_stride};
  }

  void run_rows(int64_t batch, int64_t row, Lane* packed, Number* query_sums) {
    const AttentionShape& shape = problem_.shape();
    const int64_t rows = std::min(kGradientRows, shape.rows - row);
    int64_t first_active = rows;
    for_each_strip(rows, [&](int64_t strip, int used, auto height) {
      const int64_t seen =
          problem_.forward.columns_seen(row + strip + used, column_, count_);
      if (seen <= 0) {
        return;
      }
      first_active = std::min(first_active, strip);
      run_strip<height()>(
          {batch, mask_offset_, row + strip, used, column_, seen}, strip, rows,
          packed, query_sums + strip * packing_.key_stride);
    });
    if (first_active < rows) {
      add_to_key_sums(first_active, rows, packed);
    }
  }

  template <int kRows>
  void run_strip(const StripPlace& place, int64_t strip, int64_t rows,
                 Lane* packed, Number* query_sums) {
    Number* weights = block_.strip_weights(strip);
    Number* gradients = block_.strip_gradients(strip);
    strip_gradients<Input, kRows>(
        problem_, place,
        packing_.queries(packed) + strip * packing_.left.query_depth,
        packing_.grad_outputs(packed, rows) + strip * packing_.left.grad_depth,
        keys_, key_operands_, weights, gradients);
    const int64_t seen = round_up(place.count, simd::kLanes<Number>);
    const int64_t all = round_up(count_, simd::kLanes<Number>);
    for (int i = 0; i < kRows && seen < all; ++i) {
      std::fill_n(weights + i * kScoreStride + seen, all - seen, Number{0});
      std::fill_n(gradients + i * kScoreStride + seen, all - seen, Number{0});
    }
    block_.finish_strip(strip, kRows, all);
    multiply_strip<Arithmetic, LeftByRows<kScoreStride / kDepth>, kRows>(
        block_.gradients_by_rows(strip), key_columns_,
        kColumns * depth_of<Arithmetic>(count_),
        depth_of<Arithmetic>(place.count), problem_.shape().head_size,
        AddTo<Number>{query_sums, packing_.key_stride});
  }

  void add_to_key_sums(int64_t first_row, int64_t rows, Lane* packed) {
    const AttentionShape& shape = problem_.shape();
    const int64_t depth = depth_of<Arithmetic>(rows);
    const int64_t skipped = first_row / kDepth;
    for_each_strip(count_, [&](int64_t key, int, auto height) {
      multiply_strip<Arithmetic, LeftTransposed<kScoreStride>, height()>(
          block_.weights_transposed(first_row, key),
          packing_.grad_output_columns(packed) + skipped * kColumns,
          kColumns * depth, depth - skipped, shape.value_size,
          AddTo<Number>{value_sums_ + key * packing_.value_stride,
                        packing_.value_stride});
      multiply_strip<Arithmetic, LeftTransposed<kScoreStride>, height()>(
          block_.gradients_transposed(first_row, key),
          packing_.query_columns(packed) + skipped * kColumns, kColumns * depth,
          depth - skipped, shape.head_size,
          AddTo<Number>{key_sums_ + key * packing_.key_stride,
                        packing_.key_stride});
    });
  }

  const BackwardProblem<Input>& problem_;
  const PackedHead<Input>& packing_;
  PackedKeys<Input> keys_;
  std::byte* memory_;
  BlockGradients<Arithmetic> block_;
  Lane* key_operands_;
  Lane* key_columns_;
  Number* key_sums_;
  Number* value_sums_;
  int64_t column_ = 0;
  int64_t count_ = 0;
  int64_t mask_offset_ = 0;
};

// How the work is cut: a task is a key head, or a part of its keys where there
// are too few heads for the threads; then each part sums a gradient of the
// queries of its own, and these are added in the order of the keys. Heads are
// packed as many at a time as fit kPackedBytes.
template <class Input>
struct BackwardPlan {
  static constexpr int64_t kPackedBytes = int64_t{16} << 20;
  using Lane = typename PackedHead<Input>::Lane;

  int64_t heads_at_once;
  int64_t splits;
  int64_t split_columns;

  BackwardPlan(const AttentionShape& shape, const PackedHead<Input>& packing,
               int64_t key_heads, int64_t threads) {
    const int64_t bytes = std::max<int64_t>(
        shape.group * packing.size * int64_t{sizeof(Lane)}, 1);
    heads_at_once = std::clamp<int64_t>(kPackedBytes / bytes, 1, key_heads);
    const int64_t key_blocks = (shape.columns + kKeyBlock - 1) / kKeyBlock;
    const int64_t wanted =
        threads == 1 ? 1 : (4 * threads + heads_at_once - 1) / heads_at_once;
    split_columns =
        std::max<int64_t>(1, (key_blocks + wanted - 1) / wanted) * kKeyBlock;
    splits = std::max<int64_t>(
        1, (shape.columns + split_columns - 1) / split_columns);
  }
};

// Adds up the parts of the gradients of the queries from `batch` on.
template <class Input, class Number>
void store_grad_query(const AttentionShape& shape, int64_t batch, int64_t heads,
                      int64_t splits, int64_t stride, int64_t part_size,
                      Number* sums, const GradientTarget<Input>& grad_query) {
  const int64_t grain = std::max<int64_t>(1, 16384 / (stride * splits + 1));
  parallel_for(heads * shape.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t flat = begin; flat < end; ++flat) {
      const int64_t head = flat / shape.rows;
      const int64_t row = flat % shape.rows;
      Number* first = sums + head * splits * part_size + row * stride;
      for (int64_t s = 1; s < splits; ++s) {
        const Number* part = first + s * part_size;
        for (int64_t i = 0; i < stride; ++i) {
          first[i] += part[i];
        }
      }
      grad_query.store(first, shape.head_size, static_cast<Number>(shape.scale),
                       ((batch + head) * shape.rows + row) * shape.head_size);
    }
  });
}

template <class Input>
void attention_gradients(const BackwardProblem<Input>& problem,
                         const GradientTarget<Input>& grad_query,
                         const GradientTarget<Input>& grad_key,
                         const GradientTarget<Input>& grad_value) {
  using Number = simd::Compute<Input>;
  using Lane = typename PackedHead<Input>::Lane;
  const AttentionShape& shape = problem.shape();
  const PackedHead<Input> packing(shape);
  const int64_t threads = problem.forward.threads;
  const int64_t key_heads = problem.forward.key_heads();
  const BackwardPlan<Input> plan(shape, packing, key_heads, threads);
  const int64_t row_blocks = (shape.rows + kGradientRows - 1) / kGradientRows;
  const int64_t part_size = padded_rows(shape.rows) * packing.key_stride;

  Lane* packed = Workspace::of_this_thread<4>().request<Lane>(
      plan.heads_at_once * shape.group * packing.size);
  Number* query_sums = Workspace::of_this_thread<5>().request<Number>(
      plan.heads_at_once * shape.group * plan.splits * part_size);
  for (int64_t first = 0; first < key_heads; first += plan.heads_at_once) {
    const int64_t heads = std::min(plan.heads_at_once, key_heads - first);
    const int64_t first_batch = first * shape.group;
    const int64_t batch = heads * shape.group;
    for_each_task(batch * row_blocks, threads, [&](int64_t task) {
      const int64_t head = task / row_blocks;
      const int64_t block = task % row_blocks;
      packing.pack(problem, first_batch + head, block * kGradientRows,
                   packed + head * packing.size + block * packing.block_size);
    });
    for_each_task(heads * plan.splits, threads, [&](int64_t task) {
      const int64_t head = task / plan.splits;
      const int64_t split = task % plan.splits;
      // Of each matrix the parts lie side by side.
      Number* sums =
          query_sums + (head * shape.group * plan.splits + split) * part_size;
      const int64_t sums_size = plan.splits * part_size;
      for (int64_t g = 0; g < shape.group; ++g) {
        std::fill_n(sums + g * sums_size, part_size, Number{0});
      }
      GradientBlock<Input> block(problem, packing);
      const int64_t end =
          std::min((split + 1) * plan.split_columns, shape.columns);
      for (int64_t column = split * plan.split_columns; column < end;
           column += kKeyBlock) {
        block.run(first + head, column,
                  packed + head * shape.group * packing.size, sums, sums_size,
                  grad_key, grad_value);
      }
    });
    store_grad_query(shape, first_batch, batch, plan.splits, packing.key_stride,
                     part_size, query_sums, grad_query);
  }
  Workspace::of_this_thread<4>().release_excess();
  Workspace::of_this_thread<5>().release_excess();
}

}  // namespace pkg::cpu::attention
