// Calls of CPU kernels from Python without PyTorch's dispatcher.
#pragma once

#include "pybind_headers.h"

namespace pkg::python {

void define_direct_calls(pybind11::module_& module);

}  // namespace pkg::python
