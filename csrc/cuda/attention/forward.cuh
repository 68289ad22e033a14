// What the kernels of the forward pass of attention share: the call, the
// running softmax and what becomes of a finished tile.
#pragma once

#include <cstdint>

#include "cuda/attention/problem.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/fast_math.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// The parts into which the keys are divided among blocks, and what is kept of
// each until they are combined (forward_parts.cuh).
template <class Number>
struct AttentionParts {
  int64_t count = 1;
  Number* sums = nullptr;    // parts, batch, rows, columns of values
  Number* maxima = nullptr;  // parts, batch, rows
  Number* weights = nullptr;
};

template <class Element>
struct AttentionForward {
  AttentionProblem<Element> problem;
  ResultBatch<Element> output;
  ResultBatch<Element> output_residual;  // the data may be null
  Accumulator<Element>* log_sum_exp;     // contiguous: batch, rows
  AttentionParts<Accumulator<Element>> parts = {};

  // Of kRows queries by kWidth columns of the output.
  template <int kRows, int kWidth>
  __host__ __device__ int64_t tile_count() const {
    return problem.batch_count * tiles_of(problem.rows, kRows) *
           output_tiles<kWidth>();
  }

  __host__ __device__ int64_t first_row_of_part(int64_t part,
                                                int64_t index) const {
    return (part * problem.batch_count + index) * problem.rows;
  }

  // Divides the keys. allocate(count) has memory for so many numbers.
  template <class Allocate>
  void divide_keys(int64_t count, Allocate&& allocate) {
    const int64_t rows = count * problem.batch_count * problem.rows;
    parts.count = count;
    parts.sums = allocate(rows * (problem.value_size + 2));
    parts.maxima = parts.sums + rows * problem.value_size;
    parts.weights = parts.maxima + rows;
  }

  // One at least: the log-sum-exp is due also where the output is empty.
  template <int kWidth>
  __host__ __device__ int64_t output_tiles() const {
    const int64_t tiles = tiles_of(problem.value_size, kWidth);
    return tiles > 0 ? tiles : 1;
  }
};

// Running maximum and sum of the exponentials of each row. The maximum ignores
// NaN, the sum does not. While a row has no key yet its maximum is minus
// infinity, and 0 takes its place in the differences.
template <class Scores, class Exponential>
struct OnlineSoftmax {
  using Number = typename Scores::Value;
  Number maximum[Scores::kThreadRows];
  Number sum[Scores::kThreadRows];

  __device__ __forceinline__ OnlineSoftmax() {
    PKG_UNROLL
    for (int i = 0; i < Scores::kThreadRows; ++i) {
      maximum[i] = -Number(INFINITY);
      sum[i] = 0;
    }
  }

  // Replaces the scores of row i by weights relative to its new maximum, and
  // returns the factor for what was accumulated relative to the old one.
  __device__ __forceinline__ Number update_row(int i, Scores& scores) {
    return replace_row(i, scores, Number(1), [](Number score, Number origin) {
      return Exponential()(score - origin);
    });
  }

  // The same of products that scale, which is positive, makes scores in units
  // of log(2): a multiply-add takes the maximum off and scales. What rounding
  // the maximum leaves is the same factor of all weights of a row.
  __device__ __forceinline__ Number update_row(int i, Scores& products,
                                               Number scale) {
    return replace_row(i, products, scale, [&](Number product, Number origin) {
      return Exponential::of_base_2(fma(product, scale, -origin));
    });
  }

  // After the last of such products: the maxima are those of the scores.
  __device__ __forceinline__ void scale_maxima(Number scale) {
    constexpr Number kLog2 = 0.693147180559945309;
    PKG_UNROLL
    for (int i = 0; i < Scores::kThreadRows; ++i) {
      maximum[i] = maximum[i] == -Number(INFINITY)
                       ? maximum[i]
                       : origin_of(i, scale) * kLog2;
    }
  }

