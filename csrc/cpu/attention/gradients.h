// The gradients of query, key and value: the loops over pairs of blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/attention/compensation.h"
#include "cpu/attention/grad_mask.h"
#include "cpu/attention/tiled_backward.h"
#include "cpu/attention/visible_keys.h"

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
  // Returns whether all of the block is finite, if that is asked for.
  bool pack(const BackwardProblem<Input>& problem, int64_t batch, int64_t row,
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
    return problem.forward.hides_keys() &&
           left.finite(problem, batch, row, rows, block);
  }
};

// Sums for the gradient of the queries of one head, and behind them what its
// rows are balanced by.
template <class Input>
struct QuerySums {
  using Number = simd::Compute<Input>;
  using Arithmetic = typename ArithmeticOf<Input>::type;
  int64_t stride;    // numbers of a row
  int64_t rows;      // of whole strips
  int64_t sums_end;  // the first number that is not a sum
  int64_t size;

  QuerySums(const AttentionShape& shape, const PackedHead<Input>& packing)
      : stride(packing.key_stride),
        rows(padded_rows(shape.rows)),
        sums_end(rows * stride) {
    if constexpr (kRoundsWeights<Arithmetic>) {
      size = sums_end + rows / 2 * int64_t{sizeof(PairBalance<Arithmetic>)} /
                            int64_t{sizeof(Number)};
    } else {
      size = sums_end + rows * (simd::kLanes<Number> + stride);
    }
  }
  void reset(Number* sums) const {
    std::memset(sums, 0, static_cast<size_t>(size) * sizeof(Number));
  }
  Number* row(Number* sums, int64_t row) const { return sums + row * stride; }
  PairBalance<Arithmetic>& pair_balance(Number* sums, int64_t row) const {
    return reinterpret_cast<PairBalance<Arithmetic>*>(sums + sums_end)[row / 2];
  }
  RowBalance<Arithmetic> row_balance(Number* sums, int64_t row) const {
    Number* lanes = sums + sums_end;
    return {lanes + row * simd::kLanes<Number>,
            lanes + rows * simd::kLanes<Number> + row * stride};
  }
};

// A block of keys of one head against all rows of all the heads it serves.
template <class Input>
class GradientBlock {
 public:
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using Lane = typename Arithmetic::Lane;
  using Number = simd::Compute<Input>;

  // `mask_sums`, if the mask has a gradient, for `lane` and `split`.
  GradientBlock(const BackwardProblem<Input>& problem,
                const VisibleKeys<Input>& visible_keys,
                const PackedHead<Input>& packing,
                const MaskSums<Input>* mask_sums, int64_t lane, int64_t split)
      : problem_(problem),
        visible_keys_(visible_keys),
        packing_(packing),
        mask_sums_(mask_sums),
        lane_(lane),
        split_(split),
        keys_(problem.shape()),
        sums_(problem.shape(), packing),
        memory_(Workspace::of_this_thread<3>().request<std::byte>(
            BlockGradients<Arithmetic>::bytes() + key_operands().size() +
            key_columns().size() + key_means().size() + key_sums().size() +
            value_sums().size())),
        block_(memory_),
        key_operands_(key_operands().take(memory_)),
        key_columns_(key_columns().take(memory_)),
        key_means_(key_means().take(memory_)),
        key_sums_(key_sums().take(memory_)),
        value_sums_(value_sums().take(memory_)) {}

