// What the kernels of the backward pass of attention share, and its first one.
//
// Algorithm: FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 2), with one
// kernel for each gradient in place of its atomic additions, so that every sum
// runs in one fixed order and the result is the same to the last bit each time:
//
//   D_i   = sum_e dO_ie O_ie       O: unrounded   attention_delta_kernel
//   P_ij  = exp(S_ij - log_sum_exp_i)
//   dS_ij = P_ij (M_ij (dO V^T)_ij - D_i)         M: dropout, 0 or 1 / (1 - p)
//   dQ    = scale dS K                            grad_query_*.cuh
//   dK    = scale dS^T Q,  dV = (M P)^T dO        grad_key_value_*.cuh
//   dmask = dS, summed where the mask broadcasts  grad_mask.cuh
//
// Where scores are capped, dQ and dK are made of dS_ij times the derivative of
// the cap.
//
// Each kernel recomputes P tile by tile from the log-sum-exp. A block owns a
// tile of the gradient and walks everything that adds to it: the other side's
// tiles, and all the matrices of the batch that share the operand. Together
// they do 7 products where the algorithm with atomics does 5; so do five, in a
// fixed order too, blocks that add in turn: joint_gradients_*.cuh.
//
// The delta kernel reads 2 rows value_size elements for as many operations, in
// half precision 3, the output in two parts.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/panel_shape.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/device/batch.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/fast_math.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/tile_product.cuh"

namespace pkg::cuda {

// Rows of one matrix of the batch, whose place is found once for all of them:
// found for each row it took 500 instructions, and twice the time that memory
// takes (H100).
constexpr int kDeltaRows = 128;

template <class Element>
struct AttentionBackward {
  using Number = Accumulator<Element>;
  AttentionProblem<Element> problem;
  MatrixBatch<Element> grad_output;
  MatrixBatch<Element> output;
  MatrixBatch<Element> output_residual;  // the data may be null
  const Number* log_sum_exp;             // contiguous: batch, rows
  Number* delta;                         // contiguous: batch, rows

  // None where there are no queries, and then no such kernel is launched.
  __host__ __device__ int64_t delta_tiles() const {
    return problem.batch_count * tiles_of(problem.rows, kDeltaRows);
  }
};

template <class Element>
struct AttentionGradQuery {
  AttentionBackward<Element> backward;
  BatchPartition partition;  // of the batch, as the query sees it
  ResultBatch<Element> grad_query;
  int places = 0;  // in shared memory of what follows one another, grad_*_mma

  template <int kRows, int kWidth>
  __host__ __device__ int64_t tile_count() const {
    return partition.owned_count * tiles_of(backward.problem.rows, kRows) *
           tiles_of(backward.problem.head_size, kWidth);
  }
};

// The data of either gradient may be null: where key and value are broadcast
// along different dimensions, each is computed by a launch of its own.
template <class Element>
struct AttentionGradKeyValue {
  AttentionBackward<Element> backward;
  BatchPartition partition;
  ResultBatch<Element> grad_key;
  ResultBatch<Element> grad_value;
  int places = 0;  // as AttentionGradQuery's

  template <int kWidth>
  __host__ __device__ int64_t head_tiles() const {
    const int64_t key_tiles =
        grad_key.data == nullptr ? 0
                                 : tiles_of(backward.problem.head_size, kWidth);
    const int64_t value_tiles =
        grad_value.data == nullptr
            ? 0
            : tiles_of(backward.problem.value_size, kWidth);
    return key_tiles > value_tiles ? key_tiles : value_tiles;
  }

  template <int kColumns, int kWidth>
  __host__ __device__ int64_t tile_count() const {
    return partition.owned_count *
           tiles_of(backward.problem.columns, kColumns) * head_tiles<kWidth>();
  }
};

// What a block sums, and how: kPacket neighbouring elements a lane at a time,
// a row by as many lanes as it has packets, up to those of a warp. The shuffle
// adds the lanes' sums in a fixed order, which is the same however the elements
// lie.
template <class Element>
struct DeltaRows {
  using Number = Accumulator<Element>;
  static constexpr int kPacket = 16 / sizeof(Element);
  using Elements = Packet<Element, kPacket>;

