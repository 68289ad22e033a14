// The gradients of attention's key and value by multiply-adds: of float64 and
// float32, and of heads that the tensor cores' kernel has no room for.
// dK = scale dS^T Q and dV = (M P)^T dO, see cuda/attention/gradients.cuh.
//
// A block owns 64 keys and up to 128 columns of both gradients, and walks the
// queries 64 at a time, those of all heads that share the key. 4 rows columns
// (head_size + value_size) operations for each matrix of the batch, a half if
// causal; wider heads repeat the first two of the four products.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/gradients.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/tile_product.cuh"

namespace pkg::cuda {

// The tile of the keys from column_begin on and the queries from row_begin on.
// Here it is transposed, its rows are keys and its columns queries, as the
// products that follow sum over the queries.
// Capped scores have slopes, which take as many registers again.
template <class Element, bool kCaps>
class TransposedWeights {
 public:
  using Number = Accumulator<Element>;
  using Weights = Tile<Number, kAttentionTile, kAttentionTile>;
  static constexpr int kDepth = kAttentionDepth<Element>;

  template <class PanelsA, class PanelsB>
  __device__ __forceinline__ TransposedWeights(
      const AttentionBackward<Element>& call, int64_t batch, int64_t row_begin,
      int64_t column_begin, PanelsA&& a_panels, PanelsB&& b_panels)
      : call_(call),
        extent_(call.problem.extent(batch)),
        attention_(call, batch, extent_),
        batch_(batch),
        row_begin_(row_begin),
        column_begin_(column_begin),
        weights_(0),
        cap_slopes_(0) {
    const AttentionProblem<Element>& problem = call.problem;
    multiply<kDepth, PanelPlaces::of_product>(
        weights_,
        problem.key.by_row(problem.batch, batch, extent_.first_column,
                           extent_.columns, problem.head_size),
        column_begin,
        problem.query.by_row(problem.batch, batch, extent_.first_row,
                             extent_.rows, problem.head_size),
        row_begin, a_panels, b_panels);
    if constexpr (kCaps) {
      cap_slopes_ = weights_;
      cap_slopes_.transform([&](int, int, Number product) {
        return attention_.cap_slope(product);
      });
    }
    weights_.transform([&](int column, int row, Number product) {
      return attention_.weight(row_begin + row, column_begin + column, product);
    });
    PKG_UNROLL
    for (int j = 0; j < Weights::kThreadColumns; ++j) {
      Number factors[Weights::kThreadRows];
      attention_.dropout_factors(row_begin + thread_.column(j),
                                 column_begin + thread_.row(0), factors);
      PKG_UNROLL
      for (int i = 0; i < Weights::kThreadRows; ++i) {
        kept_ |= static_cast<uint32_t>(factors[i] != Number(0)) << bit(i, j);
      }
    }
  }

  __device__ __forceinline__ Weights dropped() const {
    Weights result = weights_;
    PKG_UNROLL
    for (int i = 0; i < Weights::kThreadRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < Weights::kThreadColumns; ++j) {
        result.values[i][j] *= factor(i, j);
      }
    }
    return result;
  }

  // The gradients of the scores.
  template <class PanelsA, class PanelsB>
  __device__ __forceinline__ Weights grad_scores(PanelsA&& a_panels,
                                                 PanelsB&& b_panels) const {
    const AttentionProblem<Element>& problem = call_.problem;
    Weights result(0);
    multiply<kDepth, PanelPlaces::of_product>(
        result,
        problem.value.by_row(problem.batch, batch_, extent_.first_column,
                             extent_.columns, problem.value_size),
        column_begin_,
        call_.grad_output.by_row(problem.batch, batch_, extent_.first_row,
                                 extent_.rows, problem.value_size),
        row_begin_, a_panels, b_panels);
    PKG_UNROLL
    for (int i = 0; i < Weights::kThreadRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < Weights::kThreadColumns; ++j) {
        result.values[i][j] = attention_.grad_score(
            row_begin_ + thread_.column(j), weights_.values[i][j],
            factor(i, j) * result.values[i][j]);
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
  __device__ __forceinline__ Number factor(int i, int j) const {
    return (kept_ >> bit(i, j) & 1) != 0 ? attention_.keep_scale() : Number(0);
  }

  const AttentionBackward<Element>& call_;
  AttentionExtent extent_;
  AttentionGradients<Element> attention_;
  TileThread thread_;
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
__global__ void __launch_bounds__(kTileThreads)
    attention_grad_key_value_panels_kernel(
        const __grid_constant__ AttentionGradKeyValue<Element> call) {
  using Number = Accumulator<Element>;
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
    Tile<Number, kTile, kWidth> key_sum(0);
    Tile<Number, kTile, kWidth> value_sum(0);
    for (int64_t shared = 0; shared < call.partition.shared_count; ++shared) {
      const int64_t batch = call.partition.batch_index(owned, shared);
      const AttentionExtent extent = problem.extent(batch);
      const int64_t first_row = problem.first_row(extent, column_begin);
      const int64_t row_end = problem.row_end(extent, column_begin + kTile);
      for (int64_t row_begin = first_row; row_begin < row_end;
           row_begin += kTile) {
        const TransposedWeights<Element, kCaps> tile(
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
    const auto store = [&](const Tile<Number, kTile, kWidth>& sum,
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
