// The correlation of two images, and the gradient of either.
//
// Forward: a block computes 32 neighbouring positions of one row of the output
// at 16 neighbouring shifts in width; a thread, one position at four shifts.
// For each row of the kernel window and 8 channels at a time, the pixels that
// these need of both images lie in shared memory, where the windows and shifts
// of all threads read them again: 5 reads for 4 products.
//
// Gradient: a block gathers 32 pixels of one row of 32 channels; a thread, one
// pixel of 8 of them. For each row of the patch and 8 shifts, the output's
// gradient summed over the kernel windows is made once for all channels, beside
// the pixels of the other image: 9 reads for 8 products. Nothing is scattered
// and nothing added atomically: the same bits each time.
//
// A term counts where both of its pixels exist; it is left out, not multiplied
// by zero, since either may be NaN. Spans that do not fit, of large strides and
// dilations, are read from global memory in place.
//
// 2 C operations for each pixel and shift, forward and for each gradient; each
// block reads (32 + 15 steps) pixels for 32 x 16 products a channel.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

constexpr int kCorrelationThreads = 128;
constexpr int kCorrelationPixels = 32;  // a warp's
constexpr int kCorrelationWarps = kCorrelationThreads / kCorrelationPixels;
// Forward.
constexpr int kCorrelationThreadShifts = 4;
constexpr int kCorrelationShifts = kCorrelationWarps * kCorrelationThreadShifts;
constexpr int kCorrelationDepth = 8;  // channels at a time
constexpr int kCorrelationSpan1 = 128;
constexpr int kCorrelationSpan2 = 256;
// Gradient.
constexpr int kGradientThreadChannels = 8;
constexpr int kGradientChannels = kCorrelationWarps * kGradientThreadChannels;
constexpr int kGradientShifts = 8;
constexpr int kGradientSpan = 160;

// Height and width.
struct CorrelationPair {
  int64_t values[2];

  __host__ __device__ __forceinline__ int64_t operator[](int axis) const {
    return values[axis];
  }
};

struct CorrelationShape {
  int64_t batch;
  int64_t channels;
  CorrelationPair size;
  CorrelationPair kernel;
  CorrelationPair patch;
  CorrelationPair stride;
  CorrelationPair padding;
  CorrelationPair dilation;
  CorrelationPair dilation_patch;
  CorrelationPair output;

  __device__ __forceinline__ int64_t shift(int axis, int64_t p) const {
    return (p - (patch[axis] - 1) / 2) * dilation_patch[axis];
  }
  __device__ __forceinline__ int64_t pixel(int axis, int64_t position,
                                           int64_t k) const {
    return position * stride[axis] - padding[axis] + k * dilation[axis];
  }
  __device__ __forceinline__ bool has_pixel(int axis, int64_t pixel) const {
    return pixel >= 0 && pixel < size[axis];
  }
  // The output that reads a pixel at place k of its window; -1 for none.
  __device__ __forceinline__ int64_t position(int axis, int64_t pixel,
                                              int64_t k) const {
    const int64_t distance = pixel + padding[axis] - k * dilation[axis];
    if (distance < 0 || distance % stride[axis] != 0) {
      return -1;
    }
    const int64_t found = distance / stride[axis];
    return found < output[axis] ? found : -1;
  }
};

// A batch of images: batch, channel, row, column.
template <class Element>
struct CorrelationImages {
  const Element* data;
  int64_t strides[4];

  __device__ __forceinline__ const Element* row(int64_t image, int64_t channel,
                                                int64_t row) const {
    return data + image * strides[0] + channel * strides[1] + row * strides[2];
  }
};

template <class Element>
struct Correlation {
  CorrelationShape shape;
  CorrelationImages<Element> images1;
  CorrelationImages<Element> images2;
  Element* output;  // contiguous

  __host__ __device__ int64_t piece_count() const {
    return shape.batch * shape.patch[0] * shape.output[0] *
           tiles_of(shape.patch[1], kCorrelationShifts) *
           tiles_of(shape.output[1], kCorrelationPixels);
  }
};

