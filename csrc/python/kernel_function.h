// Functions written in C that the dispatcher enters as kernels of PyTorch's own
// operators: without a frame of Python's, and without a key set.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "python/pybind_headers.h"

namespace pkg::python {

// PyTorch's own kernel, which takes a key set before the arguments.
struct OriginalKernel {
  pybind11::object function;
  pybind11::object keys;

  PyObject* call(PyObject* const* values, Py_ssize_t count,
                 PyObject* names) const {
    const Py_ssize_t named = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
    std::vector<PyObject*> all(values, values + count + named);
    all.insert(all.begin(), keys.ptr());
    return PyObject_Vectorcall(function.ptr(), all.data(),
                               static_cast<size_t>(count) + 1, names);
  }
};

// A function by a method that finds the kernel by kernel_of(self). Kernel has a
// kCapsule, the name of what holds it.
template <class Kernel>
pybind11::object function_of(PyMethodDef& method, Kernel&& kernel) {
  auto owned = std::make_unique<Kernel>(std::move(kernel));
  const pybind11::capsule owner(
      owned.get(), Kernel::kCapsule,
      [](void* pointer) { delete static_cast<Kernel*>(pointer); });
  static_cast<void>(owned.release());
  return pybind11::reinterpret_steal<pybind11::object>(
      PyCFunction_NewEx(&method, owner.ptr(), nullptr));
}

template <class Kernel>
const Kernel& kernel_of(PyObject* self) {
  return *static_cast<const Kernel*>(
      PyCapsule_GetPointer(self, Kernel::kCapsule));
}

// What PyMethodDef takes for a function of METH_FASTCALL, with names or not.
template <class Function>
PyCFunction as_c_function(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace pkg::python
