// int4_linear: linear with a weight of 4-bit values, by the way that suits the
// number of rows.
#include "int4_linear.h"

#include <limits>
#include <type_traits>

#include "cpu/gemm/linear_product.h"
#include "cpu/int4/few_rows.h"
#include "cpu/int4/limb_panels.h"
#include "cpu/int4/products.h"
#include "cpu/pointwise/pointwise.h"
#include "host/namespace.h"

namespace pkg::cpu {
namespace {

[[maybe_unused]] constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

// Up to how many rows are multiplied by integer dot products, each on its own
// (cpu/int4/few_rows.h) and then by micro-panels (cpu/int4/limb_panels.h); what
// is beyond both goes by the product's core, or by tiles. pkg.ops.int4_linear
// names the numbers; docs/tuning/gemm.md has the measurements.
struct IntegerRows {
  int64_t each;
  int64_t panels;
};

template <class T>
constexpr IntegerRows integer_rows() {
  [[maybe_unused]] constexpr bool kIsHalf = !std::is_same_v<T, float>;
#if defined(PKG_HAS_TILES)
  // Intel Xeon, milliseconds by dot products and by tiles (cpu/int4/
  // group_tiles.h): bfloat16 and float16 4 rows 1.4 and 1.7, 8 rows 2.7 and
  // 1.7; float32 1.7 and 2.0, 3.3 and 2.1.
  return {4, 0};
#elif defined(PKG_HAS_BYTE_DOT)
  return {2, kAny};
#elif defined(__AVX512F__)
  return kIsHalf ? IntegerRows{2, kAny} : IntegerRows{4, 12};
#elif defined(__AVX2__)
  return kIsHalf ? IntegerRows{6, kAny} : IntegerRows{12, 0};
#elif defined(__SSSE3__)
  return {1, kIsHalf ? kAny : 24};
#else
  return {kIsHalf ? 32 : 12, 0};
#endif
}

// False, with nothing written, where integers are not the way. Rows that the
// micro-panels do not take, for their values, are multiplied by
// multiply_many_rows, with those of their block.
template <class T>
bool multiply_in_integers(const MatrixView<T>& input, int64_t rows,
                          const TiledWeight& weight,
                          const simd::Compute<T>* bias, T* output,
                          int64_t threads) {
  constexpr int kLimbs = std::is_same_v<T, float> ? 3 : 2;
  constexpr IntegerRows kRows = integer_rows<T>();
  if (rows <= kRows.each) {
    return multiply_few_rows<kLimbs>(input, rows, weight, bias, output,
                                     threads);
  }
  if constexpr (kRows.panels > 0) {
    if (rows <= kRows.panels) {
      // For as many rows is the weight unpacked once.
      constexpr int64_t kBlock = 240;
      for_each_block(rows, kBlock, [&](int64_t row, int64_t count) {
        T* const to = output + row * weight.layout.rows;
        if (!multiply_by_limb_panels<kLimbs>(input.from(row, 0), count, weight,
                                             bias, to, threads)) {
          multiply_many_rows(input.from(row, 0), count, weight, bias, to,
                             threads);
        }
      });
      return true;
    }
  }
  return false;
}

template <class T>
void multiply(const MatrixView<T>& input, int64_t rows,
              const TiledWeight& weight, const simd::Compute<T>* bias,
              T* output, int64_t threads) {
  if constexpr (!std::is_same_v<T, double>) {
    if (weight.layout.columns > 0 &&
        multiply_in_integers(input, rows, weight, bias, output, threads)) {
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
