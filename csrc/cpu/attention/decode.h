// A few rows against many keys, as when a model generates text: the part that
// scaled_dot_product_attention and decode_attention share. Nothing is packed,
// since each key and value is used only a few times.
//
// Algorithm: block by block of keys: scores by dot products along the head; the
// online softmax (FlashAttention-2, arXiv 2307.08691, 3.1); O += P V. Up to
// four of the rows that share a key head go together, so that each register of
// keys and values is loaded and converted once for all four. The scores and
// probabilities of a block are computed before the values of the one before it:
// while a softmax waits for its own results, there is something to read. The
// keys of a head are split among tasks (Flash-Decoding), whose partial results
// the last task of the head merges.
//
// Operations: 2 S (E + Ev) for a row. Bytes: S (E + Ev) elements, once for all
// rows. Bound by memory up to about three rows, then by the multiply-add units:
// one row, 4096 keys x 64, Zen 4, one thread, reads 29 GB/s of float32, 34 of
// bfloat16 and of float16, where plain reading gives 30. What brought it there:
// one key at a time, from its beginning to its end; the softmax a block ahead;
// blocks of a page, not of 64 keys; software prefetch (decode_prefetch.h). The
// log is in docs/tuning/attention.md.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/attention/blocking.h"
#include "cpu/attention/decode_elements.h"
#include "cpu/attention/decode_rows.h"
#include "cpu/attention/merge.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/simd.h"
#include "host/integer_math.h"

namespace pkg::cpu::attention {

// How the heads' keys are split among tasks, so that also one row of one head
// keeps all threads busy (Dao and others, "Flash-Decoding", 2023). It does not
// depend on the number of threads, and parts are merged in the order of the
// keys, so that results do not either.
//   splits  of head h are the tasks first[h] to before first[h + 1]
class SplitPlan {
 public:
  // As many tasks as make unequal ones even, where each has enough to do.
  static constexpr int64_t kTasks = 256;
  static constexpr int64_t kLeastKeys = 256;

  // `columns(head)` is how many keys the head has.
  template <class Columns>
  SplitPlan(int64_t heads, int64_t* first, const Columns& columns)
      : heads_(heads), first_(first) {
    int64_t all = 0;
    for (int64_t head = 0; head < heads; ++head) {
      all += columns(head);
    }
    keys_ = std::max(kLeastKeys, round_up(ceil_div(all, kTasks), kDecodeKeys));
    first_[0] = 0;
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t splits = ceil_div(columns(head), keys_);
      first_[head + 1] = first_[head] + std::max<int64_t>(splits, 1);
    }
  }

  int64_t tasks() const { return first_[heads_]; }
  int64_t head_of(int64_t task) const {
    return std::upper_bound(first_, first_ + heads_ + 1, task) - first_ - 1;
  }
  int64_t splits(int64_t head) const { return first_[head + 1] - first_[head]; }
  int64_t first_task(int64_t head) const { return first_[head]; }
  int64_t column(int64_t task, int64_t head) const {
    return (task - first_[head]) * keys_;
  }
  int64_t keys() const { return keys_; }

 private:
  int64_t heads_;
  int64_t* first_;
  int64_t keys_;
};

// Runs `work` over all its heads:
//   heads(), rows(), head_size(), value_size(), scale(), threads()
//   columns(head)                     how many keys there are
//   load(head, decode_rows)           sets the queries
//   run(head, decode_rows, column, column_end)
//   finish(head, row, state, sums of P V)  stores a result
// The task that is the last of its head merges the parts.
template <class Input, class Work>
void decode(const Work& work) {
  using Number = simd::Compute<Input>;
  const int64_t heads = work.heads();
  const SplitPlan plan(
      heads,
      Workspace::of_this_thread<Slot::AttentionHeads>().request<int64_t>(heads +
                                                                         1),
      [&](int64_t head) { return work.columns(head); });
  const int64_t row_count = work.rows();
  PartialResults<Number> parts{
      nullptr, DecodeRows<Input>::padded_values(work.value_size())};
  std::vector<std::atomic<int64_t>> done;
  if (plan.tasks() > heads) {
    parts.data =
        Workspace::of_this_thread<Slot::AttentionParts>().request<Number>(
            plan.tasks() * row_count * parts.size());
    done = std::vector<std::atomic<int64_t>>(static_cast<size_t>(heads));
  }
  for_each_task(plan.tasks(), work.threads(), [&](int64_t task) {
    const int64_t head = plan.head_of(task);
    const int64_t splits = plan.splits(head);
    const int64_t column = plan.column(task, head);
    DecodeRows<Input> rows(row_count, work.head_size(), work.value_size(),
                           work.scale());
    work.load(head, rows);
    work.run(head, rows, column,
             std::min(column + plan.keys(), work.columns(head)));
    for (int64_t i = 0; i < row_count; ++i) {
      if (splits > 1) {
        parts.put(task * row_count + i, rows.state(i), rows.output_sums(i));
      } else {
        work.finish(head, i, rows.state(i), rows.output_sums(i));
      }
    }
    // Acquires what the others have put, and releases this part.
    if (splits > 1 && done[static_cast<size_t>(head)].fetch_add(
                          1, std::memory_order_acq_rel) == splits - 1) {
      for (int64_t i = 0; i < row_count; ++i) {
        const int64_t first = plan.first_task(head) * row_count + i;
        const auto state = parts.merge(first, splits, row_count);
        work.finish(head, i, state, parts.output_sums(first));
      }
    }
  });
  Workspace::of_this_thread<Slot::AttentionParts>().release_excess();
}

}  // namespace pkg::cpu::attention
