#include "cpu/accelerate/aten.h"

#include <torch/csrc/stable/library.h>

#include <exception>
#include <string_view>

#include "host/compiler.h"
#include "host/last_error.h"

namespace pkg::cpu::accelerate {

namespace {

using torch::stable::detail::StableLibrary;

const AtenKernel* find_kernel(std::string_view name) {
  for (const auto& kernels :
       {product_kernels(), attention_kernels(), multi_head_kernels(),
        convolution_kernels(), activation_kernels()}) {
    for (const AtenKernel& kernel : kernels) {
      if (kernel.operator_name == name) {
        return &kernel;
      }
    }
  }
  return nullptr;
}

// What it registers stays for the life of the process.
StableLibrary& library() {
  static auto* made = new StableLibrary(StableLibrary::Kind::IMPL, "aten",
                                        "CPU", __FILE__, __LINE__);
  return *made;
}

}  // namespace

}  // namespace pkg::cpu::accelerate

// Once in the life of a process for an operator: PyTorch's dispatcher does not
// expect its tables to change while other threads use them. `results` is how
// many tensors its schema returns. False where Python has to register it: there
// is no kernel in C++, or this PyTorch does not tell what its own refuse.
extern "C" PKG_EXPORT bool pkg_accelerate_register(const char* name,
                                                   int results) {
  using namespace pkg::cpu::accelerate;
  const AtenKernel* kernel = find_kernel(name);
  if (kernel == nullptr || !kernel->is_available ||
      kernel->results != results || pkg::last_error_function() == nullptr) {
    return false;
  }
  try {
    library().impl(kernel->operator_name, kernel->entry);
  } catch (const std::exception&) {
    return false;
  }
  return true;
}
