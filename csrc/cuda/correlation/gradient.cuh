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
// channels took 136 cycles for 72.) Issue takes as long: besides the products
// 95 instructions, 42 of them those loads (counted in nvcc 13.0's code, where
// nothing is brought). So what a row of the other image needs is a step from
// that of the row before: elements from the beginning, and a bit for each row
// of the block that meets it; found anew each time it took 62 instructions
// more, 79% of the rate. Bringing a row is not in these counts: of an image as
// wide as a tile some 33 loads and 33 stores a thread. Three blocks on a
// multiprocessor would leave a thread 168 registers, with which the compiler
// spilled forty.
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
#include "host/integer_math.h"

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
  // Whether a pixel of input1 is read by one position at most, and neighbours
  // by neighbours.
  bool is_single;
  bool has_packets;  // has_channel_packets(other)
  // From a row of the other image to the next that a block meets, in elements:
  // of that image, and of the gradients of a pixel at its shift.
  int64_t row_step;
  int64_t grad_row_step;
  int64_t grad_shift_step;  // likewise from shift to shift
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
      const int channels = channels_of_column(first);
      // Of the block's first row: each later row meets the same row of the
      // other image at an earlier shift. A bit for each row that does.
      OtherRow row = first_other_row(first, channels > 0);
      uint32_t meeting = 1;
      int64_t later = shape.patch[0] - 1;  // shifts of the first row
      PKG_UNROLL_BY(1)
      for (; meeting != 0; advance(row), --later) {
        const uint32_t rows = meeting;
        meeting = (meeting << 1 | (later > 0)) & ((1u << kRows) - 1);
        if (!shape.has_pixel(0, row.index) ||
            (call_.of_input2 && !call_.is_read(0, row.index))) {
          continue;  // all threads alike
        }
        __syncthreads();
        load_others(row, channels);
        load_grads(row, rows, first, shifts, with_grads);
        __syncthreads();
        multiply(sums, rows, shifts);
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

  // A row of the other image as a thread meets it: what it brings of its
  // pixels, and of the gradients, as elements from the beginning of either.
  struct OtherRow {
    int64_t index;
    int64_t pixels;
    int64_t grads;
  };

  // That of the shift before all others. Of gradients it is the first that the
  // thread brings; where windows are added up, they begin there.
  __device__ __forceinline__ OtherRow first_other_row(int64_t first,
                                                      bool exists) const {
    const CorrelationShape& shape = call_.shape;
    const int64_t* const strides = call_.other.strides;
    const int64_t* const grad_strides = call_.grad_strides;
    const int64_t index = first_row_ + call_.shift(0, 0);
    int64_t pixels =
        image_ * strides[0] + (first_channel_ + own_turn()) * strides[1];
    if (exists) {
      pixels += (met_column_ + call_.shift(1, first)) * strides[3];
    }
    int64_t grads = moved(image_ * grad_strides[0],
                          call_.element(0, -own_line()), grad_strides[1]);
    if (call_.is_single) {
      const int64_t s = first + thread() / kOfShift;
      const int64_t row = call_.of_input2 ? index : row_at(own_line());
      const int64_t column =
          own_column_ + (call_.of_input2 ? call_.shift(1, s) : 0);
      grads = moved(grads, row + shape.padding[0], grad_strides[3]);
      grads = moved(grads, column + shape.padding[1], grad_strides[4]);
      grads = moved(grads, call_.element(1, s), grad_strides[2]);
    }
    return {index, moved(pixels, index, strides[2]), grads};
  }
  __device__ __forceinline__ void advance(OtherRow& row) const {
    row.index = moved(row.index, 1, call_.classes[0].pitch);
    row.pixels = moved(row.pixels, 1, call_.row_step);
    row.grads = moved(row.grads, 1, call_.grad_row_step);
  }

  // The threads have as many columns as there are places, and each of them as
  // many threads as there are, which take its channels in turns.
  static constexpr int kDepth = 8;  // channels at a time
  __device__ __forceinline__ int own_turn() const {
    return other_turn_ * kDepth;
  }

  // How many channels there are, from the block's first on, of the pixel that
  // the thread brings: none where that does not exist.
  __device__ __forceinline__ int channels_of_column(int64_t first) const {
    const CorrelationShape& shape = call_.shape;
    const int64_t column = met_column_ + call_.shift(1, first);
    const bool exists = shape.has_pixel(1, column) &&
                        !(call_.of_input2 && !call_.is_read(1, column));
    const int64_t left = shape.channels - first_channel_;
    return !exists ? 0 : static_cast<int>(left < kChannels ? left : kChannels);
  }

  __device__ __forceinline__ void load_others(const OtherRow& row,
                                              int channels) const {
    if (other_turn_ >= other_turns_) {
      return;
    }
    const int64_t stride = call_.other.strides[1];
    int64_t from = row.pixels;
    PKG_UNROLL_BY(1)
    for (int c = own_turn(); c < kChannels; c += other_turns_ * kDepth) {
      load_channels<kDepth>(
          memory_.part(c * kLine2 + other_place_, (kDepth - 1) * kLine2 + 1),
          kLine2, call_.other.data + from, stride, channels - c,
          call_.has_packets);
      from = moved(from, other_turns_ * kDepth, stride);
    }
  }

  // The row of the block whose gradients the thread brings.
  __device__ __forceinline__ static int own_line() {
    return thread() / Width::kPlaces1 % kRows;
  }

  // A bit for each of so many shifts whose pixels the thread's row and column
  // have, and where a pixel of input1 is read once, is read. (Of the rows of
  // the other image only those are met that are.)
  __device__ __forceinline__ uint32_t shifts_with_grads(int64_t first,
                                                        int shifts) const {
    const CorrelationShape& shape = call_.shape;
    const int64_t row = row_at(own_line());
    if (row >= shape.size[0] || (call_.is_single && !call_.of_input2 &&
                                 call_.position(0, row, 0) < 0)) {
      return 0;
    }
    int64_t other = own_column_ + call_.shift(1, first);
    uint32_t found = 0;
    PKG_UNROLL
    for (int s = 0; s < Width::kShifts; ++s) {
      const int64_t column = call_.of_input2 ? other : own_column_;
      const bool is_read = static_cast<uint64_t>(column + shape.padding[1]) <
                           static_cast<uint64_t>(shape.output[1]);
      if (s < shifts && shape.has_pixel(1, own_column_) &&
          shape.has_pixel(1, other) && (is_read || !call_.is_single)) {
        found |= 1u << s;
      }
      other = moved(other, 1, call_.classes[1].pitch);
    }
    return found;
  }

  // The output's gradients that the pixels of these of the block's rows meet.
  __device__ __forceinline__ void load_grads(const OtherRow& row, uint32_t rows,
                                             int64_t first, int shifts,
                                             uint32_t with_grads) const {
    if ((rows >> own_line() & 1) == 0) {
      with_grads = 0;
    }
    if (call_.is_single) {
      load_single_grads(row.grads, shifts, with_grads);
      return;
    }
    const int64_t row1 = call_.of_input2 ? row.index : row_at(own_line());
    PKG_UNROLL_BY(1)
    for (int s = thread() / kOfShift; s < shifts; s += kAtATime) {
      Number sum = 0;
      if ((with_grads >> s & 1) != 0) {
        const int64_t other_column = own_column_ + call_.shift(1, first + s);
        sum =
            sum_windows(call_.grad + row.grads +
                            call_.element(1, first + s) * call_.grad_strides[2],
                        row1, call_.of_input2 ? other_column : own_column_);
      }
      memory_[kGrads + s * kOfShift + thread() % kOfShift] = sum;
    }
  }

  // The same where a pixel is read by one position at most: from shift to shift
  // it is as far to the next gradient.
  __device__ __forceinline__ void load_single_grads(int64_t index, int shifts,
                                                    uint32_t with_grads) const {
    constexpr int kOwnShifts = ceil_div(Width::kShifts, kAtATime);
    const int begin = thread() / kOfShift;
    const uint32_t own = with_grads >> begin;
    Number grads[kOwnShifts];
    PKG_UNROLL
    for (int i = 0; i < kOwnShifts; ++i) {
      grads[i] = 0;
      if ((own >> (i * kAtATime) & 1) != 0) {
        grads[i] = convert<Number>(call_.grad[index]);
      }
      index = moved(index, kAtATime, call_.grad_shift_step);
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
  __device__ __forceinline__ void multiply(Sums& sums, uint32_t rows,
                                           int shifts) const {
    static_assert(kOwnRows == 2);
    const uint32_t own = rows >> row_of_warp() & 3;
    if (own == 3) {
      if (shifts >= Width::kShiftStep) {
        multiply_rows<0, 2, Width::kShiftStep>(sums, shifts);
      } else {
        multiply_rows<0, 2, 1>(sums, shifts);
      }
    } else if (own == 1) {
      multiply_rows<0, 1, 1>(sums, shifts);
    } else if (own == 2) {
      multiply_rows<1, 2, 1>(sums, shifts);
    }
  }
  // There are kLeast shifts at least.
  template <int kBegin, int kEnd, int kLeast>
  __device__ __forceinline__ void multiply_rows(Sums& sums, int shifts) const {
    constexpr int kVector = Width::kVector;
    Vector met[kOwnChannels][Width::kMet / kVector];
    load_met(met, 0);
    PKG_UNROLL
    for (int s = 0; s < Width::kShifts; ++s) {
      if (s >= kLeast && s >= shifts) {
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
  call.is_single = shape.kernel[0] == 1 && shape.kernel[1] == 1 &&
                   shape.stride[0] == 1 && shape.stride[1] == 1;
  call.has_packets = has_channel_packets(other);
  const int64_t sign = of_input2 ? -1 : 1;
  // Of the gradient of input2 the other image's pixels are those of input1,
  // whose positions move with them.
  const auto grad_step = [&](int axis) {
    const bool moves = of_input2 && call.is_single;
    return moved(sign * grad_strides[1 + axis], moves ? 1 : 0,
                 moved(0, call.classes[axis].pitch, grad_strides[3 + axis]));
  };
  call.grad_row_step = grad_step(0);
  call.grad_shift_step = grad_step(1);
  call.row_step = moved(0, call.classes[0].pitch, other.strides[2]);
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
