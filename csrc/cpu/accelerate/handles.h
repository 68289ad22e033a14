// Tensors that the dispatcher hands to a kernel, which has to delete their
// handles. Of a call that is left alone no torch::stable::Tensor is made: each
// would allocate.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <utility>

#include "host/tensor.h"

namespace pkg::cpu::accelerate {

// A handle that PyTorch handed over, or is about to get; or null.
class OwnedHandle {
 public:
  OwnedHandle() = default;
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

  // One more reference to the tensor.
  Tensor tensor() const {
    AtenTensorHandle copy = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle_, &copy));
    return Tensor(copy);
  }

  StableIValue hand_over() {
    return torch::stable::detail::from(std::exchange(handle_, nullptr));
  }

 private:
  AtenTensorHandle handle_ = nullptr;
};

// What a schema calls Tensor?.
class OptionalHandle : public OwnedHandle {
 public:
  explicit OptionalHandle(StableIValue value)
      : OwnedHandle(
            torch::stable::detail::to<std::optional<AtenTensorHandle>>(value)
                .value_or(nullptr)) {}

  // Autograd's formulas give an undefined tensor where there is none.
  bool is_given() const { return get() != nullptr && is_defined_tensor(get()); }

  std::optional<Tensor> tensor() const {
    return is_given() ? std::optional(OwnedHandle::tensor()) : std::nullopt;
  }
};

// What Python shows as None where a schema says Tensor.
inline StableIValue undefined_tensor() {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_uninitialized_tensor(&handle));
  return torch::stable::detail::from(handle);
}

}  // namespace pkg::cpu::accelerate
