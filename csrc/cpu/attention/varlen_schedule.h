// Which threads run the sequences of a packed batch, and in which order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "cpu/runtime/parallel.h"
#include "scaled_dot_product_attention_varlen.h"

namespace pkg::cpu::attention {

struct PackedSequence {
  int64_t index;
  PackedRange rows;
  PackedRange columns;
  double work;  // of one key head, as far as the load of the threads goes
};

// The scores that are computed, and a pass over rows and keys.
inline double attention_work(int64_t rows, int64_t columns,
                             const PackedAttentionOptions& options) {
  const double q = static_cast<double>(rows);
  const double k = static_cast<double>(columns);
  double scores = q * k;
  if (options.causal) {
    // A triangle of the rows that see keys, and what is left of it.
    const double seeing = std::min(q, k);
    scores = seeing * (k - seeing) + seeing * (seeing + 1) / 2;
  }
  const KeyLimits limits = options.limits(rows, columns);
  if (limits.first > -KeyLimits::kUnlimited &&
      limits.last < KeyLimits::kUnlimited) {
    scores = std::min(scores,
                      q * static_cast<double>(limits.last - limits.first + 1));
  }
  constexpr double kKeysOfAPass = 16;
  return scores + kKeysOfAPass * (q + k);
}

// The order of work. A task is a key head of a sequence, run by one thread, the
// longest first: who is done takes the next. Where a few sequences are so long
// that threads would wait for the last of them, these come first, one after the
// other, each run by all threads.
class PackedSchedule {
 public:
  PackedSchedule(const PackedAttentionShape& shape,
                 const std::vector<PackedRange>& rows,
                 const std::vector<PackedRange>& columns,
                 const PackedAttentionOptions& options)
      : key_heads_(shape.key_heads) {
    double work = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      sequences_.push_back(
          {static_cast<int64_t>(i), rows[i], columns[i],
           attention_work(rows[i].count, columns[i].count, options)});
      work += sequences_.back().work;
    }
    std::ranges::stable_sort(sequences_, std::greater<>(),
                             &PackedSequence::work);
    const auto products =
        static_cast<double>(shape.heads) *
        static_cast<double>(shape.head_size + shape.value_size);
    threads_ = work * products < static_cast<double>(kMultiplyAddGrain)
                   ? 1
                   : num_threads();
    while (threads_ > 1 && shared_ < sequences_.size() && !is_balanced()) {
      shared_ = std::min(2 * shared_ + 1, sequences_.size());
    }
  }

  // Calls alone(sequence, key_head) or together(sequence, threads).
  template <class Alone, class Together>
  void run(const Alone& alone, const Together& together) const {
    for (size_t i = 0; i < shared_; ++i) {
      together(sequences_[i], threads_);
    }
    const auto rest = static_cast<int64_t>(sequences_.size() - shared_);
    for_each_task(rest * key_heads_, threads_, [&](int64_t task) {
      alone(sequences_[shared_ + static_cast<size_t>(task / key_heads_)],
            task % key_heads_);
    });
  }

 private:
  // Whether tasks, handed out in their order, keep the threads busy to within
  // a small share of the time.
  bool is_balanced() const {
    constexpr double kShare = 0.03;
    std::priority_queue<double, std::vector<double>, std::greater<>> busy(
        std::greater<>(),
        std::vector<double>(static_cast<size_t>(threads_), 0.0));
    double longest = 0;
    double total = 0;
    for (size_t i = shared_; i < sequences_.size(); ++i) {
      for (int64_t head = 0; head < key_heads_; ++head) {
        const double end = busy.top() + sequences_[i].work;
        busy.pop();
        busy.push(end);
        longest = std::max(longest, end);
        total += sequences_[i].work;
      }
    }
    return longest * static_cast<double>(threads_) <= (1 + kShare) * total;
  }

  std::vector<PackedSequence> sequences_;
  int64_t key_heads_;
  int64_t threads_ = 1;
  size_t shared_ = 0;
};

}  // namespace pkg::cpu::attention
