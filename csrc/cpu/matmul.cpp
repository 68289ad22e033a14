// matmul: chooses, for a batch of products, between one large product, a loop
// of parallel products, and products in parallel.
#include "matmul.h"

#include <span>

#include "cpu/gemm/batch.h"
#include "cpu/gemm/matrix_product.h"
#include "cpu/runtime/element_types.h"
#include "host/namespace.h"

namespace pkg::cpu {
namespace {

template <class Input, class Output>
void multiply_one(const MatmulPlan& plan, const Input* a, const Input* b,
                  Output* output, int64_t threads) {
  matrix_product<Input, Output>({a, plan.a_row_stride, plan.a_column_stride},
                                {b, plan.b_row_stride, plan.b_column_stride},
                                plan.rows, plan.columns, plan.inner, output,
                                plan.columns, threads);
}

template <class Input, class Output>
void multiply_batch(const MatmulPlan& plan, const TensorView& a,
                    const TensorView& b, const Tensor& output) {
  const auto* a_data = static_cast<const Input*>(a.const_data_ptr());
  const auto* b_data = static_cast<const Input*>(b.const_data_ptr());
  auto* output_data = static_cast<Output*>(output.mutable_data_ptr());
  const std::span sizes(plan.batch_sizes.data(), plan.batch_dims);
  for_each_product(
      plan.batch(), plan.rows * plan.columns * plan.inner,
      [&](int64_t i, int64_t threads) {
        multiply_one(plan,
                     a_data + strided_offset(sizes, plan.a_batch_strides, i),
                     b_data + strided_offset(sizes, plan.b_batch_strides, i),
                     output_data + i * plan.rows * plan.columns, threads);
      });
}

Tensor matmul(const TensorView& a, const TensorView& b,
              std::optional<ScalarType> out_dtype) {
  MatmulPlan plan = plan_matmul(a, b, out_dtype);
  Tensor output = allocate_matmul_output(plan, a);
  fold_batch_into_rows(plan);
  if (plan.input_type == ScalarType::Char) {
    multiply_batch<int8_t, int32_t>(plan, a, b, output);
    return output;
  }
  with_floating_type(plan.input_type, [&](auto example) {
    using Input = decltype(example);
    if (plan.output_type == plan.input_type) {
      multiply_batch<Input, Input>(plan, a, b, output);
    } else if constexpr (sizeof(Input) < sizeof(float)) {
      multiply_batch<Input, float>(plan, a, b, output);
    }
  });
  return output;
}

PKG_IMPLEMENT(CPU, library) { library.impl<&matmul>("matmul"); }

}  // namespace
}  // namespace pkg::cpu
