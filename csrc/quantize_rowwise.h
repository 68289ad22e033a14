// Checks and plan of quantize_rowwise, for every device.
#pragma once

#include <algorithm>
#include <array>
#include <tuple>

#include "host/rows.h"
#include "host/tensor.h"

namespace pkg {

struct QuantizeRowwisePlan {
  ScalarType type;
  int bits;       // 8 or 4
  int64_t rows;   // over all leading dimensions
  int64_t inner;  // values in a row
  size_t leading_dims;
  std::array<int64_t, kMaxDims> output_sizes;

  int64_t row_bytes() const { return bits == 8 ? inner : inner / 2; }
};

inline QuantizeRowwisePlan plan_quantize_rowwise(const TensorView& input,
                                                 int64_t bits) {
  constexpr const char* kOp = "quantize_rowwise";
  check_floating(kOp, "input", input);
  const auto& sizes = input.sizes;
  PKG_CHECK(!sizes.empty(), kOp,
            ": input has no dimensions; it needs at least one, of a row");
  PKG_CHECK(sizes.size() <= kMaxDims, kOp, ": input has ", sizes.size(),
            " dimensions; at most ", kMaxDims, " are supported");
  PKG_CHECK(bits == 4 || bits == 8, kOp, ": bits is ", bits,
            "; it must be 4 or 8");
  QuantizeRowwisePlan plan;
  plan.type = dtype_of(input);
  plan.bits = static_cast<int>(bits);
  plan.leading_dims = sizes.size() - 1;
  plan.inner = sizes[plan.leading_dims];
  PKG_CHECK(bits == 8 || plan.inner % 2 == 0, kOp, ": input of shape ",
            shape_text(input), " has ", plan.inner,
            " elements in a row; with 4 bits there must be an even number of "
            "them, as a byte holds two");
  plan.rows = product(sizes.first(plan.leading_dims));
  std::copy_n(sizes.begin(), plan.leading_dims, plan.output_sizes.begin());
  plan.output_sizes[plan.leading_dims] = plan.row_bytes();
  return plan;
}

// Values and scales.
inline std::tuple<Tensor, Tensor> allocate_quantized(
    const QuantizeRowwisePlan& plan, const TensorView& input) {
  const std::span sizes(plan.output_sizes.data(), plan.leading_dims + 1);
  return {empty_contiguous(sizes, ScalarType::Char, device_of(input)),
          empty_contiguous(sizes.first(plan.leading_dims), plan.type,
                           device_of(input))};
}

}  // namespace pkg
