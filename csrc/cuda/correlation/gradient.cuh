// The gradient of either image of a correlation.
//
// A pixel of one image gathers, over the shifts, pixels of the other, each
// times the output's gradient summed over the windows that read the pixel of
// input1. Here it is the pixels of the image itself that fall into classes, by
// the patch's dilation, and of the gradient of input2 the shifts run backwards.
//
// A block computes 4 rows of pixels of a class, in width 8 groups of 4 (2 in
// float64), of 64 channels; a warp, two rows of half of the channels; a thread,
// a group of both rows, of 8 channels. For each row of the other image and 9
// shifts the block brings its pixels into shared memory, and makes those sums
// of the gradient once for all channels. Both rows of a thread meet the same
// row of the other image, at shifts of neighbouring rows: it reads the 12
// pixels that its group meets, of each channel, and for each shift 4 of either
// row's sums: 42 vectors of 16 bytes for 576 products. So shared memory takes
// 168 cycles of a multiprocessor for what keeps the multiply-adds of an A100
// busy for 288, of an H200 for 144: 86% of its rate. (One row of 8 pixels of 4
// channels took 136 cycles for 72.) What binds is what is issued beside them,
// fetching the sums of the gradient above all: 157 instructions (79% of the
// rate; counted in nvcc 13.0's code). Three blocks on a multiprocessor would
// leave a thread 168 registers, with which the compiler spilled forty.
//
// A pixel of input1 that no window reads has no terms: as the image itself it
// gets zeros, as the other image it counts as if it did not exist. Nothing is
// scattered and nothing added atomically: the same bits each time.
//
// 2 C operations for each pixel and shift.
#pragma once

#include <cstdint>

#include "cuda/correlation/correlation.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/divisor.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/shared.cuh"

namespace pkg::cuda {

template <class Element>
struct CorrelationGradient {
  CorrelationShape shape;
  const Element* grad;
  int64_t grad_strides[5];
  CorrelationImages<Element> other;
  bool of_input2;
  Element* result;  // contiguous
  CorrelationClasses classes[2];
  FastDivisor strides[2];
  int64_t piece_count;

  // The u-th shift from left to right, as an element of the patch.
  __device__ __forceinline__ int64_t element(int axis, int64_t u) const {
    return of_input2 ? shape.patch[axis] - 1 - u : u;
  }
  // Where the other pixel is for the u-th shift.
  __device__ __forceinline__ int64_t shift(int axis, int64_t u) const {
    const int64_t shift = shape.shift(axis, element(axis, u));
    return of_input2 ? -shift : shift;
  }
  // The output that reads a pixel of input1 at place k of its window; -1 for
  // none.
  __device__ __forceinline__ int64_t position(int axis, int64_t pixel,
                                              int64_t k) const {
    const int64_t distance =
        pixel + shape.padding[axis] - k * shape.dilation[axis];
    if (distance < 0) {
      return -1;
    }
    int64_t found = 0;
    bool is_whole = false;
    if (distance <= INT32_MAX) {
      const auto fast = strides[axis].divide(static_cast<uint32_t>(distance));
      found = fast.quotient;
      is_whole = fast.remainder == 0;
    } else {
      found = distance / shape.stride[axis];
      is_whole = found * shape.stride[axis] == distance;
    }
    return is_whole && found < shape.output[axis] ? found : -1;
  }
  // Whether an output reads this pixel of input1, as far as one axis goes.
  __device__ __forceinline__ bool is_read(int axis, int64_t pixel) const {
    PKG_UNROLL_BY(1)
    for (int64_t k = 0; k < shape.kernel[axis]; ++k) {
      if (position(axis, pixel, k) >= 0) {
        return true;
      }
    }
    return false;
  }
};

template <class Element>
class CorrelationGradientBlock {
 public:
  using Number = Accumulator<Element>;
  using Width = CorrelationVectors<Number>;
  using Vector = Packet<Number, Width::kVector>;
  static constexpr int kOwnRows = 2;
  static constexpr int kRows = 2 * kOwnRows;
  static constexpr int kOwnChannels = 8;
  static constexpr int kWarpChannels = 4 * kOwnChannels;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kChannels = kWarps * kOwnRows / kRows * kWarpChannels;
  struct Sums {
    Number values[kOwnRows][kOwnChannels][Width::kOwn];
  };

