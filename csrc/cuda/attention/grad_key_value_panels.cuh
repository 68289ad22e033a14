// The gradients of attention's key and value by multiply-adds: of float64 and
// float32, and of heads that the tensor cores' kernel has no room for.
// dK = scale dS^T Q and dV = (M P)^T dO, see cuda/attention/gradients.cuh.
//
// A block owns 64 keys and up to 128 columns of both gradients, and walks the
// queries 64 at a time, those of all heads that share the key. 4 rows columns
// (head_size + value_size) operations for each matrix of the batch, a half if
// causal; wider heads repeat the first two of the four products.
//
// Of float32 a step of a product loads 12 numbers for 32 products where heads
// are of 64 and scores are not capped, which is 12 cycles of a multiprocessor's
// shared memory for 8 of an H200's multiply-adds; of heads of 128 it is 8 for
// 16 of the scores, and 12 for 32 of the gradients.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/gradients.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/tile_product.cuh"

namespace pkg::cuda {

// Which of a tile of keys are a thread's: of float32 and heads of 64 8 x 4 of
// the scores and of each gradient, unless there are slopes of capped scores
// besides, for which the compiler spilled up to 2 registers. Of heads of 128 it
// would be 8 x 8 of either gradient, for which it spilled 6 to 8, and to add up
// all three 32 to 38 (nvcc 13.0).
template <class Number, int kWidth, bool kCaps>
using GradKeyValueThread =
    std::conditional_t<sizeof(Number) == 4 && kWidth == 64 && !kCaps,
                       GridThread<8>, TileThread>;

// The tile of the keys from column_begin on and the queries from row_begin on.
// Here it is transposed, its rows are keys and its columns queries, as the
// products that follow sum over the queries.
// Capped scores have slopes, which take as many registers again.
template <class Element, class Thread, bool kCaps>
class TransposedWeights {
 public:
  using Number = Accumulator<Element>;
  using Weights = Tile<Number, kAttentionTile, kAttentionTile, Thread>;
  static constexpr int kDepth = kAttentionDepth<Element>;

  template <class PanelsA, class PanelsB>
  __device__ __forceinline__ TransposedWeights(
      const AttentionBackward<Element>& call, int64_t batch, int64_t row_begin,
      int64_t column_begin, PanelsA&& a_panels, PanelsB&& b_panels)
      : call_(call),
        batch_(batch),
        row_begin_(row_begin),
        column_begin_(column_begin),
        weights_(0),
        cap_slopes_(0) {
    const AttentionProblem<Element>& problem = call.problem;
    const AttentionExtent extent = problem.extent(batch);
    multiply<kDepth, PanelPlaces::of_product>(
        weights_,
        problem.key.by_row(problem.batch, batch, extent.first_column,
                           extent.columns, problem.head_size),
        column_begin,
        problem.query.by_row(problem.batch, batch, extent.first_row,
                             extent.rows, problem.head_size),
        row_begin, a_panels, b_panels);
    const AttentionGradients<Element> attention = gradients();
    const bool are_products =
        attention.template are_products<Weights>(row_begin, column_begin);
    PKG_UNROLL
    for (int j = 0; j < Weights::kThreadColumns; ++j) {
      const Thread thread;
      const int64_t row = row_begin + thread.column(j);
      PKG_UNROLL
      for (int i = 0; i < Weights::kThreadRows; i += kFragment) {
        const int64_t column = column_begin + thread.row(i);
        Number factors[kFragment];
        attention.dropout_factors(row, column, factors);
        PKG_UNROLL
        for (int k = 0; k < kFragment; ++k) {
          Number& value = weights_.values[i + k][j];
          if constexpr (kCaps) {
            cap_slopes_.values[i + k][j] = attention.cap_slope(value);
          }
          value = are_products ? attention.weight_of_product(row, value)
                               : attention.weight(row, column + k, value);
          kept_ |= static_cast<uint32_t>(factors[k] != Number(0))
                   << bit(i + k, j);
        }
      }
    }
  }

  __device__ __forceinline__ Weights dropped() const {
    const Number scale = keep_scale();
    Weights result = weights_;
    PKG_UNROLL
    for (int i = 0; i < Weights::kThreadRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < Weights::kThreadColumns; ++j) {
        result.values[i][j] *= factor(i, j, scale);
      }
    }
    return result;
  }

  // The gradients of the scores.
  template <class PanelsA, class PanelsB>
  __device__ __forceinline__ Weights grad_scores(PanelsA&& a_panels,
                                                 PanelsB&& b_panels) const {
    const AttentionProblem<Element>& problem = call_.problem;
    const AttentionExtent extent = problem.extent(batch_);
    Weights result(0);
    multiply<kDepth, PanelPlaces::of_product>(
        result,
        problem.value.by_row(problem.batch, batch_, extent.first_column,
                             extent.columns, problem.value_size),
        column_begin_,
        call_.grad_output.by_row(problem.batch, batch_, extent.first_row,
                                 extent.rows, problem.value_size),
        row_begin_, a_panels, b_panels);
    const AttentionGradients<Element> attention = gradients();
    const Number scale = keep_scale();
    const Thread thread;
    PKG_UNROLL
    for (int i = 0; i < Weights::kThreadRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < Weights::kThreadColumns; ++j) {
        result.values[i][j] = attention.grad_score(
            row_begin_ + thread.column(j), weights_.values[i][j],
            factor(i, j, scale) * result.values[i][j]);
        if constexpr (kCaps) {
          result.values[i][j] *= cap_slopes_.values[i][j];
        }
      }
    }
    return result;
  }

 private:
  __device__ __forceinline__ static constexpr int bit(int i, int j) {
    static_assert(Weights::kThreadRows * Weights::kThreadColumns <= 32);
    return i * Weights::kThreadColumns + j;
  }
  // What dropout does to a weight.
  __device__ __forceinline__ Number factor(int i, int j, Number scale) const {
    return (kept_ >> bit(i, j) & 1) != 0 ? scale : Number(0);
  }
  __device__ __forceinline__ Number keep_scale() const {
    return gradients().keep_scale();
  }

  // Found out anew where it is used: in registers during the products it would
  // be too much.
  __device__ __forceinline__ AttentionGradients<Element> gradients() const {
    const int64_t batch = computed_here(batch_);
    return {call_, batch, call_.problem.extent(batch)};
  }

  const AttentionBackward<Element>& call_;
  int64_t batch_;
  int64_t row_begin_;
  int64_t column_begin_;
  struct Nothing {
    __device__ __forceinline__ explicit Nothing(int) {}
  };
  Weights weights_;
  [[no_unique_address]] std::conditional_t<kCaps, Weights, Nothing> cap_slopes_;
  uint32_t kept_ = 0;  // a bit for each of the thread's that dropout leaves
};

