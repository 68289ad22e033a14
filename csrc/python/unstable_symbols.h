// What PyTorch exports and no interface promises, found by its mangled name
// when the package is imported. Each member has a way around it, by torch._C,
// that takes longer; it is null where this PyTorch lacks the symbol, or where
// what it says at import is not what torch._C says.
#pragma once

#include <cstdint>
#include <memory>

#include "python/dispatch_key_words.h"
#include "python/pybind_headers.h"

namespace pkg::python {

struct UnstableSymbols {
  DispatchKeyWords key_words;

  // Whether anything follows the operators of this thread, as profilers do.
  bool (*has_callbacks)() = nullptr;

  // Whether this thread is in a TorchFunctionMode.
  bool (*has_function_mode)() = nullptr;

  // A level of tangents, null where forward mode is not entered. A pointer to
  // the level, of a class that nothing here has to know.
  std::shared_ptr<void> (*forward_level)(uint64_t index) = nullptr;

  // Of a tensor's implementation.
  bool (*requires_gradient)(const void* implementation) = nullptr;

  // A Python object for what a handle of the stable ABI points to. Before 2.14,
  // where the C shim has no function for it.
  PyObject* (*wrap)(const void* tensor) = nullptr;

  // Those that calls use: all that are found, but for tests of the other ways.
  static UnstableSymbols& in_use();

  static UnstableSymbols find();
};

// Looks them up, and lets tests do so again.
void define_unstable_symbols(py::module_& module);

}  // namespace pkg::python
