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
class DecodeLines {
 public:
  static constexpr int kLines = 16;
  static constexpr int kVector = 16 / sizeof(Element);
  static constexpr int kSlice = 128 / sizeof(Element);
  using Layout = SwizzledTile<Element, kLines, kSlice>;

  // Their elements from `first_element` on; `sizes` is what a line has.
  __device__ __forceinline__
  DecodeLines(const DecodeTensor<const Element>& tensor, int64_t head,
              int64_t first_element, int64_t sizes)
      : tensor_(tensor),
        data_(tensor.data + head * tensor.strides[1] +
              first_element * tensor.strides[3]),
        size_(at_most<1 << 16>(sizes - first_element)),
        is_dense_(tensor.has_vectors()) {}

  __device__ __forceinline__ const Element* data() const { return data_; }

  // Begins to copy slices of the lines that are in `lines`, line i of which is
  // at address_of(i); zeros for the others and behind their ends. The whole
  // warp calls it, and it address_of.
  template <int kMostSlices, class AddressOf>
  __device__ __forceinline__ void copy(const SharedSpan<Element>& to,
                                       int slice_begin, int slice_end,
                                       uint32_t lines,
                                       AddressOf&& address_of) const {
    if (!is_dense_) {
      gather(to, slice_begin, slice_end, lines, address_of);
      return;
    }
    const Element* from[kCopies];
    PKG_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      from[i] = address_of(line_of(i)) + place() + slice_begin * kSlice;
    }
    PKG_UNROLL
    for (int slice = 0; slice < kMostSlices; ++slice) {
      if (slice_begin + slice >= slice_end) {
        break;
      }
      const int valid = valid_of(slice_begin + slice);
      PKG_UNROLL
      for (int i = 0; i < kCopies; ++i) {
        to.copy_async(
            slice * Layout::kElements + Layout::index(line_of(i), place()),
            from[i] + slice * kSlice, has(lines, i) ? valid : 0);
      }
    }
  }

 private:
  static constexpr int kAtATime = kWarp * kVector / kSlice;
  static constexpr int kCopies = kLines / kAtATime;

  // The lane's part of a slice: kCopies lines, sixteen bytes of each.
  __device__ __forceinline__ static int line_of(int i) {
    return i * kAtATime +
           static_cast<int>(threadIdx.x) % kWarp * kVector / kSlice;
  }
  __device__ __forceinline__ static int place() {
    return static_cast<int>(threadIdx.x) * kVector % kSlice;
  }
  __device__ __forceinline__ static bool has(uint32_t lines, int i) {
    return (lines >> line_of(i) & 1) != 0;
  }
  __device__ __forceinline__ int valid_of(int slice) const {
    const int left = size_ - slice * kSlice - place();
    return left < 0 ? 0 : left < kVector ? left : kVector;
  }

  template <class AddressOf>
  __device__ __forceinline__ void gather(const SharedSpan<Element>& to,
                                         int slice_begin, int slice_end,
                                         uint32_t lines,
                                         AddressOf&& address_of) const {
    const int64_t stride = tensor_.strides[3];
    const int count = (slice_end - slice_begin) * kCopies;
    PKG_UNROLL_BY(1)  // what is in flight is in registers
    for (int part = 0; part < count; ++part) {
      const int slice = part / kCopies;
      const int i = part % kCopies;
      const int column = (slice_begin + slice) * kSlice + place();
      to.store(slice * Layout::kElements + Layout::index(line_of(i), place()),
               gathered<Element, kVector>(
                   address_of(line_of(i)) + column * stride, stride,
                   has(lines, i) ? valid_of(slice_begin + slice) : 0));
    }
  }

  const DecodeTensor<const Element>& tensor_;
  const Element* data_;  // of the head
  int size_;             // of a line
  bool is_dense_;
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
      : call_(call),
        sequence_(piece.sequence),
        data_(is_value() ? value : key) {
    if (call.page_size == 0) {
      data_ += piece.sequence * stride(0);
    }
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
    const Element* address = data_;
    bool is_there = begun.is_there;
    if (call_.page_size > 0) {
      const int64_t outer = call_.table.value(begun.outer);
      is_there = is_there && outer >= 0 && outer < call_.pages;
      address += is_there ? outer * stride(0) : 0;
    }
    keys = __ballot_sync(kWholeWarp, is_there) & 0xffffU;
    return address + (is_there ? begun.inner * stride(2) : 0);
  }

 private:
  __device__ __forceinline__ static bool is_value() {
    return threadIdx.x % kWarp >= kWarp / 2;
  }
  __device__ __forceinline__ int64_t stride(int dimension) const {
    return is_value() ? call_.value.strides[dimension]
                      : call_.key.strides[dimension];
  }

  const DecodeAttention<Element>& call_;
  int64_t sequence_;
  const Element* data_;  // of the head, and if there are no pages the sequence
};

}  // namespace pkg::cuda
