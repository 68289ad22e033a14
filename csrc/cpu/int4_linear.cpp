// int4_linear: linear with a weight of 4-bit values, by the way that suits the
// number of rows.
#include "int4_linear.h"

#include "cpu/gemm/linear_product.h"
#include "cpu/int4/few_rows.h"
#include "cpu/int4/products.h"
#include "cpu/pointwise/pointwise.h"
#include "host/namespace.h"

namespace pkg::cpu {
namespace {

// Rows up to which integer dot products are the faster way; pkg.ops.int4_linear
// and its test name the numbers. Zen 4, one core, 4096 x 4096, GFLOP/s: dot
// products 88 in float32, 114 in half precision, whatever the rows; the
// product's core with 8 / 16 / 32 rows 54 / 69 / 84 in float32, 87 / 113 / 138
// in bfloat16, 98 in float16 with 128 (docs/tuning/gemm.md).
template <class T>
constexpr int64_t few_rows() {
#if defined(PKG_HAS_TILES)
  // Intel Xeon, milliseconds by dot products and by tiles (cpu/int4/
  // group_tiles.h): bfloat16 and float16 4 rows 1.4 and 1.7, 8 rows 2.7 and
  // 1.7; float32 1.7 and 2.0, 3.3 and 2.1.
  return 4;
#else
#if defined(__AVX512BF16__)
  if (std::is_same_v<T, BFloat16>) {
    return 12;
  }
#endif
#if defined(__AVX512VNNI__)
  return std::is_same_v<T, float> ? 24 : 128;
#else
  return std::is_same_v<T, float> ? 12 : 32;
#endif
#endif
}

template <class T>
void multiply(const MatrixView<T>& input, int64_t rows,
              const TiledWeight& weight, const simd::Compute<T>* bias,
              T* output, int64_t threads) {
  if constexpr (!std::is_same_v<T, double>) {
    constexpr int kLimbs = std::is_same_v<T, float> ? 3 : 2;
    if (rows <= few_rows<T>() && weight.layout.columns > 0 &&
        multiply_few_rows<kLimbs>(input, rows, weight, bias, output, threads)) {
      return;
    }
  }
  multiply_many_rows(input, rows, weight, bias, output, threads);
}

Tensor int4_linear(const TensorView& input, const TensorView& packed_w,
                   const TensorView& scales_and_zeros, int64_t group_size,
                   int64_t inner_k_tiles,
                   const std::optional<TensorView>& bias) {
  const Int4LinearPlan whole = plan_int4_linear(
      input, packed_w, scales_and_zeros, group_size, inner_k_tiles, bias);
  const LinearPlan& plan = whole.linear;
  const Tensor output = allocate_linear_output(plan, input);
  if (product(sizes_of(TensorView(output))) == 0) {
    return output;
  }
  const TiledWeight weight =
      tiled_weight(whole.layout, whole.group_size, packed_w, scales_and_zeros);
  with_floating_type(plan.type, [&](auto example) {
    using T = decltype(example);
    const auto* bias_data = prepare_bias<T>(bias, plan.columns);
    for_each_matrix<T>(
        plan, static_cast<const T*>(input.const_data_ptr()),
        static_cast<T*>(output.mutable_data_ptr()), nullptr,
        [&](const T* rows, T* to, T*, int64_t threads) {
          multiply(MatrixView<T>{rows, plan.row_stride, plan.inner_stride},
                   plan.rows, weight, bias_data, to, threads);
        });
  });
  return output;
}

PKG_IMPLEMENT(CPU, library) { library.impl<&int4_linear>("int4_linear"); }

}  // namespace
}  // namespace pkg::cpu
