#include "../mul.h"
#include "../namespace.h"
#include "pointwise.h"

namespace pkg::cuda {
namespace {

Tensor mul(const Tensor& a, const Tensor& b) {
  check_mul(a, b);
  const DeviceGuard guard(device_of(a).index);
  const ScalarType type = result_type(a, b);
  const auto [output, loop] = plan_binary("mul", a, b, type);
  run_pointwise("mul", {loop, type, output, {&a, &b}}, Multiply{});
  return output;
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) { library.impl<&mul>("mul"); }

}  // namespace
}  // namespace pkg::cuda
