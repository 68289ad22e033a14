// The tiled backward pass. scaled_dot_product_attention_backward.cpp says what
// it computes and why it is shaped as it is.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cpu/attention/online_softmax.h"
#include "cpu/attention/packing.h"
#include "cpu/attention/problem.h"
#include "cpu/attention/products.h"
#include "cpu/runtime/workspace.h"

namespace pkg::cpu::attention {

// Rows of a pair of blocks: even, since bfloat16 goes by pairs of rows.
inline constexpr int64_t kGradientRows = kStripRows * 8;
static_assert(kGradientRows % 2 == 0);

// What of a row is needed to recompute its weights and their gradients.
template <class Number>
struct RowStatistics {
  Number origin;       // its log-sum-exp; exp(score - origin) is the weight
  Number delta;        // the sum of grad_output times output
  Number origin_rest;  // what rounding took off the origin, if known
};

template <class Input>
struct BackwardProblem {
  using Number = simd::Compute<Input>;
  Problem<Input> forward;
  Matrices<Input> grad_output;
  Matrices<Input> output;
  Matrices<Input> output_residual;  // without data, if there is none
  Matrices<Number> log_sum_exp;
  RowStatistics<Number>* statistics;         // of each row of the batch
  const Number* log_sum_exp_rest = nullptr;  // likewise, or null

  const AttentionShape& shape() const { return forward.shape; }
};

// A row without any key has weights of 0; one whose largest score is infinite
// has none that is a number.
template <class Number>
Number weight_origin(Number log_sum_exp) {
  if (log_sum_exp == -kInfinity<Number>) {
    return kInfinity<Number>;
  }
  return log_sum_exp == kInfinity<Number>
             ? std::numeric_limits<Number>::quiet_NaN()
             : log_sum_exp;
}

// delta is another form of the sum of the weights times their gradients, which
// is NaN where an output gradient is infinite: terms of either sign meet.
//
// A register of rows at a time: their elements are multiplied and added in the
// order in which the micro-kernel adds those of grad_output V^T, so that the
// difference of the two is exactly 0 where one key has all the weight.
template <class Input>
void compute_statistics(const BackwardProblem<Input>& problem) {
  using Number = simd::Compute<Input>;
  constexpr int kLanes = simd::kLanes<Number>;
  const AttentionShape& shape = problem.shape();
  const int64_t longest = problem.forward.longest_sum;
  const int64_t blocks = (shape.rows + kLanes - 1) / kLanes;
  const int64_t grain = std::max<int64_t>(
      1, 16384 / (kLanes * std::max<int64_t>(shape.value_size, 1)));
  parallel_for(shape.batch() * blocks, grain, [&](int64_t begin, int64_t end) {
    const Part<Number> part{shape.value_size * kLanes};
    std::byte* memory =
        Workspace::of_this_thread<3>().request<std::byte>(3 * part.size());
    Number* gradients = part.take(memory);
    Number* outputs = part.take(memory);
    Number* residuals = part.take(memory);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t batch = block / blocks;
      const int64_t row = block % blocks * kLanes;
      const int rows =
          static_cast<int>(std::min<int64_t>(kLanes, shape.rows - row));
      const auto pack = [&](const Matrices<Input>& matrices, Number* to) {
        const auto matrix = matrices.at(shape, batch).from(row, 0);
        pack_lines<Floating<Number>>(matrix.data, matrix.row_stride,
                                     matrix.column_stride, rows, kLanes,
                                     shape.value_size, to);
      };
      pack(problem.grad_output, gradients);
      pack(problem.output, outputs);
      if (problem.output_residual.data != nullptr) {
        pack(problem.output_residual, residuals);
        for (int64_t i = 0; i < part.count; i += kLanes) {
          simd::store(outputs + i,
                      simd::load(outputs + i) + simd::load(residuals + i));
        }
      }
      Vector<Number> delta{};
      Vector<Number> excess{};  // NaN where a gradient is not finite, else 0
      for (int64_t first = 0; first < shape.value_size; first += longest) {
        Vector<Number> sum{};
        const int64_t last = std::min(first + longest, shape.value_size);
        for (int64_t i = first * kLanes; i < last * kLanes; i += kLanes) {
          const Vector<Number> gradient = simd::load(gradients + i);
          sum = Floating<Number>::multiply_add(gradient,
                                               simd::load(outputs + i), sum);
          excess += gradient * Number{0};
        }
        delta = first == 0 ? sum : delta + sum;
      }
      const auto log_sum_exp =
          problem.log_sum_exp.at(shape, batch).from(row, 0);
      for (int i = 0; i < rows; ++i) {
        const int64_t flat = batch * shape.rows + row + i;
        problem.statistics[flat] = {weight_origin(*log_sum_exp.at(i, 0)),
                                    delta[i] + excess[i],
                                    problem.log_sum_exp_rest == nullptr
                                        ? Number{0}
                                        : problem.log_sum_exp_rest[flat]};
      }
    }
  });
}

