// The gradients of attention's key and value by multiply-adds: of float64 and
// float32, and of heads that the tensor cores' kernel has no room for.
// dK = scale dS^T Q and dV = (M P)^T dO, see cuda/attention/gradients.cuh.
//
// A block owns 64 keys and 64 or 128 columns of both gradients, and walks as
// many queries at a time, those of all heads that share the key. 4 rows columns
// (head_size + value_size) operations for each matrix of the batch, a half if
// causal; wider heads repeat the first two of the four products.
//
// Its threads are two groups: one multiplies the scores and adds up the values'
// gradient, the other multiplies the gradients of weights and adds up the
// keys'. So a thread has one tile of sums beside that of a product, of float32
// 8 x 8 of each, of which a step loads 16 numbers for 64 products: 16 cycles of
// a multiprocessor's shared memory for 16 of an H200's multiply-adds. Threads
// that added up both gradients had registers for 8 x 4 or 4 x 8 (12 cycles for
// 8), of heads of 64 with capped scores for 4 x 4 (8 for 4); for 8 x 8 of both
// the compiler spilled 6 to 8 registers, and to add up all three gradients 32
// to 38. Now it spills none (nvcc 13.0). A thread of float64 has 4 x 8.
//
// What a group needs of the other passes through shared memory, which with the
// panels of both is 68 KiB for 64 columns (of float64 85) and 84 for 128: two
// blocks of 64 columns have room in a multiprocessor of an A100 or H200, and
// one of 128, as many as registers leave. Where one gradient alone is asked
// for, the other group's sums are made in vain: in the time of both.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/gradients.cuh"
#include "cuda/attention/panel_shape.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/gemm/shared_panels.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/tile_product.cuh"

namespace pkg::cuda {

// What a block does for a tile of keys. Its first group has the scores and adds
// up the gradient of values, its second one the gradients of weights and that
// of keys.
template <class Element, int kWidth>
class GradKeyValuePanels {
 public:
  using Number = Accumulator<Element>;
  static constexpr int kTile = kAttentionTile;
  static constexpr int kDepth = kAttentionDepth<Element>;
  static constexpr int kGroups = 2;
  static constexpr int kGroupThreads =
      sizeof(Number) == 4 ? kWidth : 2 * kWidth;
  static constexpr int kThreads = kGroups * kGroupThreads;
  static constexpr int kQueries = kWidth;
  using Scores =
      Tile<Number, kQueries, kTile, GridThread<kGroupThreads / 8, 8, kGroups>>;
  using Sums =
      Tile<Number, kTile, kWidth, GridThread<8, kGroupThreads / 8, kGroups>>;

 private:
  static constexpr int kWideRow = kWidth + kPanelPadding;
  static constexpr int kRow = kTile + kPanelPadding;
  using WidePanels = SharedPanels<Number, 2, kDepth, kWideRow>;
  using KeyPanels = SharedPanels<Number, 2, kDepth, kRow>;
  using Weights = SharedRows<Number, kTile, kRow>;
  static constexpr int kPanels =
      kGroups * (WidePanels::kNumbers + KeyPanels::kNumbers);
  static constexpr int kWeights = kGroups * Weights::kNumbers;

 public:
  static constexpr int kSharedBytes =
      (kPanels + kWeights) * static_cast<int>(sizeof(Number));

  __device__ __forceinline__ explicit GradKeyValuePanels(
      const AttentionGradKeyValue<Element>& call)
      : call_(call),
        problem_(call.backward.problem),
        memory_(dynamic_shared<Number>()) {}

  // Of a tile of keys and one of the heads the gradients. Calls
  // function(batch, row_begin) once grad_scores() are those of the 64 queries
  // from there on; until it returns, weights_memory() is its own.
  template <class Function>
  __device__ __forceinline__ void make(int64_t owned, int64_t column_begin,
                                       int64_t head_begin,
                                       Function&& function) const {
    const int64_t first = call_.partition.batch_index(owned, 0);
    if (column_begin >= problem_.extent(first).columns) {
      return;
    }
    Sums sums(0);
    for (int64_t shared = 0; shared < call_.partition.shared_count; ++shared) {
      const int64_t batch = call_.partition.batch_index(owned, shared);
      const AttentionExtent extent = problem_.extent(batch);
      const int64_t row_end = problem_.row_end(extent, column_begin + kTile);
      for (int64_t row_begin = problem_.first_row(extent, column_begin);
           row_begin < row_end; row_begin += kQueries) {
        const Scores scores = multiply_scores(batch, row_begin, column_begin);
        PKG_UNROLL
        for (int part = 0; part < kQueries; part += kTile) {
          if (row_begin + part < row_end) {
            weigh(scores, part, batch, row_begin, column_begin);
            add(sums, batch, row_begin + part, head_begin);
            function(batch, row_begin + part);
          }
        }
      }
    }
    store(sums, owned, column_begin, head_begin);
  }

