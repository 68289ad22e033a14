// Python's numbers as kernels take them.
#pragma once

#include <optional>

#include "python/pybind_headers.h"

namespace pkg::python {

// Of a float or an int, and of nothing else; nothing for an int that is too
// large.
inline std::optional<double> number_of(PyObject* value) {
  if (PyFloat_CheckExact(value)) {
    return PyFloat_AS_DOUBLE(value);
  }
  if (!PyLong_CheckExact(value)) {
    return std::nullopt;
  }
  const double number = PyLong_AsDouble(value);
  if (number == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  return number;
}

}  // namespace pkg::python
