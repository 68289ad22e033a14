// Images as the kernels of spatial_correlation_sample read them: rows of
// pixels, channel after channel, in the type of the computation, with zeros
// beside each row, so that a shifted vector load never leaves its row and needs
// no bounds.
//
// Packing moves each image once; every packed row is then read by all rows of
// the patch. It also takes any strides: a row whose pixels are neighbours is
// copied, one whose channels are (channels-last) transposed in registers.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "cpu/runtime/parallel.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/transpose.h"
#include "host/integer_math.h"
#include "spatial_correlation_sample.h"

namespace pkg::cpu::spatial_correlation {

template <class Input>
struct Images {
  const Input* data;
  std::array<int64_t, 4> strides;  // batch, channel, row, column

  explicit Images(const TensorView& tensor)
      : data(static_cast<const Input*>(tensor.const_data_ptr())) {
    std::ranges::copy(strides_of(tensor), strides.begin());
  }
};

// Where the elements of a packed row lie, in elements.
struct RowLayout {
  int64_t channels;
  int64_t height;
  int64_t width;
  int64_t left;          // zeros before the first pixel of a channel
  int64_t columns;       // pixels, rounded up to whole vectors
  int64_t channel_step;  // from one channel to the next

  // With room for reading `reach` pixels beyond either end.
  RowLayout(const SpatialCorrelationPlan& plan, int64_t reach, int64_t lanes)
      : channels(plan.channels),
        height(plan.size[0]),
        width(plan.size[1]),
        left(round_up(reach, lanes)),
        columns(round_up(width, lanes)),
        channel_step(round_up(left + columns + reach, lanes)) {}

  int64_t row_size() const { return channels * channel_step; }
  int64_t image_size() const { return height * row_size(); }
};

template <class Number>
struct PackedImages {
  const Number* data;
  RowLayout layout;

  // The first pixel of the row's first channel.
  const Number* row(int64_t image, int64_t row) const {
    return data + (image * layout.height + row) * layout.row_size() +
           layout.left;
  }
};

// As many pixels of as many channels as a vector has lanes.
template <class Input>
void transpose_pixels(const Input* from, int64_t pixel_stride, int64_t pixels,
                      int64_t channels, simd::Compute<Input>* to,
                      int64_t channel_step) {
  using Number = simd::Compute<Input>;
  constexpr int kLanes = simd::kLanes<Number>;
  simd::Vector<Number> lanes[kLanes] = {};
  for (int64_t i = 0; i < std::min<int64_t>(pixels, kLanes); ++i) {
    const Input* pixel = from + i * pixel_stride;
    lanes[i] = simd::load_up_to(pixel, channels);
  }
  simd::transpose(lanes);
  for (int64_t i = 0; i < std::min<int64_t>(channels, kLanes); ++i) {
    simd::store(to + i * channel_step, lanes[i]);
  }
}

template <class Input>
void pack_row(const Input* from, int64_t channel_stride, int64_t column_stride,
              const RowLayout& layout, simd::Compute<Input>* to) {
  using Number = simd::Compute<Input>;
  constexpr int kLanes = simd::kLanes<Number>;
  const int64_t width = layout.width;
  for (int64_t c = 0; c < layout.channels; ++c) {
    Number* channel = to + c * layout.channel_step;
    std::fill_n(channel, layout.left, Number(0));
    // The last vector of pixels is written whole, so zeros begin before it.
    const int64_t first = layout.left + layout.columns - kLanes;
    std::fill(channel + std::max(first, layout.left),
              channel + layout.channel_step, Number(0));
  }
  to += layout.left;
  if (column_stride == 1 || width <= 1) {
    for (int64_t c = 0; c < layout.channels; ++c) {
      const Input* pixels = from + c * channel_stride;
      Number* channel = to + c * layout.channel_step;
      int64_t j = 0;
      for (; j + kLanes <= width; j += kLanes) {
        simd::store(channel + j, simd::load(pixels + j));
      }
      if (j < width) {
        simd::store(channel + j, simd::load_partial(
                                     pixels + j, static_cast<int>(width - j)));
      }
    }
  } else if (channel_stride == 1) {
    for (int64_t c = 0; c < layout.channels; c += kLanes) {
      for (int64_t j = 0; j < width; j += kLanes) {
        transpose_pixels(from + c + j * column_stride, column_stride, width - j,
                         layout.channels - c, to + c * layout.channel_step + j,
                         layout.channel_step);
      }
    }
  } else {
    for (int64_t c = 0; c < layout.channels; ++c) {
      for (int64_t j = 0; j < width; ++j) {
        to[c * layout.channel_step + j] =
            from[c * channel_stride + j * column_stride];
      }
    }
  }
}

// Packs images [begin, end) of a batch. Columns that are not `used` become
// zeros, whatever they hold; all are used where it is empty.
template <class Input>
PackedImages<simd::Compute<Input>> pack_images(const Images<Input>& images,
                                               int64_t begin, int64_t end,
                                               const RowLayout& layout,
                                               const std::vector<bool>& used,
                                               simd::Compute<Input>* memory) {
  const int64_t rows = (end - begin) * layout.height;
  const int64_t grain = grain_of(kElementGrain, layout.row_size());
  parallel_for(rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      auto* row = memory + i * layout.row_size();
      pack_row(images.data + (begin + i / layout.height) * images.strides[0] +
                   i % layout.height * images.strides[2],
               images.strides[1], images.strides[3], layout, row);
      for (int64_t j = 0; j < static_cast<int64_t>(used.size()); ++j) {
        for (int64_t c = 0; !used[j] && c < layout.channels; ++c) {
          row[c * layout.channel_step + layout.left + j] = 0;
        }
      }
    }
  });
  return {memory, layout};
}

