#include "../muladd.h"
#include "../namespace.h"
#include "pointwise.h"

namespace pkg::cuda {
namespace {

Tensor muladd(const Tensor& a, const Tensor& b, double c) {
  check_muladd(a, b);
  const DeviceGuard guard(device_of(a).index);
  const ScalarType type = muladd_result_type(a, b);
  const auto [output, loop] =
      plan_binary("muladd", a, b, type, Steps::kThenNumber);
  run_pointwise("muladd", {loop, type, output, {&a, &b}}, MultiplyAdd{c});
  return output;
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&muladd>("muladd");
}

}  // namespace
}  // namespace pkg::cuda