  // `packed` holds the heads that the key head serves, one after the other,
  // `finite` says it of each of their blocks of rows, and `query_sums` are the
  // sums for their gradients, of `query_sums_size` each.
  void run(int64_t key_head, int64_t column, Lane* packed, const bool* finite,
           Number* query_sums, int64_t query_sums_size,
           const GradientTarget<Input>& grad_key,
           const GradientTarget<Input>& grad_value) {
    const TileRegisters<Arithmetic> registers;
    const AttentionShape& shape = problem_.shape();
    column_ = column;
    count_ = std::min(kKeyBlock, shape.columns - column);
    const int64_t batch = key_head * shape.group;
    keys_.pack(problem_.forward, batch, column, count_, key_operands_);
    pack_columns<Arithmetic>(
        problem_.forward.key.at(shape, batch).from(column, 0), shape.head_size,
        count_, key_columns_);
    if constexpr (!kRoundsWeights<Arithmetic>) {
      KeyPieces<Arithmetic>::find_common(key_columns_, count_,
                                         packing_.key_stride, key_means_);
    }
    const bool finite_keys =
        problem_.forward.hides_keys() && keys_.finite(key_operands_, count_);
    std::fill_n(key_sums_, key_sums().count, Number{0});
    std::fill_n(value_sums_, value_sums().count, Number{0});

    for (int64_t g = 0; g < shape.group; ++g) {
      mask_offset_ = problem_.forward.mask.offset(shape, batch + g);
      for (int64_t row = 0; row < shape.rows; row += kGradientRows, ++finite) {
        run_rows(batch + g, row, finite_keys && *finite,
                 packed + g * packing_.size +
                     row / kGradientRows * packing_.block_size,
                 query_sums + g * query_sums_size);
      }
    }
    for (int64_t i = 0; i < count_; ++i) {
      grad_key.store(shape, batch, column + i,
                     key_sums_ + i * packing_.key_stride, shape.head_size,
                     static_cast<Number>(shape.scale));
      grad_value.store(shape, batch, column + i,
                       value_sums_ + i * packing_.value_stride,
                       shape.value_size, Number{1});
    }
  }

 private:
  static constexpr int kDepth = Arithmetic::kDepth;
  static constexpr int64_t kColumns = kTileColumns<Arithmetic>;
  static constexpr int64_t kLaneRows = kGradientRows / kDepth;

  Part<Lane> key_operands() const { return {keys_.size()}; }
  Part<Lane> key_columns() const {
    return {packing_.key_stride * depth_of<Arithmetic>(kKeyBlock)};
  }
  Part<Number> key_means() const {
    return {KeyPieces<Arithmetic>::kCount * packing_.key_stride};
  }
  Part<Number> key_sums() const { return {kKeyBlock * packing_.key_stride}; }
  Part<Number> value_sums() const {
    return {kKeyBlock * packing_.value_stride};
  }

  void run_rows(int64_t batch, int64_t row, bool all_finite, Lane* packed,
                Number* query_sums) {
    const AttentionShape& shape = problem_.shape();
    const int64_t rows = std::min(kGradientRows, shape.rows - row);
    const typename VisibleKeys<Input>::OfMatrix visible_keys(visible_keys_,
                                                             batch);
    int64_t first_active = rows;
    KeyRange active{count_, 0};
    for_each_strip(rows, [&](int64_t strip, int used, auto height) {
      const KeyRange seen =
          visible_keys.of_strip(row + strip, used, column_, count_, all_finite);
      if (seen.begin < seen.end) {
        first_active = std::min(first_active, strip);
        active = {std::min(active.begin, seen.begin),
                  std::max(active.end, seen.end)};
        run_strip<height()>({batch, mask_offset_, row + strip, used,
                             column_ + seen.begin, seen.end - seen.begin},
                            strip, rows, packed, query_sums);
        return;
      }
      add_to_mask(batch, row + strip, used, strip, {0, 0});
      if (first_active < rows) {
        fill_strip<height()>(strip, {0, 0});
        block_.finish_strip(strip, height(), padded_count());
      }
    });
    if (first_active < rows) {
      add_to_key_sums(first_active, rows, active, packed);
    }
  }

  void add_to_mask(int64_t batch, int64_t row, int64_t rows, int64_t strip,
                   const KeyRange& seen) {
    if (mask_sums_ != nullptr) {
      mask_sums_->add(lane_, split_, batch, row, column_, rows, count_, seen,
                      block_.strip_gradients(strip));
    }
  }

  int64_t padded_count() const {
    return round_up(count_, simd::kLanes<Number>);
  }