// What a matrix of the batch as the key sees it has gathered. Where that lies
// is found out anew, as all that belongs to a matrix is where it is used: kept
// during the whole of the sums it took a register too many of float64's (nvcc
// 13.0, sm_80).
template <class Element, class Sum>
__device__ __forceinline__ void store_owned(
    const AttentionGradKeyValue<Element>& call, int64_t owned, const Sum& sum,
    const ResultBatch<Element>& gradient, int64_t size, int64_t column_begin,
    int64_t head_begin) {
  const AttentionProblem<Element>& problem = call.backward.problem;
  const int64_t batch = call.partition.batch_index(computed_here(owned), 0);
  const AttentionExtent extent = problem.extent(batch);
  store_tile(sum, gradient.row(problem.batch, batch, extent.first_column),
             extent.columns, size, gradient.row_stride, column_begin,
             head_begin);
}

template <class Element, int kWidth, bool kCaps>
__global__ void __launch_bounds__(
    GradKeyValueThread<Accumulator<Element>, kWidth, kCaps>::kThreads)
    attention_grad_key_value_panels_kernel(
        const __grid_constant__ AttentionGradKeyValue<Element> call) {
  using Number = Accumulator<Element>;
  using Thread = GradKeyValueThread<Number, kWidth, kCaps>;
  using Sums = Tile<Number, kAttentionTile, kWidth, Thread>;
  constexpr int kTile = kAttentionTile;
  constexpr int kDepth = kAttentionDepth<Element>;
  PKG_SHARED(Number, a_panels, [2][kDepth][kTile + kPanelPadding]);
  PKG_SHARED(Number, b_panels, [2][kDepth][kWidth + kPanelPadding]);
  PKG_SHARED(Number, weights, [kTile][kTile + kPanelPadding]);

  const AttentionBackward<Element>& backward = call.backward;
  const AttentionProblem<Element>& problem = backward.problem;
  const int64_t tiles = call.template tile_count<kTile, kWidth>();
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t column_tiles =
        tiles_of(computed_here(problem.columns), kTile);
    const int64_t head_tiles = call.template head_tiles<kWidth>();
    const int64_t owned = index / head_tiles / column_tiles;
    const int64_t column_begin = index / head_tiles % column_tiles * kTile;
    const int64_t head_begin = index % head_tiles * kWidth;
    const bool wants_key =
        call.grad_key.data != nullptr && head_begin < problem.head_size;
    const bool wants_value =
        call.grad_value.data != nullptr && head_begin < problem.value_size;

    const int64_t first = call.partition.batch_index(owned, 0);
    if (column_begin >= problem.extent(first).columns) {
      continue;
    }
    Sums key_sum(0);
    Sums value_sum(0);
    for (int64_t shared = 0; shared < call.partition.shared_count; ++shared) {
      const int64_t batch = call.partition.batch_index(owned, shared);
      const AttentionExtent extent = problem.extent(batch);
      const int64_t first_row = problem.first_row(extent, column_begin);
      const int64_t row_end = problem.row_end(extent, column_begin + kTile);
      for (int64_t row_begin = first_row; row_begin < row_end;
           row_begin += kTile) {
        const TransposedWeights<Element, Thread, kCaps> tile(
            backward, batch, row_begin, column_begin, a_panels, b_panels);
        if (wants_value) {
          store_transposed(tile.dropped(), weights);
          multiply_shared<kDepth, kTile>(
              value_sum, weights,
              backward.grad_output.by_column(problem.batch, batch,
                                             extent.first_row, extent.rows,
                                             problem.value_size),
              head_begin, row_begin, b_panels);
        }
        if (wants_key) {
          store_transposed(tile.grad_scores(a_panels, b_panels), weights);
          multiply_shared<kDepth, kTile>(
              key_sum, weights,
              problem.query.by_column(problem.batch, batch, extent.first_row,
                                      extent.rows, problem.head_size),
              head_begin, row_begin, b_panels);
        }
      }
    }
    const auto store = [&](const Sums& sum,
                           const ResultBatch<Element>& gradient, int64_t size) {
      store_owned(call, owned, sum, gradient, size, column_begin, head_begin);
    };
    if (wants_key) {
      key_sum.scale(static_cast<Number>(problem.scale));
      store(key_sum, call.grad_key, problem.head_size);
    }
    if (wants_value) {
      store(value_sum, call.grad_value, problem.value_size);
    }
  }
}

}  // namespace pkg::cuda
