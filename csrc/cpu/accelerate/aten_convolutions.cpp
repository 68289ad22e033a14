// PyTorch's convolutions in a dtype of half precision that oneDNN has none for
// on this processor: float16 without AVX512-FP16, bfloat16 without AVX-512.
// PyTorch unfolds the images then and multiplies by a loop of its own, group by
// group. They are converted, convolved by oneDNN in float32, and rounded once.
//
// They are taken as a whole (aten::convolution) and not as the operators of the
// unfolding way below it, of which one with groups is as many calls.
#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "cpu/accelerate/aten.h"
#include "cpu/accelerate/handles.h"
#include "cpu/accelerate/pytorch_kernels.h"
#include "cpu/accelerate/routes.h"
#include "host/compiler.h"

namespace pkg::cpu::accelerate {

namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

using Numbers = std::vector<int64_t>;

// Below so many multiplications conversions take longer than what they save.
constexpr double kLeastWork = 1 << 18;
// What a group of several costs PyTorch beside its multiplications, in these.
constexpr double kWorkOfGroup = 1 << 16;

// Which dtypes oneDNN lacks; written before the kernels are registered.
bool takes_float16 = false;
bool takes_bfloat16 = false;

bool may_take(ScalarType type) {
  return is_on() && ((type == ScalarType::Half && takes_float16) ||
                     (type == ScalarType::BFloat16 && takes_bfloat16));
}

// What both operators take after their tensors, in this order.
struct Geometry {
  explicit Geometry(const StableIValue* arguments)
      : stride(to<Numbers>(arguments[0])),
        padding(to<Numbers>(arguments[1])),
        dilation(to<Numbers>(arguments[2])),
        is_transposed(to<bool>(arguments[3])),
        output_padding(to<Numbers>(arguments[4])),
        groups(to<int64_t>(arguments[5])) {}

