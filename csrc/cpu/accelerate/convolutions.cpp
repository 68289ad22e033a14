// PyTorch's convolutions in a dtype of half precision that oneDNN has none for
// on this processor: float16 without AVX512-FP16, bfloat16 without AVX-512.
// PyTorch unfolds the images then and multiplies by a loop of its own, group by
// group. They are converted, convolved by oneDNN in float32, and rounded once.
//
// They are taken as a whole (aten::convolution) and not as the operators of the
// unfolding way below it, of which one with groups is as many calls: 600 of 40
// us for a layer of MobileNet.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "cpu/accelerate/owned_handle.h"
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

int64_t length(const Numbers& numbers) {
  return static_cast<int64_t>(numbers.size());
}

// One number stands for all dimensions.
bool is_of(const Numbers& numbers, size_t dims) {
  return numbers.size() == dims || numbers.size() == 1;
}

int64_t at(const Numbers& numbers, size_t d) {
  return numbers.size() == 1 ? numbers[0] : numbers[d];
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

// Multiplications of the forward pass; 0 of what PyTorch refuses, or leaves
// empty.
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
          (geometry.is_transposed ? kernel[0] : kernel[1] * geometry.groups)) {
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
    if (!each.is_defined || !each.is_strided || !each.has_memory() ||
        each.dtype != tensors[0].dtype ||
        each.device.type != aoti_torch_device_type_cpu()) {
      return false;
    }
  }
  return true;
}

Tensor to_float32(OwnedHandle& handle) {
  return torch::stable::to(handle.as_tensor(), ScalarType::Float);
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

void forward_shim(AtenTensorHandle images, AtenTensorHandle weight,
                  AtenTensorHandle* bias, const Geometry& geometry,
                  OwnedHandle& result) {
  check_shim(aoti_torch_cpu_convolution(
      images, weight, bias, geometry.stride.data(), length(geometry.stride),
      geometry.padding.data(), length(geometry.padding),
      geometry.dilation.data(), length(geometry.dilation),
      static_cast<int32_t>(geometry.is_transposed),
      geometry.output_padding.data(), length(geometry.output_padding),
      geometry.groups, result.place()));
}

// Under vmap a bias that is missing is a tensor that is undefined.
bool has_bias(const OwnedHandle& bias) {
  return bias.get() != nullptr && is_defined_tensor(bias.get());
}

bool takes_forward(const OwnedHandle& images, const OwnedHandle& weight,
                   const OwnedHandle& bias, const Geometry& geometry) {
  const std::array views = {
      TensorView(images.get()), TensorView(weight.get()),
      TensorView(has_bias(bias) ? bias.get() : weight.get())};
  return are_alike(views) && is_worth_it(views[0], views[1], geometry) &&
         (!has_bias(bias) || views[2].sizes.size() == 1);
}

// (input, weight, bias or none, stride, padding, dilation, transposed,
// output_padding, groups)
void convolution(StableIValue* stack, uint64_t /*arguments*/,
                 uint64_t /*results*/) {
  OwnedHandle images(stack[0]);
  OwnedHandle weight(stack[1]);
  OwnedHandle bias(
      to<std::optional<AtenTensorHandle>>(stack[2]).value_or(nullptr));
  const Geometry geometry(stack + 3);
  const ScalarType type = dtype_of(images.get());
  OwnedHandle result(AtenTensorHandle{nullptr});
  const bool may = may_take(type);
  if (!may || !takes_forward(images, weight, bias, geometry)) {
    if (may) {
      count_left(AtenOperator::Convolution, type);
    }
    forward_shim(images.get(), weight.get(), bias.place_if_any(), geometry,
                 result);
    stack[0] = result.hand_over();
    return;
  }
  const TakenCall counted(AtenOperator::Convolution, type_index(type), 1);
  const Tensor wide_images = to_float32(images);
  const Tensor wide_weight = to_float32(weight);
  std::optional<Tensor> wide_bias;
  AtenTensorHandle bias_handle = nullptr;
  if (has_bias(bias)) {
    wide_bias = to_float32(bias);
    bias_handle = wide_bias->get();
  }
  forward_shim(wide_images.get(), wide_weight.get(),
               wide_bias ? &bias_handle : nullptr, geometry, result);
  stack[0] = from(rounded(result.as_tensor(), type));
}

using Gradients = std::array<OwnedHandle, 3>;

OwnedHandle undefined_tensor() {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_uninitialized_tensor(&handle));
  return OwnedHandle(handle);
}

