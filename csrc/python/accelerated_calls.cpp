#include "python/accelerated_calls.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <array>
#include <optional>
#include <span>

#include "accelerate.h"
#include "host/dispatch.h"
#include "python/numbers.h"
#include "python/tensor_bridge.h"
#include "python/thread_state.h"

namespace pkg::python {
namespace {

// Of the CPU library; null before one is loaded.
AcceleratedAddmm accelerated_addmm = nullptr;
AcceleratedAttention accelerated_attention = nullptr;

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
  std::array<std::optional<TensorView>, 7> views_;
  size_t count_ = 0;
};

// Calls a kernel with Python's lock released; false where it declines.
template <class Function, class Call, class Result>
bool run_without_lock(Function function, const Call& call, Result& result) {
  PyThreadState* thread = PyEval_SaveThread();
  bool is_done = false;
  try {
    is_done = function(call, result);
  } catch (const std::exception&) {
    // PyTorch's kernel then says what is wrong, such as memory running out.
  }
  PyEval_RestoreThread(thread);
  return is_done;
}

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

// PyTorch's kernels by its C shim, which takes a third of the time of its way
// for calls from Python. Another package's kernel is not called by that; and
// before 2.13 it would write what is refused to stderr.
bool may_call_shim = false;

using Shim = AOTITorchError (*)(AtenTensorHandle, AtenTensorHandle,
                                AtenTensorHandle, AtenTensorHandle, double,
                                double);

bool broadcasts(const TensorView& tensor, std::span<const int64_t> to) {
  const auto sizes = tensor.sizes;
  bool fits = sizes.size() <= to.size();
  for (size_t i = 1; fits && i <= sizes.size(); ++i) {
    const int64_t size = sizes[sizes.size() - i];
    fits = size == 1 || size == to[to.size() - i];
  }
  return fits;
}

// The sizes of the result of a call that PyTorch is known not to refuse; none
// of another one.
std::span<const int64_t> sizes_of_result(const AddmmCall& call,
                                         std::array<int64_t, 3>& sizes) {
  const size_t dims = call.op == AtenOperator::Addmm     ? 2
                      : call.op == AtenOperator::Baddbmm ? 3
                                                         : 0;
  const TensorView& a = *call.a;
  const TensorView& b = *call.b;
  if (dims == 0 || a.sizes.size() != dims || b.sizes.size() != dims ||
      !is_floating(a.dtype) || b.dtype != a.dtype ||
      call.input->dtype != a.dtype || a.sizes[dims - 1] != b.sizes[dims - 2] ||
      a.sizes[0] != (dims == 3 ? b.sizes[0] : a.sizes[0])) {
    return {};
  }
  std::copy_n(a.sizes.begin(), dims - 1, sizes.begin());
  sizes[dims - 1] = b.sizes[dims - 1];
  const std::span<const int64_t> result = std::span(sizes).first(dims);
  return broadcasts(*call.input, result) ? result : std::span<const int64_t>{};
}

// A new result; nothing where PyTorch is to be called by Python.
std::optional<Tensor> call_shim(PyObject* const* values,
                                const AddmmCall& call) {
  std::array<int64_t, 3> sizes{};
  const auto result = sizes_of_result(call, sizes);
  if (result.empty()) {
    return std::nullopt;
  }
  const auto& state = ThreadState::instance();
  void* const input = state.implementation_of(values[kInput]);
  void* const a = state.implementation_of(values[kA]);
  void* const b = state.implementation_of(values[kB]);
  const auto handle = [](void* const& implementation) {
    return reinterpret_cast<AtenTensorHandle>(
        const_cast<void**>(&implementation));
  };
  const Shim shim = call.op == AtenOperator::Addmm
                        ? &aoti_torch_cpu_addmm_out
                        : &aoti_torch_cpu_baddbmm_out;
  PyThreadState* thread = PyEval_SaveThread();
  std::optional<Tensor> made;
  try {
    made = empty_contiguous(result, call.a->dtype,
                            {aoti_torch_device_type_cpu(), -1});
    if (shim(made->get(), handle(input), handle(a), handle(b), call.beta,
             call.alpha) != TORCH_SUCCESS) {
      made.reset();
    }
  } catch (const std::exception&) {
    made.reset();  // such as memory running out, which PyTorch tells in words
  }
  PyEval_RestoreThread(thread);
  return made;
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
      !read_call(values, tensors, call, output)) {
    Py_RETURN_NONE;
  }
  if (!run_without_lock(accelerated_addmm, call, output)) {
    output.made = may_call_shim && output.view == nullptr
                      ? call_shim(values, call)
                      : std::nullopt;
    if (!output.made) {
      Py_RETURN_NONE;
    }
  }
  if (output.view != nullptr) {
    Py_RETURN_TRUE;
  }
  return TensorBridge::instance().object_of(output.made->get());
}

