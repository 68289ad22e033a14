// Two words that PyTorch keeps of each tensor, read where they lie: the pointer
// to the implementation in the Python object, and the dispatch keys in the
// implementation. Asked by way of Python they take 50 and 70 ns a tensor, two
// percent and more of a small call (TensorBase.is_neg, which tells one key,
// goes through the dispatcher and lets go of the interpreter's lock).
//
// No interface says where they lie. That is found when the package is imported,
// on tensors of different keys; where one of them disagrees, nothing is found
// and Python is asked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "python/device_keys.h"
#include "python/pybind_headers.h"

namespace pkg::python {

namespace py = pybind11;

class TensorWords {
 public:
  TensorWords() {
    try {
      find();
    } catch (const std::exception&) {
      implementation_at_ = keys_at_ = 0;  // a PyTorch that lacks what is asked
    }
  }

  bool tells_implementation() const { return implementation_at_ != 0; }

  bool are_found() const { return implementation_at_ != 0 && keys_at_ != 0; }

  // Of a tensor of the type torch.Tensor or Parameter.
  void* implementation_of(PyObject* tensor) const {
    return reinterpret_cast<void*>(word(tensor, implementation_at_));
  }

  // Whether a tensor is known to be dense on the device and to have no key of
  // what is lazy or wrapped.
  bool is_ordinary(const void* implementation, const DeviceKeys& device) const {
    return keys_at_ != 0 && device.are_ordinary(word(implementation, keys_at_));
  }
  bool is_ordinary(const void* implementation) const {
    return is_ordinary(implementation, cpu_);
  }

 private:
  // Implementations are larger than this, and their keys are their last member.
  static constexpr size_t kImplementationWords = 24;

  static uint64_t word(const void* object, size_t index) {
    uint64_t value = 0;
    std::memcpy(&value, static_cast<const std::byte*>(object) + 8 * index, 8);
    return value;
  }

  // The first word that holds the value of each object; 0 for none.
  using Held = std::vector<std::pair<const void*, uint64_t>>;
  static size_t find_word(size_t begin, size_t end, const Held& held) {
    for (size_t index = begin; index < end; ++index) {
      bool is_held = true;
      for (const auto& [object, value] : held) {
        is_held = is_held && word(object, index) == value;
      }
      if (is_held) {
        return index;
      }
    }
    return 0;
  }

  void find() {
    static_assert(sizeof(void*) == sizeof(uint64_t));
    const py::module_ torch = py::module_::import("torch");
    const py::module_ c = py::module_::import("torch._C");
    const py::object plain = torch.attr("empty")(0, py::arg("device") = "cpu");
    const std::vector<py::object> tensors{
        plain,
        torch.attr("nn").attr("Parameter")(plain),
        torch.attr("_neg_view")(plain),
        torch.attr("empty")(0, py::arg("device") = "meta"),
    };
    Held implementations;
    Held keys;
    for (const py::object& tensor : tensors) {
      const auto address = tensor.attr("_cdata").cast<uint64_t>();
      const auto set = c.attr("_dispatch_keys")(tensor);
      implementations.emplace_back(tensor.ptr(), address);
      keys.emplace_back(reinterpret_cast<const void*>(address), key_bits(set));
    }
    const auto size = c.attr("TensorBase").attr("__basicsize__").cast<size_t>();
    implementation_at_ =
        find_word(sizeof(PyObject) / 8, size / 8, implementations);
    keys_at_ = find_word(1, kImplementationWords, keys);
    cpu_ = DeviceKeys("CPU");
  }

  size_t implementation_at_ = 0;
  size_t keys_at_ = 0;
  DeviceKeys cpu_;
};

}  // namespace pkg::python