  // Zeros for the keys outside of what a strip's rows see.
  template <int kRows>
  void fill_strip(int64_t strip, const KeyRange& seen) {
    const int64_t end = round_up(seen.end, simd::kLanes<Number>);
    for (Number* matrix :
         {block_.strip_weights(strip), block_.strip_gradients(strip)}) {
      for (int i = 0; i < kRows; ++i) {
        Number* row = matrix + i * kScoreStride;
        std::fill_n(row, seen.begin, Number{0});
        std::fill(row + end, row + padded_count(), Number{0});
      }
    }
  }

  template <int kRows>
  void run_strip(const StripPlace& place, int64_t strip, int64_t rows,
                 Lane* packed, Number* query_sums) {
    const int64_t first = place.column - column_;
    strip_gradients<Input, kRows>(
        problem_, place,
        packing_.queries(packed) + strip * packing_.left.query_depth,
        packing_.grad_outputs(packed, rows) + strip * packing_.left.grad_depth,
        keys_, key_operands_, first, block_.strip_weights(strip) + first,
        block_.strip_gradients(strip) + first,
        mask_sums_ == nullptr ? FetchedRows{}
                              : mask_sums_->fetched(lane_, split_, place.batch,
                                                    place.row, place.column));
    add_to_mask(place.batch, place.row, place.used, strip,
                {first, first + place.count});
    fill_strip<kRows>(strip, {first, first + place.count});
    block_.finish_strip(strip, kRows, padded_count());
    if constexpr (kRoundsWeights<Arithmetic>) {
      for (int i = 0; i < kRows; i += 2) {
        sums_.pair_balance(query_sums, place.row + i)
            .add(block_.weights_transposed(strip + i, first),
                 block_.gradients_transposed(strip + i, first), place.column,
                 round_up(place.count, simd::kLanes<Number>));
      }
    } else {
      for (int i = 0; i < place.used; ++i) {
        sums_.row_balance(query_sums, place.row + i)
            .add(block_.strip_weights(strip) + i * kScoreStride,
                 block_.strip_gradients(strip) + i * kScoreStride,
                 padded_count(), key_means_, sums_.stride);
      }
    }
    multiply_strip<Arithmetic, kRows>(
        LeftByRows<Lane, kScoreStride / kDepth>{
            block_.gradients_by_rows(strip) + first / kDepth},
        packed_panels<Arithmetic>(key_columns_, depth_of<Arithmetic>(count_),
                                  first / kDepth),
        depth_of<Arithmetic>(place.count), problem_.shape().head_size,
        add_to(sums_.row(query_sums, place.row), sums_.stride));
  }

  // Of the keys that any of the rows sees.
  void add_to_key_sums(int64_t first_row, int64_t rows, const KeyRange& active,
                       Lane* packed) {
    const AttentionShape& shape = problem_.shape();
    const int64_t depth = depth_of<Arithmetic>(rows);
    const int64_t skipped = first_row / kDepth;
    for_each_strip(active.end - active.begin, [&](int64_t i, int, auto height) {
      const int64_t key = active.begin + i;
      alignas(64) Lane memory[height() * kLaneRows];
      const auto transposed = [&](const Lane* rows) {
        return transposed_left<Arithmetic, height(), kScoreStride, kLaneRows>(
            rows, depth - skipped, memory);
      };
      multiply_strip<Arithmetic, height()>(
          transposed(block_.weights_transposed(first_row, key)),
          packed_panels<Arithmetic>(packing_.grad_output_columns(packed), depth,
                                    skipped),
          depth - skipped, shape.value_size,
          add_to(value_sums_ + key * packing_.value_stride,
                 packing_.value_stride));
      multiply_strip<Arithmetic, height()>(
          transposed(block_.gradients_transposed(first_row, key)),
          packed_panels<Arithmetic>(packing_.query_columns(packed), depth,
                                    skipped),
          depth - skipped, shape.head_size,
          add_to(key_sums_ + key * packing_.key_stride, packing_.key_stride));
    });
  }