// (query, key, value, attn_mask or None, is_causal, scale or None), and for the
// backward pass (grad_output, output, log_sum_exp) after these: a tuple of the
// operator's results, None where PyTorch's own kernel is to be called.
PyObject* attention(PyObject* /*module*/, PyObject* const* values,
                    Py_ssize_t count) {
  constexpr Py_ssize_t kForward = 6;
  constexpr Py_ssize_t kBackward = 9;
  if (count != kForward && count != kBackward) {
    PyErr_SetString(PyExc_TypeError,
                    "_accelerated_attention takes six or nine arguments");
    return nullptr;
  }
  ReadTensors tensors;
  AttentionCall call{};
  AttentionResults results;
  const bool is_backward = count == kBackward;
  call.is_causal = values[4] == Py_True;
  if (values[5] != Py_None) {
    call.scale = number_of(values[5]);
  }
  if (accelerated_attention == nullptr ||
      (values[5] != Py_None && !call.scale) ||
      !tensors.read(values[0], false, call.query) ||
      !tensors.read(values[1], false, call.key) ||
      !tensors.read(values[2], false, call.value) ||
      !tensors.read(values[3], true, call.attn_mask) ||
      (is_backward && !(tensors.read(values[6], false, call.grad_output) &&
                        tensors.read(values[7], false, call.output) &&
                        tensors.read(values[8], false, call.log_sum_exp))) ||
      !run_without_lock(accelerated_attention, call, results)) {
    Py_RETURN_NONE;
  }
  py::tuple made(is_backward ? 3 : 2);
  for (size_t i = 0; i < made.size(); ++i) {
    made[i] = *results[i];
  }
  return made.release().ptr();
}

template <class Function>
PyMethodDef method(const char* name, Function* function) {
  return {name,
          reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          METH_FASTCALL, "See pkg/_accelerate_routes.py."};
}

PyMethodDef addmm_method = method("_accelerated_addmm", &addmm);
PyMethodDef attention_method = method("_accelerated_attention", &attention);

void use_accelerated(uintptr_t addmm, uintptr_t attention) {
  if (ThreadState::instance().can_read_tensors()) {
    accelerated_addmm = reinterpret_cast<AcceleratedAddmm>(addmm);
    accelerated_attention = reinterpret_cast<AcceleratedAttention>(attention);
  }
}

}  // namespace

void define_accelerate_functions(py::module_& module) {
  for (PyMethodDef* definition : {&addmm_method, &attention_method}) {
    module.attr(definition->ml_name) = py::reinterpret_steal<py::object>(
        PyCFunction_NewEx(definition, nullptr, nullptr));
  }
  module.def("_use_accelerated", &use_accelerated, py::arg("addmm"),
             py::arg("attention"), "Called by the loader.");
  module.def(
      "_let_products_call_shim",
      [](bool may) {
        may_call_shim = may && pkg::detail::last_error_function() != nullptr;
      },
      py::arg("may"), "See pkg/_accelerate_routes.py.");
}

}  // namespace pkg::python
