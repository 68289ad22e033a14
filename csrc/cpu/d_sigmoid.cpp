// d_sigmoid: the derivative of the logistic function, and its own derivative.
//
// With e = exp(-|z|), which never overflows: sigma (1 - sigma) = e / (1 + e)^2,
// the same for z and -z and without cancellation however large |z| is, and
// 1 - 2 sigma = -sign(z) (1 - e) / (1 + e), with 1 - e from expm1.
//
// One load and one store (two loads in the backward) and some 25 operations an
// element: near the balance of arithmetic and memory on one core.
#include "../d_sigmoid.h"

#include "../namespace.h"
#include "pointwise.h"
#include "simd_math.h"

namespace pkg::cpu {
namespace {

Tensor d_sigmoid(const TensorView& z) {
  check_d_sigmoid(z);
  const ScalarType type = dtype_of(z);
  const PointwisePlan<2> plan = plan_unary(z, type);
  with_floating_type(type, [&](auto example) {
    using T = decltype(example);
    run_pointwise<T>(plan.loop, plan.output, std::array{&z}, [](auto x) {
      const auto e = simd::exp(-simd::abs(x));
      return e / ((e + 1) * (e + 1));
    });
  });
  return plan.output;
}

Tensor d_sigmoid_backward(const TensorView& grad, const TensorView& z) {
  check_d_sigmoid_backward(grad, z);
  const ScalarType type = dtype_of(z);
  const PointwisePlan<3> plan =
      plan_binary("d_sigmoid_backward", z, grad, type);
  with_floating_type(type, [&](auto example) {
    using T = decltype(example);
    run_pointwise<T>(plan.loop, plan.output, std::array{&z, &grad},
                     [](auto x, auto gradient) {
                       const auto negative = -simd::abs(x);
                       const auto e = simd::exp(negative);
                       const auto tanh_half =
                           -simd::expm1_of_nonpositive(negative) / (e + 1);
                       return gradient * (e / ((e + 1) * (e + 1))) *
                              (x < 0 ? tanh_half : -tanh_half);
                     });
  });
  return plan.output;
}

PKG_IMPLEMENT(CPU, library) {
  library.impl<&d_sigmoid>("d_sigmoid");
  library.impl<&d_sigmoid_backward>("d_sigmoid_backward");
}

}  // namespace
}  // namespace pkg::cpu
