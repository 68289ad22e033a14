// The tokens of a packed batch that no sequence covers: those in front of the
// first and behind the last one. Their results are zeros, and minus infinity
// as log-sum-exp.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "host/tensor.h"
#include "scaled_dot_product_attention_varlen.h"

namespace pkg::cpu::attention {

class UncoveredTokens {
 public:
  UncoveredTokens(const std::vector<PackedRange>& sequences, int64_t tokens)
      : tokens_(tokens), ranges_{{{0, tokens}, {tokens, 0}}} {
    if (!sequences.empty()) {
      const int64_t end = sequences.back().begin + sequences.back().count;
      ranges_ = {{{0, sequences.front().begin}, {end, tokens - end}}};
    }
  }

  // Of a contiguous tensor (tokens, heads, size).
  void zero(const Tensor& tensor) const {
    const auto sizes = sizes_of(tensor);
    const int64_t row = sizes[1] * sizes[2] * element_size(dtype_of(tensor));
    for (const PackedRange& range : ranges_) {
      if (range.count * row > 0) {
        std::memset(
            static_cast<char*>(tensor.mutable_data_ptr()) + range.begin * row,
            0, static_cast<size_t>(range.count * row));
      }
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
  int64_t tokens_;
  std::array<PackedRange, 2> ranges_;
};

}  // namespace pkg::cpu::attention