// Copies columns [begin, begin + span) of `kDepth` channels of a row to
// panel[channel][column], zeros where there is no pixel.
template <class Number, int kDepth, class Element, class Panel>
__device__ __forceinline__ void load_span(
    const CorrelationImages<Element>& images, const CorrelationShape& shape,
    int64_t image, int64_t row, int64_t channel_begin, int64_t begin, int span,
    Panel&& panel) {
  const Element* const from = images.row(image, channel_begin, row);
  // Neighbouring threads read what is neighbouring in memory.
  const bool channels_inside = images.strides[1] == 1;
  for (int i = static_cast<int>(threadIdx.x); i < kDepth * span;
       i += kCorrelationThreads) {
    const int c = channels_inside ? i % kDepth : i / span;
    const int j = channels_inside ? i / kDepth : i % span;
    const bool exists =
        channel_begin + c < shape.channels && shape.has_pixel(1, begin + j);
    panel[c][j] =
        exists
            ? convert<Number>(
                  from[c * images.strides[1] + (begin + j) * images.strides[3]])
            : Number(0);
  }
}

template <class Element>
__global__ void __launch_bounds__(kCorrelationThreads)
    spatial_correlation_kernel(
        const __grid_constant__ Correlation<Element> call) {
  using Number = Accumulator<Element>;
  PKG_SHARED(Number, pixels1, [kCorrelationDepth][kCorrelationSpan1]);
  PKG_SHARED(Number, pixels2, [kCorrelationDepth][kCorrelationSpan2]);

  const CorrelationShape& shape = call.shape;
  const int lane = static_cast<int>(threadIdx.x) % kCorrelationPixels;
  const int warp = static_cast<int>(threadIdx.x) / kCorrelationPixels;
  const int64_t step = shape.dilation_patch[1];
  const int64_t span1 = (kCorrelationPixels - 1) * shape.stride[1] +
                        (shape.kernel[1] - 1) * shape.dilation[1] + 1;
  const int64_t span2 = span1 + (kCorrelationShifts - 1) * step;
  const bool is_shared =
      span1 <= kCorrelationSpan1 && span2 <= kCorrelationSpan2;
  const int64_t position_tiles = tiles_of(shape.output[1], kCorrelationPixels);
  const int64_t shift_tiles = tiles_of(shape.patch[1], kCorrelationShifts);

  for (int64_t piece = blockIdx.x; piece < call.piece_count();
       piece += gridDim.x) {
    int64_t rest = piece;
    const int64_t position_begin = rest % position_tiles * kCorrelationPixels;
    rest /= position_tiles;
    const int64_t shift_begin = rest % shift_tiles * kCorrelationShifts;
    rest /= shift_tiles;
    const int64_t h = rest % shape.output[0];
    rest /= shape.output[0];
    const int64_t patch_row = rest % shape.patch[0];
    const int64_t image = rest / shape.patch[0];

    const int64_t w = position_begin + lane;
    const int64_t first_shift = shift_begin + warp * kCorrelationThreadShifts;
    const int64_t begin1 = shape.pixel(1, position_begin, 0);
    const int64_t begin2 = begin1 + shape.shift(1, shift_begin);
    Number sums[kCorrelationThreadShifts];
    PKG_UNROLL
    for (int s = 0; s < kCorrelationThreadShifts; ++s) {
      sums[s] = 0;
    }
    for (int64_t ki = 0; ki < shape.kernel[0]; ++ki) {
      const int64_t row1 = shape.pixel(0, h, ki);
      const int64_t row2 = row1 + shape.shift(0, patch_row);
      if (!shape.has_pixel(0, row1) || !shape.has_pixel(0, row2)) {
        continue;  // all threads alike
      }
      for (int64_t channel = 0; channel < shape.channels;
           channel += kCorrelationDepth) {
        if (is_shared) {
          __syncthreads();
          load_span<Number, kCorrelationDepth>(
              call.images1, shape, image, row1, channel, begin1,
              static_cast<int>(span1), pixels1);
          load_span<Number, kCorrelationDepth>(
              call.images2, shape, image, row2, channel, begin2,
              static_cast<int>(span2), pixels2);
          __syncthreads();
        }
        for (int64_t kj = 0; kj < shape.kernel[1]; ++kj) {
          const int64_t column = shape.pixel(1, w, kj);
          Number terms[kCorrelationThreadShifts];
          bool exists[kCorrelationThreadShifts];
          PKG_UNROLL
          for (int s = 0; s < kCorrelationThreadShifts; ++s) {
            terms[s] = 0;
            exists[s] =
                w < shape.output[1] && first_shift + s < shape.patch[1] &&
                shape.has_pixel(1, column) &&
                shape.has_pixel(1, column + shape.shift(1, first_shift + s));
          }
          if (is_shared) {
            const int place = static_cast<int>(lane * shape.stride[1] +
                                               kj * shape.dilation[1]);
            const int shifted = place + warp * kCorrelationThreadShifts *
                                            static_cast<int>(step);
            PKG_UNROLL
            for (int c = 0; c < kCorrelationDepth; ++c) {
              const Number pixel = pixels1[c][place];
              PKG_UNROLL
              for (int s = 0; s < kCorrelationThreadShifts; ++s) {
                terms[s] +=
                    pixel * pixels2[c][shifted + s * static_cast<int>(step)];
              }
            }
          } else {
            for (int c = 0; c < kCorrelationDepth; ++c) {
              if (channel + c >= shape.channels) {
                break;
              }
              const Element* const from1 =
                  call.images1.row(image, channel + c, row1);
              const Element* const from2 =
                  call.images2.row(image, channel + c, row2);
              PKG_UNROLL
              for (int s = 0; s < kCorrelationThreadShifts; ++s) {
                if (exists[s]) {
                  const int64_t other =
                      column + shape.shift(1, first_shift + s);
                  terms[s] +=
                      convert<Number>(from1[column * call.images1.strides[3]]) *
                      convert<Number>(from2[other * call.images2.strides[3]]);
                }
              }
            }
          }
          PKG_UNROLL
          for (int s = 0; s < kCorrelationThreadShifts; ++s) {
            sums[s] += exists[s] ? terms[s] : Number(0);
          }
        }
      }
    }
    if (w < shape.output[1]) {
      PKG_UNROLL
      for (int s = 0; s < kCorrelationThreadShifts; ++s) {
        const int64_t p = first_shift + s;
        if (p < shape.patch[1]) {
          const int64_t plane =
              (image * shape.patch[0] + patch_row) * shape.patch[1] + p;
          call.output[(plane * shape.output[0] + h) * shape.output[1] + w] =
              convert<Element>(sums[s]);
        }
      }
    }
  }
}

