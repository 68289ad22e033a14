// The blocked forward pass: how the work is cut and who does what.
// scaled_dot_product_attention_forward.cpp says what it computes and why it is
// shaped as it is; forward_block.h is what a task does.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/attention/blocking.h"
#include "cpu/attention/forward_block.h"
#include "cpu/attention/forward_operands.h"
#include "cpu/attention/forward_outputs.h"
#include "cpu/attention/merge.h"
#include "cpu/attention/problem.h"
#include "cpu/attention/tile_forward_block.h"
#include "cpu/attention/visible_keys.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/simd.h"
#include "host/integer_math.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

// How the work is cut. A block of kBlockRows rows keeps its queries, values and
// a block of keys in half of a 1 MiB L2 cache at a head size of 64 to 128; with
// few rows in all, blocks shrink until each thread has some, and then the keys
// are split. Keys and values of heads_at_once() heads are packed at a time.
struct ForwardPlan {
  static constexpr int64_t kBlockRows = 16 * kStripRows;
  static constexpr int64_t kLeastRows = 4 * kStripRows;

  int64_t block_rows;
  int64_t row_blocks;
  int64_t splits;
  int64_t split_columns;

  // `batch` is how many matrices of the batch are at hand at a time.
  // Blocks are of whole strips of strip_rows rows, as far as there are rows.
  ForwardPlan(const AttentionShape& shape, int64_t batch, int64_t threads,
              int64_t strip_rows) {
    const int64_t wanted = threads > 1 ? 4 * threads : 1;
    const int64_t most = std::max<int64_t>(1, shape.rows / kLeastRows);
    row_blocks = std::max<int64_t>(ceil_div(shape.rows, kBlockRows),
                                   std::min(ceil_div(wanted, batch), most));
    block_rows = round_up(ceil_div(shape.rows, row_blocks), strip_rows);
    row_blocks = ceil_div(shape.rows, block_rows);
    const int64_t key_blocks = ceil_div(shape.columns, kKeyBlock);
    splits =
        batch * row_blocks >= threads
            ? 1
            : std::min((wanted + batch * row_blocks - 1) / (batch * row_blocks),
                       std::max<int64_t>(key_blocks, 1));
    split_columns = ceil_div(key_blocks, splits) * kKeyBlock;
    splits = std::max<int64_t>(
        1, split_columns == 0 ? 1 : ceil_div(shape.columns, split_columns));
  }
};

// What makes the products, and what it wants packed, of how many heads at a
// time.
template <class Input>
struct ByVectors {
  using Packing = PackedKeyValue<Input>;
  using Element = typename Packing::KGroup;
  using Block = ForwardBlock<Input>;
  static constexpr int64_t kRows = kStripRows;
  static int64_t heads_at_once(int64_t head_bytes, int64_t threads) {
    return attention::heads_at_once(head_bytes, threads);
  }
  static bool is_refused(const Packing& /*packing*/) { return false; }
};
#if defined(PKG_HAS_TILES)
template <class Input>
struct ByTiles {
  using Packing = TilePackedKeyValue<Input>;
  using Element = std::byte;
  using Block = TileForwardBlock<Input>;
  static constexpr int64_t kRows = tiles::kStrip;
  static int64_t heads_at_once(int64_t head_bytes, int64_t threads) {
    return tile_heads_at_once(head_bytes, threads);
  }
  static bool is_refused(const Packing& packing) { return packing.is_refused; }
};
#endif

template <class Input, class Way>
class BlockedForward {
 public:
  BlockedForward(const Problem<Input>& problem,
                 const ForwardOutputs<Input>& outputs)
      : problem_(problem),
        outputs_(outputs),
        visible_keys_(problem),
        packing_(problem.shape),
        key_blocks_(ceil_div(problem.shape.columns, kKeyBlock)),
        heads_at_once_(std::clamp<int64_t>(
            Way::heads_at_once(packing_.size * int64_t{sizeof(Element)},
                               problem.threads),
            1, std::max<int64_t>(problem.key_heads(), 1))),
        plan_(problem.shape, heads_at_once_ * problem.shape.group,
              problem.threads, Way::kRows),
        partial_results_{nullptr, packing_.value_stride} {
    if (plan_.splits > 1) {
      partial_results_.data =
          Workspace::of_this_thread<Slot::AttentionParts>().request<Number>(
              shape().batch() * shape().rows * plan_.splits *
              partial_results_.size());
    }
    packed_ =
        Workspace::of_this_thread<Slot::AttentionHeads>().request<Element>(
            heads_at_once_ * packing_.size);
    finite_ = Workspace::of_this_thread<Slot::AttentionFlags>().request<bool>(
        heads_at_once_ * key_blocks_);
  }

