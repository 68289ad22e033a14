// Tensors as the dispatcher hands them over to a kernel of the stable ABI, and
// what is given back. Of a call that is left alone no torch::stable::Tensor is
// made: each would allocate.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <stdexcept>
#include <utility>

#include "host/dispatch.h"

namespace pkg::cpu::accelerate {

// A handle that PyTorch handed over, or is about to get; null where a tensor
// may be missing and is.
class OwnedHandle {
 public:
  explicit OwnedHandle(StableIValue value)
      : handle_(torch::stable::detail::to<AtenTensorHandle>(value)) {}
  explicit OwnedHandle(AtenTensorHandle handle) : handle_(handle) {}
  ~OwnedHandle() {
    if (handle_ != nullptr) {
      aoti_torch_delete_tensor_object(handle_);
    }
  }
  OwnedHandle(const OwnedHandle&) = delete;
  OwnedHandle& operator=(const OwnedHandle&) = delete;

  AtenTensorHandle get() const { return handle_; }

  // As the argument of a C function that writes a handle of its own there, or
  // that takes null for a tensor that is missing.
  AtenTensorHandle* place() { return &handle_; }
  AtenTensorHandle* place_if_any() { return handle_ ? &handle_ : nullptr; }

  StableIValue hand_over() {
    return torch::stable::detail::from(std::exchange(handle_, nullptr));
  }

  Tensor as_tensor() { return Tensor(std::exchange(handle_, nullptr)); }

 private:
  AtenTensorHandle handle_;
};

// What a function of PyTorch's C shim answers, as an exception in its words.
inline void check_shim(AOTITorchError error) {
  if (error != TORCH_SUCCESS) {
    throw std::runtime_error(pkg::detail::last_error_function()());
  }
}

}  // namespace pkg::cpu::accelerate
