// A call of a CPU kernel from Python without PyTorch's dispatcher, where the
// dispatcher would do nothing but enter that kernel. Everything else, errors
// included, is left to a Python function that goes through torch.ops.
//
// What the dispatcher looks at, and what is looked at here in its stead:
// - the tensors: of the types torch.Tensor or Parameter and of no subclass, on
//   the CPU, dense, with memory, not lazily negated. Conjugate tensors are
//   complex, which no kernel takes; wrappers of torch.func have no memory;
// - the state of the thread: no transform of torch.func, no TorchDispatchMode
//   or TorchFunctionMode, no level of forward-mode differentiation, no tracing,
//   no profiler, and no autocast where the operator has a rule for it.
#include "direct_call.h"

#include <array>
#include <optional>
#include <string>

#include "borrowed_tensor.h"
#include "kernel_library.h"
#include "tensor_caster.h"

namespace pkg::python {
namespace {

constexpr size_t kMaxArguments = 16;

// Takes over a reference. True for False, 0 and nothing else.
bool is_false(PyObject* answer) {
  if (answer == nullptr) {
    PyErr_Clear();
    return false;
  }
  const bool result = answer == Py_False || PyObject_Not(answer) == 1;
  Py_DECREF(answer);
  return result;
}

// None where this PyTorch lacks it.
py::object attribute(const py::object& owner, const char* name) {
  return py::getattr(owner, name, py::none());
}

py::object attribute(const char* module, const char* name) {
  return attribute(py::module_::import(module), name);
}

constexpr int kCallingConvention = METH_VARARGS | METH_KEYWORDS | METH_NOARGS |
                                   METH_O | METH_FASTCALL | METH_METHOD;

// A function without arguments that answers False or 0 in the plain case. One
// written in C is entered straight, which spares a third of the time.
class Question {
 public:
  explicit Question(py::object function) : function_(std::move(function)) {
    PyObject* object = function_.ptr();
    if (PyCFunction_Check(object) &&
        (PyCFunction_GetFlags(object) & kCallingConvention) == METH_NOARGS) {
      entry_ = PyCFunction_GetFunction(object);
      self_ = PyCFunction_GetSelf(object);
    }
  }

  // Never, where there is no such function.
  bool is_denied() const {
    return is_false(entry_ != nullptr ? entry_(self_, nullptr)
                                      : PyObject_CallNoArgs(function_.ptr()));
  }

 private:
  py::object function_;
  PyCFunction entry_ = nullptr;
  PyObject* self_ = nullptr;
};

// The same of a tensor: a method of TensorBase, or an attribute.
class TensorQuestion {
 public:
  explicit TensorQuestion(const char* name)
      : name_(py::reinterpret_steal<py::object>(
            PyUnicode_InternFromString(name))),
        descriptor_(attribute(attribute("torch._C", "TensorBase"), name)) {
    if (Py_IS_TYPE(descriptor_.ptr(), &PyGetSetDescr_Type)) {
      const PyGetSetDef* definition =
          reinterpret_cast<PyGetSetDescrObject*>(descriptor_.ptr())->d_getset;
      getter_ = definition->get;
      closure_ = definition->closure;
    } else if (Py_IS_TYPE(descriptor_.ptr(), &PyMethodDescr_Type)) {
      const PyMethodDef* definition =
          reinterpret_cast<PyMethodDescrObject*>(descriptor_.ptr())->d_method;
      if ((definition->ml_flags & kCallingConvention) == METH_NOARGS) {
        method_ = definition->ml_meth;
      }
    }
  }

  bool is_denied(PyObject* tensor) const {
    return is_false(getter_ != nullptr   ? getter_(tensor, closure_)
                    : method_ != nullptr ? method_(tensor, nullptr)
                                         : ask_slowly(tensor));
  }

 private:
  PyObject* ask_slowly(PyObject* tensor) const {
    PyObject* value = PyObject_GetAttr(tensor, name_.ptr());
    if (value == nullptr || !PyCallable_Check(value)) {
      return value;
    }
    PyObject* answer = PyObject_CallNoArgs(value);
    Py_DECREF(value);
    return answer;
  }

  py::object name_;
  py::object descriptor_;
  getter getter_ = nullptr;
  void* closure_ = nullptr;
  PyCFunction method_ = nullptr;
};

// Where PyTorch keeps what a thread is in. Made when the package is imported,
// and never freed.
class PythonState {
 public:
  static const PythonState& instance() {
    static const PythonState* state = new PythonState();
    return *state;
  }