  // Whether it was done: the way is right for the operands. Else the outputs
  // are yet to be written.
  bool run() {
    const int64_t key_heads = problem_.key_heads();
    for (int64_t first = 0; first < key_heads; first += heads_at_once_) {
      const int64_t heads = std::min(heads_at_once_, key_heads - first);
      pack_keys_and_values(first, heads);
      if (!Way::is_refused(packing_)) {
        run_row_blocks(first, heads);
      }
      if (Way::is_refused(packing_)) {
        return false;
      }
    }
    if (plan_.splits > 1) {
      merge_rows(shape(), partial_results_, plan_.splits, outputs_);
      Workspace::of_this_thread<Slot::AttentionParts>().release_excess();
    }
    Workspace::of_this_thread<Slot::AttentionHeads>().release_excess();
    return true;
  }

 private:
  using Number = simd::Compute<Input>;
  using Element = typename Way::Element;

  const AttentionShape& shape() const { return problem_.shape; }

  void pack_keys_and_values(int64_t first, int64_t heads) {
    for_each_task(heads * key_blocks_, problem_.threads, [&](int64_t task) {
      const int64_t head = task / key_blocks_;
      finite_[task] = packing_.pack_block(problem_, first + head,
                                          task % key_blocks_ * kKeyBlock,
                                          packed_ + head * packing_.size);
    });
  }

  // A task is a split of the keys against a block of rows of one of the query
  // heads that share a key head.
  void run_row_blocks(int64_t first, int64_t heads) {
    const int64_t tasks_per_head =
        shape().group * plan_.row_blocks * plan_.splits;
    for_each_task(heads * tasks_per_head, problem_.threads, [&](int64_t task) {
      const int64_t head = task / tasks_per_head;
      int64_t inside = task % tasks_per_head;
      const int64_t split = inside % plan_.splits;
      inside /= plan_.splits;
      // The last rows first: they see most keys if causal.
      const int64_t block = plan_.row_blocks - 1 - inside % plan_.row_blocks;
      const int64_t row = block * plan_.block_rows;
      const ForwardTask work{
          (first + head) * shape().group + inside / plan_.row_blocks, row,
          std::min(plan_.block_rows, shape().rows - row),
          split * plan_.split_columns,
          std::min((split + 1) * plan_.split_columns, shape().columns)};
      typename Way::Block rows(problem_, visible_keys_, packing_,
                               plan_.block_rows);
      rows.run(work, packed_ + head * packing_.size,
               finite_ + head * key_blocks_);
      if (!Way::is_refused(packing_)) {
        store_rows(work, rows, split);
      }
    });
  }

  void store_rows(const ForwardTask& task, const typename Way::Block& rows,
                  int64_t split) {
    for (int64_t i = 0; i < task.rows; ++i) {
      if (plan_.splits > 1) {
        const int64_t flat = task.batch * shape().rows + task.row + i;
        partial_results_.put(flat * plan_.splits + split, rows.state(i),
                             rows.output_sums(i));
      } else {
        outputs_.store(shape(), task.batch, task.row + i, rows.state(i),
                       rows.output_sums(i));
      }
    }
  }

  const Problem<Input>& problem_;
  const ForwardOutputs<Input>& outputs_;
  VisibleKeys<Input> visible_keys_;
  typename Way::Packing packing_;
  int64_t key_blocks_;
  int64_t heads_at_once_;
  ForwardPlan plan_;
  PartialResults<Number> partial_results_;
  Element* packed_;
  bool* finite_;  // of each block of keys that is packed
};

template <class Input>
void attention_forward_by_vectors(const Problem<Input>& problem,
                                  const ForwardOutputs<Input>& outputs) {
  BlockedForward<Input, ByVectors<Input>>(problem, outputs).run();
}

template <class Input>
void attention_forward_blocked(const Problem<Input>& problem,
                               const ForwardOutputs<Input>& outputs) {
#if defined(PKG_HAS_TILES)
  if constexpr (kGoesByTiles<Input>) {
    if (goes_by_tiles<Input>(problem.shape, outputs.has_backward) &&
        BlockedForward<Input, ByTiles<Input>>(problem, outputs).run()) {
      return;
    }
  }
#endif
  attention_forward_by_vectors(problem, outputs);
}

}  // namespace pkg::cpu::attention
