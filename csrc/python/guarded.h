// What Python calls as a C function must not throw: it would throw through
// Python's own frames. pybind11 sees to that for the functions that it defines.
#pragma once

#include <exception>
#include <new>

#include "python/pybind_headers.h"

namespace pkg::python {

// What the body returns; null with Python's error set where it throws.
template <class Body>
PyObject* guarded(const Body& body) noexcept {
  try {
    return body();
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const std::bad_alloc& error) {
    PyErr_SetString(PyExc_MemoryError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace pkg::python
