// Every operator of the package as a plain function of pkg._C, made from the
// schemas that are registered.
#pragma once

#include "python/pybind_headers.h"

namespace pkg::python {

void define_operator_functions(pybind11::module_& module);

}  // namespace pkg::python