  // 0 or 1.
  __device__ __forceinline__ static int group() {
    return computed_here(static_cast<int>(threadIdx.x)) / kGroupThreads;
  }

  // Panels of the thread's group, of operands as wide as the tile of a head.
  __device__ __forceinline__ WidePanels wide_panels() const {
    return WidePanels(
        memory_.part(group() * WidePanels::kNumbers, WidePanels::kNumbers));
  }
  // [query][key]
  __device__ __forceinline__ Weights grad_scores() const { return weights(1); }
  __device__ __forceinline__ SharedSpan<Number> weights_memory() const {
    return memory_.part(kPanels, kWeights);
  }

  // Makes weights after dropout of products, and gradients of scores of those
  // of weights.
  __device__ __forceinline__ static void weigh_four(
      const AttentionGradients<Element>& attention, bool are_products,
      int64_t row, int64_t column, Number (&products)[kFragment],
      Number (&gradients)[kFragment]) {
    Number factors[kFragment];
    attention.dropout_factors(row, column, factors);
    const auto weigh = [&](auto of_products) {
      PKG_UNROLL
      for (int j = 0; j < kFragment; ++j) {
        const Number product = products[j];
        const Number gradient = factors[j] * gradients[j];
        if constexpr (of_products) {
          const Number weight = attention.weight_of_product(row, product);
          products[j] = factors[j] * weight;
          gradients[j] = attention.grad_product(row, weight, gradient);
        } else {
          const Number weight = attention.weight(row, column + j, product);
          products[j] = factors[j] * weight;
          gradients[j] = attention.grad_score(row, weight, gradient) *
                         attention.cap_slope(product);
        }
      }
    };
    are_products ? weigh(std::true_type()) : weigh(std::false_type());
  }

 private:
  __device__ __forceinline__ KeyPanels key_panels() const {
    return KeyPanels(memory_.part(
        kGroups * WidePanels::kNumbers + group() * KeyPanels::kNumbers,
        KeyPanels::kNumbers));
  }
  // [query][key]: weights after dropout, and gradients of scores, each as the
  // group adds them up.
  __device__ __forceinline__ Weights weights(int of_group) const {
    return Weights(memory_.part(kPanels + of_group * Weights::kNumbers,
                                Weights::kNumbers));
  }

  // Scores before their scale, of the other group the gradients of weights.
  __device__ __forceinline__ Scores multiply_scores(
      int64_t batch, int64_t row_begin, int64_t column_begin) const {
    const AttentionExtent extent = problem_.extent(batch);
    const auto rows_of = [&](const MatrixBatch<Element>& matrix, int64_t size) {
      return matrix.by_row(problem_.batch, batch, extent.first_row, extent.rows,
                           size);
    };
    const auto columns_of = [&](const MatrixBatch<Element>& matrix,
                                int64_t size) {
      return matrix.by_row(problem_.batch, batch, extent.first_column,
                           extent.columns, size);
    };
    const bool has_scores = group() == 0;
    const int64_t head_size = problem_.head_size;
    const int64_t value_size = problem_.value_size;
    Scores scores(0);
    multiply_depth<kDepth, PanelPlaces::of_product>(
        scores, head_size > value_size ? head_size : value_size,
        has_scores ? rows_of(problem_.query, head_size)
                   : rows_of(call_.backward.grad_output, value_size),
        row_begin,
        has_scores ? columns_of(problem_.key, head_size)
                   : columns_of(problem_.value, value_size),
        column_begin, wide_panels(), key_panels());
    return scores;
  }

  static constexpr int kHalf = kTile / 2;
  static constexpr int kPartRows = Scores::Thread::own_rows(kTile);

