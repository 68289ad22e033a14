// Defines the operators as soon as the library is loaded; the CUDA sources,
// compiled for CPU tensors, implement them.
#include "cuda/host/launch.h"
#include "library.h"

namespace {

[[maybe_unused]] const bool defined = (pkg::define_operators(), true);

}  // namespace

#define PKG_EXPORTED extern "C" __attribute__((visibility("default")))

PKG_EXPORTED int pkg_emulated_launched_threads() {
  return pkg::cuda::launched_threads;
}

PKG_EXPORTED const char* pkg_emulated_launched_kernel_type() {
  return pkg::cuda::launched_kernel_type;
}

PKG_EXPORTED void pkg_emulated_give_to_device(void* begin, size_t size) {
  pkg::emulation::give_to_device(begin, size);
}

PKG_EXPORTED void pkg_emulated_take_from_device() {
  pkg::emulation::take_from_device();
}

PKG_EXPORTED int64_t pkg_emulated_host_accesses() {
  return pkg::emulation::host_accesses();
}
