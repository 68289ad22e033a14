#include "cuda/int4/rowwise_host.h"
#include "host/namespace.h"

namespace pkg::cuda {
namespace {

Tensor rowwise_scaled_linear_s8s4(const Tensor& input,
                                  const Tensor& input_scale,
                                  const Tensor& weight,
                                  const Tensor& weight_scale,
                                  const std::optional<Tensor>& bias,
                                  std::optional<ScalarType> out_dtype) {
  return rowwise_scaled_linear<false>("rowwise_scaled_linear_s8s4", input,
                                      input_scale, weight, weight_scale, bias,
                                      out_dtype);
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&rowwise_scaled_linear_s8s4>("rowwise_scaled_linear_s8s4");
}

}  // namespace
}  // namespace pkg::cuda