  const BackwardProblem<Input>& problem_;
  const VisibleKeys<Input>& visible_keys_;
  const PackedHead<Input>& packing_;
  const MaskSums<Input>* mask_sums_;
  int64_t lane_;
  int64_t split_;
  PackedKeys<Input> keys_;
  QuerySums<Input> sums_;
  std::byte* memory_;
  BlockGradients<Arithmetic> block_;
  Lane* key_operands_;
  Lane* key_columns_;
  Number* key_means_;
  Number* key_sums_;
  Number* value_sums_;
  int64_t column_ = 0;
  int64_t count_ = 0;
  int64_t mask_offset_ = 0;
};

// How the work is cut: a task is a key head (or a lane of MaskSums), or a part
// of its keys where there are too few heads for the threads; then each part
// sums a gradient of the queries of its own, and these are added in the order
// of the keys. Heads are packed as many at a time as fit kPackedBytes.
template <class Input>
struct BackwardPlan {
  static constexpr int64_t kPackedBytes = int64_t{16} << 20;
  using Lane = typename PackedHead<Input>::Lane;

  int64_t heads_at_once;
  int64_t splits;
  int64_t key_blocks;

  BackwardPlan(const AttentionShape& shape, const PackedHead<Input>& packing,
               int64_t key_heads, int64_t threads,
               const MaskSums<Input>* mask_sums) {
    const int64_t bytes = std::max<int64_t>(
        shape.group * packing.size * int64_t{sizeof(Lane)}, 1);
    heads_at_once = std::clamp<int64_t>(kPackedBytes / bytes, 1,
                                        std::max<int64_t>(key_heads, 1));
    const int64_t lanes =
        mask_sums == nullptr ? heads_at_once : mask_sums->lanes(heads_at_once);
    // Two tasks a thread even out unequal ones, as few blocks make them: then
    // each is a task.
    key_blocks = (shape.columns + kKeyBlock - 1) / kKeyBlock;
    const int64_t wanted = threads == 1                ? 1
                           : key_blocks <= 4 * threads ? key_blocks
                                                       : 2 * threads;
    splits = std::clamp<int64_t>((wanted + lanes - 1) / lanes, 1,
                                 std::max<int64_t>(key_blocks, 1));
  }

  // The first key of a part.
  int64_t column(int64_t split) const {
    return key_blocks * split / splits * kKeyBlock;
  }
};

// Adds up the parts of the gradients of the queries from `batch` on.
template <class Input, class Number>
void store_grad_query(const BackwardProblem<Input>& problem,
                      const QuerySums<Input>& part, int64_t batch,
                      int64_t heads, int64_t splits, Number* sums,
                      const GradientTarget<Input>& grad_query) {
  using Arithmetic = typename ArithmeticOf<Input>::type;
  const AttentionShape& shape = problem.shape();
  const int64_t grain =
      std::max<int64_t>(1, 16384 / (part.stride * splits + 1));
  parallel_for(heads * shape.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t flat = begin; flat < end; ++flat) {
      const int64_t head = flat / shape.rows;
      const int64_t row = flat % shape.rows;
      Number* of_head = sums + head * splits * part.size;
      Number* first = part.row(of_head, row);
      for (int64_t s = 1; s < splits; ++s) {
        const Number* other = first + s * part.size;
        for (int64_t i = 0; i < part.stride; ++i) {
          first[i] += other[i];
        }
      }
      if constexpr (kRoundsWeights<Arithmetic>) {
        auto balance = part.pair_balance(of_head, row);
        for (int64_t split = 1; split < splits; ++split) {
          balance.merge(part.pair_balance(of_head + split * part.size, row));
        }
        take_off_balance(balance, row % 2,
                         problem.forward.key.at(shape, batch + head),
                         shape.columns, shape.head_size, first);
      } else {
        const auto balance = part.row_balance(of_head, row);
        for (int64_t split = 1; split < splits; ++split) {
          balance.merge(part.row_balance(of_head + split * part.size, row),
                        part.stride);
        }
        balance.take_off(part.stride, first);
      }
      grad_query.store(shape, batch + head, row, first, shape.head_size,
                       static_cast<Number>(shape.scale));
    }
  });
}

