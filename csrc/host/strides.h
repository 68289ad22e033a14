// Where the elements of tensors lie.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace pkg {

// PyTorch's own limit for the operators that TensorIterator serves.
inline constexpr int64_t kMaxDims = 64;

using Strides = std::array<int64_t, kMaxDims>;

inline Strides contiguous_strides(std::span<const int64_t> sizes) {
  Strides strides;
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

// The stride of a dimension of size 1 may be anything.
inline bool has_strides(std::span<const int64_t> sizes,
                        std::span<const int64_t> strides,
                        const Strides& expected) {
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && strides[d] != expected[d]) {
      return false;
    }
  }
  return true;
}

// Of an element by its number in the order of a contiguous tensor.
inline int64_t strided_offset(std::span<const int64_t> sizes,
                              std::span<const int64_t> strides, int64_t index) {
  int64_t offset = 0;
  for (size_t d = sizes.size(); d-- > 0;) {
    offset += index % sizes[d] * strides[d];
    index /= sizes[d];
  }
  return offset;
}

}  // namespace pkg
