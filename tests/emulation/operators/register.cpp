// Defines the operators as soon as the library is loaded; the CUDA sources,
// compiled for CPU tensors, implement them.
#include "cuda/host/launch.h"
#include "library.h"

namespace {

[[maybe_unused]] const bool defined = (pkg::define_operators(), true);

}  // namespace

extern "C" __attribute__((visibility("default"))) int
pkg_emulated_launched_threads() {
  return pkg::cuda::launched_threads;
}
