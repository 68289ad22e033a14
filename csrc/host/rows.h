// The rows of a tensor: its last dimension, over all those before it.
#pragma once

#include "host/tensor.h"

namespace pkg {

// Where a row begins, in elements, by its number over the first `leading_dims`
// dimensions.
inline int64_t row_offset(const TensorView& tensor, size_t leading_dims,
                          int64_t row) {
  return strided_offset(tensor.sizes.first(leading_dims), tensor.strides, row);
}

}  // namespace pkg