  static int64_t piece_count(const CorrelationGradient<Element>& call) {
    const CorrelationClasses& rows = call.classes[0];
    return call.shape.batch * tiles_of(call.shape.channels, kChannels) *
           rows.position_classes * tiles_of(rows.positions, kRows) *
           Width::tiles(call.classes[1]);
  }
  static LaunchShape launch_shape() {
    return {kThreads, kNumbers * static_cast<int>(sizeof(Number))};
  }

  __device__ __forceinline__ CorrelationGradientBlock(
      const CorrelationGradient<Element>& call, int64_t piece)
      : call_(call), memory_(dynamic_shared<Number>()) {
    const CorrelationClasses& rows = call.classes[0];
    const auto take = [&piece](int64_t count) {
      const int64_t index = piece % count;
      piece /= count;
      return index;
    };
    width_ = Width(call.classes[1], take(Width::tiles(call.classes[1])));
    const int64_t row = take(tiles_of(rows.positions, kRows)) * kRows;
    first_row_ = take(rows.position_classes) + row * rows.pitch;
    first_channel_ = take(tiles_of(call.shape.channels, kChannels)) * kChannels;
    image_ = piece;
    met_ = width_.met(CorrelationLane().group);
    const int places = width_.places2();
    other_place_ = thread() % places;
    other_turn_ = thread() / places;
    other_turns_ = kThreads / places;
    const auto place = width_.place2(other_place_);
    met_column_ = moved(place.of_class, place.index, call.classes[1].pitch);
    const int own = thread() % Width::kPlaces1;
    const auto group = width_.group(own / Width::kOwn);
    own_column_ = moved(group.of_class, group.index + own % Width::kOwn,
                        call.classes[1].pitch);
  }

  __device__ __forceinline__ void compute(Sums& sums) const {
    const CorrelationShape& shape = call_.shape;
    PKG_UNROLL
    for (int k = 0; k < kOwnRows; ++k) {
      PKG_UNROLL
      for (int c = 0; c < kOwnChannels; ++c) {
        PKG_UNROLL
        for (int i = 0; i < Width::kOwn; ++i) {
          sums.values[k][c][i] = 0;
        }
      }
    }
    PKG_UNROLL_BY(1)
    for (int64_t first = 0, tiles = Width::shift_tiles(shape.patch[1]);
         tiles > 0; --tiles, first += Width::kShiftStep) {
      const int shifts = Width::shifts_of_tile(first, shape.patch[1]);
      const uint32_t with_grads = shifts_with_grads(first, shifts);
      // Of the block's first row: each later row meets the same row of the
      // other image at an earlier shift.
      PKG_UNROLL_BY(1)
      for (int64_t u = 0; u < shape.patch[0] + kRows - 1; ++u) {
        const int64_t other_row =
            moved(first_row_ + call_.shift(0, 0), u, call_.classes[0].pitch);
        if (!shape.has_pixel(0, other_row) ||
            (call_.of_input2 && !call_.is_read(0, other_row))) {
          continue;  // all threads alike
        }
        __syncthreads();
        load_others(other_row, first);
        load_grads(other_row, u, first, shifts, with_grads);
        __syncthreads();
        multiply(sums, u, shifts);
      }
    }
  }

  __device__ __forceinline__ void store(Sums& sums) const {
    const CorrelationShape& shape = call_.shape;
    const CorrelationClasses& columns = call_.classes[1];
    const CorrelationLane lane;
    const auto group = width_.group(lane.group);
    if (group.of_class >= columns.position_classes) {
      return;
    }
    const int64_t column = group.of_class + group.index * columns.pitch;
    const bool vectorised =
        stores_packets<Width::kOwn>(call_.result, shape.size[1], columns.pitch);
    PKG_UNROLL
    for (int k = 0; k < kOwnRows; ++k) {
      const int64_t row = row_at(row_of_warp() + k);
      if (row >= shape.size[0]) {
        continue;
      }
      if (!call_.of_input2) {
        leave_out(sums.values[k], row, column);
      }
      PKG_UNROLL
      for (int c = 0; c < kOwnChannels; ++c) {
        const int64_t channel = first_channel_ + own_channel(c);
        if (channel < shape.channels) {
          const int64_t line =
              (image_ * shape.channels + channel) * shape.size[0] + row;
          store_group(sums.values[k][c], call_.result + line * shape.size[1],
                      column, columns.pitch, shape.size[1], vectorised);
        }
      }
    }
  }

