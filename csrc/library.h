#pragma once

#include <string>
#include <vector>

#include "host/namespace.h"

namespace pkg {

inline constexpr const char* kNamespaceTaken =
    "the operator namespace '" PKG_NAMESPACE_TEXT
    "' is already registered in this process, by another installation or "
    "another build of pkg; PyTorch allows one. Import only one of them, or "
    "build "
    "this one under another name: pkg.jit.load(namespace=\"another_name\")";

// Registers every operator's schema with PyTorch; throws if the namespace is
// taken. A second call does nothing: Python may import the module twice.
void define_operators();

bool operators_are_defined();

// In the order of their schemas, without the namespace.
std::vector<std::string> operator_names();

}  // namespace pkg
