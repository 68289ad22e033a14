// Where the keys of a row are split among tasks (Dao and others,
// "Flash-Decoding", 2023): the partial results of a row, and their merging.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/attention/forward_outputs.h"
#include "cpu/attention/softmax_state.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/runtime/parallel.h"
#include "cpu/simd/math.h"
#include "cpu/simd/simd.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

// Each split leaves a row's maximum, the sum of its probabilities and the sum
// of P V, to be merged in the order of the keys.
template <class Number>
struct PartialResults {
  Number* data;
  int64_t value_stride;  // whole registers

  int64_t size() const { return kState + value_stride; }
  Number* output_sums(int64_t part) const { return at(part) + kState; }

  void put(int64_t part, const SoftmaxState<Number>& state,
           const Number* from) const {
    at(part)[0] = state.maximum;
    at(part)[1] = state.sum;
    std::copy_n(from, value_stride, output_sums(part));
  }

  // Merges `count` parts, `stride` apart; P V is added to the first one's.
  SoftmaxState<Number> merge(int64_t first, int64_t count,
                             int64_t stride) const {
    constexpr int kLanes = simd::kLanes<Number>;
    SoftmaxState<Number> state;
    for (int64_t i = 0; i < count; ++i) {
      state.maximum = std::max(state.maximum, at(first + i * stride)[0]);
    }
    Number* sums = output_sums(first);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t part = first + i * stride;
      const Number factor =
          simd::exp(simd::broadcast(at(part)[0] - origin_of(state.maximum)))[0];
      state.sum += at(part)[1] * factor;
      for (int64_t j = 0; j < value_stride; j += kLanes) {
        const Vector<Number> scaled =
            simd::load(output_sums(part) + j) * factor;
        simd::store(sums + j, i == 0 ? scaled : simd::load(sums + j) + scaled);
      }
    }
    return state;
  }

 private:
  static constexpr int64_t kState = 64 / static_cast<int64_t>(sizeof(Number));

  Number* at(int64_t part) const { return data + part * size(); }
};

// Merges the splits of every row, which follow one another.
template <class Input, class Number>
void merge_rows(const AttentionShape& shape,
                const PartialResults<Number>& parts, int64_t splits,
                const ForwardOutputs<Input>& outputs) {
  const int64_t grain = std::max<int64_t>(1, 16384 / (splits * parts.size()));
  parallel_for(shape.batch() * shape.rows, grain,
               [&](int64_t begin, int64_t end) {
                 for (int64_t flat = begin; flat < end; ++flat) {
                   const auto state = parts.merge(flat * splits, splits, 1);
                   outputs.store(shape, flat / shape.rows, flat % shape.rows,
                                 state, parts.output_sums(flat * splits));
                 }
               });
}

}  // namespace pkg::cpu::attention
