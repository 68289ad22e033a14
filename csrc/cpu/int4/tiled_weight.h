// A 4-bit weight in the tensor-core tiled layout, as the CPU kernels read it.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "cpu/runtime/workspace.h"
#include "cpu/simd/simd.h"
#include "tensor_core_tiled_layout.h"

namespace pkg::cpu {

// Elements of any strides, in order: the tensor itself where it is contiguous,
// else a copy that is valid until the next use of the slot.
template <class T, Slot kSlot>
const T* contiguous_elements(const TensorView& tensor) {
  const auto sizes = sizes_of(tensor);
  const auto strides = strides_of(tensor);
  const T* from = static_cast<const T*>(tensor.const_data_ptr());
  const int64_t count = product(sizes);
  if (count == 0 || is_contiguous(tensor)) {
    return from;
  }
  T* copy = Workspace::of_this_thread<kSlot>().template request<T>(count);
  std::array<int64_t, 4> index{};
  int64_t offset = 0;
  for (int64_t i = 0; i < count; ++i) {
    copy[i] = from[offset];
    for (size_t d = sizes.size(); d-- > 0;) {
      offset += strides[d];
      if (++index[d] < sizes[d]) {
        break;
      }
      offset -= sizes[d] * strides[d];
      index[d] = 0;
    }
  }
  return copy;
}

struct TiledWeight {
  TiledLayout layout;
  int64_t group_size;
  const uint32_t* words;
  // Pairs of bfloat16, (groups, rows): the scale first.
  const std::byte* scales_and_zeros;

  int64_t groups() const { return layout.columns / group_size; }

  uint32_t pair(int64_t group, int64_t row) const {
    uint32_t bits;
    std::memcpy(&bits, pairs(group, row), sizeof(bits));
    return bits;
  }
  const std::byte* pairs(int64_t group, int64_t row) const {
    return scales_and_zeros + (group * layout.rows + row) * 4;
  }
};

inline float scale_of_pair(uint32_t pair) {
  return std::bit_cast<float>(pair << 16);
}
inline float zero_of_pair(uint32_t pair) {
  return std::bit_cast<float>(pair & 0xFFFF0000U);
}

inline TiledWeight tiled_weight(const TiledLayout& layout, int64_t group_size,
                                const TensorView& packed_w,
                                const TensorView& scales_and_zeros) {
  static_assert(std::endian::native == std::endian::little);
  return {
      layout, group_size,
      contiguous_elements<uint32_t, Slot::WeightWords>(packed_w),
      reinterpret_cast<const std::byte*>(
          contiguous_elements<uint16_t, Slot::WeightScales>(scales_and_zeros))};
}

}  // namespace pkg::cpu
