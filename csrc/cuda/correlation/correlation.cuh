// The correlation of two images: what its kernels share.
//
// Along an axis, position w reads pixel s w of input1 and pixel s w + d p of
// input2 for shift p. With s' = s / gcd(s, d) and d' = d / gcd(s, d), positions
// d' apart and shifts s' apart both move by s' d pixels. So the axis falls
// apart into classes of positions and of shifts, and within two classes the
// q-th position and the u-th shift meet the (q + u)-th of pixels s' d apart,
// whatever stride and dilation are: a thread that computes a few neighbours
// of each reads every pixel once for all of them. Of stride 1 there is one
// class of shifts, and of dilation 1 one of positions.
//
// A term counts where both of its pixels exist; it is left out, not multiplied
// by zero, since either may be NaN.
#pragma once

#include <cstdint>
#include <numeric>

#include "cuda/device/device.cuh"
#include "cuda/device/divisor.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/gemm/tile.cuh"
#include "host/integer_math.h"

namespace pkg::cuda {

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
    return static_cast<uint64_t>(pixel) < static_cast<uint64_t>(size[axis]);
  }
};

// Pixels so many steps on. What no image is as wide as may wrap around: no term
// needs it.
__host__ __device__ __forceinline__ int64_t moved(int64_t pixel, int64_t steps,
                                                  int64_t pitch) {
  return static_cast<int64_t>(static_cast<uint64_t>(pixel) +
                              static_cast<uint64_t>(steps) *
                                  static_cast<uint64_t>(pitch));
}

// The classes of an axis.
struct CorrelationClasses {
  int64_t pitch;             // pixels from one of a class to the next
  int64_t position_step;     // positions likewise
  int64_t shift_step;        // shifts likewise
  int64_t position_classes;  // that have any
  int64_t shift_classes;
  int64_t positions;  // at most, of a class
  int64_t shifts;

  CorrelationClasses() = default;
  CorrelationClasses(int64_t stride, int64_t dilation_patch,
                     int64_t position_count, int64_t shift_count) {
    const int64_t common = std::gcd(stride, dilation_patch);
    position_step = dilation_patch / common;
    shift_step = stride / common;
    pitch = stride * position_step;
    position_classes =
        position_step < position_count ? position_step : position_count;
    shift_classes = shift_step < shift_count ? shift_step : shift_count;
    positions = ceil_div(position_count, position_step);
    shifts = ceil_div(shift_count, shift_step);
  }
};

// A batch of images: batch, channel, row, column.
template <class Element>
struct CorrelationImages {
  const Element* data;
  int64_t strides[4];
};

// The tile of a block in width: groups of neighbouring positions of a class,
// and so many neighbouring shifts as leave the places of input2 whole vectors.
// A group is a thread's. Shared memory has a place for each pixel of input1,
// and for those of input2 that the groups meet, which neighbours of a class
// share.
template <int kOwnPositions, int kGroupCount>
struct CorrelationTile {
  static constexpr int kOwn = kOwnPositions;  // of a group
  static constexpr int kGroups = kGroupCount;
  static constexpr int kShifts = 9;
  static constexpr int kMet = kOwn + kShifts - 1;  // places of input2
  static constexpr int kPlaces1 = kGroups * kOwn;
  static constexpr int kPlaces2 = kGroups * kMet;  // if all classes differ

  // Each eighth shift begins a tile, and the last one takes one more: patches
  // are odd, and those of 9 are one tile, not two.
  static constexpr int kShiftStep = kShifts - 1;
  __host__ __device__ static constexpr int64_t shift_tiles(int64_t shifts) {
    return shifts > kShifts ? tiles_of(shifts - 1, kShiftStep) : 1;
  }
  // How many are those of the tile from `first` on.
  __device__ __forceinline__ static int shifts_of_tile(int64_t first,
                                                       int64_t shifts) {
    const int64_t left = shifts - first;
    return static_cast<int>(left <= kShifts ? left : kShiftStep);
  }

  // A class, and one of it.
  struct Place {
    int64_t of_class;
    int64_t index;
  };

  int64_t groups_of_class;
  int64_t first_class;
  int64_t first_group;  // of its class

  CorrelationTile() = default;
  __device__ __forceinline__ CorrelationTile(const CorrelationClasses& classes,
                                             int64_t tile)
      : groups_of_class(groups_in(classes)) {
    first_class = tile * kGroups / groups_of_class;
    first_group = tile * kGroups % groups_of_class;
  }

  __host__ __device__ static int64_t groups_in(
      const CorrelationClasses& classes) {
    return tiles_of(classes.positions, kOwn);
  }
  // The most that places2() is of any tile.
  static int most_places2(const CorrelationClasses& classes) {
    const int64_t groups = groups_in(classes);
    const int64_t met = (kGroups + groups - 2) / groups + 1;
    return kPlaces1 +
           static_cast<int>(met < kGroups ? met : kGroups) * kShiftStep;
  }
  __host__ __device__ static int64_t tiles(const CorrelationClasses& classes) {
    return tiles_of(classes.position_classes * groups_in(classes), kGroups);
  }

