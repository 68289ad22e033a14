#include "cuda/gemm/linear_host.h"
#include "cuda/gemm/pack_weight.cuh"
#include "cuda/host/launch.h"
#include "host/namespace.h"
#include "packed_linear.h"

namespace pkg::cuda {
namespace {

Tensor packed_linear(const Tensor& input, const Tensor& packed_weight,
                     int64_t out_features, const std::optional<Tensor>& bias,
                     const std::optional<Text>& activation) {
  const LinearPlan plan =
      plan_packed_linear(input, packed_weight, out_features, bias, activation);
  const DeviceGuard guard(device_of(input).index);
  const Tensor output = allocate_linear_output(plan, input);
  const LinearWeight weight = {packed_weight.const_data_ptr(),
                               packed_pitch(out_features), 1};
  launch_linear("packed_linear", plan, input, weight, bias, output, nullptr);
  return output;
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&packed_linear>("packed_linear");
}

}  // namespace
}  // namespace pkg::cuda
