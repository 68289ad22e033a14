// Products of PyTorch's own operators, from the Python functions that
// pkg.accelerate() registers for them.
#pragma once

#include "python/pybind_headers.h"

namespace pkg::python {

// Defines _accelerated_addmm and what the loader calls.
void define_accelerate_functions(pybind11::module_& module);

}  // namespace pkg::python
