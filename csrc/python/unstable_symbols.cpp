#include "python/unstable_symbols.h"

#include <exception>

#include "host/symbol_lookup.h"
#include "host/tensor.h"
#include "python/tensor_bridge.h"

namespace pkg::python {
namespace {

template <class Pointer>
void look_up(Pointer& pointer, const char* name) {
  pointer = find_torch_symbol<Pointer>(name);
}

// In the library that Python loads for itself alone, to which none of ours is
// linked.
template <class Pointer>
void look_up_in_torch_python(Pointer& pointer, const char* name) {
#if defined(__linux__)
  if (void* library = dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD)) {
    pointer = reinterpret_cast<Pointer>(dlsym(library, name));
    dlclose(library);  // a reference: PyTorch keeps it loaded
  }
#endif
}

py::object empty_tensor(bool requires_gradient) {
  return py::module_::import("torch").attr("empty")(
      0, py::arg("device") = "cpu",
      py::arg("requires_grad") = requires_gradient);
}

void* implementation_of(const py::object& tensor) {
  return reinterpret_cast<void*>(tensor.attr("_cdata").cast<uintptr_t>());
}

// Whether a function tells of two tensors what is so.
bool tells_gradients(bool (*requires_gradient)(const void*)) {
  const py::object without = empty_tensor(false);
  const py::object with = empty_tensor(true);
  return requires_gradient(implementation_of(with)) &&
         !requires_gradient(implementation_of(without));
}

// Whether a handle points to what a function takes, and that gives the object
// that the tensor has.
bool gives_objects(PyObject* (*wrap)(const void*)) {
  const py::object object = empty_tensor(false);
  const Tensor tensor(TensorBridge::instance().handle_of(object.ptr()));
  return *reinterpret_cast<void**>(tensor.get()) == implementation_of(object) &&
         py::reinterpret_steal<py::object>(wrap(tensor.get())).is(object);
}

py::dict use(bool any) {
  UnstableSymbols& symbols = UnstableSymbols::in_use();
  symbols = any ? UnstableSymbols::find() : UnstableSymbols();
  py::dict found;
  found["key_words"] = symbols.key_words.are_found();
  found["has_callbacks"] = symbols.has_callbacks != nullptr;
  found["has_function_mode"] = symbols.has_function_mode != nullptr;
  found["forward_level"] = symbols.forward_level != nullptr;
  found["requires_gradient"] = symbols.requires_gradient != nullptr;
  found["wrap"] = symbols.wrap != nullptr;
  return found;
}

}  // namespace

UnstableSymbols& UnstableSymbols::in_use() {
  static auto* symbols = new UnstableSymbols();
  return *symbols;
}

UnstableSymbols UnstableSymbols::find() {
  UnstableSymbols found;
  found.key_words = DispatchKeyWords::find();
  look_up(found.has_callbacks, "_ZN2at12hasCallbacksEv");
  look_up(found.has_function_mode,
          "_ZN2at4impl27torch_function_mode_enabledEv");
  look_up(found.forward_level,
          "_ZN5torch8autograd14ForwardADLevel14try_get_by_idxEm");
  look_up(found.requires_gradient, "_ZNK3c1010TensorImpl13requires_gradEv");
  look_up_in_torch_python(found.wrap,
                          "_Z16THPVariable_WrapRKN2at10TensorBaseE");
  try {
    if (found.requires_gradient && !tells_gradients(found.requires_gradient)) {
      found.requires_gradient = nullptr;
    }
    if (found.wrap && !gives_objects(found.wrap)) {
      found.wrap = nullptr;
    }
  } catch (const std::exception&) {
    // As in a mode that makes no such tensors; the longer way is always right.
    found.requires_gradient = nullptr;
    found.wrap = nullptr;
  }
  return found;
}

void define_unstable_symbols(py::module_& module) {
  use(true);
  module.def("_use_unstable_symbols", &use, py::arg("any"),
             "For tests: looks csrc/python/unstable_symbols.h's symbols up, or "
             "forgets them. Which of them calls use from now on.");
}

}  // namespace pkg::python
