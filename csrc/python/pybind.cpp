// The module pkg._C: facts about the build and the processor, and every
// operator as a plain function on tensors (operator_functions.h).
#include <torch/headeronly/version.h>

#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "host/namespace.h"
#include "library.h"
#include "python/accelerated_calls.h"
#include "python/cpu_features.h"
#include "python/generator_draws.h"
#include "python/operator_functions.h"
#include "python/pybind_headers.h"
#include "python/tensor_bridge.h"
#include "python/unstable_symbols.h"

// What setup.py knows of its build; pkg.jit writes none.
#if __has_include("build_facts.h")
#include "build_facts.h"
#else
#define PKG_VERSION "unknown"
#define PKG_COMPILE_FLAGS ""
#define PKG_CUDA_TOOLKIT ""
#define PKG_BUILT_CPU_LEVELS ""
#define PKG_CUDA_ARCHITECTURES ""
#endif

namespace py = pybind11;

namespace pkg::python {
namespace {

// PyTorch's own refusal would come with a backtrace on stderr.
void refuse_taken_namespace() {
  const auto schemas =
      py::module_::import("torch._C")
          .attr("_jit_get_schemas_for_operator")(PKG_NAMESPACE_TEXT "::muladd");
  if (py::len(schemas) > 0 && !operators_are_defined()) {
    throw py::import_error(kNamespaceTaken);
  }
}

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

std::string version_text(uint64_t version) {
  return std::to_string((version >> 56) & 0xFF) + "." +
         std::to_string((version >> 48) & 0xFF);
}

// The package's libraries that lie beside this one.
std::vector<std::string> libraries_beside(const py::handle& module) {
  std::set<std::string> names;
  const std::filesystem::path file(module.attr("__file__").cast<std::string>());
  for (const auto& entry :
       std::filesystem::directory_iterator(file.parent_path())) {
    const std::string name = entry.path().filename().string();
    const std::string extension = entry.path().extension().string();
    if (name.starts_with('_') && (extension == ".so" || extension == ".pyd")) {
      names.insert(name.substr(0, name.find('.')));
    }
  }
  return {names.begin(), names.end()};
}

py::dict build_info(const py::handle& module) {
  py::dict info;
  info["version"] = PKG_VERSION;
  info["namespace"] = PKG_NAMESPACE_TEXT;
  info["compiler"] = compiler();
  info["flags"] = PKG_COMPILE_FLAGS;
  info["stable_abi_target"] = version_text(TORCH_TARGET_VERSION);
  info["built_with_torch"] = version_text(TORCH_ABI_VERSION);
  info["cuda_toolkit"] =
      *PKG_CUDA_TOOLKIT ? py::cast(PKG_CUDA_TOOLKIT) : py::none();
  info["cpu_levels"] = py::str(PKG_BUILT_CPU_LEVELS).attr("split")();
  info["cuda_architectures"] = PKG_CUDA_ARCHITECTURES;
  info["libraries"] = libraries_beside(module);
  return info;
}

// The level of the CPU library in use, which the loader tells.
std::string& cpu_capability_in_use() {
  static std::string capability;
  return capability;
}

std::optional<std::string> cpu_capability() {
  if (!cpu_capability_in_use().empty()) {
    return cpu_capability_in_use();
  }
  const auto runnable = runnable_capabilities();
  return runnable.empty()
             ? std::nullopt
             : std::optional<std::string>(capability_name(runnable.back()));
}

std::vector<std::string> cpu_capabilities() {
  std::vector<std::string> names;
  for (const CpuCapability capability : runnable_capabilities()) {
    names.emplace_back(capability_name(capability));
  }
  return names;
}

}  // namespace
}  // namespace pkg::python

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace pkg::python;

  module.doc() = "Compiled part of pkg: build facts and operators on tensors.";
  TensorBridge::instance();
  define_unstable_symbols(module);
  refuse_taken_namespace();
  pkg::define_operators();

  module.def(
      "build_info", [self = module.ptr()] { return build_info(self); },
      "Version, compiler, flags, stable-ABI target, CPU levels and CUDA "
      "toolkit that this "
      "build was made with, and the libraries that are present.");
  module.def("cpu_capability", &cpu_capability,
             "The instruction set of the CPU library in use; before one is "
             "loaded the best that this processor and its operating system "
             "run, or None below the baseline.");
  module.def(
      "_set_cpu_capability",
      [](std::string capability) {
        cpu_capability_in_use() = std::move(capability);
      },
      py::arg("capability"), "Called by the loader.");
  module.def("cpu_capabilities", &cpu_capabilities,
             "All instruction sets that can run here, the least first.");

  define_operator_functions(module);
  define_accelerate_functions(module);
  define_generator_draws(module);
}
