#include "../d_sigmoid.h"
#include "../namespace.h"
#include "pointwise.h"

namespace pkg::cuda {
namespace {

Tensor d_sigmoid(const Tensor& z) {
  check_d_sigmoid(z);
  const DeviceGuard guard(device_of(z).index);
  const ScalarType type = dtype_of(z);
  const auto [output, loop] = plan_unary(z, type);
  run_pointwise("d_sigmoid", {loop, type, output, {&z}}, SigmoidDerivative{});
  return output;
}

Tensor d_sigmoid_backward(const Tensor& grad, const Tensor& z) {
  check_d_sigmoid_backward(grad, z);
  const DeviceGuard guard(device_of(z).index);
  const ScalarType type = dtype_of(z);
  // z first: the result's strides are those of z, as on the CPU.
  const auto [output, loop] = plan_binary("d_sigmoid_backward", z, grad, type);
  run_pointwise("d_sigmoid_backward", {loop, type, output, {&z, &grad}},
                SigmoidDerivativeBackward{});
  return output;
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&d_sigmoid>("d_sigmoid");
  library.impl<&d_sigmoid_backward>("d_sigmoid_backward");
}

}  // namespace
}  // namespace pkg::cuda
