#include "add_out.h"
#include "cuda/pointwise/pointwise_host.h"
#include "host/namespace.h"

namespace pkg::cuda {
namespace {

void add_out(const Tensor& a, const Tensor& b, const Tensor& out) {
  const Shape shape = check_add_out(a, b, out);
  const DeviceGuard guard(device_of(a).index);
  const ScalarType type = result_type(a, b);
  const TensorView operands[] = {out, a, b};
  const auto loop =
      plan_pointwise_into<3>(shape, {&operands[0], &operands[1], &operands[2]});
  run_pointwise("add_out", {loop, type, out, {&operands[1], &operands[2]}},
                Add{});
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&add_out>("add_out");
}

}  // namespace
}  // namespace pkg::cuda