// How many images to pack at a time: as many as the memory that is kept holds,
// but at least one.
inline int64_t images_at_once(int64_t batch, int64_t bytes_of_one) {
  constexpr int64_t kBytes = int64_t{32} << 20;
  return std::clamp<int64_t>(kBytes / std::max<int64_t>(bytes_of_one, 1), 1,
                             std::max<int64_t>(batch, 1));
}

// Which pixels along an axis some output reads; empty where all are.
inline std::vector<bool> used_pixels(const SpatialCorrelationPlan& plan,
                                     int axis) {
  std::vector<bool> used(static_cast<size_t>(plan.size[axis]), false);
  for (int64_t k = 0; k < plan.kernel[axis]; ++k) {
    for (int64_t o = 0; o < plan.output[axis]; ++o) {
      const int64_t pixel = plan.pixel(axis, o, k);
      if (pixel >= 0 && pixel < plan.size[axis]) {
        used[static_cast<size_t>(pixel)] = true;
      }
    }
  }
  const bool all = std::ranges::all_of(used, [](bool each) { return each; });
  return all ? std::vector<bool>() : used;
}

// The positions whose term exists for a shift: both pixels in the image.
inline std::array<int64_t, 2> overlap(int64_t size, int64_t shift) {
  return {std::max<int64_t>(0, -shift), std::min(size, size - shift)};
}

// Positions [begin, end) of the output that read pixels [first, last) of an
// axis at place k of the kernel window.
inline std::array<int64_t, 2> positions_of(const SpatialCorrelationPlan& plan,
                                           int axis, int64_t k, int64_t first,
                                           int64_t last) {
  const int64_t stride = plan.stride[axis];
  const int64_t origin = plan.pixel(axis, 0, k);
  const auto at_least = [&](int64_t pixel) {
    return pixel <= origin ? 0 : ceil_div(pixel - origin, stride);
  };
  const int64_t begin = at_least(first);
  return {begin, std::max(begin, std::min(plan.output[axis], at_least(last)))};
}

}  // namespace pkg::cpu::spatial_correlation
