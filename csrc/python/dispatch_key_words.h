// The two sets of dispatch keys that PyTorch keeps for each thread, those that
// are included in every call and those that are excluded, read where they lie:
// two words, which say of the thread what five functions of torch._C and two
// calls by key say (nearly 300 ns a call together). Transforms, modes, tracing,
// autocast, inference mode: the dispatcher knows of them by these keys alone.
//
// The words are a variable of libc10 that no interface promises. It is looked
// up when the package is imported and held to what torch._C tells of the sets,
// in several states; where that disagrees or the variable is missing, nothing
// is found and the functions are asked.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <iterator>

#include "host/symbol_lookup.h"
#include "python/device_keys.h"
#include "python/pybind_headers.h"

namespace pkg::python {

namespace py = pybind11;

class DispatchKeyWords {
 public:
  static DispatchKeyWords find() {
    DispatchKeyWords words;
    try {
      words.are_found_ = words.read_keys();
    } catch (const std::exception&) {
      words.are_found_ = false;  // a PyTorch that lacks what is asked
    }
    return words;
  }

  bool are_found() const { return are_found_; }

  // Whether the dispatcher takes a tensor of the device to no key but those of
  // the device and of autograd. That other keys are excluded changes nothing
  // for it.
  bool are_plain(const DeviceKeys& device, bool has_autocast) const {
    const uint64_t* words = of_this_thread();
    const uint64_t keys =
        has_autocast ? device.needed() | device.autocast() : device.needed();
    return (words[0] & ~view_) == 0 && (words[1] & keys) == 0;
  }

  bool is_autograd_on() const { return (of_this_thread()[1] & autograd_) == 0; }

 private:
  using Words = std::array<uint64_t, 2>;

  // Of included and of excluded keys, each as what differs from the state in
  // which a thread begins, so that memory of zeros is that state. Null where
  // this PyTorch has no such variable.
  static const uint64_t* of_this_thread() {
    static thread_local const uint64_t* words = nullptr;
    if (words == nullptr) {
      words = find_torch_symbol<const uint64_t*>(
          "_ZN3c104impl26raw_local_dispatch_key_setE");
    }
    return words;
  }

  // The sets of this thread.
  static Words told(const py::module_& c) {
    return {key_bits(c.attr("_dispatch_tls_local_include_set")()),
            key_bits(c.attr("_dispatch_tls_local_exclude_set")())};
  }

  // What a new thread has, by the words and what is told of this one.
  static Words initial(const py::module_& c) {
    const uint64_t* words = of_this_thread();
    const Words sets = told(c);
    return {words[0] ^ sets[0], words[1] ^ sets[1]};
  }

  bool read_keys() {
    static_assert(sizeof(void*) == sizeof(uint64_t));
#if !defined(__linux__)
    return false;  // elsewhere the address of a thread's variable is no symbol
#else
    if (of_this_thread() == nullptr) {
      return false;
    }
    const py::module_ c = py::module_::import("torch._C");
    const Words begun = initial(c);
    autograd_ = key_named("AutogradFunctionality") |
                key_named("AutogradOther") | key_named("AutogradNestedTensor");
    view_ = key_named("ADInplaceOrView");
    const DeviceKeys cpu("CPU");
    return cpu.are_known() && (begun[0] & view_) != 0 &&
           (begun[1] & cpu.autocast()) != 0 &&
           (begun[1] & (autograd_ | cpu.needed())) == 0 &&
           follow_guards(c, begun);
#endif
  }

  // Whether the words change as the sets do when a key is added to each.
  static bool follow_guards(const py::module_& c, const Words& begun) {
    const py::object key = c.attr("DispatchKey").attr("PreDispatch");
    const py::object key_set = c.attr("DispatchKeySet")(key);
    const py::object guards[] = {c.attr("_IncludeDispatchKeyGuard")(key),
                                 c.attr("_ExcludeDispatchKeyGuard")(key_set)};
    return std::all_of(
        std::begin(guards), std::end(guards), [&](const py::object& guard) {
          guard.attr("__enter__")();
          const Words held = initial(c);
          guard.attr("__exit__")(py::none(), py::none(), py::none());
          return held == begun;
        });
  }

  bool are_found_ = false;
  uint64_t autograd_ = 0;
  uint64_t view_ = 0;  // included, but for inference mode
};

}  // namespace pkg::python
