// d_sigmoid: the derivative of the logistic function, and its own derivative.
//
// With e = exp(-|z|), which never overflows: sigma (1 - sigma) = e / (1 + e)^2,
// the same for z and -z and without cancellation however large |z| is, and
// 1 - 2 sigma = -sign(z) (1 - e) / (1 + e), with 1 - e from expm1.
//
// One load and one store (two loads in the backward) and some 25 operations an
// element: near the balance of arithmetic and memory on one core.
#include "host/elementwise.h"

namespace pkg {

PKG_ELEMENTWISE(d_sigmoid, Takes::kFloating, Tensor z) {
  const Tensor e = math::exp(-math::abs(z));
  return e / ((e + 1) * (e + 1));
}

PKG_ELEMENTWISE(d_sigmoid_backward, Takes::kGradient, Tensor grad, Tensor z) {
  const Tensor negative = -math::abs(z);
  const Tensor e = math::exp(negative);
  const Tensor tanh_half = -math::expm1_of_nonpositive(negative) / (e + 1);
  return grad * (e / ((e + 1) * (e + 1))) * (z < 0 ? tanh_half : -tanh_half);
}

}  // namespace pkg