template <class Input>
void attention_gradients(const BackwardProblem<Input>& problem,
                         const GradientTarget<Input>& grad_query,
                         const GradientTarget<Input>& grad_key,
                         const GradientTarget<Input>& grad_value,
                         MaskSums<Input>* mask_sums = nullptr) {
  using Number = simd::Compute<Input>;
  using Lane = typename PackedHead<Input>::Lane;
  const AttentionShape& shape = problem.shape();
  const VisibleKeys<Input> visible_keys(problem.forward);
  const PackedHead<Input> packing(shape);
  const int64_t threads = problem.forward.threads;
  const int64_t key_heads = problem.forward.key_heads();
  const BackwardPlan<Input> plan(shape, packing, key_heads, threads, mask_sums);
  if (mask_sums != nullptr) {
    mask_sums->allocate(plan.splits);
  }
  const int64_t row_blocks = (shape.rows + kGradientRows - 1) / kGradientRows;
  const QuerySums<Input> part(shape, packing);

  Lane* packed = Workspace::of_this_thread<4>().request<Lane>(
      plan.heads_at_once * shape.group * packing.size);
  Number* query_sums = Workspace::of_this_thread<5>().request<Number>(
      plan.heads_at_once * shape.group * plan.splits * part.size);
  bool* finite = Workspace::of_this_thread<6>().request<bool>(
      plan.heads_at_once * shape.group * row_blocks);
  for (int64_t first = 0; first < key_heads; first += plan.heads_at_once) {
    const int64_t heads = std::min(plan.heads_at_once, key_heads - first);
    const int64_t first_batch = first * shape.group;
    const int64_t batch = heads * shape.group;
    for_each_task(batch * row_blocks, threads, [&](int64_t task) {
      const int64_t head = task / row_blocks;
      const int64_t block = task % row_blocks;
      finite[task] = packing.pack(
          problem, first_batch + head, block * kGradientRows,
          packed + head * packing.size + block * packing.block_size);
    });
    const int64_t lanes =
        mask_sums == nullptr ? heads : mask_sums->lanes(heads);
    for_each_task(lanes * plan.splits, threads, [&](int64_t task) {
      const int64_t lane = task / plan.splits;
      const int64_t split = task % plan.splits;
      GradientBlock<Input> block(problem, visible_keys, packing, mask_sums,
                                 lane, split);
      for (int64_t head = lane * heads / lanes;
           head < (lane + 1) * heads / lanes; ++head) {
        // Of each matrix the parts lie side by side.
        Number* sums =
            query_sums + (head * shape.group * plan.splits + split) * part.size;
        const int64_t sums_size = plan.splits * part.size;
        for (int64_t g = 0; g < shape.group; ++g) {
          part.reset(sums + g * sums_size);
        }
        const int64_t end = std::min(plan.column(split + 1), shape.columns);
        for (int64_t column = plan.column(split); column < end;
             column += kKeyBlock) {
          block.run(first + head, column,
                    packed + head * shape.group * packing.size,
                    finite + head * shape.group * row_blocks, sums, sums_size,
                    grad_key, grad_value);
        }
      }
    });
    store_grad_query(problem, part, first_batch, batch, plan.splits, query_sums,
                     grad_query);
  }
  Workspace::of_this_thread<4>().release_excess();
  Workspace::of_this_thread<5>().release_excess();
}

// Compiled in scaled_dot_product_attention_backward.cpp, once for all
// operators.
#define PKG_ATTENTION_BACKWARD(kind, Input)                             \
  kind template void compute_statistics(const BackwardProblem<Input>&); \
  kind template void attention_gradients(                               \
      const BackwardProblem<Input>&, const GradientTarget<Input>&,      \
      const GradientTarget<Input>&, const GradientTarget<Input>&,       \
      MaskSums<Input>*)
PKG_ATTENTION_BACKWARD(extern, double);
PKG_ATTENTION_BACKWARD(extern, float);
PKG_ATTENTION_BACKWARD(extern, Half);
PKG_ATTENTION_BACKWARD(extern, BFloat16);

}  // namespace pkg::cpu::attention
