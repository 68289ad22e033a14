// A packed batch of sequences as the CPU kernels of attention see it: which
// problems it is made of, and which threads run them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "cpu/attention/problem.h"
#include "scaled_dot_product_attention_varlen.h"

namespace pkg::cpu::attention {

struct PackedSequence {
  int64_t index;
  PackedRange rows;
  PackedRange columns;
  double work;  // of one key head, as far as it matters to the balance

  int64_t causal_shift() const { return columns.count - rows.count; }
};

// The scores that are computed, and a pass over rows and keys.
inline double attention_work(int64_t rows, int64_t columns, bool is_causal) {
  const double q = static_cast<double>(rows);
  const double k = static_cast<double>(columns);
  double scores = q * k;
  if (is_causal) {
    // A triangle of the rows that see keys, and what is left of it.
    const double seeing = std::min(q, k);
    scores = seeing * (k - seeing) + seeing * (seeing + 1) / 2;
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
                 const std::vector<PackedRange>& columns, bool is_causal)
      : key_heads_(shape.key_heads) {
    double work = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      sequences_.push_back(
          {static_cast<int64_t>(i), rows[i], columns[i],
           attention_work(rows[i].count, columns[i].count, is_causal)});
      work += sequences_.back().work;
    }
    std::ranges::stable_sort(sequences_, std::greater<>(),
                             &PackedSequence::work);
    constexpr double kGrain = 64 * 64 * 64;  // multiply-adds
    const auto products =
        static_cast<double>(shape.heads) *
        static_cast<double>(shape.head_size + shape.value_size);
    threads_ = work * products < kGrain ? 1 : num_threads();
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

// The tokens of one sequence in a tensor (tokens, heads, size), from `head` on.
inline AttentionOperand packed_operand(std::span<const int64_t> strides,
                                       int64_t group) {
  AttentionOperand operand{};
  operand.row_stride = strides[0];
  operand.column_stride = strides[2];
  operand.group = group;
  operand.lead_strides[0] = strides[1];
  return operand;
}

template <class T>
Matrices<T> packed_matrices(const TensorView& tensor, int64_t first_token,
                            int64_t first_head, int64_t group = 1) {
  const auto strides = strides_of(tensor);
  return {static_cast<const T*>(tensor.const_data_ptr()) +
              first_token * strides[0] + first_head * strides[1],
          packed_operand(strides, group)};
}

// Consecutive key heads of one sequence, with the query heads that share them.
struct PackedHeads {
  const PackedSequence& sequence;
  int64_t key_head;
  int64_t key_heads;
  int64_t threads;
};

struct PackedInputs {
  const PackedAttentionShape& shape;
  const TensorView& query;
  const TensorView& key;
  const TensorView& value;
  const std::optional<TensorView>& dropout_seed;
  const PackedAttentionOptions& options;
};

inline AttentionShape shape_of(const PackedAttentionShape& packed,
                               const PackedHeads& heads) {
  AttentionShape shape{};
  shape.type = packed.type;
  shape.rows = heads.sequence.rows.count;
  shape.columns = heads.sequence.columns.count;
  shape.head_size = packed.head_size;
  shape.value_size = packed.value_size;
  shape.group = packed.group();
  shape.scale = packed.scale;
  shape.lead_dims = 1;
  shape.lead_sizes[0] = heads.key_heads * packed.group();
  return shape;
}

template <class Input>
Problem<Input> packed_problem(const PackedInputs& inputs,
                              const PackedHeads& heads) {
  using Number = simd::Compute<Input>;
  const PackedAttentionShape& packed = inputs.shape;
  const PackedSequence& sequence = heads.sequence;
  const int64_t group = packed.group();
  const AttentionShape shape = shape_of(packed, heads);
  Problem<Input> problem{
      shape,
      packed_matrices<Input>(inputs.query, sequence.rows.begin,
                             heads.key_head * group),
      packed_matrices<Input>(inputs.key, sequence.columns.begin, heads.key_head,
                             group),
      packed_matrices<Input>(inputs.value, sequence.columns.begin,
                             heads.key_head, group),
      ScoreMask<Number>(shape, std::nullopt),
      Dropout<Number>(inputs.dropout_seed, inputs.options.dropout_p),
      // The last row sees every key: alone it is none the worse without.
      inputs.options.causal && shape.rows > 1,
      heads.threads > 1 ? useful_threads(shape) : 1};
  problem.causal_shift = sequence.causal_shift();
  problem.first_batch = sequence.index * packed.heads + heads.key_head * group;
  return problem;
}

}  // namespace pkg::cpu::attention