// Queries and output gradients of one head as left operands (for the scores
// and the weights' gradients), block of rows by block of rows.
template <class Input>
struct PackedQueries {
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using Lane = typename Arithmetic::Lane;
  int64_t query_depth;
  int64_t grad_depth;

  explicit PackedQueries(const AttentionShape& shape)
      : query_depth(depth_of<Arithmetic>(shape.head_size)),
        grad_depth(depth_of<Arithmetic>(shape.value_size)) {}

  int64_t size(int64_t rows) const {
    return padded_rows(rows) * (query_depth + grad_depth);
  }
  Lane* queries(Lane* block) const { return block; }
  Lane* gradients(Lane* block, int64_t rows) const {
    return block + padded_rows(rows) * query_depth;
  }
  // Whether a packed block and what the forward pass left of it are finite.
  bool finite(const BackwardProblem<Input>& problem, int64_t batch, int64_t row,
              int64_t rows, Lane* block) const {
    const auto* statistics =
        problem.statistics + batch * problem.shape().rows + row;
    for (int64_t i = 0; i < rows; ++i) {
      if (std::isnan(statistics[i].origin) || std::isnan(statistics[i].delta)) {
        return false;
      }
    }
    return all_finite<Arithmetic>(block, size(rows));
  }
  void pack(const BackwardProblem<Input>& problem, int64_t batch, int64_t row,
            int64_t rows, Lane* block) const {
    const AttentionShape& shape = problem.shape();
    pack_strips<Arithmetic>(problem.forward.query.at(shape, batch).from(row, 0),
                            rows, shape.head_size, queries(block));
    pack_strips<Arithmetic>(problem.grad_output.at(shape, batch).from(row, 0),
                            rows, shape.value_size, gradients(block, rows));
  }
};

// Keys and values of a block as right operands for the same products.
template <class Input>
struct PackedKeys {
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using Lane = typename Arithmetic::Lane;
  int64_t key_depth;
  int64_t value_depth;

  explicit PackedKeys(const AttentionShape& shape)
      : key_depth(depth_of<Arithmetic>(shape.head_size)),
        value_depth(depth_of<Arithmetic>(shape.value_size)) {}

  static constexpr int64_t kPaddedKeys =
      round_up(kKeyBlock, kTileColumns<Arithmetic>);
  int64_t size() const { return kPaddedKeys * (key_depth + value_depth); }
  Lane* keys(Lane* block) const { return block; }
  Lane* values(Lane* block) const { return block + kPaddedKeys * key_depth; }
  void pack(const Problem<Input>& problem, int64_t batch, int64_t column,
            int64_t count, Lane* block) const {
    const AttentionShape& shape = problem.shape;
    pack_columns<Arithmetic>(
        problem.key.at(shape, batch).from(column, 0).transposed(), count,
        shape.head_size, keys(block));
    pack_columns<Arithmetic>(
        problem.value.at(shape, batch).from(column, 0).transposed(), count,
        shape.value_size, values(block));
  }
  bool finite(Lane* block, int64_t count) const {
    const int64_t padded = round_up(count, kTileColumns<Arithmetic>);
    return all_finite<Arithmetic>(keys(block), padded * key_depth) &&
           all_finite<Arithmetic>(values(block), padded * value_depth);
  }
};