 private:
  static constexpr int kLine2 = Width::kPlaces2;
  static constexpr int kGrads = kChannels * kLine2;
  static constexpr int kNumbers =
      kGrads + Width::kShifts * kRows * Width::kPlaces1;
  static_assert(Width::kPlaces2 <= kThreads);
  // Gradients of a shift, and shifts that the threads bring at a time.
  static constexpr int kOfShift = kRows * Width::kPlaces1;
  static constexpr int kAtATime = kThreads / kOfShift;
  static_assert(kAtATime * kOfShift == kThreads);

  __device__ __forceinline__ static int thread() {
    return static_cast<int>(threadIdx.x);
  }
  // The first of its rows.
  __device__ __forceinline__ static int row_of_warp() {
    return thread() / 32 % (kRows / kOwnRows) * kOwnRows;
  }
  // Of a lane's channels neighbouring ones are the lines of other lanes.
  __device__ __forceinline__ static int own_channel(int c) {
    const CorrelationLane lane;
    return thread() / 32 / (kRows / kOwnRows) * kWarpChannels + c * 4 +
           lane.line;
  }
  __device__ __forceinline__ int64_t row_at(int row) const {
    return moved(first_row_, row, call_.classes[0].pitch);
  }
  __device__ __forceinline__ bool has_shift(int64_t u) const {
    return u >= 0 && u < call_.shape.patch[0];
  }

  // Zeros for the pixels that no window reads.
  __device__ __forceinline__ void leave_out(
      Number (&sums)[kOwnChannels][Width::kOwn], int64_t row,
      int64_t column) const {
    const bool row_is_read = call_.is_read(0, row);
    PKG_UNROLL
    for (int i = 0; i < Width::kOwn; ++i) {
      if (!row_is_read ||
          !call_.is_read(1, moved(column, i, call_.classes[1].pitch))) {
        PKG_UNROLL
        for (int c = 0; c < kOwnChannels; ++c) {
          sums[c][i] = 0;
        }
      }
    }
  }

  // The threads have as many columns as there are places, and each of them as
  // many threads as there are, which take its channels in turns.
  __device__ __forceinline__ void load_others(int64_t row,
                                              int64_t first) const {
    const CorrelationShape& shape = call_.shape;
    if (other_turn_ >= other_turns_) {
      return;
    }
    const int64_t column = met_column_ + call_.shift(1, first);
    const bool exists = shape.has_pixel(1, column) &&
                        !(call_.of_input2 && !call_.is_read(1, column));
    constexpr int kDepth = 8;  // at a time
    const int64_t* const strides = call_.other.strides;
    const bool vectorised = has_channel_packets(call_.other);
    const Element* from = call_.other.data + image_ * strides[0] +
                          first_channel_ * strides[1] + row * strides[2] +
                          (exists ? column : 0) * strides[3];
    const int64_t left = shape.channels - first_channel_;
    const int valid =
        !exists ? 0 : static_cast<int>(left < kChannels ? left : kChannels);
    PKG_UNROLL_BY(1)
    for (int c = other_turn_ * kDepth; c < kChannels;
         c += other_turns_ * kDepth) {
      load_channels<kDepth>(
          memory_.part(c * kLine2 + other_place_, (kDepth - 1) * kLine2 + 1),
          kLine2, from + c * strides[1], strides[1], valid - c, vectorised);
    }
  }

  // Whether each pixel of input1 is read by one position at most, and
  // neighbours by neighbours.
  __device__ __forceinline__ bool is_single() const {
    const CorrelationShape& shape = call_.shape;
    return shape.kernel[0] == 1 && shape.kernel[1] == 1 && shape.stride[1] == 1;
  }

