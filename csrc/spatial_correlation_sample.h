// Checks and shape arithmetic of spatial_correlation_sample, for every device.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "host/tensor.h"

namespace pkg {

// Height and width.
using Pair = std::array<int64_t, 2>;

// What the operator was asked for, as it came: lists of any length.
struct SpatialCorrelationOptions {
  const std::vector<int64_t>& kernel_size;
  const std::vector<int64_t>& patch_size;
  const std::vector<int64_t>& stride;
  const std::vector<int64_t>& padding;
  const std::vector<int64_t>& dilation;
  const std::vector<int64_t>& dilation_patch;
};

// Each array holds one number for the height and one for the width.
struct SpatialCorrelationPlan {
  ScalarType type;
  int64_t batch;
  int64_t channels;
  Pair size;  // of the images
  Pair kernel;
  Pair patch;
  Pair stride;
  Pair padding;
  Pair dilation;
  Pair dilation_patch;
  Pair output;

  // Where input2 is read for element `p` of the patch, relative to input1.
  int64_t shift(int axis, int64_t p) const {
    return (p - (patch[axis] - 1) / 2) * dilation_patch[axis];
  }

  // The pixel of input1 that an output reads at one place of its kernel window;
  // it may lie outside the image.
  int64_t pixel(int axis, int64_t position, int64_t k) const {
    return position * stride[axis] - padding[axis] + k * dilation[axis];
  }

  // The output that reads this pixel at that place of its kernel window, or -1.
  int64_t position(int axis, int64_t pixel, int64_t k) const {
    const int64_t distance = pixel + padding[axis] - k * dilation[axis];
    if (distance < 0 || distance % stride[axis] != 0) {
      return -1;
    }
    const int64_t found = distance / stride[axis];
    return found < output[axis] ? found : -1;
  }

  // Elements of the patch that shift some pixel to another of the image: from
  // the first to before the second.
  std::array<int64_t, 2> patch_range(int axis) const {
    const int64_t middle = (patch[axis] - 1) / 2;
    const int64_t reach =
        size[axis] > 0 ? (size[axis] - 1) / dilation_patch[axis] : 0;
    return {std::max<int64_t>(0, middle - reach),
            std::min(patch[axis], middle + reach + 1)};
  }

