// The dispatch keys of a device's tensors, as the bits of PyTorch's key sets.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "python/pybind_headers.h"

namespace pkg::python {

namespace py = pybind11;

inline uint64_t key_bits(const py::handle& key_set) {
  return key_set.attr("raw_repr")().cast<uint64_t>();
}

inline py::object key_set_named(const std::string& name) {
  const py::module_ c = py::module_::import("torch._C");
  return c.attr("DispatchKeySet")(c.attr("DispatchKey").attr(name.c_str()));
}

inline uint64_t key_named(const std::string& name) {
  return key_bits(key_set_named(name));
}

class DeviceKeys {
 public:
  DeviceKeys() = default;

  // "CPU" or "CUDA".
  explicit DeviceKeys(const std::string& device) {
    try {
      key_set_ = key_set_named(device);
      autocast_key_ = py::module_::import("torch._C")
                          .attr("DispatchKey")
                          .attr(("Autocast" + device).c_str());
      needed_ = key_bits(key_set_);
      autocast_ = key_named("Autocast" + device);
      allowed_ = needed_ | key_named("Autograd" + device) |
                 key_named("ADInplaceOrView") | autocast_;
    } catch (const std::exception&) {
      needed_ = 0;  // a PyTorch that lacks what is asked
    }
  }

  bool are_known() const { return needed_ != 0; }

  // Whether a tensor of these keys is dense memory of the device, and has no
  // key of what is lazy (negated, conjugate, zero without memory) or wrapped.
  bool are_ordinary(uint64_t keys) const {
    return are_known() && (keys & needed_) == needed_ &&
           (keys & ~allowed_) == 0;
  }

  const py::object& key_set() const { return key_set_; }
  uint64_t needed() const { return needed_; }
  uint64_t autocast() const { return autocast_; }
  const py::object& autocast_key() const { return autocast_key_; }

 private:
  py::object key_set_;
  py::object autocast_key_;
  uint64_t needed_ = 0;    // the keys of dense tensors of the device
  uint64_t allowed_ = 0;   // and those of autograd and autocast
  uint64_t autocast_ = 0;  // excluded in a thread where autocast is off
};

}  // namespace pkg::python
