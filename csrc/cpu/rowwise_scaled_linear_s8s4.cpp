// rowwise_scaled_linear_s8s4: rows of int8 times packed int4, by the kernel
// that both operators share (cpu/int4/rowwise.cpp).
#include "cpu/int4/rowwise.h"
#include "cpu/pointwise/pointwise.h"
#include "host/namespace.h"

namespace pkg::cpu {
namespace {

Tensor rowwise_scaled_linear_s8s4(const TensorView& input,
                                  const TensorView& input_scale,
                                  const TensorView& weight,
                                  const TensorView& weight_scale,
                                  const std::optional<TensorView>& bias,
                                  std::optional<ScalarType> out_dtype) {
  return rowwise_scaled_linear("rowwise_scaled_linear_s8s4", RowValues::Int8,
                               input, input_scale, weight, weight_scale, bias,
                               out_dtype);
}

PKG_IMPLEMENT(CPU, library) {
  library.impl<&rowwise_scaled_linear_s8s4>("rowwise_scaled_linear_s8s4");
}

}  // namespace
}  // namespace pkg::cpu
