// What the thread and its tensors are in, as Python knows it: the questions
// that decide whether PyTorch's dispatcher would do nothing but enter a CPU
// kernel.
//
// - the tensors: of the types torch.Tensor or Parameter and of no subclass, on
//   the CPU, dense, with memory, not lazily negated. Conjugate tensors are
//   complex, which no kernel takes; wrappers of torch.func have no memory;
// - the state of the thread: no transform of torch.func, no TorchDispatchMode
//   or TorchFunctionMode, no level of forward-mode differentiation, no tracing,
//   no profiler, and no autocast where the operator has a rule for it.
#pragma once

#include <array>
#include <optional>
#include <utility>

#include "python/borrowed_tensor.h"
#include "python/pybind_headers.h"
#include "python/unstable_symbols.h"

namespace pkg::python {

namespace py = pybind11;

// Takes over a reference. True for False, 0 and nothing else.
inline bool is_false(PyObject* answer) {
  if (answer == nullptr) {
    PyErr_Clear();
    return false;
  }
  const bool result = answer == Py_False || PyObject_Not(answer) == 1;
  Py_DECREF(answer);
  return result;
}

// None where this PyTorch lacks it.
inline py::object attribute(const py::object& owner, const char* name) {
  return py::getattr(owner, name, py::none());
}

inline py::object attribute(const char* module, const char* name) {
  return attribute(py::module_::import(module), name);
}

inline constexpr int kCallingConvention = METH_VARARGS | METH_KEYWORDS |
                                          METH_NOARGS | METH_O | METH_FASTCALL |
                                          METH_METHOD;

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
class ThreadState {
 public:
  static const ThreadState& instance() {
    static const ThreadState* state = new ThreadState();
    return *state;
  }

  // Whether observers may follow the operators of this thread. Where nothing
  // tells, they may.
  bool may_be_observed() const {
    const auto has_callbacks = UnstableSymbols::in_use().has_callbacks;
    return has_callbacks == nullptr || has_callbacks();
  }

  // Whether there may be tangents. Where PyTorch's library does not tell,
  // torch.autograd.forward_ad does, which does not hear of the levels that
  // compiled programs enter.
  bool is_forward_mode() const {
    if (const auto level_of = UnstableSymbols::in_use().forward_level) {
      return level_of(0) != nullptr;
    }
    PyObject* level =
        PyDict_GetItemWithError(forward_mode_.ptr(), level_.ptr());
    return level == nullptr || PyLong_AsLong(level) >= 0;
  }

  bool is_plain(bool has_autocast, bool may_be_observed) const {
    return has_plain_keys(has_autocast) && !has_function_mode() &&
           !is_forward_mode() && !(may_be_observed && is_profiled());
  }

  // The same of the device, for a thread that is plain for the CPU.
  bool is_plain_on(const DeviceKeys& device, bool has_autocast) const {
    const DispatchKeyWords& words = UnstableSymbols::in_use().key_words;
    return words.are_found() ? words.are_plain(device, has_autocast)
                             : !has_autocast || is_autocast_off(device);
  }

  // Whether a tensor is known to be nothing but dense memory on the device.
  bool is_ordinary(PyObject* tensor, const DeviceKeys& device) const {
    const void* implementation = tensors_.implementation_of(tensor);
    return implementation != nullptr &&
           tensors_.is_ordinary(implementation, device);
  }

  // Whether a tensor is nothing but dense memory on the CPU.
  bool is_on_cpu(PyObject* tensor) const {
    return plain_implementation_of(tensor) != nullptr;
  }

  bool is_autograd_on() const {
    const DispatchKeyWords& words = UnstableSymbols::in_use().key_words;
    return words.are_found() ? words.is_autograd_on()
                             : is_excluded(autograd_, Py_False);
  }

  bool is_plain_type(PyObject* object) const {
    return Py_TYPE(object) == tensor_ || Py_TYPE(object) == parameter_;
  }

  bool requires_gradient(PyObject* tensor) const {
    const auto requires_gradient = UnstableSymbols::in_use().requires_gradient;
    void* implementation = requires_gradient != nullptr
                               ? tensors_.implementation_of(tensor)
                               : nullptr;
    return implementation != nullptr ? requires_gradient(implementation)
                                     : !requires_grad_.is_denied(tensor);
  }

  // A tensor that is nothing but dense memory on the CPU; otherwise nothing.
  std::optional<TensorView> memory_of(PyObject* tensor) const {
    void* implementation = plain_implementation_of(tensor);
    return implementation != nullptr ? tensors_.read(implementation)
                                     : std::nullopt;
  }
  // The same of one that is to be written to, of which count_write() tells. One
  // that was made in inference mode may be written to in that mode alone, and
  // is else left to the dispatcher, which says so.
  std::optional<WritableView> memory_to_write_of(PyObject* tensor) const {
    void* implementation = plain_implementation_of(tensor);
    return implementation != nullptr && counts_writes() &&
                   (is_inference_.is_denied(tensor) ||
                    !is_inference_mode_.is_denied())
               ? tensors_.read_to_write(implementation)
               : std::nullopt;
  }