  // A bit for each of so many shifts whose pixels the thread's column has,
  // and where a pixel of input1 is read once, is read.
  __device__ __forceinline__ uint32_t shifts_with_grads(int64_t first,
                                                        int shifts) const {
    const CorrelationShape& shape = call_.shape;
    int64_t other = own_column_ + call_.shift(1, first);
    uint32_t found = 0;
    PKG_UNROLL
    for (int s = 0; s < Width::kShifts; ++s) {
      const int64_t column = call_.of_input2 ? other : own_column_;
      const bool is_read = static_cast<uint64_t>(column + shape.padding[1]) <
                           static_cast<uint64_t>(shape.output[1]);
      if (s < shifts && shape.has_pixel(1, own_column_) &&
          shape.has_pixel(1, other) && (is_read || !is_single())) {
        found |= 1u << s;
      }
      other = moved(other, 1, call_.classes[1].pitch);
    }
    return found;
  }

  // The output's gradients that the pixels of the block's rows meet.
  __device__ __forceinline__ void load_grads(int64_t other_row, int64_t u,
                                             int64_t first, int shifts,
                                             uint32_t with_grads) const {
    const CorrelationShape& shape = call_.shape;
    const int line = thread() / Width::kPlaces1 % kRows;
    const int64_t row1 = call_.of_input2 ? other_row : row_at(line);
    const bool exists = has_shift(u - line) && row_at(line) < shape.size[0];
    const Element* const from =
        call_.grad + image_ * call_.grad_strides[0] +
        (exists ? call_.element(0, u - line) : 0) * call_.grad_strides[1];
    if (is_single()) {
      const int64_t h = exists ? call_.position(0, row1, 0) : -1;
      load_single_grads(from, h, first, shifts, h < 0 ? 0 : with_grads);
      return;
    }
    PKG_UNROLL_BY(1)
    for (int s = thread() / kOfShift; s < shifts; s += kAtATime) {
      Number sum = 0;
      if (exists && (with_grads >> s & 1) != 0) {
        const int64_t other_column = own_column_ + call_.shift(1, first + s);
        sum = sum_windows(
            from + call_.element(1, first + s) * call_.grad_strides[2], row1,
            call_.of_input2 ? other_column : own_column_);
      }
      memory_[kGrads + s * kOfShift + thread() % kOfShift] = sum;
    }
  }

  // The same where a pixel is read by one position at most, that of row h: from
  // shift to shift it is as far to the next gradient.
  __device__ __forceinline__ void load_single_grads(const Element* from,
                                                    int64_t h, int64_t first,
                                                    int shifts,
                                                    uint32_t with_grads) const {
    constexpr int kOwnShifts = (Width::kShifts + kAtATime - 1) / kAtATime;
    const int64_t* const strides = call_.grad_strides;
    const int begin = thread() / kOfShift;
    const int64_t other = own_column_ + call_.shift(1, first + begin);
    const int64_t w =
        (call_.of_input2 ? other : own_column_) + call_.shape.padding[1];
    int64_t index = h * strides[3] + w * strides[4] +
                    call_.element(1, first + begin) * strides[2];
    const int64_t step = call_.of_input2
                             ? call_.classes[1].pitch * strides[4] - strides[2]
                             : strides[2];
    const uint32_t own = with_grads >> begin;
    Number grads[kOwnShifts];
    PKG_UNROLL
    for (int i = 0; i < kOwnShifts; ++i) {
      grads[i] = 0;
      if ((own >> (i * kAtATime) & 1) != 0) {
        grads[i] = convert<Number>(from[index]);
      }
      index += kAtATime * step;
    }
    PKG_UNROLL
    for (int i = 0; i < kOwnShifts; ++i) {
      const int s = begin + i * kAtATime;
      if (s < shifts) {
        memory_[kGrads + s * kOfShift + thread() % kOfShift] = grads[i];
      }
    }
  }

  // Over the windows that read this pixel of input1.
  __device__ __forceinline__ Number sum_windows(const Element* from,
                                                int64_t row,
                                                int64_t column) const {
    const CorrelationShape& shape = call_.shape;
    Number sum = 0;
    PKG_UNROLL_BY(1)
    for (int64_t ki = 0; ki < shape.kernel[0]; ++ki) {
      const int64_t h = call_.position(0, row, ki);
      PKG_UNROLL_BY(1)
      for (int64_t kj = 0; h >= 0 && kj < shape.kernel[1]; ++kj) {
        const int64_t w = call_.position(1, column, kj);
        if (w >= 0) {
          sum += convert<Number>(
              from[h * call_.grad_strides[3] + w * call_.grad_strides[4]]);
        }
      }
    }
    return sum;
  }