  // Where a group's positions begin.
  __device__ __forceinline__ Place group(int index) const {
    Place place = {first_class, first_group + index};
    if (place.index >= groups_of_class) {
      const auto beyond = static_cast<uint32_t>(place.index - groups_of_class);
      const uint32_t groups = groups_of_whole_class();
      place.of_class += 1 + beyond / groups;
      place.index = beyond % groups;
    }
    place.index *= kOwn;
    return place;
  }
  // Where its places of input2 begin in shared memory.
  __device__ __forceinline__ int met(int index) const {
    const auto classes = static_cast<int>(group(index).of_class - first_class);
    return index * kOwn + classes * kShiftStep;
  }
  __device__ __forceinline__ int places2() const {
    return met(kGroups - 1) + kMet;
  }
  // What is at one of those places.
  __device__ __forceinline__ Place place2(int index) const {
    const int64_t left = groups_of_class - first_group;
    const int own =
        static_cast<int>(left < kGroups ? left : kGroups) * kOwn + kShiftStep;
    if (index < own) {
      return {first_class, first_group * kOwn + index};
    }
    const uint32_t whole = groups_of_whole_class() * kOwn + kShiftStep;
    const auto beyond = static_cast<uint32_t>(index - own);
    return {first_class + 1 + beyond / whole, beyond % whole};
  }

 private:
  __device__ __forceinline__ uint32_t groups_of_whole_class() const {
    return static_cast<uint32_t>(groups_of_class < kGroups ? groups_of_class
                                                           : kGroups);
  }
};

// The tile where a thread reads vectors of numbers from shared memory, and a
// group is one: eight lanes read, and write, 128 bytes side by side.
template <class Number>
struct CorrelationVectors
    : CorrelationTile<16 / static_cast<int>(sizeof(Number)), 8> {
  using Tile = CorrelationTile<16 / static_cast<int>(sizeof(Number)), 8>;
  using Tile::Tile;
  static constexpr int kVector = Tile::kOwn;
  static_assert(Tile::kMet % kVector == 0);
};

// A thread's group of that tile, and which of the warp's four lines of groups
// it is of.
struct CorrelationLane {
  int group;
  int line;

  __device__ __forceinline__ CorrelationLane() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    group = lane % 8;
    line = lane / 8;
  }
};

// kDepth channels of a pixel, a stride apart or, `vectorised`, in packets.
template <int kDepth, class Element>
__device__ __forceinline__ void read_channels(const Element* from,
                                              int64_t stride, bool vectorised,
                                              Element (&channels)[kDepth]) {
  constexpr int kPacket = 16 / sizeof(Element);
  PKG_UNROLL
  for (int c = 0; c < kDepth; c += kPacket) {
    if (vectorised) {
      const auto packet =
          *reinterpret_cast<const Packet<Element, kPacket>*>(from + c);
      PKG_UNROLL
      for (int i = 0; i < kPacket; ++i) {
        channels[c + i] = packet.values[i];
      }
      continue;
    }
    PKG_UNROLL
    for (int i = 0; i < kPacket; ++i) {
      channels[c + i] = *from;
      from += stride;
    }
  }
}

// The same as a column of shared memory, zeros behind the first `valid`: the
// pixels of the border and the last channels, one by one.
template <int kDepth, class Number, class Element>
__device__ __forceinline__ void load_channels(const SharedSpan<Number>& to,
                                              int line, const Element* from,
                                              int64_t stride, int valid,
                                              bool vectorised) {
  if (valid >= kDepth) {
    Element channels[kDepth];
    read_channels(from, stride, vectorised, channels);
    PKG_UNROLL
    for (int c = 0; c < kDepth; ++c) {
      to[c * line] = convert<Number>(channels[c]);
    }
    return;
  }
  PKG_UNROLL_BY(1)
  for (int c = 0; c < kDepth; ++c) {
    to[c * line] = c < valid ? convert<Number>(from[c * stride]) : Number(0);
  }
}

// Whether the channels of each pixel lie side by side in whole packets.
template <class Element>
__host__ __device__ __forceinline__ bool has_channel_packets(
    const CorrelationImages<Element>& images) {
  constexpr int kPacket = 16 / sizeof(Element);
  const int64_t* const strides = images.strides;
  return strides[1] == 1 && is_aligned(images.data, kPacket) &&
         (strides[0] | strides[2] | strides[3]) % kPacket == 0;
}

// Writes one row's values of a group, `step` columns apart, to a row of so many
// columns. `vectorised`: packets lie wholly inside, and are aligned.
template <int kCount, class Element, class Number>
__device__ __forceinline__ void store_group(const Number (&values)[kCount],
                                            Element* row, int64_t first,
                                            int64_t step, int64_t columns,
                                            bool vectorised) {
  constexpr int kWidest = 16 / sizeof(Element);
  constexpr int kPacket = kCount < kWidest ? kCount : kWidest;
  PKG_UNROLL
  for (int i = 0; i < kCount; i += kPacket) {
    if (vectorised) {
      if (first + i < columns) {
        Packet<Element, kPacket> packet;
        PKG_UNROLL
        for (int k = 0; k < kPacket; ++k) {
          packet.values[k] = convert<Element>(values[i + k]);
        }
        *reinterpret_cast<Packet<Element, kPacket>*>(row + first + i) = packet;
      }
      continue;
    }
    PKG_UNROLL
    for (int k = 0; k < kPacket; ++k) {
      const int64_t column = first + (i + k) * step;
      if (column < columns) {
        row[column] = convert<Element>(values[i + k]);
      }
    }
  }
}

template <int kCount, class Element>
__device__ __forceinline__ bool stores_packets(const Element* matrix,
                                               int64_t columns, int64_t step) {
  constexpr int kWidest = 16 / sizeof(Element);
  constexpr int kPacket = kCount < kWidest ? kCount : kWidest;
  return step == 1 && columns % kPacket == 0 && is_aligned(matrix, kPacket);
}

}  // namespace pkg::cuda