void backward_shim(AtenTensorHandle grad_output, AtenTensorHandle images,
                   AtenTensorHandle weight,
                   const std::optional<Numbers>& bias_sizes,
                   const Geometry& geometry, std::span<const int32_t> mask,
                   Gradients& results) {
  const int64_t* sizes = bias_sizes ? bias_sizes->data() : nullptr;
  check_shim(aoti_torch_cpu_convolution_backward(
      grad_output, images, weight, bias_sizes ? &sizes : nullptr,
      bias_sizes ? length(*bias_sizes) : 0, geometry.stride.data(),
      length(geometry.stride), geometry.padding.data(),
      length(geometry.padding), geometry.dilation.data(),
      length(geometry.dilation), static_cast<int32_t>(geometry.is_transposed),
      geometry.output_padding.data(), length(geometry.output_padding),
      geometry.groups, mask.data(), static_cast<int64_t>(mask.size()),
      results[0].place(), results[1].place(), results[2].place()));
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
  OwnedHandle grad_output(stack[0]);
  OwnedHandle images(stack[1]);
  OwnedHandle weight(stack[2]);
  const auto bias_sizes = to<std::optional<Numbers>>(stack[3]);
  const Geometry geometry(stack + 4);
  std::array<int32_t, 3> mask{};
  const auto wanted = to<std::vector<bool>>(stack[10]);
  for (size_t i = 0; i < mask.size(); ++i) {
    mask[i] = static_cast<int32_t>(wanted.at(i));
  }
  Gradients results = {OwnedHandle(AtenTensorHandle{nullptr}),
                       OwnedHandle(AtenTensorHandle{nullptr}),
                       OwnedHandle(AtenTensorHandle{nullptr})};
  const ScalarType type = dtype_of(images.get());
  const bool may = may_take(type);
  if (!may || !takes_backward(grad_output, images, weight, geometry)) {
    if (may) {
      count_left(AtenOperator::ConvolutionBackward, type);
    }
    backward_shim(grad_output.get(), images.get(), weight.get(), bias_sizes,
                  geometry, mask, results);
    for (size_t i = 0; i < results.size(); ++i) {
      stack[i] = results[i].hand_over();
    }
    return;
  }
  const TakenCall counted(AtenOperator::ConvolutionBackward, type_index(type),
                          1);
  const Tensor wide_gradient = to_float32(grad_output);
  const Tensor wide_images = to_float32(images);
  const Tensor wide_weight = to_float32(weight);
  backward_shim(wide_gradient.get(), wide_images.get(), wide_weight.get(),
                bias_sizes, geometry, mask, results);
  // oneDNN computes the gradients of weight and bias together.
  for (size_t i = 0; i < results.size(); ++i) {
    stack[i] = mask[i] != 0 ? from(rounded(results[i].as_tensor(), type))
                            : undefined_tensor().hand_over();
  }
}

}  // namespace

}  // namespace pkg::cpu::accelerate

// Whether this PyTorch tells what its kernels refuse.
extern "C" PKG_EXPORT bool pkg_accelerate_knows_errors() {
  return pkg::detail::last_error_function() != nullptr;
}

// Once in the life of a process, with the dtypes of which oneDNN has no
// convolution, and where PyTorch tells what its kernels refuse.
extern "C" PKG_EXPORT void pkg_accelerate_register_convolutions(int float16,
                                                                int bfloat16) {
  using namespace pkg::cpu::accelerate;
  takes_float16 = float16 != 0;
  takes_bfloat16 = bfloat16 != 0;
  auto* library = new torch::stable::detail::StableLibrary(
      torch::stable::detail::StableLibrary::Kind::IMPL, "aten", "CPU", __FILE__,
      __LINE__);
  library->impl("convolution", &convolution);
  library->impl("convolution_backward", &convolution_backward);
}