  // Of row 0; the residual may be null.
  const Element* grad_output;
  const Element* output;
  const Element* residual;
  int64_t strides[3];  // from row to row, in that order
  int64_t columns[3];  // from column to column
  int64_t value_size;
  Number* delta;

  // Whether a load brings a packet.
  __device__ __forceinline__ bool has_packets() const {
    const auto suits = [&](const Element* data, int i) {
      return data == nullptr || (columns[i] == 1 && strides[i] % kPacket == 0 &&
                                 is_aligned(data, kPacket));
    };
    return value_size % kPacket == 0 && suits(grad_output, 0) &&
           suits(output, 1) && suits(residual, 2);
  }

  template <bool kHasPackets>
  __device__ __forceinline__ void sum(int rows) const {
    const int thread = static_cast<int>(threadIdx.x);
    int lanes = 1;
    while (lanes < kWarp && lanes * kPacket < value_size) {
      lanes *= 2;
    }
    const int rows_at_once = kTileThreads / lanes;
    // By whole warps, of which the last may have fewer rows.
    PKG_UNROLL_BY(1)
    for (int first = 0; first < rows; first += rows_at_once) {
      const int row = first + thread / lanes;
      Number total =
          row < rows ? part<kHasPackets>(row, thread % lanes, lanes) : 0;
      for (int distance = lanes / 2; distance > 0; distance /= 2) {
        total += __shfl_xor_sync(0xffffffffu, total, distance);
      }
      if (row < rows && thread % lanes == 0) {
        delta[row] = total;
      }
    }
  }

 private:
  template <bool kHasPackets>
  __device__ __forceinline__ Elements load(const Element* data, int i,
                                           int64_t row, int64_t column) const {
    const Element* const first = data + row * strides[i] + column * columns[i];
    if constexpr (kHasPackets) {
      return *reinterpret_cast<const Elements*>(first);
    } else {
      Elements elements;
      PKG_UNROLL
      for (int c = 0; c < kPacket; ++c) {
        elements.values[c] = column + c < value_size ? first[c * columns[i]]
                                                     : convert<Element>(0.0f);
      }
      return elements;
    }
  }

  template <bool kHasPackets>
  __device__ __forceinline__ Number part(int64_t row, int lane,
                                         int lanes) const {
    Number total = 0;
    for (int64_t column = lane * kPacket; column < value_size;
         column += lanes * kPacket) {
      const Elements grads = load<kHasPackets>(grad_output, 0, row, column);
      const Elements rounded = load<kHasPackets>(output, 1, row, column);
      Elements rest{};
      if (residual != nullptr) {
        rest = load<kHasPackets>(residual, 2, row, column);
      }
      PKG_UNROLL
      for (int c = 0; c < kPacket; ++c) {
        total += convert<Number>(grads.values[c]) *
                 (convert<Number>(rounded.values[c]) +
                  convert<Number>(rest.values[c]));
      }
    }
    return total;
  }
};

template <class Element>
__global__ void __launch_bounds__(kTileThreads) attention_delta_kernel(
    const __grid_constant__ AttentionBackward<Element> call) {
  let_next_kernel_begin();
  const AttentionProblem<Element>& problem = call.problem;
  const int64_t row_tiles = tiles_of(problem.rows, kDeltaRows);
  const int64_t tiles = call.delta_tiles();
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t batch = tile / row_tiles;
    const int64_t row_begin = tile % row_tiles * kDeltaRows;
    const AttentionExtent extent = problem.extent(batch);
    const int64_t rows = extent.rows - row_begin;
    if (rows <= 0) {
      continue;
    }
    const auto first = [&](const MatrixBatch<Element>& matrices) {
      return matrices.data == nullptr
                 ? nullptr
                 : matrices.row(problem.batch, batch,
                                extent.first_row + row_begin);
    };
    const DeltaRows<Element> own{
        first(call.grad_output),
        first(call.output),
        first(call.output_residual),
        {call.grad_output.row_stride, call.output.row_stride,
         call.output_residual.row_stride},
        {call.grad_output.column_stride, call.output.column_stride,
         call.output_residual.column_stride},
        problem.value_size,
        call.delta + extent.statistics + row_begin};
    const int count = static_cast<int>(rows < kDeltaRows ? rows : kDeltaRows);
    if (own.has_packets()) {
      own.template sum<true>(count);
    } else {
      own.template sum<false>(count);
    }
  }
}

