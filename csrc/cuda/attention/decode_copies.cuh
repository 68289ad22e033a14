// Where the tensor cores' kernel of decode_attention finds keys and values, and
// how it copies them to shared memory.
#pragma once

#include <cstdint>

#include "cuda/attention/decode.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/gemm/operand_tile.cuh"

namespace pkg::cuda {

// Keys or values of one head, as lanes of a warp copy them: 16 lines, a line to
// eight neighbouring lanes.
template <class Element>
struct DecodeLines {
  static constexpr int kLines = 16;
  static constexpr int kVector = 16 / sizeof(Element);
  static constexpr int kSlice = 128 / sizeof(Element);
  static constexpr int kAtATime = kWarp * kVector / kSlice;
  static constexpr int kCopies = kLines / kAtATime;
  using Layout = SwizzledTile<Element, kLines, kSlice>;

  const Element* data;  // of the head
  int64_t stride;       // of the elements
  int size;             // of a line
  bool is_dense;

  __device__ __forceinline__
  DecodeLines(const DecodeTensor<const Element>& tensor, int64_t head,
              int64_t first_element, int64_t sizes)
      : data(tensor.data + head * tensor.strides[1] +
             first_element * tensor.strides[3]),
        stride(tensor.strides[3]),
        size(at_most<1 << 16>(sizes - first_element)),
        is_dense(stride == 1 && tensor.strides[0] % kVector == 0 &&
                 tensor.strides[1] % kVector == 0 &&
                 tensor.strides[2] % kVector == 0 &&
                 is_aligned(tensor.data, kVector)) {}

  // Begins to copy the lines that are at `lines`, the i-th at address_of(i),
  // zeros for the others and behind their ends.
  template <int kMostSlices, class AddressOf>
  __device__ __forceinline__ void copy(const SharedSpan<Element>& to,
                                       int slices, uint32_t lines,
                                       AddressOf&& address_of) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int first_line = lane * kVector / kSlice;
    const int place = lane * kVector % kSlice;
    const Element* from[kCopies];
    PKG_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      from[i] = address_of(i * kAtATime + first_line) + place * stride;
    }
    const auto valid_of = [&](int slice, int line) {
      const int left = size - slice * kSlice - place;
      const bool is_there = (lines >> line & 1) != 0;
      return !is_there || left < 0 ? 0 : left < kVector ? left : kVector;
    };
    if (!is_dense) {
      gather(to, slices, from, valid_of);
      return;
    }
    PKG_UNROLL
    for (int slice = 0; slice < kMostSlices; ++slice) {
      if (slice >= slices) {
        break;
      }
      PKG_UNROLL
      for (int i = 0; i < kCopies; ++i) {
        const int line = i * kAtATime + first_line;
        to.copy_async(slice * Layout::kElements + Layout::index(line, place),
                      from[i] + slice * kSlice, valid_of(slice, line));
      }
    }
  }

 private:
  template <class ValidOf>
  __device__ __forceinline__ void gather(const SharedSpan<Element>& to,
                                         int slices,
                                         const Element* (&from)[kCopies],
                                         ValidOf&& valid_of) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int first_line = lane * kVector / kSlice;
    const int place = lane * kVector % kSlice;
    PKG_UNROLL_BY(1)  // what is in flight is in registers
    for (int slice = 0; slice < slices; ++slice) {
      PKG_UNROLL
      for (int i = 0; i < kCopies; ++i) {
        const int line = i * kAtATime + first_line;
        to.store(slice * Layout::kElements + Layout::index(line, place),
                 gathered<Element, kVector>(from[i] + slice * kSlice * stride,
                                            stride, valid_of(slice, line)));
      }
    }
  }
};

// Where the keys and values of a piece lie: the lower 16 lanes of a warp find
// its keys, the upper ones their values.
template <class Element>
class DecodeSearch {
 public:
  // What a lane knows of its key before the block table has answered.
  struct Begun {
    bool is_there = false;
    int inner = 0;
    DecodeIndices::Pending outer = {};
  };

  __device__ __forceinline__ DecodeSearch(const DecodeAttention<Element>& call,
                                          const DecodePiece& piece,
                                          const Element* key,
                                          const Element* value)
      : call_(call), sequence_(piece.sequence) {
    const bool is_value = threadIdx.x % kWarp >= kWarp / 2;
    const auto& tensor = is_value ? call.value : call.key;
    data_ = is_value ? value : key;
    outer_stride_ = tensor.strides[0];
    inner_stride_ = tensor.strides[2];
  }

  // Of the lane's key, the i-th from `first` on, if it is below `end`, and not
  // below `least`.
  __device__ __forceinline__ Begun begin(int first, int least, int end) const {
    const int key = first + static_cast<int>(threadIdx.x) % (kWarp / 2);
    Begun begun;
    begun.is_there = key >= least && key < end;
    begun.inner = key;
    if (call_.page_size > 0 && begun.is_there) {
      const auto size = static_cast<uint32_t>(call_.page_size);
      const uint32_t page = static_cast<uint32_t>(key) / size;
      begun.inner = key - static_cast<int>(page * size);
      begun.outer = call_.table.begin_at(sequence_, page);
    }
    return begun;
  }

  // The address of the lane's key or value, and for the whole warp which keys
  // there are.
  __device__ __forceinline__ const Element* finish(const Begun& begun,
                                                   uint32_t& keys) const {
    int64_t outer = sequence_;
    bool is_there = begun.is_there;
    if (call_.page_size > 0) {
      outer = call_.table.value(begun.outer);
      is_there = is_there && outer >= 0 && outer < call_.pages;
    }
    keys = __ballot_sync(kWholeWarp, is_there) & 0xffffU;
    return is_there
               ? data_ + outer * outer_stride_ + begun.inner * inner_stride_
               : data_;
  }

 private:
  const DecodeAttention<Element>& call_;
  int64_t sequence_;
  const Element* data_;
  int64_t outer_stride_;
  int64_t inner_stride_;
};

}  // namespace pkg::cuda
