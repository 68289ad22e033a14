// What every pointwise operator decides before its kernel runs, on any device:
// the promoted dtype, the broadcast shape, the layout of the result, and a loop
// nest with as few dimensions as the strides allow. The rules are those of
// PyTorch's TensorIterator, so that results have the dtype and the strides that
// a PyTorch operator would give.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "host/check.h"
#include "host/tensor.h"

namespace pkg {

// Operand 0 is the output. Dimension 0 is the innermost; strides count
// elements.
template <int kOperands>
struct PointwiseLoop {
  int dims = 0;
  std::array<int64_t, kMaxDims> sizes;
  std::array<std::array<int64_t, kMaxDims>, kOperands> strides;

  PointwiseLoop() = default;
  // Copies the dimensions that there are, not the kilobytes for 64 of them.
  PointwiseLoop(const PointwiseLoop& other) : dims(other.dims) {
    std::copy_n(other.sizes.begin(), dims, sizes.begin());
    for (int operand = 0; operand < kOperands; ++operand) {
      std::copy_n(other.strides[operand].begin(), dims,
                  strides[operand].begin());
    }
  }

  int64_t numel() const {
    return product({sizes.data(), static_cast<size_t>(dims)});
  }
};

inline bool is_supported_by_pointwise(ScalarType type) {
  return is_floating(type) || is_integral(type);
}

inline ScalarType promote(ScalarType a, ScalarType b) {
  if (a == b) {
    return a;
  }
  const auto width = [](ScalarType type) {
    switch (type) {
      case ScalarType::Bool:
        return 0;
      case ScalarType::Byte:
      case ScalarType::Char:
        return 1;
      case ScalarType::Half:
      case ScalarType::BFloat16:
      case ScalarType::Short:
        return 2;
      case ScalarType::Int:
      case ScalarType::Float:
        return 4;
      default:
        return 8;
    }
  };
  if (is_floating(a) != is_floating(b)) {
    return is_floating(a) ? a : b;
  }
  if (width(a) == width(b)) {
    // Half with bfloat16, and uint8 with int8: neither holds the other.
    return is_floating(a) ? ScalarType::Float : ScalarType::Short;
  }
  return width(a) > width(b) ? a : b;
}

// PyTorch's rule for a mix of tensors with and without dimensions: a tensor
// without dimensions changes the result's dtype only by being of a higher
// category (bool, integral, floating).
inline ScalarType result_type(const TensorView& a, const TensorView& b) {
  const ScalarType a_type = dtype_of(a);
  const ScalarType b_type = dtype_of(b);
  const bool a_has_dims = !sizes_of(a).empty();
  const bool b_has_dims = !sizes_of(b).empty();
  if (a_has_dims == b_has_dims) {
    return promote(a_type, b_type);
  }
  const auto category = [](ScalarType type) {
    return type == ScalarType::Bool ? 0 : is_integral(type) ? 1 : 2;
  };
  const ScalarType with_dims = a_has_dims ? a_type : b_type;
  const ScalarType without = a_has_dims ? b_type : a_type;
  return category(without) > category(with_dims) ? promote(with_dims, without)
                                                 : with_dims;
}

// torch.get_default_dtype(), which the stable ABI only shows in what a factory
// makes when no dtype is given.
inline ScalarType default_dtype() {
  std::array<StableIValue, 6> stack{
      torch::stable::detail::from(std::vector<int64_t>{}),
      torch::stable::detail::from(std::nullopt),
      torch::stable::detail::from(std::nullopt),
      torch::stable::detail::from(std::nullopt),
      torch::stable::detail::from(std::nullopt),
      torch::stable::detail::from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(
      "aten::empty", "memory_format", stack.data(), TORCH_ABI_VERSION));
  return dtype_of(torch::stable::detail::to<Tensor>(stack[0]));
}

inline void check_pointwise_dtype(const char* op, const char* name,
                                  const TensorView& tensor) {
  check_strided(op, name, tensor);
  const ScalarType type = dtype_of(tensor);
  PKG_CHECK(is_supported_by_pointwise(type), op, ": ", name, " is ",
            dtype_name(type),
            "; supported are torch.bool, uint8, int8, int16, int32, int64, "
            "float16, bfloat16, float32 and float64");
}

struct Shape {
  std::array<int64_t, kMaxDims> sizes;
  size_t dims = 0;

