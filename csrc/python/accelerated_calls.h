// The kernels of PyTorch's own operators that pkg.accelerate() registers by way
// of Python.
#pragma once

#include "python/pybind_headers.h"

namespace pkg::python {

// Defines what pkg/_accelerate_routes.py and the loader call.
void define_accelerate_functions(pybind11::module_& module);

}  // namespace pkg::python
