// Draws of PyTorch's generator, for pkg/_accelerate_dropout.py.
#pragma once

#include "python/pybind_headers.h"

namespace pkg::python {

void define_generator_draws(pybind11::module_& module);

}  // namespace pkg::python
