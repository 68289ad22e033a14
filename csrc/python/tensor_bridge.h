// Python's torch.Tensor and torch.dtype, and what the stable ABI knows them by.
//
// From PyTorch 2.14 on two functions of the C shim convert tensors; they are
// looked up at run time. Before that, torch._C._aoti hands tensor handles over
// in capsules; a result's object is then made by the function that this ends in
// (unstable_symbols.h), which spares 200 ns a call.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <exception>
#include <optional>
#include <span>

#include "host/symbol_lookup.h"
#include "host/tensor.h"
#include "python/pybind_headers.h"
#include "python/unstable_symbols.h"

namespace pkg::python {

namespace py = pybind11;

class TensorBridge {
 public:
  // Filled when the module is imported, and never freed: tensors may still pass
  // while the interpreter shuts down.
  static TensorBridge& instance() {
    static TensorBridge* bridge = new TensorBridge();
    return *bridge;
  }

  bool is_tensor(PyObject* object) const {
    return PyObject_TypeCheck(object, tensor_type_) != 0;
  }

  // A new handle on the tensor, or null with a Python error set.
  AtenTensorHandle handle_of(PyObject* object) const {
    AtenTensorHandle handle = nullptr;
    if (from_python_ != nullptr) {
      return from_python_(object, &handle) == TORCH_SUCCESS ? handle : nullptr;
    }
    PyObject* capsule = PyObject_CallOneArg(handle_to_capsule_, object);
    if (capsule == nullptr) {
      return nullptr;
    }
    // The capsule has no destructor: the handle in it becomes ours.
    handle = static_cast<AtenTensorHandle>(
        PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
    Py_DECREF(capsule);
    return handle;
  }

  // A new reference to a Python tensor that shares the handle's tensor, or null
  // with a Python error set. The handle is only borrowed.
  PyObject* object_of(AtenTensorHandle handle) const {
    if (to_python_ != nullptr) {
      void* object = nullptr;
      return to_python_(handle, nullptr, &object) == TORCH_SUCCESS
                 ? static_cast<PyObject*>(object)
                 : nullptr;
    }
    if (UnstableSymbols::in_use().wrap != nullptr) {
      return wrapped(handle);
    }
    PyObject* capsule = PyCapsule_New(handle, nullptr, nullptr);
    if (capsule == nullptr) {
      return nullptr;
    }
    // Copies the tensor out of the handle, in spite of the function's name.
    PyObject* object = PyObject_CallOneArg(handle_from_capsule_, capsule);
    Py_DECREF(capsule);
    return object;
  }

  // The objects of as many results as there are, of an operator with several.
  PyObject* tuple_of(std::span<const std::optional<Tensor>> results) const {
    const auto end = std::ranges::find(
        results, false, [](const auto& result) { return result.has_value(); });
    const Py_ssize_t count = end - results.begin();
    PyObject* objects = PyTuple_New(count);
    for (Py_ssize_t i = 0; objects != nullptr && i < count; ++i) {
      PyObject* object = object_of(results[static_cast<size_t>(i)]->get());
      if (object == nullptr) {
        Py_CLEAR(objects);
        break;
      }
      PyTuple_SET_ITEM(objects, i, object);
    }
    return objects;
  }

  std::optional<ScalarType> dtype_of_object(PyObject* object) const {
    for (const auto& [dtype, type] : dtypes_) {
      if (dtype == object) {
        return type;
      }
    }
    if (Py_TYPE(object) == dtype_type_) {
      return ScalarType::Undefined;  // a dtype, but none that pkg computes with
    }
    return std::nullopt;
  }

 private:
  using FromPython = AOTITorchError (*)(void*, AtenTensorHandle*);
  using ToPython = AOTITorchError (*)(AtenTensorHandle, void*, void**);

  static PyObject* wrapped(AtenTensorHandle handle) {
    try {
      return UnstableSymbols::in_use().wrap(handle);
    } catch (const std::exception& error) {
      if (PyErr_Occurred() == nullptr) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
      }
      return nullptr;
    }
  }

  TensorBridge() {
    const py::module_ torch = py::module_::import("torch");
    const py::module_ aoti = py::module_::import("torch._C._aoti");
    tensor_type_ =
        reinterpret_cast<PyTypeObject*>(new_reference(torch, "Tensor"));
    dtype_type_ =
        reinterpret_cast<PyTypeObject*>(new_reference(torch, "dtype"));
    handle_to_capsule_ =
        new_reference(aoti, "unsafe_alloc_void_ptr_from_tensor");
    handle_from_capsule_ =
        new_reference(aoti, "alloc_tensor_by_stealing_from_void_ptr");
    const std::pair<const char*, ScalarType> names[] = {
        {"bool", ScalarType::Bool},     {"uint8", ScalarType::Byte},
        {"int8", ScalarType::Char},     {"int16", ScalarType::Short},
        {"int32", ScalarType::Int},     {"int64", ScalarType::Long},
        {"float16", ScalarType::Half},  {"bfloat16", ScalarType::BFloat16},
        {"float32", ScalarType::Float}, {"float64", ScalarType::Double},
    };
    for (size_t i = 0; i < dtypes_.size(); ++i) {
      dtypes_[i] = {new_reference(torch, names[i].first), names[i].second};
    }
    from_python_ = find_torch_symbol<FromPython>("torch_tensor_from_pyobject");
    to_python_ = find_torch_symbol<ToPython>("torch_tensor_to_pyobject");
  }

  static PyObject* new_reference(const py::module_& module, const char* name) {
    return module.attr(name).cast<py::object>().release().ptr();
  }

  PyTypeObject* tensor_type_;
  PyTypeObject* dtype_type_;
  PyObject* handle_to_capsule_;
  PyObject* handle_from_capsule_;
  std::array<std::pair<PyObject*, ScalarType>, 10> dtypes_;
  FromPython from_python_;
  ToPython to_python_;
};

}  // namespace pkg::python
