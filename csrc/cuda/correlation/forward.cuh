// The correlation of two images.
//
// A block computes 8 rows of positions of a class, in width 8 groups of 4 (2 in
// float64) at 9 shifts; a thread, a group of two rows, the second of them at
// the row of shifts before that of the first: so both meet the same row of
// input2. For each channel it reads 4 pixels of either row and the 12 of input2
// that they meet, by 5 vectors of 16 bytes, for 72 products. So shared memory
// takes 20 cycles of a multiprocessor for what keeps the multiply-adds of an
// A100 busy for 36, of an H200 for 18, and 163 instructions of two channels
// 20.4: 88% of an H200's rate (predicted 90% before; counted in nvcc 13.0's
// code). One row of 8 positions took 24 cycles.
//
// A warp has one such row of shifts, and where the patch begins or ends one row
// of positions alone. The block is given registers for two on a multiprocessor:
// with three of them the compiler spilled some twelve numbers of a piece.
//
// For each place of the kernel window and 8 channels at a time (4 in float64),
// a thread brings columns of both images into shared memory. 8 rows of input1
// and 10 of input2 serve 32 pairs of rows: a value for 14 products. The bound
// of the main loop leaves out the bringing.
//
// Products go on where one of the pixels does not exist, and are left out
// afterwards. So of a kernel of several places the sums over channels are added
// to totals in shared memory, place by place; and those of many channels are
// made of parts likewise, whose rounding errors add up to less.
//
// 2 C operations for each pixel, shift and place of the window.
#pragma once

#include <cstdint>

#include "cuda/correlation/correlation.cuh"
#include "cuda/correlation/piece.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/shared.cuh"

namespace pkg::cuda {

template <class Element>
class CorrelationBlock {
 public:
  using Number = Accumulator<Element>;
  using Width = CorrelationVectors<Number>;
  using Vector = Packet<Number, Width::kVector>;
  static constexpr int kOwnRows = 2;
  static constexpr int kRows = 4 * kOwnRows;  // of positions
  static constexpr int kShiftRows = 4;        // a warp each
  static constexpr int kThreads = 32 * kShiftRows;
  static constexpr int kDepth = 32 / static_cast<int>(sizeof(Number));
  static constexpr int kChain = 64;  // channels of a part
  using Piece = CorrelationPiece<Width, kRows, kShiftRows, kOwnRows>;
  struct Sums {
    Number values[kOwnRows][Width::kShifts][Width::kOwn];
  };

  static LaunchShape launch_shape(const CorrelationPlan& plan) {
    const int line2 = Width::most_places2(plan.classes[1]);
    const int numbers =
        pixels_begin(plan.shape) + kDepth * (kRows * kLine1 + kRows2 * line2);
    return {kThreads, numbers * static_cast<int>(sizeof(Number))};
  }

  __device__ __forceinline__ CorrelationBlock(const Correlation<Element>& call,
                                              int64_t index)
      : call_(call),
        memory_(dynamic_shared<Number>()),
        piece_(call, index),
        line2_(piece_.width.places2()),
        pixels1_(pixels_begin(call.shape)) {}

  __device__ __forceinline__ void compute(Sums& sums) const {
    const CorrelationShape& shape = call_.shape;
    const bool totals = has_totals(shape);
    clear(sums);
    if (totals) {
      store_totals(sums);
    }
    PKG_UNROLL_BY(1)
    for (int64_t ki = 0; ki < shape.kernel[0]; ++ki) {
      if (!piece_.has_rows(ki)) {
        continue;  // all threads alike
      }
      PKG_UNROLL_BY(1)
      for (int64_t kj = 0; kj < shape.kernel[1]; ++kj) {
        PKG_UNROLL_BY(1)
        for (int64_t begin = 0; begin < shape.channels; begin += kChain) {
          clear(sums);
          add_channels(sums, ki, kj, begin);
          leave_out(sums, ki, kj);
          if (totals) {
            add_totals(sums);
            store_totals(sums);
          }
        }
      }
    }
    if (totals) {
      clear(sums);
      add_totals(sums);
    }
  }