  bool is_plain() const {
    for (const auto& question : questions_) {
      if (!question.is_denied()) {
        return false;
      }
    }
    PyObject* level = PyDict_GetItem(forward_mode_.ptr(), level_.ptr());
    PyObject* profiling = PyDict_GetItem(profiler_.ptr(), profiling_.ptr());
    return level != nullptr && PyLong_AsLong(level) < 0 &&
           profiling == Py_False;
  }

  bool is_autocast_off() const { return is_excluded(autocast_, Py_True); }

  bool is_autograd_on() const { return is_excluded(autograd_, Py_False); }

  bool is_plain_type(PyObject* object) const {
    return Py_TYPE(object) == tensor_ || Py_TYPE(object) == parameter_;
  }

  bool requires_gradient(PyObject* tensor) const {
    return !requires_grad_.is_denied(tensor);
  }

  // A tensor that is nothing but dense memory on the CPU; otherwise nothing.
  std::optional<TensorView> memory_of(PyObject* tensor) const {
    const std::optional<TensorView> view = tensors_.read(tensor);
    return view && is_negated_.is_denied(tensor) ? view : std::nullopt;
  }

  bool can_read_tensors() const { return tensors_.can_be_read(); }

 private:
  // Whether this is the answer for a key of the dispatcher.
  bool is_excluded(const py::object& key, PyObject* expected) const {
    PyObject* answer = PyObject_CallOneArg(is_excluded_.ptr(), key.ptr());
    if (answer == nullptr) {
      PyErr_Clear();
      return false;
    }
    Py_DECREF(answer);
    return answer == expected;
  }

  PythonState() = default;

  BorrowedTensors tensors_;
  py::object tensor_type_ = attribute("torch", "Tensor");
  py::object parameter_type_ = attribute("torch.nn", "Parameter");
  PyTypeObject* tensor_ = reinterpret_cast<PyTypeObject*>(tensor_type_.ptr());
  PyTypeObject* parameter_ =
      reinterpret_cast<PyTypeObject*>(parameter_type_.ptr());
  std::array<Question, 5> questions_{
      Question(attribute("torch._C", "_are_functorch_transforms_active")),
      Question(attribute("torch._C", "_len_torch_dispatch_stack")),
      Question(attribute("torch._C", "_len_torch_function_stack")),
      Question(attribute("torch._C", "_is_tracing")),
      Question(attribute("torch._C._autograd", "_profiler_enabled")),
  };
  TensorQuestion requires_grad_{"requires_grad"};
  TensorQuestion is_negated_{"is_neg"};
  py::object forward_mode_ = attribute("torch.autograd.forward_ad", "__dict__");
  py::object profiler_ = attribute("torch.autograd.profiler", "__dict__");
  py::object is_excluded_ =
      attribute("torch._C", "_dispatch_tls_is_dispatch_key_excluded");
  py::object keys_ = attribute("torch._C", "DispatchKey");
  py::object autocast_ = attribute(keys_, "AutocastCPU");
  py::object autograd_ = attribute(keys_, "AutogradFunctionality");
  py::str level_ = interned("_current_level");
  py::str profiling_ = interned("_is_profiler_enabled");

  static py::str interned(const char* text) {
    return py::reinterpret_steal<py::str>(PyUnicode_InternFromString(text));
  }
};

// Tells observers that follow every operator of one.
class ObservedCall {
 public:
  explicit ObservedCall(const char* name) {
    aoti_record_function_start(name, nullptr, nullptr, 0, &handle_);
  }
  ~ObservedCall() { aoti_record_function_end(handle_); }
  ObservedCall(const ObservedCall&) = delete;
  ObservedCall& operator=(const ObservedCall&) = delete;

 private:
  AtenRecordFunctionHandle handle_ = nullptr;
};

struct DirectCall {
  std::string name;  // for observers; empty where they know of the call
  DirectKernel kernel;
  bool is_checked;
  bool has_autocast;
  py::object record;
  py::object otherwise;

  PyObject* operator()(PyObject* const* values, size_t count) const {
    const auto& state = PythonState::instance();
    if (count > kMaxArguments || !types_are_plain(values, count)) {
      return call(otherwise, values, count);
    }
    if (is_checked) {
      if (!state.is_plain() || (has_autocast && !state.is_autocast_off())) {
        return call(otherwise, values, count);
      }
      if (needs_gradient(values, count)) {
        const bool records = !record.is_none() && state.is_autograd_on();
        return call(records ? record : otherwise, values, count);
      }
    }
    return run(values, count);
  }

 private:
  static PyObject* call(const py::object& function, PyObject* const* values,
                        size_t count) {
    return PyObject_Vectorcall(function.ptr(), values, count, nullptr);
  }

  // Tensors of a subclass do as they like.
  static bool types_are_plain(PyObject* const* values, size_t count) {
    const auto& state = PythonState::instance();
    for (size_t i = 0; i < count; ++i) {
      if (!state.is_plain_type(values[i]) &&
          TensorBridge::instance().is_tensor(values[i])) {
        return false;
      }
    }
    return true;
  }

