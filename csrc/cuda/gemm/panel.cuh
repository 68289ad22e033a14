// Panels: the slices of a matrix that pass through shared memory.
//
// A panel is `depth` steps of the summed dimension by the tile's outer
// dimension, depth first: [depth][outer]. Panels hold the accumulator's type,
// so that halves are converted once per tile and not once per product.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"

namespace pkg::cuda {

constexpr int kTileThreads = 256;
// Keeps rows of a panel on 16-byte boundaries, and keeps threads that write
// down a panel's depth off the same bank.
constexpr int kPanelPadding = 4;

// A matrix in global memory as an operand: `outer` is its row or column of the
// product, `depth` the summed dimension. Any strides, so a transposed operand
// is the same matrix with its two strides exchanged.
template <class Element>
struct PanelSource {
  const Element* data;
  int64_t outer_size;
  int64_t depth_size;
  int64_t outer_stride;
  int64_t depth_stride;
};

template <int kMost>
__device__ __forceinline__ int at_most(int64_t size) {
  return size < kMost ? static_cast<int>(size) : kMost;
}

// Whether a thread's places in a panel may lie in registers from one product to
// the next. A kernel with other work between its products lacks them there; one
// whose loop is the product would compute more in it (matmul, 60 instructions a
// panel; nvcc 13.0).
enum class PanelPlaces { kept, of_product };

// One panel on its way through the registers of the block, or of each of its
// groups one.
template <class Element, int kOuter, int kDepth,
          PanelPlaces kPlaces = PanelPlaces::kept, int kThreads = kTileThreads,
          int kGroups = 1>
class PanelStage {
 public:
  // Loads the panel whose first element is (outer_begin, depth_begin), a
  // multiple of the panel's extents. Beyond the matrix it is zero.
  __device__ __forceinline__ void fetch(const PanelSource<Element>& source,
                                        int64_t outer_begin,
                                        int64_t depth_begin) {
    along_depth_ = source.depth_stride <= source.outer_stride;
    const int64_t packet_stride =
        along_depth_ ? source.depth_stride : source.outer_stride;
    const int64_t other_stride =
        along_depth_ ? source.outer_stride : source.depth_stride;
    const bool vectorised = packet_stride == 1 && other_stride % kPacket == 0 &&
                            is_aligned(source.data, kPacket);
    const int outer_size = at_most<kOuter>(source.outer_size - outer_begin);
    const int depth_size = at_most<kDepth>(source.depth_size - depth_begin);
    PKG_UNROLL
    for (int i = 0; i < kPackets; ++i) {
      const int outer_left = outer_size - outer_place(i);
      const int depth_left = depth_size - depth_place(i);
      int valid = 0;
      if (outer_left > 0 && depth_left > 0) {
        valid = along_depth_ ? depth_left : outer_left;
      }
      const Element* from =
          source.data + (outer_begin + outer_place(i)) * source.outer_stride +
          (depth_begin + depth_place(i)) * source.depth_stride;
      if (vectorised && valid >= kPacket) {
        values_[i] = *reinterpret_cast<const Packet<Element, kPacket>*>(from);
      } else {
        PKG_UNROLL
        for (int j = 0; j < kPacket; ++j) {
          values_[i].values[j] =
              j < valid ? from[j * packet_stride] : convert<Element>(0.0f);
        }
      }
    }
  }

  template <class Panel>
  __device__ __forceinline__ void store(Panel&& panel) const {
    PKG_UNROLL
    for (int i = 0; i < kPackets; ++i) {
      const int outer_index = outer_place(i);
      const int depth_index = depth_place(i);
      PKG_UNROLL
      for (int j = 0; j < kPacket; ++j) {
        const auto value = convert<Accumulator<Element>>(values_[i].values[j]);
        if (along_depth_) {
          panel[depth_index + j][outer_index] = value;
        } else {
          panel[depth_index][outer_index + j] = value;
        }
      }
    }
  }

 private:
  static constexpr int kElements = kOuter * kDepth / kThreads;
  static_assert(kElements * kThreads == kOuter * kDepth);
  static constexpr int kWidest = 16 / sizeof(Element);
  static constexpr int kPacket = kElements < kWidest ? kElements : kWidest;
  static constexpr int kPackets = kElements / kPacket;
  static_assert(kPackets * kPacket == kElements);
  static_assert(kDepth % kPacket == 0 && kOuter % kPacket == 0);

  __device__ __forceinline__ int thread() const {
    if constexpr (kPlaces == PanelPlaces::of_product) {
      return thread_;
    } else {
      return static_cast<int>(threadIdx.x);
    }
  }

  // Neighbouring threads load neighbouring packets along the dimension in
  // which the matrix is dense.
  __device__ __forceinline__ int outer_place(int i) const {
    const int index = thread() + i * kThreads;
    return along_depth_ ? index / (kDepth / kPacket)
                        : index % (kOuter / kPacket) * kPacket;
  }
  __device__ __forceinline__ int depth_place(int i) const {
    const int index = thread() + i * kThreads;
    return along_depth_ ? index % (kDepth / kPacket) * kPacket
                        : index / (kOuter / kPacket);
  }

  Packet<Element, kPacket> values_[kPackets];
  bool along_depth_;
  int thread_ = kPlaces == PanelPlaces::of_product
                    ? of_group<kThreads, kGroups>(
                          computed_here(static_cast<int>(threadIdx.x)))
                    : 0;
  static_assert(kGroups == 1 || kPlaces == PanelPlaces::of_product);
};

}  // namespace pkg::cuda
