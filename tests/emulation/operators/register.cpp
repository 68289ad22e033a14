// Defines the operators as soon as the library is loaded; the CUDA sources,
// compiled for CPU tensors, implement them.
#include "library.h"

namespace {

[[maybe_unused]] const bool defined = (pkg::define_operators(), true);

}  // namespace