// The weights of one matrix of the batch, and their gradients.
template <class Element>
class AttentionGradients {
 public:
  using Number = Accumulator<Element>;

  __device__ __forceinline__
  AttentionGradients(const AttentionBackward<Element>& call, int64_t batch,
                     const AttentionExtent& extent)
      : scores_(call.problem, batch, extent),
        log_sum_exp_(call.log_sum_exp + extent.statistics),
        delta_(call.delta + extent.statistics) {}

  // A row without any key has weights of zero, not exp(-inf + inf).
  __device__ __forceinline__ Number weight(int64_t row, int64_t column,
                                           Number product) const {
    return weight_of_score(row, scores_.score(row, column, product));
  }

  // The same where scores are products and nothing else, of rows that there
  // are: what belongs to a row is loaded without asking, and without a branch.
  template <class Tile>
  __device__ __forceinline__ bool are_products(int64_t row_begin,
                                               int64_t column_begin) const {
    return scores_.template are_products<Tile>(row_begin, column_begin);
  }
  __device__ __forceinline__ Number weight_of_product(int64_t row,
                                                      Number product) const {
    const Number score = product * scores_.scale();
    return zero_where_equal(score, -Number(INFINITY),
                            exp(score - log_sum_exp_[row]));
  }
  __device__ __forceinline__ Number grad_product(int64_t row, Number weight,
                                                 Number grad_weight) const {
    return zero_where_equal(weight, Number(0),
                            weight * (grad_weight - delta_[row]));
  }

  // The gradient of a score, from that of its weight after dropout. A weight of
  // zero passes nothing on, whatever its value holds.
  __device__ __forceinline__ Number grad_score(int64_t row, Number weight,
                                               Number grad_weight) const {
    return weight == Number(0) ? Number(0)
                               : weight * (grad_weight - delta_[row]);
  }

  __device__ __forceinline__ Number cap_slope(Number product) const {
    return scores_.cap_slope(product);
  }

  __device__ __forceinline__ void dropout_factors(int64_t row, int64_t column,
                                                  Number (&factors)[4]) const {
    scores_.dropout_factors(row, column, factors);
  }

 private:
  __device__ __forceinline__ Number weight_of_score(int64_t row,
                                                    Number score) const {
    return score == -Number(INFINITY) ? Number(0)
                                      : exp(score - log_sum_exp_[row]);
  }

  AttentionScores<Element> scores_;
  const Number* log_sum_exp_;
  const Number* delta_;
};

// Four rows by four columns of the gradients of a thread's weights, from its
// i-th row and j-th column on: of the first kAttentionTile columns from shared
// memory, see take_grad_scores().
template <class Scores, class Parked, class Number>
__device__ __forceinline__ void load_grad_weights(
    int i, int j, const Parked& parked, const Scores& grad_weights,
    Number (&four)[kFragment][kFragment]) {
  using Thread = typename Scores::Thread;
  const Thread thread;
  PKG_UNROLL
  for (int c = 0; c < kFragment; ++c) {
    PKG_UNROLL
    for (int r = 0; r < kFragment; ++r) {
      four[r][c] = j < Thread::own_columns(kAttentionTile)
                       ? parked[thread.column(j + c)][thread.row(i + r)]
                       : grad_weights.values[i + r][j + c];
    }
  }
}