  // Autograd must notice where a tensor that it saved is overwritten. False
  // with Python's error set.
  bool count_write(PyObject* tensor) const {
    PyObject* tensors = PyTuple_Pack(1, tensor);
    PyObject* done = tensors != nullptr ? PyObject_CallOneArg(
                                              increment_version_.ptr(), tensors)
                                        : nullptr;
    Py_XDECREF(tensors);
    Py_XDECREF(done);
    return done != nullptr;
  }

  // What a handle of the stable ABI points to a copy of, or null.
  void* implementation_of(PyObject* tensor) const {
    return tensors_.implementation_of(tensor);
  }

  // Of such a tensor, or null.
  void* memory_to_write(PyObject* tensor) const {
    return tensors_.memory_to_write(tensor);
  }

  bool can_read_tensors() const { return tensors_.can_be_read(); }

  bool finds_tensor_words() const { return tensors_.finds_words(); }

 private:
  void* plain_implementation_of(PyObject* tensor) const {
    void* implementation = tensors_.implementation_of(tensor);
    const bool is_plain = implementation != nullptr &&
                          (tensors_.is_ordinary(implementation) ||
                           (tensors_.is_dense_on_cpu(implementation) &&
                            is_negated_.is_denied(tensor)));
    return is_plain ? implementation : nullptr;
  }

  bool counts_writes() const { return !increment_version_.is_none(); }

  // Transforms, modes below the dispatcher, tracing and autocast.
  bool has_plain_keys(bool has_autocast) const {
    const DispatchKeyWords& words = UnstableSymbols::in_use().key_words;
    return words.are_found() ? words.are_plain(cpu_, has_autocast)
                             : is_plain_by_questions(has_autocast);
  }

  bool is_plain_by_questions(bool has_autocast) const {
    for (const auto& question : questions_) {
      if (!question.is_denied()) {
        return false;
      }
    }
    return !has_autocast || is_autocast_off(cpu_);
  }

  bool is_autocast_off(const DeviceKeys& device) const {
    return is_excluded(device.autocast_key(), Py_True);
  }

  bool has_function_mode() const {
    const auto has_function_mode = UnstableSymbols::in_use().has_function_mode;
    return has_function_mode != nullptr ? has_function_mode()
                                        : !function_modes_.is_denied();
  }

  bool is_profiled() const {
    PyObject* profiling =
        PyDict_GetItemWithError(profiler_.ptr(), profiling_.ptr());
    return profiling != Py_False || !thread_profiler_.is_denied();
  }

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

  ThreadState() = default;

  BorrowedTensors tensors_;
  py::object tensor_type_ = attribute("torch", "Tensor");
  py::object parameter_type_ = attribute("torch.nn", "Parameter");
  PyTypeObject* tensor_ = reinterpret_cast<PyTypeObject*>(tensor_type_.ptr());
  PyTypeObject* parameter_ =
      reinterpret_cast<PyTypeObject*>(parameter_type_.ptr());
  std::array<Question, 3> questions_{
      Question(attribute("torch._C", "_are_functorch_transforms_active")),
      Question(attribute("torch._C", "_len_torch_dispatch_stack")),
      Question(attribute("torch._C", "_is_tracing")),
  };
  Question function_modes_{attribute("torch._C", "_len_torch_function_stack")};
  Question thread_profiler_{
      attribute("torch._C._autograd", "_profiler_enabled")};
  TensorQuestion requires_grad_{"requires_grad"};
  TensorQuestion is_inference_{"is_inference"};
  Question is_inference_mode_{attribute("torch", "is_inference_mode_enabled")};
  TensorQuestion is_negated_{"is_neg"};
  py::object forward_mode_ = attribute("torch.autograd.forward_ad", "__dict__");
  py::object profiler_ = attribute("torch.autograd.profiler", "__dict__");
  py::object increment_version_ = attribute("torch._C", "_increment_version");
  py::object is_excluded_ =
      attribute("torch._C", "_dispatch_tls_is_dispatch_key_excluded");
  py::object keys_ = attribute("torch._C", "DispatchKey");
  DeviceKeys cpu_{"CPU"};
  py::object autograd_ = attribute(keys_, "AutogradFunctionality");
  py::str level_ = interned("_current_level");
  py::str profiling_ = interned("_is_profiler_enabled");

  static py::str interned(const char* text) {
    return py::reinterpret_steal<py::str>(PyUnicode_InternFromString(text));
  }
};

}  // namespace pkg::python