  Numbers stride;
  Numbers padding;
  Numbers dilation;
  bool is_transposed;
  Numbers output_padding;
  int64_t groups;
};

// One number stands for all dimensions.
bool is_of(const Numbers& numbers, size_t dims) {
  return numbers.size() == dims || numbers.size() == 1;
}

int64_t at(const Numbers& numbers, size_t d) {
  return numbers.size() == 1 ? numbers[0] : numbers[d];
}

// oneDNN's convolution of float32, in groups and with a bias, ends the process
// for images of one column with padding around it, where channels are last and
// steps are of two and dilated (PyTorch 2.13); PyTorch's own way does not.
bool may_crash(const Geometry& geometry, std::span<const int64_t> sizes) {
  bool has_padded_column = false;
  for (size_t d = 0; d + 2 < sizes.size(); ++d) {
    has_padded_column |= sizes[d + 2] == 1 && at(geometry.padding, d) > 0;
  }
  return geometry.groups > 1 && has_padded_column;
}

// How often each element of the weight is multiplied along a dimension; 0 or
// less where PyTorch refuses the call or its result is empty.
int64_t places(const Geometry& geometry, size_t d, int64_t size,
               int64_t kernel) {
  const int64_t step = at(geometry.stride, d);
  const int64_t margin = at(geometry.padding, d);
  const int64_t dilation = at(geometry.dilation, d);
  const int64_t spread = dilation * (kernel - 1) + 1;
  if (step <= 0 || margin < 0 || dilation <= 0 || kernel <= 0) {
    return 0;
  }
  if (geometry.is_transposed) {
    const int64_t result = (size - 1) * step - 2 * margin + spread +
                           at(geometry.output_padding, d);
    return result > 0 ? size : 0;
  }
  const int64_t room = size + 2 * margin - spread;
  return room < 0 ? 0 : room / step + 1;
}

// Multiplications of the forward pass; 0 of what PyTorch refuses, leaves empty,
// or has to compute in its own way.
double work(const TensorView& images, const TensorView& weight,
            const Geometry& geometry) {
  const auto& sizes = images.sizes;
  const auto& kernel = weight.sizes;
  if (sizes.size() < 3 || sizes.size() > 5 || kernel.size() != sizes.size()) {
    return 0;
  }
  const size_t dims = sizes.size() - 2;
  if (!is_of(geometry.stride, dims) || !is_of(geometry.padding, dims) ||
      !is_of(geometry.dilation, dims) ||
      !is_of(geometry.output_padding, dims) || geometry.groups <= 0 ||
      kernel[0] % geometry.groups != 0 ||
      sizes[1] !=
          (geometry.is_transposed ? kernel[0] : kernel[1] * geometry.groups) ||
      may_crash(geometry, sizes)) {
    return 0;
  }
  auto total = static_cast<double>(sizes[0]);
  for (const int64_t size : kernel) {
    total *= static_cast<double>(size);
  }
  for (size_t d = 0; d < dims; ++d) {
    const int64_t count = places(geometry, d, sizes[d + 2], kernel[d + 2]);
    total *= count > 0 ? static_cast<double>(count) : 0;
  }
  return total;
}

bool is_worth_it(const TensorView& images, const TensorView& weight,
                 const Geometry& geometry) {
  const double multiplications = work(images, weight, geometry);
  const double of_groups =
      geometry.groups > 1 ? kWorkOfGroup * static_cast<double>(geometry.groups)
                          : 0;
  return multiplications > 0 && multiplications + of_groups >= kLeastWork;
}

// Plain tensors with memory, of one dtype.
bool are_alike(std::span<const TensorView> tensors) {
  for (const TensorView& each : tensors) {
    if (!is_plain(each) || each.dtype != tensors[0].dtype ||
        each.device.type != aoti_torch_device_type_cpu()) {
      return false;
    }
  }
  return true;
}

// Of an expanded tensor, which for PyTorch never has its channels last, a
// contiguous one: the order of its channels would be kept else.
Tensor to_float32(const OwnedHandle& handle) {
  using torch::headeronly::MemoryFormat;
  const TensorView view(handle.get());
  std::optional<MemoryFormat> format;
  for (size_t d = 0; d < view.sizes.size(); ++d) {
    if (view.sizes[d] > 1 && view.strides[d] == 0) {
      format = MemoryFormat::Contiguous;
    }
  }
  return torch::stable::to(handle.tensor(), ScalarType::Float, std::nullopt,
                           std::nullopt, std::nullopt, false, false, format);
}

// In three dimensions PyTorch's unfolding way gives contiguous results, where
// oneDNN keeps the channels last.
Tensor rounded(const Tensor& tensor, ScalarType type) {
  using torch::headeronly::MemoryFormat;
  constexpr size_t kVolume = 5;
  std::optional<MemoryFormat> format;
  if (sizes_of(tensor).size() == kVolume) {
    format = MemoryFormat::Contiguous;
  }
  return torch::stable::to(tensor, type, std::nullopt, std::nullopt,
                           std::nullopt, false, false, format);
}

Tensor rounded(MadeTensor&& made, ScalarType type) {
  return rounded(to<Tensor>(std::move(made).hand_over()), type);
}

MadeTensor call_pytorch(AtenTensorHandle images, AtenTensorHandle weight,
                        const OptionalTensor& bias, const Geometry& geometry) {
  return PytorchKernels::instance().convolution(
      images, weight, bias, IntList(geometry.stride), IntList(geometry.padding),
      IntList(geometry.dilation), geometry.is_transposed,
      IntList(geometry.output_padding), geometry.groups);
}

bool takes_forward(const OwnedHandle& images, const OwnedHandle& weight,
                   const OptionalHandle& bias, const Geometry& geometry) {
  const std::array views = {
      TensorView(images.get()), TensorView(weight.get()),
      TensorView(bias.is_given() ? bias.get() : weight.get())};
  return are_alike(views) && is_worth_it(views[0], views[1], geometry) &&
         (!bias.is_given() || views[2].sizes.size() == 1);
}

// (input, weight, bias or none, stride, padding, dilation, transposed,
// output_padding, groups)
void convolution(StableIValue* stack, uint64_t /*arguments*/,
                 uint64_t /*results*/) {
  const OwnedHandle images(stack[0]);
  const OwnedHandle weight(stack[1]);
  const OptionalHandle bias(stack[2]);
  const Geometry geometry(stack + 3);
  const ScalarType type = dtype_of(images.get());
  const bool may = may_take(type);
  if (!may || !takes_forward(images, weight, bias, geometry)) {
    if (may) {
      count_left(AtenOperator::Convolution, type);
    }
    stack[0] =
        call_pytorch(images.get(), weight.get(), OptionalTensor(bias), geometry)
            .hand_over();
    return;
  }
  const TakenCall counted(AtenOperator::Convolution, type_index(type), 1);
  const Tensor wide_images = to_float32(images);
  const Tensor wide_weight = to_float32(weight);
  std::optional<Tensor> wide_bias;
  if (bias.is_given()) {
    wide_bias = to_float32(bias);
  }
  stack[0] = from(rounded(
      call_pytorch(wide_images.get(), wide_weight.get(),
                   OptionalTensor(wide_bias ? wide_bias->get() : nullptr),
                   geometry),
      type));
}

using Mask = std::array<bool, 3>;

PytorchKernels::Three call_pytorch_backward(
    AtenTensorHandle grad_output, AtenTensorHandle images,
    AtenTensorHandle weight, const std::optional<Numbers>& bias_sizes,
    const Geometry& geometry, const Mask& mask) {
  return PytorchKernels::instance().convolution_backward(
      grad_output, images, weight,
      bias_sizes ? std::optional(IntList(*bias_sizes)) : std::nullopt,
      IntList(geometry.stride), IntList(geometry.padding),
      IntList(geometry.dilation), geometry.is_transposed,
      IntList(geometry.output_padding), geometry.groups, mask);
}

bool takes_backward(const OwnedHandle& grad_output, const OwnedHandle& images,
                    const OwnedHandle& weight, const Geometry& geometry) {
  const std::array views = {TensorView(images.get()), TensorView(weight.get()),
                            TensorView(grad_output.get())};
  return are_alike(views) && is_worth_it(views[0], views[1], geometry) &&
         views[2].sizes.size() == views[0].sizes.size();
}

// (grad_output, input, weight, sizes of the bias or none, stride, padding,
// dilation, transposed, output_padding, groups, output_mask)
void convolution_backward(StableIValue* stack, uint64_t /*arguments*/,
                          uint64_t /*results*/) {
  const OwnedHandle grad_output(stack[0]);
  const OwnedHandle images(stack[1]);
  const OwnedHandle weight(stack[2]);
  const auto bias_sizes = to<std::optional<Numbers>>(stack[3]);
  const Geometry geometry(stack + 4);
  const auto wanted = to<std::vector<bool>>(stack[10]);
  const Mask mask = {wanted.at(0), wanted.at(1), wanted.at(2)};
  const ScalarType type = dtype_of(images.get());
  const bool may = may_take(type);
  if (!may || !takes_backward(grad_output, images, weight, geometry)) {
    if (may) {
      count_left(AtenOperator::ConvolutionBackward, type);
    }
    hand_over(call_pytorch_backward(grad_output.get(), images.get(),
                                    weight.get(), bias_sizes, geometry, mask),
              stack);
    return;
  }
  const TakenCall counted(AtenOperator::ConvolutionBackward, type_index(type),
                          1);
  const Tensor wide_gradient = to_float32(grad_output);
  const Tensor wide_images = to_float32(images);
  const Tensor wide_weight = to_float32(weight);
  hand_over(
      call_pytorch_backward(wide_gradient.get(), wide_images.get(),
                            wide_weight.get(), bias_sizes, geometry, mask),
      stack);
  // oneDNN computes the gradients of weight and bias together.
  for (size_t i = 0; i < mask.size(); ++i) {
    const OwnedHandle made(stack[i]);
    stack[i] =
        mask[i] ? from(rounded(made.tensor(), type)) : undefined_tensor();
  }
}

}  // namespace

std::span<const AtenKernel> convolution_kernels() {
  const auto& pytorch = PytorchKernels::instance();
  static const std::array kernels = {
      AtenKernel{"convolution", &convolution, pytorch.convolution != nullptr,
                 1},
      AtenKernel{"convolution_backward", &convolution_backward,
                 pytorch.convolution_backward != nullptr, 3},
  };
  return kernels;
}

}  // namespace pkg::cpu::accelerate

// The dtypes of which oneDNN has no convolution; before the kernels are
// registered.
extern "C" PKG_EXPORT void pkg_accelerate_convolved_types(int float16,
                                                          int bfloat16) {
  pkg::cpu::accelerate::takes_float16 = float16 != 0;
  pkg::cpu::accelerate::takes_bfloat16 = bfloat16 != 0;
}
