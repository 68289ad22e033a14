// The host side of decode_attention's kernels.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/attention/decode.cuh"
#include "cuda/host/launch.h"
#include "decode_attention.h"

namespace pkg::cuda {

inline DecodeIndices decode_indices(const Tensor& tensor) {
  DecodeIndices indices = {};
  indices.data = tensor.const_data_ptr();
  std::ranges::copy(strides_of(tensor), indices.strides);
  indices.is_wide = dtype_of(tensor) == ScalarType::Long;
  return indices;
}

template <class Element>
DecodeTensor<const Element> decode_operand(const Tensor& tensor) {
  DecodeTensor<const Element> operand = {};
  operand.data = static_cast<const Element*>(tensor.const_data_ptr());
  std::ranges::copy(strides_of(tensor), operand.strides);
  return operand;
}

// Enough blocks for the largest devices, some 150 multiprocessors, to hold four
// each. The lengths are not known here: the device divides each sequence anew.
inline int64_t decode_splits(const DecodeAttentionPlan& plan, int64_t pieces) {
  constexpr int64_t kBlocks = 600;
  constexpr int64_t kLeastKeys = 4 * kDecodeTile;
  const int64_t wanted = pieces == 0 ? 1 : (kBlocks + pieces - 1) / pieces;
  const int64_t most = (plan.capacity + kLeastKeys - 1) / kLeastKeys;
  return std::max<int64_t>(1, std::min(wanted, most));
}

// Calls function.operator()<rows, width>() with the tiles of a block: 128
// columns where 64 would have several blocks repeat the scores, if the
// registers of a thread hold so many.
template <class Element, class Function>
void with_decode_tiles(int64_t rows, int64_t value_size, Function&& function) {
  const auto with_width = [&]<int kRows>() {
    if constexpr (!std::is_same_v<Element, double>) {
      if (value_size > 64) {
        return function.template operator()<kRows, 128>();
      }
    }
    function.template operator()<kRows, 64>();
  };
  if (rows == 1) {
    with_width.template operator()<1>();
  } else {
    with_width.template operator()<kDecodeRows>();
  }
}

}  // namespace pkg::cuda
