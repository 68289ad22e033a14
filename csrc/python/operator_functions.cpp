#include "python/operator_functions.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "host/namespace.h"
#include "library.h"
#include "python/guarded.h"
#include "python/operator_call.h"
#include "python/tensor_bridge.h"
#include "python/thread_state.h"

namespace pkg::python {
namespace {

using FindKernel = DirectKernel (*)(const char*);

// What one operator's function of pkg._C is made of. It lives as long as the
// process, as the operator does.
struct OperatorFunction {
  Signature signature;
  OperatorCall call;
  std::string documentation;
  PyMethodDef by_name;
  PyMethodDef by_position;
};

std::map<std::string, std::unique_ptr<OperatorFunction>>& functions() {
  static auto* all =
      new std::map<std::string, std::unique_ptr<OperatorFunction>>();
  return *all;
}

OperatorFunction& function_of(const std::string& name) {
  const auto found = functions().find(name);
  if (found == functions().end()) {
    throw py::key_error("pkg has no operator named " + name);
  }
  return *found->second;
}

const OperatorCall& call_of(PyObject* capsule) {
  return *static_cast<const OperatorCall*>(
      PyCapsule_GetPointer(capsule, nullptr));
}

PyObject* call_by_name(PyObject* self, PyObject* const* values,
                       Py_ssize_t count, PyObject* names) {
  return guarded([&]() -> PyObject* {
    const auto& call = call_of(self);
    const auto bound =
        call.signature->bind(values, static_cast<size_t>(count), names);
    return bound ? call(bound->data()) : nullptr;
  });
}

PyObject* call_by_position(PyObject* self, PyObject* const* values,
                           Py_ssize_t count) {
  const auto& call = call_of(self);
  if (static_cast<size_t>(count) != call.signature->size()) {
    PyErr_Format(PyExc_TypeError, "%s takes %zu arguments but %zd were given",
                 call.signature->name().c_str(), call.signature->size(), count);
    return nullptr;
  }
  return guarded([&] { return call(values); });
}

bool is_tensor(PyObject* value) {
  return TensorBridge::instance().is_tensor(value);
}

// Whether autograd wants a gradient of each tensor among the values.
bool all_gradients_are_needed(PyObject* context, PyObject* const* values,
                              Py_ssize_t count) {
  static PyObject* const name = PyUnicode_InternFromString("needs_input_grad");
  PyObject* needed = PyObject_GetAttr(context, name);
  if (needed == nullptr) {
    PyErr_Clear();
    return false;
  }
  bool all = PyTuple_Check(needed) && PyTuple_GET_SIZE(needed) == count;
  for (Py_ssize_t i = 0; all && i < count; ++i) {
    all = !is_tensor(values[i]) || PyTuple_GET_ITEM(needed, i) == Py_True;
  }
  Py_DECREF(needed);
  return all;
}

// What FunctionCtx.save_for_backward does with the tensors among the values.
bool save_for_backward(PyObject* context, PyObject* const* values,
                       Py_ssize_t count) {
  static PyObject* const to_save = PyUnicode_InternFromString("to_save");
  const Py_ssize_t tensors = std::count_if(values, values + count, is_tensor);
  PyObject* saved = PyTuple_New(tensors);
  if (saved == nullptr) {
    return false;
  }
  for (Py_ssize_t i = 0; i < tensors; ++values) {
    if (is_tensor(*values)) {
      PyTuple_SET_ITEM(saved, i++, Py_NewRef(*values));
    }
  }
  const bool is_saved = PyObject_SetAttr(context, to_save, saved) == 0;
  Py_DECREF(saved);
  return is_saved;
}

// An autograd function's forward, which takes the context and then the
// arguments of the function that it is made of; and, where some gradients are
// not needed, the forward that is called in its place.
PyObject* call_and_save(PyObject* self, PyObject* const* values,
                        Py_ssize_t count) {
  if (count == 0) {
    PyErr_SetString(PyExc_TypeError, "forward takes a context");
    return nullptr;
  }
  PyObject* function = PyTuple_GET_ITEM(self, 0);
  PyObject* otherwise = PyTuple_GET_ITEM(self, 1);
  if (otherwise != Py_None &&
      !all_gradients_are_needed(*values, values + 1, count - 1)) {
    return PyObject_Vectorcall(otherwise, values, static_cast<size_t>(count),
                               nullptr);
  }
  PyObject* result = PyObject_Vectorcall(
      function, values + 1, static_cast<size_t>(count - 1), nullptr);
  if (result != nullptr && !save_for_backward(*values, values + 1, count - 1)) {
    Py_CLEAR(result);
  }
  return result;
}

template <class Function>
PyMethodDef method(const char* name, Function* function, int convention,
                   const char* documentation) {
  return {name,
          reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          convention, documentation};
}

py::object function_object(PyMethodDef& definition, const py::object& self) {
  return py::reinterpret_steal<py::object>(PyCFunction_NewEx(
      &definition, self.ptr(), py::str(PKG_NAMESPACE_TEXT "._C").ptr()));
}

// By position alone, with all the arguments: what the public functions call.
PyMethodDef positional_method =
    method("call", &call_by_position, METH_FASTCALL, nullptr);
PyMethodDef saving_method =
    method("forward", &call_and_save, METH_FASTCALL, nullptr);

void define_function(py::module_& module, const py::object& operators,
                     const std::string& name,
                     const std::shared_ptr<const DeviceKeys>& cuda) {
  const py::object dispatched = operators.attr(name.c_str()).attr("default");
  auto function = std::make_unique<OperatorFunction>(
      OperatorFunction{{name, dispatched.attr("_schema")}, {}, {}, {}, {}});
  OperatorCall& call = function->call;
  call.signature = &function->signature;
  call.kernel = direct_kernels.find(name);
  call.observed_as = PKG_NAMESPACE_TEXT "::" + name;
  call.dispatched = dispatched;
  call.below_autograd = BelowAutograd(dispatched, cuda);
  function->documentation =
      function->signature.text() + "\n--\n\n" +
      py::str(dispatched.attr("_schema")).cast<std::string>() +
      "\n\nSee the function of that name in pkg.ops.";
  function->by_name =
      method(function->signature.name().c_str(), &call_by_name,
             METH_FASTCALL | METH_KEYWORDS, function->documentation.c_str());
  module.attr(name.c_str()) = function_object(
      function->by_name, py::capsule(static_cast<const void*>(&call)));
  functions()[name] = std::move(function);
}

// The kernels of a CPU library, by the address of its pkg_direct_kernel.
void use_kernels(uintptr_t find_kernel) {
  const auto find = reinterpret_cast<FindKernel>(find_kernel);
  for (auto& [name, function] : functions()) {
    function->call.kernel = ThreadState::instance().can_read_tensors()
                                ? find(name.c_str())
                                : nullptr;
  }
}

// See pkg/ops/_call.py.
void set_short_way(const std::string& name, std::optional<py::object> record,
                   std::optional<bool> has_autocast,
                   std::optional<std::string> observed_as,
                   std::optional<py::object> below_autograd) {
  OperatorCall& call = function_of(name).call;
  if (record) {
    call.record = *record;
  }
  if (has_autocast) {
    call.has_autocast = *has_autocast;
  }
  if (observed_as) {
    call.observed_as = *observed_as;
  }
  if (below_autograd) {
    call.below_autograd.enter(*below_autograd);
  }
}

py::object by_position(const std::string& name) {
  return function_object(
      positional_method,
      py::capsule(static_cast<const void*>(&function_of(name).call)));
}

py::object inner_call(const std::string& name, py::object otherwise,
                      std::optional<py::object> record, bool is_observed,
                      bool is_checked, bool has_autocast) {
  const OperatorCall& outer = function_of(name).call;
  if (outer.kernel == nullptr) {
    return otherwise;
  }
  auto* call = new OperatorCall(outer);
  call->observed_as = is_observed ? outer.observed_as : "";
  call->is_checked = is_checked;
  call->has_autocast = has_autocast;
  call->record = record.value_or(py::object());
  call->otherwise = std::move(otherwise);
  return function_object(positional_method, py::capsule(call, [](void* owned) {
                           delete static_cast<OperatorCall*>(owned);
                         }));
}

// Of tensors of the device as though its kernels had no short way, and
// otherwise by what is given.
py::object call_below_autograd(const std::string& name, const char* device,
                               py::object otherwise, py::object record,
                               bool has_autocast) {
  auto* call = new OperatorCall(function_of(name).call);
  call->kernel = [](const DirectArgument*, size_t, DirectResults&) {
    return false;
  };
  call->has_autocast = has_autocast;
  call->record = std::move(record);
  call->otherwise = std::move(otherwise);
  call->below_autograd = call->below_autograd.on(
      call->dispatched, std::make_shared<const DeviceKeys>(device));
  return function_object(positional_method, py::capsule(call, [](void* owned) {
                           delete static_cast<OperatorCall*>(owned);
                         }));
}

py::object saving_forward(const py::object& function,
                          const py::object& otherwise) {
  return function_object(saving_method, py::make_tuple(function, otherwise));
}

}  // namespace

void define_operator_functions(py::module_& module) {
  const py::object operators =
      py::module_::import("torch").attr("ops").attr(PKG_NAMESPACE_TEXT);
  const auto cuda = std::make_shared<const DeviceKeys>("CUDA");
  for (const std::string& name : operator_names()) {
    define_function(module, operators, name, cuda);
  }
  module.def("_use_kernels", &use_kernels, py::arg("find_kernel"),
             "Called by the loader.");
  module.def("_set_short_way", &set_short_way, py::arg("name"), py::kw_only(),
             py::arg("record") = py::none(),
             py::arg("has_autocast") = py::none(),
             py::arg("observed_as") = py::none(),
             py::arg("below_autograd") = py::none(), "See pkg/ops/_call.py.");
  module.def("_by_position", &by_position, py::arg("name"),
             "See pkg/ops/_call.py.");
  module.def("_inner_call", &inner_call, py::arg("name"), py::arg("otherwise"),
             py::arg("record"), py::arg("is_observed"), py::arg("is_checked"),
             py::arg("has_autocast"), "See pkg/ops/_call.py.");
  module.def("_call_below_autograd", &call_below_autograd, py::arg("name"),
             py::arg("device"), py::arg("otherwise"), py::arg("record"),
             py::kw_only(), py::arg("has_autocast") = false, "For tests.");
  module.def(
      "_is_forward_mode",
      [] { return ThreadState::instance().is_forward_mode(); },
      "Whether a level of tangents is entered.");
  module.def("_saving_forward", &saving_forward, py::arg("function"),
             py::arg("otherwise") = py::none(),
             "See pkg/ops/_registration.py.");
}

}  // namespace pkg::python
