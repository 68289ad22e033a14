// Checks that two operands agree.
#pragma once

#include <algorithm>

#include "host/tensor.h"

namespace pkg {

inline void check_same_dtype(const char* op, const char* name,
                             const TensorView& tensor, const char* other_name,
                             const TensorView& other) {
  PKG_CHECK(dtype_of(tensor) == dtype_of(other), op, ": ", name, " is ",
            dtype_name(dtype_of(tensor)), " but ", other_name, " is ",
            dtype_name(dtype_of(other)), "; they must have one dtype");
}

inline void check_same_shape(const char* op, const char* name,
                             const TensorView& tensor, const char* other_name,
                             const TensorView& other) {
  PKG_CHECK(std::ranges::equal(sizes_of(tensor), sizes_of(other)), op, ": ",
            name, " has shape ", shape_text(tensor), " but ", other_name,
            " has shape ", shape_text(other), "; they must be equal");
}

}  // namespace pkg
