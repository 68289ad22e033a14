// PyTorch's own CPU kernels, past the dispatcher: functions of at::cpu and
// at::compositeexplicitautograd, which libtorch_cpu exports and no interface
// promises. They are found by their mangled names when they are needed, and
// null where this PyTorch lacks them; the kernel is then called by way of
// Python, and convolutions stay PyTorch's (pkg/_accelerate_routes.py).
//
// The C shim has some of them. It allocates more, and keeps the words of an
// error but not its class.
//
// A mangled name says the types of the arguments. Of the types' layout this
// file knows: an at::Tensor is a pointer to its implementation, to which a
// handle of the stable ABI points; std::optional of it is that and a bool. What
// a function returns the name does not say: pkg_accelerate_register() compares
// the schema.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/accelerate/handles.h"

namespace pkg::cpu::accelerate {

// An at::Tensor as a function returns it: by a hidden pointer, for which a
// destructor is what it takes. It owns a reference until it is handed over.
class MadeTensor {
 public:
  MadeTensor(const MadeTensor&) = delete;
  MadeTensor& operator=(const MadeTensor&) = delete;
  ~MadeTensor() {
    if (implementation_ != nullptr) {
      release();
    }
  }

  // To PyTorch. Once; an undefined tensor too, which is no null pointer.
  StableIValue hand_over() &&;

 private:
  void release() noexcept;

  void* implementation_;
};

// An argument of type `const std::optional<at::Tensor>&`.
struct OptionalTensor {
  void* implementation;
  bool has_value;

  explicit OptionalTensor(const OptionalHandle& handle)
      : OptionalTensor(handle.get()) {}
  explicit OptionalTensor(AtenTensorHandle handle)
      : implementation(handle != nullptr ? *reinterpret_cast<void**>(handle)
                                         : nullptr),
        has_value(handle != nullptr) {}
};

// An argument of type c10::ArrayRef<int64_t>; std::optional of it is how a
// c10::OptionalArrayRef lies.
struct IntList {
  const int64_t* data;
  size_t size;

  explicit IntList(const std::vector<int64_t>& numbers)
      : data(numbers.data()), size(numbers.size()) {}
};

struct PytorchKernels {
  using In = AtenTensorHandle;  // const at::Tensor&
  using Two = std::tuple<MadeTensor, MadeTensor>;
  using Three = std::tuple<MadeTensor, MadeTensor, MadeTensor>;

  // self, mat2; with the result before them
  using Product = MadeTensor (*)(In, In);
  using ProductInto = void* (*)(AtenTensorHandle, In, In);
  Product mm;
  ProductInto mm_out;
  Product bmm;
  ProductInto bmm_out;
  Product int_mm;
  ProductInto int_mm_out;

  // query, key, value, dropout_p, is_causal, attn_mask, scale
  Two (*attention)(In, In, In, double, bool, const OptionalTensor&,
                   std::optional<double>);

  // grad_out, query, key, value, out, logsumexp, and as above
  Three (*attention_backward)(In, In, In, In, In, In, double, bool,
                              const OptionalTensor&, std::optional<double>);

  // query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight,
  // proj_bias, mask, need_weights, average_attn_weights, mask_type
  Two (*multi_head_attention)(In, In, In, int64_t, int64_t, In, In, In, In,
                              const OptionalTensor&, bool, bool,
                              std::optional<int64_t>);

  // input, weight, bias, stride, padding, dilation, transposed, output_padding,
  // groups
  MadeTensor (*convolution)(In, In, const OptionalTensor&, IntList, IntList,
                            IntList, bool, IntList, int64_t);

  // grad_output, input, weight, bias_sizes, from stride on as above,
  // output_mask
  Three (*convolution_backward)(In, In, In, std::optional<IntList>, IntList,
                                IntList, IntList, bool, IntList, int64_t,
                                std::array<bool, 3>);

  // self, approximate; with the result before them
  MadeTensor (*gelu)(In, std::string_view);
  void* (*gelu_out)(AtenTensorHandle, In, std::string_view);
  void* (*gelu_in_place)(AtenTensorHandle, std::string_view);
  MadeTensor (*silu)(In);
  void* (*silu_out)(AtenTensorHandle, In);
  void* (*silu_in_place)(AtenTensorHandle);

  // grad_output, self, approximate; with the result before them
  MadeTensor (*gelu_backward)(In, In, std::string_view);
  void* (*gelu_backward_out)(AtenTensorHandle, In, In, std::string_view);
  MadeTensor (*silu_backward)(In, In);
  void* (*silu_backward_out)(AtenTensorHandle, In, In);

  static const PytorchKernels& instance();
};

// Results of a kernel in the dispatcher's stack.
template <class... Results>
void hand_over(std::tuple<Results...>&& results, StableIValue* stack) {
  std::apply(
      [&](auto&... each) { ((*stack++ = std::move(each).hand_over()), ...); },
      results);
}

}  // namespace pkg::cpu::accelerate