// Where a strip lies: rows from `row` of matrix `batch`, of which `used` exist,
// against `count` keys from `column`.
struct StripPlace {
  int64_t batch;
  int64_t mask_offset;
  int64_t row;
  int used;
  int64_t column;
  int64_t count;
};

// exp(score - origin), registers side by side. The difference of two numbers of
// some size is small, and rounding it to their precision would be the largest
// error of the gradients: what was rounded off (Knuth's exact sum of two
// numbers) is put back. Half precision does not notice.
template <bool kPrecise, class Number, size_t kCount>
[[gnu::always_inline]] inline void recompute_weights(
    Vector<Number> (&scores)[kCount], Number origin, Number origin_rest) {
  Vector<Number> weights[kCount];
  for (size_t i = 0; i < kCount; ++i) {
    weights[i] = scores[i] - origin;
  }
  if constexpr (!kPrecise) {
    simd::exp_of_nonpositive<kPrecise>(weights);
    std::copy_n(weights, kCount, scores);
    return;
  }
  for (size_t i = 0; i < kCount; ++i) {
    const Vector<Number> taken = scores[i] - weights[i];
    const Vector<Number> rest =
        (scores[i] - (weights[i] + taken)) + (taken - origin - origin_rest);
    scores[i] = rest == rest ? rest : Vector<Number>{};  // infinite scores
  }
  simd::exp_of_nonpositive<kPrecise>(weights);
  for (size_t i = 0; i < kCount; ++i) {
    scores[i] = weights[i] * scores[i] + weights[i];
  }
}

// Makes of a row's scores and of the products of its output
// gradient with the values
//   weights = M exp(S - log_sum_exp)
//   gradients = exp(S - log_sum_exp) (M (grad_output V^T) - delta)
// with M of dropout, over a whole number of registers.
template <bool kPrecise, class Number>
[[gnu::always_inline]] inline void differentiate_row(
    Number* weights, Number* gradients, int64_t count,
    const RowStatistics<Number>& statistics, const Number* factors) {
  using V = Vector<Number>;
  constexpr int kLanes = simd::kLanes<Number>;
  const auto differentiate = [&](int64_t from, auto registers) {
    V weight[registers()];
    for (int i = 0; i < registers(); ++i) {
      weight[i] = simd::load(weights + from + i * kLanes);
    }
    recompute_weights<kPrecise>(weight, statistics.origin,
                                statistics.origin_rest);
    for (int i = 0; i < registers(); ++i) {
      const int64_t at = from + i * kLanes;
      V gradient = simd::load(gradients + at);
      V dropped = weight[i];
      if (factors != nullptr) {
        const V factor = simd::load(factors + at);
        gradient *= factor;
        dropped *= factor;
      }
      simd::store(gradients + at, weight[i] * (gradient - statistics.delta));
      simd::store(weights + at, dropped);
    }
  };
  int64_t i = 0;
  for (; i + detail::kExpRegisters * kLanes <= count;
       i += detail::kExpRegisters * kLanes) {
    differentiate(i, std::integral_constant<int, detail::kExpRegisters>{});
  }
  for (; i < count; i += kLanes) {
    differentiate(i, std::integral_constant<int, 1>{});
  }
}

