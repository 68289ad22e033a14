// Checks of d_sigmoid and its gradient, for every device.
#pragma once

#include "pointwise.h"

namespace pkg {

inline void check_d_sigmoid(const TensorView& z) {
  check_floating("d_sigmoid", "z", z);
}

inline void check_d_sigmoid_backward(const TensorView& grad,
                                     const TensorView& z) {
  check_floating("d_sigmoid_backward", "grad", grad);
  check_floating("d_sigmoid_backward", "z", z);
  check_same_device("d_sigmoid_backward", "z", z, "grad", grad);
  PKG_CHECK(dtype_of(grad) == dtype_of(z), "d_sigmoid_backward: grad is ",
            dtype_name(dtype_of(grad)), " but z is ", dtype_name(dtype_of(z)),
            "; they must have one dtype");
  PKG_CHECK(std::ranges::equal(sizes_of(grad), sizes_of(z)),
            "d_sigmoid_backward: grad has shape ", shape_text(grad),
            " but z has shape ", shape_text(z), "; they must be equal");
}

}  // namespace pkg