template <class Element>
struct CorrelationGradient {
  CorrelationShape shape;
  const Element* grad;
  int64_t grad_strides[5];
  CorrelationImages<Element> other;
  bool of_input2;
  Element* result;  // contiguous

  __host__ __device__ int64_t piece_count() const {
    return shape.batch * shape.size[0] *
           tiles_of(shape.channels, kGradientChannels) *
           tiles_of(shape.size[1], kCorrelationPixels);
  }
};

// The output's gradient at one shift, summed over the kernel windows that read
// the pixel of input1 at (row1, column1). False where none does, or where the
// pixel has no partner.
template <class Element>
__device__ __forceinline__ bool sum_windows(
    const CorrelationGradient<Element>& call, int64_t image, int64_t patch_row,
    int64_t p, int64_t row1, int64_t column1, Accumulator<Element>& sum) {
  const CorrelationShape& shape = call.shape;
  sum = 0;
  if (p >= shape.patch[1] || !shape.has_pixel(1, column1) ||
      !shape.has_pixel(1, column1 + shape.shift(1, p))) {
    return false;
  }
  const int64_t* const strides = call.grad_strides;
  const Element* const from =
      call.grad + image * strides[0] + patch_row * strides[1] + p * strides[2];
  bool is_read = false;
  for (int64_t ki = 0; ki < shape.kernel[0]; ++ki) {
    const int64_t h = shape.position(0, row1, ki);
    for (int64_t kj = 0; h >= 0 && kj < shape.kernel[1]; ++kj) {
      const int64_t w = shape.position(1, column1, kj);
      if (w >= 0) {
        is_read = true;
        sum += convert<Accumulator<Element>>(
            from[h * strides[3] + w * strides[4]]);
      }
    }
  }
  return is_read;
}