// Recomputes the weights of a strip and the gradients of its scores. Both have
// rows of kScoreStride; what is not used of the strip's rows is 0, and so are
// the keys up to a whole register. `first` is the place's first key in the
// packed block, the beginning of a panel; `fetched` is what will be read next.
template <class Input, int kRows>
void strip_gradients(const BackwardProblem<Input>& problem,
                     const StripPlace& place,
                     const typename PackedQueries<Input>::Lane* queries,
                     const typename PackedQueries<Input>::Lane* grad_outputs,
                     const PackedKeys<Input>& packing,
                     typename PackedKeys<Input>::Lane* keys, int64_t first,
                     simd::Compute<Input>* weights,
                     simd::Compute<Input>* gradients,
                     const FetchedRows& fetched) {
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using Number = simd::Compute<Input>;
  const Problem<Input>& forward = problem.forward;
  const AttentionShape& shape = problem.shape();
  multiply_strip<Arithmetic, kRows>(
      packed_rows<Arithmetic>(queries, packing.key_depth),
      packed_panels<Arithmetic>(packing.keys(keys) + first * packing.key_depth,
                                packing.key_depth),
      packing.key_depth, place.count,
      store_scaled(
          weights, kScoreStride, static_cast<Number>(shape.scale),
          forward.mask.fetched(place.mask_offset, place.row, place.column)),
      forward.longest_sum);
  multiply_strip<Arithmetic, kRows>(
      packed_rows<Arithmetic>(grad_outputs, packing.value_depth),
      packed_panels<Arithmetic>(
          packing.values(keys) + first * packing.value_depth,
          packing.value_depth),
      packing.value_depth, place.count,
      store_to(gradients, kScoreStride, fetched), forward.longest_sum);

  const int64_t padded = round_up(place.count, simd::kLanes<Number>);
  const bool masks = forward.masks_strip(place.row, place.column, place.count);
  // Scaled already: if the compiler fused the scale into the differences of
  // recompute_weights, these would not be exact.
  if (masks) {
    forward.mask_strip(weights, kScoreStride, Number{1}, place.mask_offset,
                       place.row, place.used, place.column, place.count);
  }
  alignas(64) Number factors[kScoreStride + Dropout<Number>::kSpare];
  for (int i = 0; i < place.used; ++i) {
    Number* weight_row = weights + i * kScoreStride;
    const int64_t row = place.row + i;
    if (forward.dropout) {
      forward.dropout_factors(factors, place.batch, row, place.column, padded);
    }
    differentiate_row<kPreciseWeights<Input>>(
        weight_row, gradients + i * kScoreStride, padded,
        problem.statistics[place.batch * shape.rows + row],
        forward.dropout ? factors : nullptr);
  }
  for (int i = place.used; i < kRows; ++i) {
    std::fill_n(weights + i * kScoreStride, padded, Number{0});
    std::fill_n(gradients + i * kScoreStride, padded, Number{0});
  }
}

// Weights and score gradients of a pair of blocks, as operands: by rows for the
// gradient of the queries, transposed for those of keys and values. For
// numbers that multiply as they are, one layout serves both.
template <class Arithmetic>
struct BlockGradients {
  using Number = typename Arithmetic::Accumulator;
  static constexpr int kDepth = Arithmetic::kDepth;
  Number* weights;
  Number* gradients;

  static constexpr int64_t kCount = kGradientRows * kScoreStride;
  static int64_t bytes() { return 2 * Part<Number>{kCount}.size(); }
  explicit BlockGradients(std::byte*& memory)
      : weights(Part<Number>{kCount}.take(memory)),
        gradients(Part<Number>{kCount}.take(memory)) {}

  Number* strip_weights(int64_t row) { return weights + row * kScoreStride; }
  Number* strip_gradients(int64_t row) {
    return gradients + row * kScoreStride;
  }
  void finish_strip(int64_t, int, int64_t) {}

  const Number* gradients_by_rows(int64_t row) const {
    return gradients + row * kScoreStride;
  }
  const Number* weights_transposed(int64_t row, int64_t key) const {
    return weights + row * kScoreStride + key;
  }
  const Number* gradients_transposed(int64_t row, int64_t key) const {
    return gradients + row * kScoreStride + key;
  }
};