  // Weights and gradients of scores of the 64 queries from row `part` of the
  // tile on. Either group makes those of 32 keys, for which it gets from the
  // other what that has of them, and in the places where that was: no other
  // thread's. Others see them after a barrier.
  __device__ __forceinline__ void weigh(const Scores& scores, int part,
                                        int64_t batch, int64_t row_begin,
                                        int64_t column_begin) const {
    const int own_first = part / kTile * kPartRows;
    const typename Scores::Thread thread;
    const bool has_scores = group() == 0;
    const int own_half = has_scores ? 0 : kHalf;
    const Weights given = weights(has_scores ? 0 : 1);
    PKG_UNROLL
    for (int i = 0; i < kPartRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < kFragment; ++j) {
        given[thread.row(i)][kHalf - own_half + thread.column(j)] =
            chosen(has_scores, scores.values[own_first + i][j + kFragment],
                   scores.values[own_first + i][j]);
      }
    }
    __syncthreads();
    // Not before: in registers during the products it would be too much.
    const int64_t scored = computed_here(batch);
    const AttentionGradients<Element> attention(call_.backward, scored,
                                                problem_.extent(scored));
    const bool are_products =
        attention.template are_products<Scores>(row_begin, column_begin);
    const Weights taken = weights(has_scores ? 1 : 0);
    PKG_UNROLL
    for (int i = 0; i < kPartRows; ++i) {
      const int place = thread.row(i);
      const int first = own_half + thread.column(0);
      Number products[kFragment];
      Number gradients[kFragment];
      PKG_UNROLL
      for (int j = 0; j < kFragment; ++j) {
        const auto& own = scores.values[own_first + i];
        const Number mine = chosen(has_scores, own[j], own[j + kFragment]);
        const Number others = taken[place][first + j];
        products[j] = has_scores ? mine : others;
        gradients[j] = has_scores ? others : mine;
      }
      weigh_four(attention, are_products, row_begin + part + place,
                 column_begin + first, products, gradients);
      PKG_UNROLL
      for (int j = 0; j < kFragment; ++j) {
        weights(0)[place][first + j] = products[j];
        weights(1)[place][first + j] = gradients[j];
      }
    }
  }

  // Adds what 64 queries give to the gradient that is the thread's group's.
  __device__ __forceinline__ void add(Sums& sums, int64_t batch,
                                      int64_t row_begin,
                                      int64_t head_begin) const {
    const AttentionExtent extent = problem_.extent(batch);
    const auto steps_of = [&](const MatrixBatch<Element>& matrix,
                              int64_t size) {
      return matrix.by_column(problem_.batch, batch, extent.first_row,
                              extent.rows, size);
    };
    const int of_group = group();
    multiply_shared<kDepth, kTile>(
        sums, weights(of_group),
        of_group == 0
            ? steps_of(call_.backward.grad_output, problem_.value_size)
            : steps_of(problem_.query, problem_.head_size),
        head_begin, row_begin, wide_panels());
  }

  // Where a matrix lies is found out anew, as all that belongs to a matrix is
  // where it is used.
  __device__ __forceinline__ void store(Sums& sums, int64_t owned,
                                        int64_t column_begin,
                                        int64_t head_begin) const {
    const bool has_values = group() == 0;
    const ResultBatch<Element>& gradient =
        has_values ? call_.grad_value : call_.grad_key;
    if (gradient.data == nullptr) {
      return;
    }
    const int64_t batch = call_.partition.batch_index(computed_here(owned), 0);
    const AttentionExtent extent = problem_.extent(batch);
    sums.scale(has_values ? Number(1) : static_cast<Number>(problem_.scale));
    store_tile(sums, gradient.row(problem_.batch, batch, extent.first_column),
               extent.columns,
               has_values ? problem_.value_size : problem_.head_size,
               gradient.row_stride, column_begin, head_begin);
  }

  const AttentionGradKeyValue<Element>& call_;
  const AttentionProblem<Element>& problem_;
  SharedSpan<Number> memory_;
};

template <class Element, int kWidth>
__global__ void __launch_bounds__(GradKeyValuePanels<Element, kWidth>::kThreads)
    attention_grad_key_value_panels_kernel(
        const __grid_constant__ AttentionGradKeyValue<Element> call) {
  wait_for_kernel_before();
  constexpr int kTile = kAttentionTile;
  const int64_t tiles = call.template tile_count<kTile, kWidth>();
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t column_tiles =
        tiles_of(computed_here(call.backward.problem.columns), kTile);
    const int64_t head_tiles = call.template head_tiles<kWidth>();
    GradKeyValuePanels<Element, kWidth>(call).make(
        index / head_tiles / column_tiles,
        index / head_tiles % column_tiles * kTile, index % head_tiles * kWidth,
        [](int64_t, int64_t) {});
  }
}

}  // namespace pkg::cuda