  std::span<const int64_t> span() const { return {sizes.data(), dims}; }
};

inline Shape broadcast_shapes(const char* op, std::span<const int64_t> a,
                              std::span<const int64_t> b,
                              const char* a_name = "a",
                              const char* b_name = "b") {
  Shape shape;
  shape.dims = std::max(a.size(), b.size());
  PKG_CHECK(shape.dims <= kMaxDims, op, ": ", a_name, " has ", a.size(),
            " dimensions and ", b_name, " ", b.size(), "; at most ", kMaxDims,
            " are supported");
  for (size_t i = 0; i < shape.dims; ++i) {  // i counts from the last dimension
    const int64_t a_size = i < a.size() ? a[a.size() - 1 - i] : 1;
    const int64_t b_size = i < b.size() ? b[b.size() - 1 - i] : 1;
    PKG_CHECK(a_size == b_size || a_size == 1 || b_size == 1, op, ": ", a_name,
              " of shape ", shape_text(a), " and ", b_name, " of shape ",
              shape_text(b), " do not broadcast: ", a_size, " and ", b_size,
              " meet in dimension ", shape.dims - 1 - i,
              "; make them equal, or one of them 1");
    shape.sizes[shape.dims - 1 - i] = a_size == 1 ? b_size : a_size;
  }
  return shape;
}

namespace detail {

// Strides of an operand in the broadcast shape, last dimension first.
inline void broadcast_strides(const TensorView& tensor, const Shape& shape,
                              int64_t* strides) {
  const auto sizes = sizes_of(tensor);
  const auto own = strides_of(tensor);
  for (size_t i = 0; i < shape.dims; ++i) {
    const bool present = i < sizes.size();
    const size_t d = present ? sizes.size() - 1 - i : 0;
    const bool stretched =
        !present || (sizes[d] == 1 && shape.sizes[shape.dims - 1 - i] != 1);
    strides[i] = stretched ? 0 : own[d];
  }
}

// Positive where dimension `inner` should be outside dimension `outer`, zero
// where the operands do not tell.
template <int kOperands>
int compare_dims(const PointwiseLoop<kOperands>& loop, int first_operand,
                 int inner, int outer) {
  for (int operand = first_operand; operand < kOperands; ++operand) {
    const int64_t inner_stride = loop.strides[operand][inner];
    const int64_t outer_stride = loop.strides[operand][outer];
    if (inner_stride == 0 || outer_stride == 0) {
      continue;
    }
    if (inner_stride != outer_stride) {
      return inner_stride < outer_stride ? -1 : 1;
    }
    if (loop.sizes[inner] > loop.sizes[outer]) {
      return 1;
    }
  }
  return 0;
}

// The order of the dimensions by stride, innermost first: an insertion sort,
// because the comparison is not transitive where operands do not tell.
template <int kOperands>
std::array<int, kMaxDims> order_of_dims(const PointwiseLoop<kOperands>& loop,
                                        int first_operand) {
  std::array<int, kMaxDims> order;
  std::iota(order.begin(), order.begin() + loop.dims, 0);
  for (int i = 1; i < loop.dims; ++i) {
    int moved = i;
    for (int below = i - 1; below >= 0; --below) {
      const int comparison =
          compare_dims(loop, first_operand, order[below], order[moved]);
      if (comparison > 0) {
        std::swap(order[below], order[moved]);
        moved = below;
      } else if (comparison < 0) {
        break;
      }
    }
  }
  return order;
}

template <int kOperands>
void permute(PointwiseLoop<kOperands>& loop,
             const std::array<int, kMaxDims>& order) {
  const PointwiseLoop<kOperands> old = loop;
  for (int i = 0; i < loop.dims; ++i) {
    loop.sizes[i] = old.sizes[order[i]];
    for (int operand = 0; operand < kOperands; ++operand) {
      loop.strides[operand][i] = old.strides[operand][order[i]];
    }
  }
}

// Joins neighbouring dimensions that every operand steps through evenly.
template <int kOperands>
void coalesce(PointwiseLoop<kOperands>& loop) {
  int last = 0;
  for (int next = 1; next < loop.dims; ++next) {
    bool joins = true;
    for (int operand = 0; operand < kOperands && joins; ++operand) {
      joins = loop.sizes[last] == 1 || loop.sizes[next] == 1 ||
              loop.strides[operand][next] ==
                  loop.sizes[last] * loop.strides[operand][last];
    }
    if (joins) {
      for (int operand = 0; loop.sizes[last] == 1 && operand < kOperands;
           ++operand) {
        loop.strides[operand][last] = loop.strides[operand][next];
      }
      loop.sizes[last] *= loop.sizes[next];
      continue;
    }
    ++last;
    loop.sizes[last] = loop.sizes[next];
    for (int operand = 0; operand < kOperands; ++operand) {
      loop.strides[operand][last] = loop.strides[operand][next];
    }
  }
  loop.dims = loop.dims == 0 ? 0 : last + 1;
}

template <int kOperands>
void lay_over(const Shape& shape,
              const std::array<const TensorView*, kOperands>& operands,
              PointwiseLoop<kOperands>& loop) {
  loop.dims = static_cast<int>(shape.dims);
  std::reverse_copy(shape.sizes.begin(), shape.sizes.begin() + loop.dims,
                    loop.sizes.begin());
  for (int operand = 0; operand < kOperands; ++operand) {
    if (operands[operand] != nullptr) {
      broadcast_strides(*operands[operand], shape,
                        loop.strides[operand].data());
    }
  }
}

}  // namespace detail

template <int kOperands>
struct PointwisePlan {
  Tensor output;
  PointwiseLoop<kOperands> loop;
};

namespace detail {

// Of a tensor with elements and four dimensions.
inline Strides channels_last_strides(std::span<const int64_t> sizes) {
  Strides strides;
  int64_t stride = 1;
  for (const size_t d : {1, 3, 2, 0}) {
    strides[d] = stride;
    stride *= sizes[d];
  }
  return strides;
}

// Whether a tensor with elements has no gap in its memory and no element twice.
inline bool is_dense(const TensorView& tensor) {
  std::array<size_t, kMaxDims> order;
  size_t count = 0;
  for (size_t d = 0; d < tensor.sizes.size(); ++d) {
    if (tensor.sizes[d] != 1) {
      order[count++] = d;
    }
  }
  std::sort(order.begin(), order.begin() + count, [&](size_t a, size_t b) {
    return tensor.strides[a] < tensor.strides[b];
  });
  int64_t expected = 1;
  for (size_t i = 0; i < count; ++i) {
    if (tensor.strides[order[i]] != expected) {
      return false;
    }
    expected *= tensor.sizes[order[i]];
  }
  return true;
}

// TensorIterator's short way: inputs of one shape that are all contiguous, all
// channels last, or all dense with the same strides. The result is laid out as
// they are; in dimensions of size 1, where their strides may be anything, as
// the first of the three that holds says. False where they are not so alike.
template <int kOperands>
bool find_strides_of_alike(
    const Shape& shape,
    const std::array<const TensorView*, kOperands>& operands,
    Strides& strides) {
  const TensorView& first = *operands[1];
  const auto all = [&](const auto& holds) {
    return std::all_of(operands.begin() + 1, operands.end(),
                       [&](const TensorView* input) { return holds(*input); });
  };
  if (!all([&](const TensorView& input) {
        return std::ranges::equal(input.sizes, shape.span());
      })) {
    return false;
  }
  const auto all_have = [&](const Strides& expected) {
    return all([&](const TensorView& input) {
      return has_strides(input.sizes, input.strides, expected);
    });
  };
  strides = contiguous_strides(shape.span());
  if (product(shape.span()) == 0 || all_have(strides)) {
    return true;
  }
  if (shape.dims == 4) {
    strides = channels_last_strides(shape.span());
    if (all_have(strides)) {
      return true;
    }
  }
  std::ranges::copy(first.strides, strides.begin());
  return is_dense(first) && all([&](const TensorView& input) {
           return std::ranges::equal(input.strides, first.strides);
         });
}

// The strides of a new result whose dimensions lie in this order, the innermost
// first. As in TensorIterator they are zero outside an empty dimension, unless
// the order is that of a contiguous tensor.
inline Strides strides_in_order(const Shape& shape,
                                const std::array<int, kMaxDims>& order) {
  if (std::is_sorted(order.begin(), order.begin() + shape.dims)) {
    return contiguous_strides(shape.span());
  }
  Strides strides;
  int64_t stride = 1;
  for (size_t i = 0; i < shape.dims; ++i) {
    const size_t d = shape.dims - 1 - order[i];
    strides[d] = stride;
    stride *= shape.sizes[d];
  }
  return strides;
}

// The strides that adding a number to a tensor of these strides gives: a number
// has another shape, so this is not TensorIterator's short way.
inline Strides strides_after_number(const Shape& shape,
                                    const Strides& strides) {
  PointwiseLoop<1> loop;
  loop.dims = static_cast<int>(shape.dims);
  std::reverse_copy(shape.sizes.begin(), shape.sizes.begin() + loop.dims,
                    loop.sizes.begin());
  std::reverse_copy(strides.begin(), strides.begin() + loop.dims,
                    loop.strides[0].begin());
  return shape.dims == 0 ? strides
                         : strides_in_order(shape, order_of_dims(loop, 0));
}

}  // namespace detail

// What PyTorch's way to the same result would be: one operator, or one and then
// another that takes its result and a number. It shows in the strides of
// dimensions of size 1.
enum class Steps { kOne, kThenNumber };

// Allocates the result for the inputs, dense, with its dimensions in the order
// of theirs, and plans the loop.
template <int kOperands>
PointwisePlan<kOperands> plan_pointwise(
    const Shape& shape, ScalarType dtype,
    const std::array<const TensorView*, kOperands>& operands,
    Steps steps = Steps::kOne) {
  PointwiseLoop<kOperands> loop;
  Strides strides;
  if (detail::find_strides_of_alike<kOperands>(shape, operands, strides)) {
    loop.dims = shape.dims == 0 ? 0 : 1;
    loop.sizes[0] = product(shape.span());
    for (auto& of_operand : loop.strides) {
      of_operand[0] = 1;
    }
  } else {
    detail::lay_over<kOperands>(shape, operands, loop);
    const auto order = detail::order_of_dims(loop, 1);
    strides = detail::strides_in_order(shape, order);
    std::reverse_copy(strides.begin(), strides.begin() + loop.dims,
                      loop.strides[0].begin());
    detail::permute(loop, order);
    detail::coalesce(loop);
  }
  if (steps == Steps::kThenNumber) {
    strides = detail::strides_after_number(shape, strides);
  }
  return {empty_strided(shape.span(), {strides.data(), shape.dims}, dtype,
                        device_of(*operands[1])),
          loop};
}

// The same for a result that the caller supplies (operands[0]).
template <int kOperands>
PointwiseLoop<kOperands> plan_pointwise_into(
    const Shape& shape,
    const std::array<const TensorView*, kOperands>& operands) {
  PointwiseLoop<kOperands> loop;
  detail::lay_over<kOperands>(shape, operands, loop);
  detail::permute(loop, detail::order_of_dims(loop, 0));
  detail::coalesce(loop);
  return loop;
}

}  // namespace pkg