template <class Element>
__global__ void __launch_bounds__(kCorrelationThreads)
    spatial_correlation_gradient_kernel(
        const __grid_constant__ CorrelationGradient<Element> call) {
  using Number = Accumulator<Element>;
  PKG_SHARED(Number, others, [kGradientChannels][kGradientSpan]);
  PKG_SHARED(Number, grads, [kGradientShifts][kCorrelationPixels]);
  PKG_SHARED(int, is_read, [kGradientShifts][kCorrelationPixels]);

  const CorrelationShape& shape = call.shape;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kCorrelationPixels;
  const int warp = thread / kCorrelationPixels;
  const int64_t step = shape.dilation_patch[1];
  const int64_t span = kCorrelationPixels + (kGradientShifts - 1) * step;
  const bool is_shared = span <= kGradientSpan;
  const int64_t column_tiles = tiles_of(shape.size[1], kCorrelationPixels);
  const int64_t channel_tiles = tiles_of(shape.channels, kGradientChannels);

  for (int64_t piece = blockIdx.x; piece < call.piece_count();
       piece += gridDim.x) {
    int64_t rest = piece;
    const int64_t column_begin = rest % column_tiles * kCorrelationPixels;
    rest /= column_tiles;
    const int64_t channel_begin = rest % channel_tiles * kGradientChannels;
    rest /= channel_tiles;
    const int64_t row = rest % shape.size[0];
    const int64_t image = rest / shape.size[0];

    const int64_t column = column_begin + lane;
    const int64_t channel = channel_begin + warp * kGradientThreadChannels;
    Number sums[kGradientThreadChannels];
    PKG_UNROLL
    for (int c = 0; c < kGradientThreadChannels; ++c) {
      sums[c] = 0;
    }
    for (int64_t patch_row = 0; patch_row < shape.patch[0]; ++patch_row) {
      const int64_t shift = shape.shift(0, patch_row);
      const int64_t other_row = call.of_input2 ? row - shift : row + shift;
      if (!shape.has_pixel(0, other_row)) {
        continue;  // all threads alike
      }
      const int64_t row1 = call.of_input2 ? other_row : row;
      for (int64_t first = 0; first < shape.patch[1];
           first += kGradientShifts) {
        // The leftmost pixel that the tile needs of the other image.
        const int64_t other_begin =
            column_begin + (call.of_input2
                                ? -shape.shift(1, first + kGradientShifts - 1)
                                : shape.shift(1, first));
        __syncthreads();
        for (int i = thread; i < kGradientShifts * kCorrelationPixels;
             i += kCorrelationThreads) {
          const int s = i / kCorrelationPixels;
          const int j = i % kCorrelationPixels;
          const int64_t column1 =
              column_begin + j -
              (call.of_input2 ? shape.shift(1, first + s) : 0);
          Number sum;
          is_read[s][j] =
              sum_windows(call, image, patch_row, first + s, row1, column1, sum)
                  ? 1
                  : 0;
          grads[s][j] = sum;
        }
        if (is_shared) {
          load_span<Number, kGradientChannels>(
              call.other, shape, image, other_row, channel_begin, other_begin,
              static_cast<int>(span), others);
        }
        __syncthreads();
        for (int s = 0; s < kGradientShifts; ++s) {
          if (is_read[s][lane] == 0) {
            continue;
          }
          const Number grad = grads[s][lane];
          const int64_t place =
              lane + (call.of_input2 ? kGradientShifts - 1 - s : s) * step;
          PKG_UNROLL
          for (int c = 0; c < kGradientThreadChannels; ++c) {
            if (is_shared) {
              sums[c] += grad * others[warp * kGradientThreadChannels + c]
                                      [static_cast<int>(place)];
            } else if (channel + c < shape.channels &&
                       shape.has_pixel(1, other_begin + place)) {
              const Element* const from =
                  call.other.row(image, channel + c, other_row);
              sums[c] +=
                  grad *
                  convert<Number>(
                      from[(other_begin + place) * call.other.strides[3]]);
            }
          }
        }
      }
    }
    PKG_UNROLL
    for (int c = 0; c < kGradientThreadChannels; ++c) {
      if (column < shape.size[1] && channel + c < shape.channels) {
        const int64_t line =
            (image * shape.channels + channel + c) * shape.size[0] + row;
        call.result[line * shape.size[1] + column] = convert<Element>(sums[c]);
      }
    }
  }
}

}  // namespace pkg::cuda