#if defined(__AVX512BF16__)
// bfloat16 pairs: neighbours in a row, or the same key of two rows.
template <>
struct BlockGradients<Bfloat16Dot> {
  float* weights;
  float* gradients;
  uint16_t* gradient_rows;
  uint32_t* weight_pairs;
  uint32_t* gradient_pairs;

  static constexpr int64_t kStrip = kStripRows * kScoreStride;
  static constexpr int64_t kCount = kGradientRows * kScoreStride;
  static int64_t bytes() {
    return 2 * Part<float>{kStrip}.size() + Part<uint16_t>{kCount}.size() +
           2 * Part<uint32_t>{kCount / 2}.size();
  }
  explicit BlockGradients(std::byte*& memory)
      : weights(Part<float>{kStrip}.take(memory)),
        gradients(Part<float>{kStrip}.take(memory)),
        gradient_rows(Part<uint16_t>{kCount}.take(memory)),
        weight_pairs(Part<uint32_t>{kCount / 2}.take(memory)),
        gradient_pairs(Part<uint32_t>{kCount / 2}.take(memory)) {}

  float* strip_weights(int64_t) { return weights; }
  float* strip_gradients(int64_t) { return gradients; }

  // The numbers of one row in the low halves, those of the next in the high.
  static void store_pairs(const float* first, uint32_t* to) {
    const auto bits = [](const float* from) {
      return __builtin_convertvector(
          std::bit_cast<simd::detail::Bits16>(
              _mm512_cvtneps_pbh(std::bit_cast<__m512>(simd::load(from)))),
          Vector<uint32_t>);
    };
    simd::store(to, bits(first) | bits(first + kScoreStride) << 16);
  }
  void finish_strip(int64_t row, int height, int64_t count) {
    constexpr int kLanes = simd::kLanes<float>;
    for (int i = 0; i < height; ++i) {
      for (int64_t j = 0; j < count; j += kLanes) {
        WeightsOf<Bfloat16Dot>::store(
            gradient_rows + (row + i) * kScoreStride + j,
            simd::load(gradients + i * kScoreStride + j));
      }
    }
    for (int i = 0; i < height; i += 2) {
      for (int64_t j = 0; j < count; j += kLanes) {
        const int64_t from = i * kScoreStride + j;
        const int64_t to = (row + i) / 2 * kScoreStride + j;
        store_pairs(weights + from, weight_pairs + to);
        store_pairs(gradients + from, gradient_pairs + to);
      }
    }
  }

  const uint32_t* gradients_by_rows(int64_t row) const {
    return reinterpret_cast<const uint32_t*>(gradient_rows +
                                             row * kScoreStride);
  }
  const uint32_t* weights_transposed(int64_t row, int64_t key) const {
    return weight_pairs + row / 2 * kScoreStride + key;
  }
  const uint32_t* gradients_transposed(int64_t row, int64_t key) const {
    return gradient_pairs + row / 2 * kScoreStride + key;
  }
};
#endif

// Where a gradient goes: to the matrices of a result of the inputs' type, or of
// the type of the sums where the operand was broadcast and the gradient is yet
// to be summed over the batch.
template <class Input>
struct GradientTarget {
  using Number = simd::Compute<Input>;
  Input* narrow;
  Number* wide;
  AttentionOperand layout;  // its columns are contiguous

  void store(const AttentionShape& shape, int64_t batch, int64_t row,
             const Number* from, int64_t count, Number factor) const {
    const int64_t to = layout.offset(shape, batch) + row * layout.row_stride;
    if (wide != nullptr) {
      store_row(from, count, factor, wide + to);
    } else {
      store_row(from, count, factor, narrow + to);
    }
  }
};

}  // namespace pkg::cpu::attention