// What take_grad_scores() does to four rows by four columns of gradients.
template <bool kOfMask, class Element, class Scores, class Number>
__device__ __forceinline__ void grad_weights_to_scores(
    const AttentionGradients<Element>& attention, const Scores& scores,
    bool are_products, int64_t row_begin, int64_t column_begin, int i, int j,
    Number (&gradients)[kFragment][kFragment]) {
  const typename Scores::Thread thread;
  PKG_UNROLL
  for (int r = 0; r < kFragment; ++r) {
    const int64_t row = row_begin + thread.row(i + r);
    const int64_t column = column_begin + thread.column(j);
    Number factors[kFragment];
    attention.dropout_factors(row, column, factors);
    const auto convert_row = [&](auto of_products) {
      PKG_UNROLL
      for (int c = 0; c < kFragment; ++c) {
        const Number product = scores.values[i + r][j + c];
        Number& gradient = gradients[r][c];
        gradient *= factors[c];
        if constexpr (of_products) {
          const Number weight = attention.weight_of_product(row, product);
          gradient = attention.grad_product(row, weight, gradient);
        } else {
          const Number weight = attention.weight(row, column + c, product);
          gradient = attention.grad_score(row, weight, gradient);
          if constexpr (!kOfMask) {
            gradient *= attention.cap_slope(product);
          }
        }
      }
    };
    are_products ? convert_row(std::true_type())
                 : convert_row(std::false_type());
  }
}

// The gradients of the scores of the queries from row_begin on against the keys
// from column_begin on; where scores are capped, of those before their cap,
// unless it is the mask's gradient (kOfMask), whose matrices are of one length.
// Calls take(i, j, gradients) for each four rows by four columns of a thread's,
// from its i-th row and j-th column on.
//
// Those of the weights come first, of which the first kAttentionTile columns
// wait in shared memory, [column][row], until the scores are there: so a thread
// has registers for one tile beside what it adds up. The place of each belongs
// to the thread that takes it.
template <bool kOfMask, class Scores, class Element, class PanelsA,
          class PanelsB, class Parked, class Take>
__device__ __forceinline__ void take_grad_scores(
    const AttentionBackward<Element>& call, int64_t batch, int64_t row_begin,
    int64_t column_begin, PanelsA&& a_panels, PanelsB&& b_panels,
    Parked&& parked, Take&& take) {
  using Number = Accumulator<Element>;
  constexpr int kDepth = kAttentionDepth<Element>;
  const AttentionProblem<Element>& problem = call.problem;
  const auto extent_of = [&](int64_t index) {
    return kOfMask ? problem.extent_of_one_length(index)
                   : problem.extent(index);
  };
  const AttentionExtent extent = extent_of(batch);

  Scores grad_weights(0);
  multiply<kDepth, PanelPlaces::of_product>(
      grad_weights,
      call.grad_output.by_row(problem.batch, batch, extent.first_row,
                              extent.rows, problem.value_size),
      row_begin,
      problem.value.by_row(problem.batch, batch, extent.first_column,
                           extent.columns, problem.value_size),
      column_begin, a_panels, b_panels);
  store_transposed<kAttentionTile>(grad_weights, 0, parked);
  Scores scores(0);
  multiply<kDepth, PanelPlaces::of_product>(
      scores,
      problem.query.by_row(problem.batch, batch, extent.first_row, extent.rows,
                           problem.head_size),
      row_begin,
      problem.key.by_row(problem.batch, batch, extent.first_column,
                         extent.columns, problem.head_size),
      column_begin, a_panels, b_panels);

  // Not before: in registers during the products it would be too much.
  const int64_t scored = computed_here(batch);
  const AttentionGradients<Element> attention(call, scored, extent_of(scored));
  const bool are_products =
      attention.template are_products<Scores>(row_begin, column_begin);
  PKG_UNROLL
  for (int i = 0; i < Scores::kThreadRows; i += kFragment) {
    PKG_UNROLL
    for (int j = 0; j < Scores::kThreadColumns; j += kFragment) {
      Number gradients[kFragment][kFragment];
      load_grad_weights(i, j, parked, grad_weights, gradients);
      grad_weights_to_scores<kOfMask>(attention, scores, are_products,
                                      row_begin, column_begin, i, j, gradients);
      take(i, j, gradients);
    }
  }
}

}  // namespace pkg::cuda