 private:
  // By weight(score, origin): the origin is the maximum, scaled.
  template <class Weight>
  __device__ __forceinline__ Number replace_row(int i, Scores& scores,
                                                Number scale, Weight&& weight) {
    auto& row = scores.values[i];
    const Number previous = maximum[i];
    maximum[i] =
        fmax(previous, row_maximum<typename Scores::Thread>(largest_of(row)));
    const Number origin = origin_of(i, scale);
    const Number correction = weight(previous, origin);
    Number totals[kChains] = {};
    PKG_UNROLL
    for (int j = 0; j < Scores::kThreadColumns; ++j) {
      row[j] = weight(row[j], origin);
      totals[j % kChains] += row[j];
    }
    Number total = totals[0];
    PKG_UNROLL
    for (int chain = 1; chain < kChains; ++chain) {
      total += totals[chain];
    }
    sum[i] = sum[i] * correction + row_sum<typename Scores::Thread>(total);
    return correction;
  }

  // Of a row's maximum and sum: an instruction that needs the result of the one
  // before waits for it, so that several such chains take less time than one.
  static constexpr int kChains = Scores::kThreadColumns >= 16 ? 4 : 1;

  __device__ __forceinline__ static Number largest_of(
      const Number (&row)[Scores::kThreadColumns]) {
    Number largest[kChains];
    PKG_UNROLL
    for (int j = 0; j < Scores::kThreadColumns; ++j) {
      largest[j % kChains] =
          j < kChains ? row[j] : fmax(largest[j % kChains], row[j]);
    }
    PKG_UNROLL
    for (int chain = 1; chain < kChains; ++chain) {
      largest[0] = fmax(largest[0], largest[chain]);
    }
    return largest[0];
  }

  __device__ __forceinline__ Number origin_of(int i, Number scale) const {
    return maximum[i] == -Number(INFINITY) ? Number(0) : maximum[i] * scale;
  }
};

// Leaves what rounding takes off each value.
template <class Element, class OutputTile>
__device__ __forceinline__ void take_rounded_off(OutputTile& tile) {
  tile.transform(
      [](int, int, auto value) { return rounded_off<Element>(value); });
}

// Divides the sums of weighted values by the sum of the weights, and writes
// what a block has computed.
template <class Element, class OutputTile, class Softmax>
__device__ __forceinline__ void store_attention(
    const AttentionForward<Element>& call, const AttentionExtent& extent,
    int64_t batch, int64_t row_begin, int64_t output_begin, OutputTile& output,
    const Softmax& softmax) {
  using Number = typename OutputTile::Value;
  const AttentionProblem<Element>& problem = call.problem;
  const typename OutputTile::Thread thread;
  // A sum of zero is a row without any key: its output is zero. What is rounded
  // to half precision is multiplied: a division of float32 takes a branch.
  constexpr bool kDivides = sizeof(Element) > 2;
  PKG_UNROLL
  for (int i = 0; i < output.kThreadRows; ++i) {
    const Number sum = softmax.sum[i];
    [[maybe_unused]] const Number inverse = Number(1) / sum;
    PKG_UNROLL
    for (int j = 0; j < output.kThreadColumns; ++j) {
      Number& value = output.values[i][j];
      if constexpr (kDivides) {
        value = sum == Number(0) ? Number(0) : value / sum;
      } else {
        value = zero_where_equal(sum, Number(0), value * inverse);
      }
    }
    const int64_t row = row_begin + thread.row(i);
    if (output_begin == 0 && thread.is_first_of_row() && row < extent.rows) {
      call.log_sum_exp[extent.statistics + row] = softmax.maximum[i] + log(sum);
    }
  }
  store_tile(output, call.output.row(problem.batch, batch, extent.first_row),
             extent.rows, problem.value_size, call.output.row_stride, row_begin,
             output_begin);
  if (call.output_residual.data != nullptr) {
    take_rounded_off<Element>(output);
    store_tile(output,
               call.output_residual.row(problem.batch, batch, extent.first_row),
               extent.rows, problem.value_size, call.output_residual.row_stride,
               row_begin, output_begin);
  }
}

}  // namespace pkg::cuda
