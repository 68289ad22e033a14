// The tokens of a packed batch that no sequence covers: those in front of the
// first, behind the last one, and beyond the longest that the caller told of.
// Their results are zeros, and minus infinity as log-sum-exp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "host/tensor.h"
#include "scaled_dot_product_attention_varlen.h"

namespace pkg::cpu::attention {

class UncoveredTokens {
 public:
  // Sequences follow one another and do not overlap.
  UncoveredTokens(const std::vector<PackedRange>& sequences, int64_t tokens)
      : tokens_(tokens) {
    int64_t end = 0;
    for (const PackedRange& sequence : sequences) {
      add(end, sequence.begin);
      end = sequence.begin + sequence.count;
    }
    add(end, tokens);
  }

  // Of a contiguous tensor (tokens, heads, size).
  void zero(const Tensor& tensor) const {
    const auto sizes = sizes_of(tensor);
    const int64_t row = sizes[1] * sizes[2] * element_size(dtype_of(tensor));
    if (row == 0) {
      return;
    }
    for (const PackedRange& range : ranges_) {
      std::memset(
          static_cast<char*>(tensor.mutable_data_ptr()) + range.begin * row, 0,
          static_cast<size_t>(range.count * row));
    }
  }

  // Of a contiguous log-sum-exp (heads, tokens).
  template <class Number>
  void have_no_key(Number* log_sum_exp, int64_t heads) const {
    for (const PackedRange& range : ranges_) {
      for (int64_t head = 0; head < heads; ++head) {
        std::fill_n(log_sum_exp + head * tokens_ + range.begin, range.count,
                    -std::numeric_limits<Number>::infinity());
      }
    }
  }

 private:
  void add(int64_t begin, int64_t end) {
    if (end > begin) {
      ranges_.push_back({begin, end - begin});
    }
  }

  int64_t tokens_;
  std::vector<PackedRange> ranges_;
};

}  // namespace pkg::cpu::attention
