// The host side of decode_attention's kernels.
#pragma once

#include <algorithm>

#include "cuda/attention/decode_kernels.cuh"
#include "cuda/host/launch.h"
#include "decode_attention.h"
#include "host/integer_math.h"

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

// Into how many parts sequences are divided, so that `pieces` of work in each
// part are about as many blocks as the device holds at a time: a few more would
// run when all others are done. The lengths are not known here: the device
// divides each sequence anew.
inline int64_t decode_splits(int64_t capacity, int64_t pieces, int64_t blocks) {
  constexpr int64_t kLeastKeys = 4 * kDecodeTile;
  const int64_t wanted = pieces == 0 ? 1 : blocks / pieces;
  const int64_t most = ceil_div(capacity, kLeastKeys);
  return std::max<int64_t>(1, std::min(wanted, most));
}

// The launches, defined with decode_attention and shared by attention of a few
// queries. The caller holds a DeviceGuard.
template <class Element>
void launch_decoding(DecodeAttention<Element> call, const Tensor& query);

}  // namespace pkg::cuda