  static bool needs_gradient(PyObject* const* values, size_t count) {
    const auto& state = PythonState::instance();
    if (!aoti_torch_grad_mode_is_enabled()) {
      return false;
    }
    for (size_t i = 0; i < count; ++i) {
      if (state.is_plain_type(values[i]) &&
          state.requires_gradient(values[i])) {
        return true;
      }
    }
    return false;
  }

  // False for what no kernel takes as it is.
  static bool convert(PyObject* value, DirectArgument& argument) {
    const auto& state = PythonState::instance();
    if (state.is_plain_type(value)) {
      const auto memory = state.memory_of(value);
      if (!memory) {
        return false;
      }
      argument = *memory;
    } else if (value == Py_None) {
      argument = std::monostate{};
    } else if (PyFloat_CheckExact(value)) {
      argument = PyFloat_AS_DOUBLE(value);
    } else if (PyBool_Check(value)) {
      argument = value == Py_True;
    } else if (PyUnicode_CheckExact(value)) {
      Py_ssize_t length = 0;
      const char* text = PyUnicode_AsUTF8AndSize(value, &length);
      if (text == nullptr) {
        PyErr_Clear();
        return false;
      }
      argument = std::string_view(text, static_cast<size_t>(length));
    } else if (PyLong_CheckExact(value)) {
      int overflow = 0;
      argument =
          static_cast<int64_t>(PyLong_AsLongLongAndOverflow(value, &overflow));
      return overflow == 0;
    } else {
      const auto dtype = TensorBridge::instance().dtype_of_object(value);
      if (!dtype || *dtype == ScalarType::Undefined) {
        return false;
      }
      argument = *dtype;
    }
    return true;
  }

  PyObject* run(PyObject* const* values, size_t count) const {
    std::array<DirectArgument, kMaxArguments> arguments;
    DirectResults results;
    for (size_t i = 0; i < count; ++i) {
      if (!convert(values[i], arguments[i])) {
        return call(otherwise, values, count);
      }
    }
    if (!enter(arguments.data(), count, results)) {
      return call(otherwise, values, count);
    }
    return results[1] ? tuple_of(results) : object_of(*results[0]);
  }

  // False where the kernel refuses.
  bool enter(const DirectArgument* arguments, size_t count,
             DirectResults& results) const {
    PyThreadState* thread = PyEval_SaveThread();
    bool done = false;
    try {
      std::optional<ObservedCall> observed;
      if (!name.empty()) {
        observed.emplace(name.c_str());
      }
      done = kernel(arguments, count, results);
    } catch (const std::exception&) {
    }
    PyEval_RestoreThread(thread);
    return done;
  }

  static PyObject* object_of(const Tensor& tensor) {
    return TensorBridge::instance().object_of(tensor.get());
  }

  static PyObject* tuple_of(const DirectResults& results) {
    Py_ssize_t count = 0;
    while (count < static_cast<Py_ssize_t>(results.size()) && results[count]) {
      ++count;
    }
    PyObject* objects = PyTuple_New(count);
    for (Py_ssize_t i = 0; objects != nullptr && i < count; ++i) {
      PyObject* object = object_of(*results[i]);
      if (object == nullptr) {
        Py_CLEAR(objects);
        break;
      }
      PyTuple_SET_ITEM(objects, i, object);
    }
    return objects;
  }
};

PyObject* call_direct(PyObject* self, PyObject* const* values,
                      Py_ssize_t count) {
  const auto& direct =
      *static_cast<const DirectCall*>(PyCapsule_GetPointer(self, nullptr));
  return direct(values, static_cast<size_t>(count));
}

PyMethodDef direct_call_method = {
    "direct_call",
    reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_direct)),
    METH_FASTCALL, "An operator's kernel, or what stands in for it."};

// See pkg/ops/_call.py.
py::object direct_call(const std::string& name, uintptr_t kernel,
                       bool is_checked, bool has_autocast, py::object record,
                       py::object otherwise) {
  if (kernel == 0 || !PythonState::instance().can_read_tensors()) {
    return otherwise;
  }
  const py::capsule self(
      new DirectCall{name, reinterpret_cast<DirectKernel>(kernel), is_checked,
                     has_autocast, std::move(record), std::move(otherwise)},
      [](void* direct) { delete static_cast<DirectCall*>(direct); });
  return py::reinterpret_steal<py::object>(
      PyCFunction_New(&direct_call_method, self.ptr()));
}

}  // namespace

void define_direct_calls(py::module_& module) {
  module.def("_direct_call", &direct_call);
}

}  // namespace pkg::python