  __device__ __forceinline__ void store(const Sums& sums) const {
    const CorrelationShape& shape = call_.shape;
    const CorrelationClasses& columns = call_.classes[1];
    const CorrelationLane lane;
    const auto group = piece_.width.group(lane.group);
    if (group.of_class >= columns.position_classes) {
      return;
    }
    const bool vectorised = stores_packets<Width::kOwn>(
        call_.output, shape.output[1], columns.position_step);
    const int64_t position =
        group.of_class + group.index * columns.position_step;
    const int64_t plane = shape.output[0] * shape.output[1];
    const int64_t first = piece_.shift_of(0);
    const int count = Width::shifts_of_tile(piece_.first_shift, columns.shifts);
    PKG_UNROLL
    for (int k = 0; k < kOwnRows; ++k) {
      const int64_t row = piece_.row(own_row(k));
      if (row >= shape.output[0] || !has_shift_row(k)) {
        continue;
      }
      Element* to =
          call_.output +
          ((piece_.image * shape.patch[0] + shift_row(k)) * shape.patch[1] +
           first) *
              plane +
          row * shape.output[1];
      PKG_UNROLL
      for (int s = 0; s < Width::kShifts; ++s) {
        if (s < count && first + s * columns.shift_step < shape.patch[1]) {
          store_group(sums.values[k][s], to, position, columns.position_step,
                      shape.output[1], vectorised);
        }
        to += columns.shift_step * plane;
      }
    }
  }

 private:
  static constexpr int kRows2 = Piece::kRows2;
  static constexpr int kLine1 = Width::kPlaces1;
  static constexpr int kSums = kOwnRows * Width::kShifts * Width::kOwn;
  static_assert(Width::kPlaces2 <= kThreads);

  // Totals lie before the pixels, at the same place for every piece: a warp
  // that is done with one may write those of the next.
  __host__ __device__ static int pixels_begin(const CorrelationShape& shape) {
    return has_totals(shape) ? kSums * kThreads : 0;
  }
  __device__ __forceinline__ int pixels2() const {
    return pixels1_ + kDepth * kRows * kLine1;
  }

  // Whether sums over channels are added up in shared memory.
  __host__ __device__ static bool has_totals(const CorrelationShape& shape) {
    return shape.kernel[0] > 1 || shape.kernel[1] > 1 ||
           shape.channels > kChain;
  }

  __device__ __forceinline__ static int thread() {
    return static_cast<int>(threadIdx.x);
  }
  __device__ __forceinline__ static int warp() { return thread() / 32; }

  // Of a thread's rows: which of the piece's, and at which row of shifts.
  __device__ __forceinline__ static int own_row(int k) {
    return CorrelationLane().line * kOwnRows + k;
  }
  __device__ __forceinline__ int64_t shift_row(int k) const {
    return piece_.shift_row(warp() - k);
  }
  __device__ __forceinline__ bool has_shift_row(int k) const {
    return static_cast<uint64_t>(shift_row(k)) <
           static_cast<uint64_t>(call_.shape.patch[0]);
  }

  __device__ __forceinline__ static void clear(Sums& sums) {
    PKG_UNROLL
    for (int k = 0; k < kOwnRows; ++k) {
      PKG_UNROLL
      for (int s = 0; s < Width::kShifts; ++s) {
        PKG_UNROLL
        for (int i = 0; i < Width::kOwn; ++i) {
          sums.values[k][s][i] = 0;
        }
      }
    }
  }

