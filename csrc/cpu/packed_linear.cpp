// packed_linear: linear on a weight that pack_linear_weight has packed, so that
// a product with few rows reads it once, in order, and packs nothing.
#include "packed_linear.h"

#include "cpu/gemm/linear_product.h"
#include "cpu/gemm/packed_product.h"
#include "cpu/pointwise/pointwise.h"
#include "host/namespace.h"

namespace pkg::cpu {
namespace {

// The kernels load whole cache lines of the packed operand.
constexpr uintptr_t kAlignment = 64;

Tensor packed_linear(const TensorView& input, const TensorView& packed_weight,
                     int64_t out_features,
                     const std::optional<TensorView>& bias,
                     const std::optional<Text>& activation) {
  const LinearPlan plan =
      plan_packed_linear(input, packed_weight, out_features, bias, activation);
  const void* packed = packed_weight.const_data_ptr();
  PKG_CHECK(reinterpret_cast<uintptr_t>(packed) % kAlignment == 0,
            "packed_linear: packed_weight does not begin at a multiple of ",
            kAlignment,
            " bytes; pass the tensor that pack_linear_weight returned, or a "
            "clone of it, not a part of another one");
  const Tensor output = allocate_linear_output(plan, input);
  with_floating_type(plan.type, [&](auto example) {
    using T = decltype(example);
    const auto* bias_data = prepare_bias<T>(bias, plan.columns);
    for_each_matrix<T>(
        plan, static_cast<const T*>(input.const_data_ptr()),
        static_cast<T*>(output.mutable_data_ptr()), nullptr,
        [&](const T* rows, T* to, T* kept, int64_t threads) {
          const MatrixView<T> left{rows, plan.row_stride, plan.inner_stride};
          multiply_packed(left, static_cast<const T*>(packed), plan.rows,
                          plan.columns, plan.inner, to, plan.columns, threads,
                          LinearEpilogue<T>{plan.activation, bias_data, kept,
                                            plan.columns});
        });
  });
  return output;
}

PKG_IMPLEMENT(CPU, library) { library.impl<&packed_linear>("packed_linear"); }

}  // namespace
}  // namespace pkg::cpu
