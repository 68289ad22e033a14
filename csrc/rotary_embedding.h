// Checks and plan of rotary_embedding and of its gradient, for every device.
#pragma once

#include <algorithm>

#include "host/alike.h"
#include "host/pointwise.h"
#include "host/tensor.h"

namespace pkg {

// Which elements of a row are turned together: those i and half + i apart, or
// neighbours, 2 i and 2 i + 1.
enum class RotaryPairs { kHalves, kNeighbours };

// The gradient turns back: by the angles' negatives.
enum class RotaryWay { kForward, kBack };

// Rows are turned independently of each other.
struct RotaryEmbeddingPlan {
  ScalarType type;
  ScalarType table_type;  // `type`, or float32
  int64_t inner;          // elements of a row
  int64_t half;           // pairs of a row that are turned
  RotaryPairs pairs;
  RotaryWay way;
  Tensor output;
  // Over the rows of the output, the input, and both tables.
  PointwiseLoop<4> rows;
  // Between neighbours of a row, of the same four.
  std::array<int64_t, 4> steps;
};

namespace detail {

// A tensor without its last dimension.
inline TensorView rows_of(TensorView tensor) {
  const size_t leading = tensor.sizes.size() - 1;
  tensor.sizes = tensor.sizes.first(leading);
  tensor.strides = tensor.strides.first(leading);
  return tensor;
}

inline void check_rotary_dims(const char* op, const char* name,
                              const TensorView& tensor) {
  PKG_CHECK(!tensor.sizes.empty(), op, ": ", name,
            " has no dimensions; it needs at least one, of a row");
}

inline void check_rotary_shapes(const char* op, const char* name,
                                const TensorView& input,
                                const TensorView& cos) {
  const auto& sizes = input.sizes;
  const auto& table = cos.sizes;
  PKG_CHECK(2 * table.back() <= sizes.back(), op, ": cos has ", table.back(),
            " columns, which turn ", 2 * table.back(), " elements; a row of ",
            name, " has ", sizes.back());
  const bool has_fewer = table.size() <= sizes.size();
  bool is_broadcast = has_fewer;
  for (size_t i = 1; has_fewer && i < table.size(); ++i) {
    const int64_t own = table[table.size() - 1 - i];
    is_broadcast &= own == 1 || own == sizes[sizes.size() - 1 - i];
  }
  PKG_CHECK(is_broadcast, op, ": cos of shape ", shape_text(cos),
            " does not broadcast to the rows of ", name, ", which has shape ",
            shape_text(input),
            "; but for the last, its dimensions must be those of ", name,
            " from the right, or 1");
}

inline void check_rotary(const char* op, const char* name,
                         const TensorView& input, const TensorView& cos,
                         const TensorView& sin) {
  check_floating(op, name, input);
  check_floating(op, "cos", cos);
  check_floating(op, "sin", sin);
  check_same_device(op, name, input, "cos", cos);
  check_same_device(op, name, input, "sin", sin);
  PKG_CHECK(cos.dtype == input.dtype || cos.dtype == ScalarType::Float, op,
            ": cos is ", dtype_name(cos.dtype), " but ", name, " is ",
            dtype_name(input.dtype),
            "; cos must be of the same dtype, or torch.float32");
  check_same_dtype(op, "sin", sin, "cos", cos);
  check_rotary_dims(op, name, input);
  check_rotary_dims(op, "cos", cos);
  PKG_CHECK(input.sizes.size() <= kMaxDims, op, ": ", name, " has ",
            input.sizes.size(), " dimensions; at most ", kMaxDims,
            " are supported");
  check_same_shape(op, "sin", sin, "cos", cos);
  check_rotary_shapes(op, name, input, cos);
}

}  // namespace detail

// Checks, and allocates the output: dense, its dimensions in the order of the
// input's. `name` is the input's.
inline RotaryEmbeddingPlan plan_rotary_embedding(
    const char* op, const char* name, const TensorView& input,
    const TensorView& cos, const TensorView& sin, bool interleaved,
    RotaryWay way) {
  detail::check_rotary(op, name, input, cos, sin);
  Shape shape;
  shape.dims = input.sizes.size();
  std::ranges::copy(input.sizes, shape.sizes.begin());
  Tensor output =
      plan_pointwise<2>(shape, input.dtype, {nullptr, &input}).output;
  const TensorView result(output);
  const TensorView rows[] = {detail::rows_of(result), detail::rows_of(input),
                             detail::rows_of(cos), detail::rows_of(sin)};
  --shape.dims;
  return {
      input.dtype,
      cos.dtype,
      input.sizes.back(),
      cos.sizes.back(),
      interleaved ? RotaryPairs::kNeighbours : RotaryPairs::kHalves,
      way,
      output,
      plan_pointwise_into<4>(shape, {&rows[0], &rows[1], &rows[2], &rows[3]}),
      {result.strides.back(), input.strides.back(), cos.strides.back(),
       sin.strides.back()}};
}

}  // namespace pkg