  std::array<int64_t, 4> input_sizes() const {
    return {batch, channels, size[0], size[1]};
  }
  std::array<int64_t, 5> output_sizes() const {
    return {batch, patch[0], patch[1], output[0], output[1]};
  }
};

namespace detail {

inline Pair pair_of(const char* op, const char* name,
                    const std::vector<int64_t>& values, int64_t least) {
  // So that the products of any two of them, and their sums, are no overflow.
  constexpr int64_t kMost = (int64_t{1} << 30) - 1;
  PKG_CHECK(values.size() == 2, op, ": ", name, " has ", values.size(),
            " elements; it must be a number or a pair, of height and width");
  for (const int64_t value : values) {
    PKG_CHECK(value >= least && value <= kMost, op, ": ", name, " is ",
              shape_text(values), "; it must be at least ", least,
              " and at most ", kMost);
  }
  return {values[0], values[1]};
}

inline void check_images(const char* op, const char* name,
                         const TensorView& images) {
  check_floating(op, name, images);
  PKG_CHECK(sizes_of(images).size() == 4, op, ": ", name, " has shape ",
            shape_text(images),
            "; it must have shape (batch, channels, height, width)");
}

}  // namespace detail

// Of images of this tensor's shape.
inline SpatialCorrelationPlan plan_spatial_correlation(
    const char* op, const char* name, const TensorView& images,
    const SpatialCorrelationOptions& options) {
  detail::check_images(op, name, images);
  const auto sizes = sizes_of(images);
  SpatialCorrelationPlan plan = {};
  plan.type = dtype_of(images);
  plan.batch = sizes[0];
  plan.channels = sizes[1];
  plan.size = {sizes[2], sizes[3]};
  plan.kernel = detail::pair_of(op, "kernel_size", options.kernel_size, 1);
  plan.patch = detail::pair_of(op, "patch_size", options.patch_size, 1);
  plan.stride = detail::pair_of(op, "stride", options.stride, 1);
  plan.padding = detail::pair_of(op, "padding", options.padding, 0);
  plan.dilation = detail::pair_of(op, "dilation", options.dilation, 1);
  plan.dilation_patch =
      detail::pair_of(op, "dilation_patch", options.dilation_patch, 1);
  for (int axis = 0; axis < 2; ++axis) {
    const int64_t window = (plan.kernel[axis] - 1) * plan.dilation[axis] + 1;
    const int64_t padded = plan.size[axis] + 2 * plan.padding[axis];
    PKG_CHECK(window <= padded, op, ": the kernel covers ", window, " pixels ",
              axis == 0 ? "in height" : "in width", " but ", name, " of shape ",
              shape_text(images), " has ", padded, " with its padding");
    plan.output[axis] = (padded - window) / plan.stride[axis] + 1;
  }
  double elements = 1;
  for (const int64_t size : plan.output_sizes()) {
    elements *= static_cast<double>(std::max<int64_t>(size, 1));
  }
  PKG_CHECK(elements < 0x1p60, op, ": the output would have shape ",
            shape_text(plan.output_sizes()), ", more than any memory holds");
  return plan;
}

inline SpatialCorrelationPlan plan_spatial_correlation_sample(
    const TensorView& input1, const TensorView& input2,
    const SpatialCorrelationOptions& options) {
  constexpr const char* kOp = "spatial_correlation_sample";
  const SpatialCorrelationPlan plan =
      plan_spatial_correlation(kOp, "input1", input1, options);
  detail::check_images(kOp, "input2", input2);
  check_same_device(kOp, "input1", input1, "input2", input2);
  PKG_CHECK(dtype_of(input1) == dtype_of(input2), kOp, ": input1 is ",
            dtype_name(dtype_of(input1)), " but input2 is ",
            dtype_name(dtype_of(input2)), "; convert one of them");
  PKG_CHECK(std::ranges::equal(sizes_of(input1), sizes_of(input2)), kOp,
            ": input1 has shape ", shape_text(input1), " but input2 has shape ",
            shape_text(input2), "; they must be equal");
  return plan;
}

// The gradient of one input, given the output's and the other input.
inline SpatialCorrelationPlan plan_spatial_correlation_sample_backward(
    const TensorView& grad, const TensorView& other,
    const SpatialCorrelationOptions& options) {
  constexpr const char* kOp = "spatial_correlation_sample_backward";
  const SpatialCorrelationPlan plan =
      plan_spatial_correlation(kOp, "other", other, options);
  check_floating(kOp, "grad", grad);
  check_same_device(kOp, "other", other, "grad", grad);
  PKG_CHECK(dtype_of(grad) == dtype_of(other), kOp, ": grad is ",
            dtype_name(dtype_of(grad)), " but other is ",
            dtype_name(dtype_of(other)), "; convert one of them");
  PKG_CHECK(std::ranges::equal(sizes_of(grad), plan.output_sizes()), kOp,
            ": grad has shape ", shape_text(grad), "; for other of shape ",
            shape_text(other), " it must have shape ",
            shape_text(plan.output_sizes()));
  return plan;
}

inline Tensor allocate_correlation(const SpatialCorrelationPlan& plan,
                                   const TensorView& like) {
  return empty_contiguous(plan.output_sizes(), plan.type, device_of(like));
}

inline Tensor allocate_image_gradient(const SpatialCorrelationPlan& plan,
                                      const TensorView& like) {
  return empty_contiguous(plan.input_sizes(), plan.type, device_of(like));
}

}  // namespace pkg
