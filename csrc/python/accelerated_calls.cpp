#include "python/accelerated_calls.h"

#include <array>
#include <optional>

#include "accelerate.h"
#include "python/tensor_bridge.h"
#include "python/thread_state.h"

namespace pkg::python {
namespace {

// Of the CPU library; null before one is loaded.
AcceleratedAddmm accelerated_addmm = nullptr;

// A number as operators take them; nothing for what is none of Python's own.
std::optional<double> number_of(PyObject* value) {
  if (PyFloat_CheckExact(value)) {
    return PyFloat_AS_DOUBLE(value);
  }
  if (!PyLong_CheckExact(value)) {
    return std::nullopt;
  }
  const double number = PyLong_AsDouble(value);
  if (number == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  return number;
}

// Tensors of a call, read in place.
class ReadTensors {
 public:
  // False for what is no plain tensor on the CPU. None is read as null where it
  // may be.
  bool read(PyObject* object, bool may_be_none, const TensorView*& view) {
    const auto& state = ThreadState::instance();
    if (object == Py_None) {
      view = nullptr;
      return may_be_none;
    }
    auto& place = views_[count_++];
    if (state.is_plain_type(object)) {
      place = state.memory_of(object);
    }
    view = place ? &*place : nullptr;
    return place.has_value();
  }

 private:
  std::array<std::optional<TensorView>, 4> views_;
  size_t count_ = 0;
};

enum Position { kOperator, kInput, kA, kB, kBeta, kAlpha, kActivation, kOut };
constexpr Py_ssize_t kPositions = 8;

bool read_call(PyObject* const* values, ReadTensors& tensors, AddmmCall& call,
               AddmmOutput& output) {
  const auto beta = number_of(values[kBeta]);
  const auto alpha = number_of(values[kAlpha]);
  if (!beta || !alpha || !tensors.read(values[kA], false, call.a) ||
      !tensors.read(values[kB], false, call.b) ||
      !tensors.read(values[kInput], true, call.input) ||
      !tensors.read(values[kOut], true, output.view)) {
    return false;
  }
  call.op = static_cast<AtenOperator>(PyLong_AsLong(values[kOperator]));
  call.beta = *beta;
  call.alpha = *alpha;
  call.activation = static_cast<Activation>(PyLong_AsLong(values[kActivation]));
  if (output.view != nullptr) {
    output.data = ThreadState::instance().memory_to_write(values[kOut]);
  }
  return output.view == nullptr || output.data != nullptr;
}

bool run_without_lock(const AddmmCall& call, AddmmOutput& output) {
  PyThreadState* thread = PyEval_SaveThread();
  bool is_done = false;
  try {
    is_done = accelerated_addmm(call, output);
  } catch (const std::exception&) {
    // PyTorch's kernel then says what is wrong, such as memory running out.
  }
  PyEval_RestoreThread(thread);
  return is_done;
}

// (operator, input or None, a, b, beta, alpha, activation, out or None): the
// result, True where it was written to `out`, None where PyTorch's own kernel
// is to be called.
PyObject* addmm(PyObject* /*module*/, PyObject* const* values,
                Py_ssize_t count) {
  if (count != kPositions) {
    PyErr_SetString(PyExc_TypeError,
                    "_accelerated_addmm takes eight arguments");
    return nullptr;
  }
  ReadTensors tensors;
  AddmmCall call{};
  AddmmOutput output;
  if (accelerated_addmm == nullptr ||
      !read_call(values, tensors, call, output) ||
      !run_without_lock(call, output)) {
    Py_RETURN_NONE;
  }
  if (output.view != nullptr) {
    Py_RETURN_TRUE;
  }
  return TensorBridge::instance().object_of(output.made->get());
}

PyMethodDef addmm_method = {
    "_accelerated_addmm",
    reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&addmm)),
    METH_FASTCALL, "See pkg/accelerate.py."};

}  // namespace

void define_accelerate_functions(py::module_& module) {
  module.attr("_accelerated_addmm") = py::reinterpret_steal<py::object>(
      PyCFunction_NewEx(&addmm_method, nullptr, nullptr));
  module.def(
      "_use_accelerated",
      [](uintptr_t addmm) {
        accelerated_addmm = ThreadState::instance().can_read_tensors()
                                ? reinterpret_cast<AcceleratedAddmm>(addmm)
                                : nullptr;
      },
      py::arg("addmm"), "Called by the loader.");
}

}  // namespace pkg::python
