// A call of an operator with the dispatch key of a kernel alone: past autograd,
// which is written in Python and takes longer than all else of the way through
// the dispatcher where it has nothing to record (a matmul of 8 x 8 on a Zen 4:
// 5.2 us by torch.ops, 2.5 so). For devices whose kernels have no short way.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "python/pybind_headers.h"
#include "python/signature.h"
#include "python/thread_state.h"

namespace pkg::python {

class BelowAutograd {
 public:
  // Takes nothing.
  BelowAutograd() = default;

  // Of torch.ops.<namespace>.<name>.default, on the device of these keys, which
  // all operators share. It takes nothing where this PyTorch lacks what it
  // needs, or the operator writes to an argument, which a key between the two
  // counts.
  BelowAutograd(const py::object& dispatched,
                std::shared_ptr<const DeviceKeys> device)
      : device_(std::move(device)) {
    const bool writes =
        dispatched.attr("_schema").attr("is_mutable").cast<bool>();
    if (!writes && device_->are_known()) {
      function_ =
          attribute(attribute(dispatched, "_handle"), "redispatch_boxed");
    }
  }

  // The same on another device.
  BelowAutograd on(const py::object& dispatched,
                   std::shared_ptr<const DeviceKeys> device) const {
    BelowAutograd other(dispatched, std::move(device));
    other.enter(entered_);
    return other;
  }

  // Calls that in place of the operator: it takes the set of keys, and then
  // what the operator takes. For one that is made of another operator in
  // Python, of which the dispatcher knows no kernel of the device: it would
  // come to the other by all keys, autograd's too (attention of 1 x 8: 11.0 us,
  // 5.2 so).
  void enter(const py::object& function) {
    if (function) {
      entered_ = function;
    }
  }

  // Whether the dispatcher would do nothing but enter the kernel: all tensors
  // are dense ones of the device. The thread is known to be plain on the CPU.
  bool takes(const Signature& signature, PyObject* const* values,
             bool has_autocast) const {
    if (!function_ || function_.is_none()) {
      return false;
    }
    bool has_tensor = false;
    for (const Parameter& parameter : signature.parameters()) {
      PyObject* value = *values++;
      if (parameter.type == ValueType::Tensor && value != Py_None) {
        if (!is_of_device(value)) {
          return false;
        }
        has_tensor = true;
      }
    }
    return has_tensor && is_thread_plain(has_autocast);
  }

  // Whether a tensor is known to be nothing but dense memory of the device.
  bool is_of_device(PyObject* tensor) const {
    return device_ != nullptr &&
           ThreadState::instance().is_ordinary(tensor, *device_);
  }

  // Whether this thread, which is plain on the CPU, is so on the device.
  bool is_thread_plain(bool has_autocast) const {
    return device_ != nullptr &&
           ThreadState::instance().is_plain_on(*device_, has_autocast);
  }

  // Null where the kernel refuses, with its error. A list stands where the
  // operator takes one.
  PyObject* call(const Signature& signature, PyObject* const* values) const {
    std::array<PyObject*, kMaxArguments + 1> arguments{
        device_->key_set().ptr()};
    std::copy_n(values, signature.size(), arguments.begin() + 1);
    return PyObject_Vectorcall((entered_ ? entered_ : function_).ptr(),
                               arguments.data(), signature.positional() + 1,
                               signature.keywords());
  }

 private:
  std::shared_ptr<const DeviceKeys> device_;
  py::object function_;
  py::object entered_;
};

}  // namespace pkg::python