  // sums += the products of a part of the channels at a place of the window.
  __device__ __forceinline__ void add_channels(Sums& sums, int64_t ki,
                                               int64_t kj,
                                               int64_t begin) const {
    const CorrelationShape& shape = call_.shape;
    const int place1 = thread() % kLine1;
    const int place2 = thread() % line2_;
    const Turns turns1 = {thread() / kLine1, kThreads / kLine1};
    const Turns turns2 = {thread() / line2_, kThreads / line2_};
    const auto position = piece_.width.group(place1 / Width::kOwn);
    const int64_t at1 = piece_.column1(
        kj, {position.of_class, position.index + place1 % Width::kOwn});
    const int64_t at2 = piece_.column2(kj, piece_.width.place2(place2));
    const int64_t left = shape.channels - begin;
    const int count = static_cast<int>(left < kChain ? left : kChain);
    PKG_UNROLL_BY(1)
    for (int c = 0; c < count; c += kDepth) {
      const int64_t channel = begin + c;
      __syncthreads();
      load_column<kRows>(call_.images1, at1, piece_.row1(ki, 0), channel,
                         pixels1_ + place1, kLine1, turns1);
      load_column<kRows2>(call_.images2, at2, piece_.row2(ki, 0), channel,
                          pixels2() + place2, line2_, turns2);
      __syncthreads();
      multiply(sums);
    }
  }

  // The threads have as many columns as a line has places, and each of them as
  // many threads as there are, which take its rows in turns.
  struct Turns {
    int first;
    int step;
  };

  // Of so many rows of a column, for channels from `channel` on, those of the
  // thread, to places a line apart.
  template <int kCount>
  __device__ __forceinline__ void load_column(
      const CorrelationImages<Element>& images, int64_t column, int64_t row,
      int64_t channel, int place, int line, const Turns& turns) const {
    if (turns.first >= turns.step) {
      return;
    }
    const CorrelationShape& shape = call_.shape;
    const bool exists = shape.has_pixel(1, column);
    const int64_t left = shape.channels - channel;
    const int channels = static_cast<int>(left < kDepth ? left : kDepth);
    const bool vectorised = has_channel_packets(images);
    const Element* from = images.data + piece_.image * images.strides[0] +
                          channel * images.strides[1] +
                          (exists ? column : 0) * images.strides[3];
    PKG_UNROLL_BY(1)
    for (int i = turns.first; i < kCount; i += turns.step) {
      const int64_t at = moved(row, i, call_.classes[0].pitch);
      const bool valid = exists && shape.has_pixel(0, at);
      load_channels<kDepth>(
          memory_.part(place + i * line, (kDepth - 1) * kCount * line + 1),
          kCount * line, from + (valid ? at : 0) * images.strides[2],
          images.strides[1], valid ? channels : 0, vectorised);
    }
  }

  // sums += the products of kDepth channels: of both rows, or of the one whose
  // shift is of the patch.
  __device__ __forceinline__ void multiply(Sums& sums) const {
    const bool first = has_shift_row(0);
    const bool last = has_shift_row(kOwnRows - 1);
    if (first && last) {
      multiply_rows<0, kOwnRows>(sums);
    } else if (first) {
      multiply_rows<0, 1>(sums);
    } else if (last) {
      multiply_rows<kOwnRows - 1, kOwnRows>(sums);
    }
  }
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void multiply_rows(Sums& sums) const {
    static_assert(kOwnRows == 2);
    const CorrelationLane lane;
    const int place1 =
        pixels1_ + own_row(0) * kLine1 + lane.group * Width::kOwn;
    const int place2 = pixels2() + (own_row(0) + warp()) * line2_ +
                       piece_.width.met(lane.group);
    PKG_UNROLL_BY(2)
    for (int c = 0; c < kDepth; ++c) {
      Vector pixels[kOwnRows];
      Vector met[Width::kMet / Width::kVector];
      PKG_UNROLL
      for (int k = kBegin; k < kEnd; ++k) {
        pixels[k] =
            memory_.template load<Vector>(place1 + (c * kRows + k) * kLine1);
      }
      PKG_UNROLL
      for (int i = 0; i < Width::kMet / Width::kVector; ++i) {
        met[i] = memory_.template load<Vector>(place2 + c * kRows2 * line2_ +
                                               i * Width::kVector);
      }
      PKG_UNROLL
      for (int k = kBegin; k < kEnd; ++k) {
        PKG_UNROLL
        for (int s = 0; s < Width::kShifts; ++s) {
          PKG_UNROLL
          for (int i = 0; i < Width::kOwn; ++i) {
            const Vector& other = met[(i + s) / Width::kVector];
            sums.values[k][s][i] +=
                pixels[k].values[i] * other.values[(i + s) % Width::kVector];
          }
        }
      }
    }
  }