  // sums += the products at so many shifts: of both rows, or of the one whose
  // shift is of the patch.
  __device__ __forceinline__ void multiply(Sums& sums, int64_t u,
                                           int shifts) const {
    static_assert(kOwnRows == 2);
    const bool first = has_shift(u - row_of_warp());
    const bool last = has_shift(u - row_of_warp() - 1);
    if (first && last) {
      multiply_rows<0, 2>(sums, shifts);
    } else if (first) {
      multiply_rows<0, 1>(sums, shifts);
    } else if (last) {
      multiply_rows<1, 2>(sums, shifts);
    }
  }
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void multiply_rows(Sums& sums, int shifts) const {
    constexpr int kVector = Width::kVector;
    Vector met[kOwnChannels][Width::kMet / kVector];
    load_met(met, 0);
    PKG_UNROLL
    for (int s = 0; s < Width::kShifts; ++s) {
      if (s >= shifts) {
        break;  // what a shift beyond the patch meets may be NaN
      }
      if (s % kVector == 1) {
        load_met(met, s / kVector + 1);
      }
      PKG_UNROLL
      for (int k = kBegin; k < kEnd; ++k) {
        const auto grads = memory_.template load<Vector>(
            kGrads + (s * kRows + row_of_warp() + k) * Width::kPlaces1 +
            CorrelationLane().group * Width::kOwn);
        PKG_UNROLL
        for (int c = 0; c < kOwnChannels; ++c) {
          PKG_UNROLL
          for (int i = 0; i < Width::kOwn; ++i) {
            const Vector& other = met[c][(i + s) / kVector];
            sums.values[k][c][i] +=
                grads.values[i] * other.values[(i + s) % kVector];
          }
        }
      }
    }
  }
  // One vector of each of the thread's channels: those before the last two are
  // not needed any more.
  template <int kVectors>
  __device__ __forceinline__ void load_met(
      Vector (&met)[kOwnChannels][kVectors], int vector) const {
    PKG_UNROLL
    for (int c = 0; c < kOwnChannels; ++c) {
      met[c][vector] = memory_.template load<Vector>(
          own_channel(c) * kLine2 + met_ + vector * Width::kVector);
    }
  }

  const CorrelationGradient<Element>& call_;
  SharedSpan<Number> memory_;
  int64_t image_;
  int64_t first_channel_;
  int64_t first_row_;
  Width width_;
  int met_;  // where the thread's pixels of the other image begin
  // What it brings of the other image: which of a line's places, from which
  // channels on, every so many.
  int other_place_;
  int other_turn_;
  int other_turns_;
  int64_t met_column_;  // at shift 0, of that place
  int64_t own_column_;  // of the pixel whose gradients it brings
};

template <class Element>
CorrelationGradient<Element> correlation_gradient_of(
    const CorrelationShape& shape, const Element* grad,
    const int64_t (&grad_strides)[5], const CorrelationImages<Element>& other,
    bool of_input2, Element* result) {
  CorrelationGradient<Element> call = {};
  call.shape = shape;
  call.grad = grad;
  for (int i = 0; i < 5; ++i) {
    call.grad_strides[i] = grad_strides[i];
  }
  call.other = other;
  call.of_input2 = of_input2;
  call.result = result;
  for (int axis = 0; axis < 2; ++axis) {
    call.classes[axis] = CorrelationClasses(
        1, shape.dilation_patch[axis], shape.size[axis], shape.patch[axis]);
    call.strides[axis] = FastDivisor(shape.stride[axis]);
  }
  call.piece_count = CorrelationGradientBlock<Element>::piece_count(call);
  return call;
}

template <class Element>
__global__ void __launch_bounds__(CorrelationGradientBlock<Element>::kThreads,
                                  2)
    spatial_correlation_gradient_kernel(
        const __grid_constant__ CorrelationGradient<Element> call) {
  using Block = CorrelationGradientBlock<Element>;
  for (int64_t piece = blockIdx.x; piece < call.piece_count;
       piece += gridDim.x) {
    const Block block(call, piece);
    typename Block::Sums sums;
    block.compute(sums);
    block.store(sums);
  }
}

}  // namespace pkg::cuda
