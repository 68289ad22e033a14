// Kernels for operators of PyTorch's own namespace: ours where the table says
// so, and else PyTorch's, past the dispatcher, which would come back here.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <span>

namespace pkg::cpu::accelerate {

struct AtenKernel {
  const char* operator_name;  // with its overload
  void (*entry)(StableIValue* stack, uint64_t arguments, uint64_t results);
  bool is_available;  // PyTorch's kernel can be called from here
  int results;
};

// Of each file that has some.
std::span<const AtenKernel> product_kernels();
std::span<const AtenKernel> attention_kernels();
std::span<const AtenKernel> multi_head_kernels();
std::span<const AtenKernel> convolution_kernels();
std::span<const AtenKernel> activation_kernels();

}  // namespace pkg::cpu::accelerate
