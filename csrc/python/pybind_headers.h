// pybind11, as PyTorch brings it, in sources that keep to the stable ABI.
//
// PyTorch 2.10 and 2.11 refuse their pybind11 headers where the macros of the
// stable ABI are defined, though pybind11 uses nothing of PyTorch's.
#pragma once

#pragma push_macro("TORCH_STABLE_ONLY")
#pragma push_macro("TORCH_TARGET_VERSION")
#undef TORCH_STABLE_ONLY
#undef TORCH_TARGET_VERSION
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#pragma pop_macro("TORCH_TARGET_VERSION")
#pragma pop_macro("TORCH_STABLE_ONLY")