  // Zeros where one of the pixels does not exist.
  __device__ __forceinline__ void leave_out(Sums& sums, int64_t ki,
                                            int64_t kj) const {
    const CorrelationShape& shape = call_.shape;
    const CorrelationLane lane;
    const auto group = piece_.width.group(lane.group);
    const bool row2 = shape.has_pixel(0, piece_.row2(ki, own_row(0) + warp()));
    uint32_t exist1 = 0;
    uint32_t exist2 = 0;
    PKG_UNROLL
    for (int i = 0; i < Width::kMet; ++i) {
      const typename Width::Place place = {group.of_class, group.index + i};
      if (i < Width::kOwn && row2 &&
          shape.has_pixel(1, piece_.column1(kj, place))) {
        exist1 |= 1u << i;
      }
      if (shape.has_pixel(1, piece_.column2(kj, place))) {
        exist2 |= 1u << i;
      }
    }
    PKG_UNROLL
    for (int k = 0; k < kOwnRows; ++k) {
      const bool row1 = shape.has_pixel(0, piece_.row1(ki, own_row(k)));
      PKG_UNROLL
      for (int s = 0; s < Width::kShifts; ++s) {
        const uint32_t exist = row1 ? exist1 & exist2 >> s : 0;
        PKG_UNROLL
        for (int i = 0; i < Width::kOwn; ++i) {
          if ((exist >> i & 1) == 0) {
            sums.values[k][s][i] = 0;
          }
        }
      }
    }
  }

  // What a thread keeps of its sums in shared memory, by vectors side by side
  // with those of other threads.
  __device__ __forceinline__ static int total_place(int vector) {
    return (vector * kThreads + thread()) * Width::kVector;
  }
  __device__ __forceinline__ void store_totals(const Sums& sums) const {
    PKG_UNROLL
    for (int k = 0; k < kSums / Width::kVector; ++k) {
      Vector vector;
      PKG_UNROLL
      for (int i = 0; i < Width::kVector; ++i) {
        vector.values[i] =
            sums.values[k / Width::kShifts][k % Width::kShifts][i];
      }
      memory_.store(total_place(k), vector);
    }
  }
  __device__ __forceinline__ void add_totals(Sums& sums) const {
    PKG_UNROLL
    for (int k = 0; k < kSums / Width::kVector; ++k) {
      const auto vector = memory_.template load<Vector>(total_place(k));
      PKG_UNROLL
      for (int i = 0; i < Width::kVector; ++i) {
        sums.values[k / Width::kShifts][k % Width::kShifts][i] +=
            vector.values[i];
      }
    }
  }

  const Correlation<Element>& call_;
  SharedSpan<Number> memory_;
  Piece piece_;
  int line2_;    // places of a row of input2 in shared memory
  int pixels1_;  // where those of input1 begin there
};

template <class Element>
__global__ void __launch_bounds__(CorrelationBlock<Element>::kThreads, 2)
    spatial_correlation_kernel(
        const __grid_constant__ Correlation<Element> call) {
  using Block = CorrelationBlock<Element>;
  for (int64_t piece = blockIdx.x; piece < call.piece_count;
       piece += gridDim.x) {
    const Block block(call, piece);
    typename Block::Sums sums;
    block.compute(sums);
    block.store(sums);
  }
}

}  // namespace pkg::cuda
