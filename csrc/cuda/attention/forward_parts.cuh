// Attention whose keys are divided among blocks, where there are too few
// queries to keep a device busy: what a block leaves of its part, and the
// kernel that combines the parts, in their order ("Flash-Decoding", Dao and
// others, 2023).
//
// A part is the maximum of its scores, the sum of their exponentials relative
// to it, and as many sums of values, not divided yet, as the output has
// columns. The kernel reads all of them once: a block has 16 queries and 64
// columns of their output, a thread four of each.
#pragma once

#include <cstdint>

#include "cuda/attention/forward.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/fast_math.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// Writes what a block has computed of one part of the keys. The matrices are of
// one length.
template <class Element, class OutputTile, class Softmax>
__device__ __forceinline__ void store_attention_part(
    const AttentionForward<Element>& call, int64_t part, int64_t batch,
    int64_t row_begin, int64_t output_begin, const OutputTile& output,
    const Softmax& softmax) {
  const AttentionProblem<Element>& problem = call.problem;
  const int64_t first = call.first_row_of_part(part, batch);
  const typename OutputTile::Thread thread;
  PKG_UNROLL
  for (int i = 0; i < output.kThreadRows; ++i) {
    const int64_t row = row_begin + thread.row(i);
    if (output_begin == 0 && thread.is_first_of_row() && row < problem.rows) {
      call.parts.maxima[first + row] = softmax.maximum[i];
      call.parts.weights[first + row] = softmax.sum[i];
    }
  }
  store_tile(output, call.parts.sums + first * problem.value_size, problem.rows,
             problem.value_size, problem.value_size, row_begin, output_begin);
}

template <class Element>
class AttentionCombination {
 public:
  static constexpr int kRows = 16;
  static constexpr int kWidth = 64;
  using Thread = GridThread<4, 16>;
  static constexpr int kThreads = Thread::kThreads;

  __device__ __forceinline__ static void make(
      const AttentionForward<Element>& call, int64_t index) {
    const AttentionProblem<Element>& problem = call.problem;
    const int64_t row_tiles = tiles_of(problem.rows, kRows);
    const int64_t output_tiles = call.template output_tiles<kWidth>();
    const int64_t batch = index / output_tiles / row_tiles;
    const int64_t row_begin = index / output_tiles % row_tiles * kRows;
    const int64_t output_begin = index % output_tiles * kWidth;

    State state;
    PKG_UNROLL_BY(1)
    for (int64_t part = 0; part < call.parts.count; ++part) {
      state.enlarge(state_of(call, part, batch, row_begin));
    }
    Output output(0);
    PKG_UNROLL_BY(1)
    for (int64_t part = 0; part < call.parts.count; ++part) {
      Output sums(0);
      add_stored(sums,
                 call.parts.sums +
                     call.first_row_of_part(part, batch) * problem.value_size,
                 problem.rows, problem.value_size, row_begin, output_begin);
      state.add(output, sums, state_of(call, part, batch, row_begin));
    }
    store_attention(call, problem.extent_of_one_length(batch), batch, row_begin,
                    output_begin, output, state);
  }

 private:
  using Number = Accumulator<Element>;
  using Output = Tile<Number, kRows, kWidth, Thread>;

  // Of a thread's rows; it makes no exponential by itself.
  struct State : OnlineSoftmax<Output, FastExponential> {
    __device__ __forceinline__ void enlarge(const State& part) {
      PKG_UNROLL
      for (int i = 0; i < Output::kThreadRows; ++i) {
        this->maximum[i] = fmax(this->maximum[i], part.maximum[i]);
      }
    }

    // After enlarge() with all of them.
    __device__ __forceinline__ void add(Output& output, const Output& sums,
                                        const State& part) {
      PKG_UNROLL
      for (int i = 0; i < Output::kThreadRows; ++i) {
        const Number largest = this->maximum[i];
        const Number origin =
            largest == -Number(INFINITY) ? Number(0) : largest;
        const Number factor = exp(part.maximum[i] - origin);
        this->sum[i] += part.sum[i] * factor;
        PKG_UNROLL
        for (int j = 0; j < Output::kThreadColumns; ++j) {
          output.values[i][j] += sums.values[i][j] * factor;
        }
      }
    }
  };

  __device__ __forceinline__ static State state_of(
      const AttentionForward<Element>& call, int64_t part, int64_t batch,
      int64_t row_begin) {
    const Thread thread;
    const int64_t first = call.first_row_of_part(part, batch);
    State state;
    PKG_UNROLL
    for (int i = 0; i < Output::kThreadRows; ++i) {
      const int64_t row = row_begin + thread.row(i);
      if (row < call.problem.rows) {
        state.maximum[i] = call.parts.maxima[first + row];
        state.sum[i] = call.parts.weights[first + row];
      }
    }
    return state;
  }
};

template <class Element>
__global__ void __launch_bounds__(AttentionCombination<Element>::kThreads)
    attention_forward_combine_kernel(
        const __grid_constant__ AttentionForward<Element> call) {
  wait_for_kernel_before();
  using Block = AttentionCombination<Element>;
  const int64_t tiles = call.template tile_count<Block::kRows, Block::kWidth>();
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    Block::make(call, index);
  }
}

}  // namespace pkg::cuda
