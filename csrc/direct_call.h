// Calls of CPU kernels from Python without PyTorch's dispatcher.
#pragma once

#include <pybind11/pybind11.h>

namespace pkg::python {

void define_direct_calls(pybind11::module_& module);

}  // namespace pkg::python
