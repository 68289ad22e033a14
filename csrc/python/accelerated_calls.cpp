#include "python/accelerated_calls.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <array>
#include <optional>
#include <utility>

#include "accelerate.h"
#include "host/last_error.h"
#include "python/guarded.h"
#include "python/interpreter_lock.h"
#include "python/kernel_function.h"
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
    elements_ += place ? pkg::product(place->sizes) : 0;
    return place.has_value();
  }

  int64_t elements() const { return elements_; }

 private:
  std::array<std::optional<TensorView>, 7> views_;
  size_t count_ = 0;
  int64_t elements_ = 0;
};

// Calls a kernel, with Python's lock released unless its tensors are small;
// false where it declines.
template <class Function>
bool run(const ReadTensors& tensors, const Function& function) {
  const ReleasedLock released(tensors.elements() > kFewElements);
  try {
    return function();
  } catch (const std::exception&) {
    return false;  // PyTorch's kernel says what is wrong, as of memory
  }
}

// What the dispatcher enters for one of PyTorch's products: a function written
// in C and without a key set, which spares a frame of Python's and an object a
// call. What is not taken goes to PyTorch's kernel.
struct ProductKernel {
  static constexpr const char* kCapsule = "pkg.ProductKernel";

  AtenOperator op;
  OriginalKernel original;

  bool has_input() const {
    return op == AtenOperator::Addmm || op == AtenOperator::Baddbmm ||
           op == AtenOperator::AddmmActivation;
  }
};

// Of a call; None and null are what was not given.
struct ProductArguments {
  PyObject* input = Py_None;
  PyObject* a = Py_None;
  PyObject* b = Py_None;
  PyObject* out = Py_None;
  PyObject* beta = nullptr;
  PyObject* alpha = nullptr;
  PyObject* use_gelu = nullptr;

  // False for names or numbers of arguments that are not the operator's.
  bool read(const ProductKernel& kernel, PyObject* const* values,
            Py_ssize_t count, PyObject* names) {
    if (count != (kernel.has_input() ? 3 : 2)) {
      return false;
    }
    input = kernel.has_input() ? values[0] : Py_None;
    a = values[count - 2];
    b = values[count - 1];
    const Py_ssize_t named = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
    for (Py_ssize_t i = 0; i < named; ++i) {
      PyObject** const place = named_place(PyTuple_GET_ITEM(names, i));
      if (place == nullptr) {
        return false;
      }
      *place = values[count + i];
    }
    return true;
  }

 private:
  PyObject** named_place(PyObject* name) {
    const auto is = [&](const char* text) {
      return PyUnicode_CompareWithASCIIString(name, text) == 0;
    };
    return is("out")        ? &out
           : is("beta")     ? &beta
           : is("alpha")    ? &alpha
           : is("use_gelu") ? &use_gelu
                            : nullptr;
  }
};

bool read_factor(PyObject* value, double& factor) {
  const auto number = value != nullptr ? number_of(value) : std::optional(1.0);
  factor = number.value_or(0.0);
  return number.has_value();
}

Activation activation_of(AtenOperator op, const ProductArguments& arguments) {
  return op != AtenOperator::AddmmActivation ? Activation::None
         : arguments.use_gelu == Py_True     ? Activation::Gelu
                                             : Activation::Relu;
}

bool read_call(const ProductArguments& arguments, ReadTensors& tensors,
               AddmmCall& call, AddmmOutput& output) {
  if (!tensors.read(arguments.a, false, call.a) ||
      !tensors.read(arguments.b, false, call.b) ||
      !tensors.read(arguments.input, true, call.input) ||
      !tensors.read(arguments.out, true, output.view) ||
      !read_factor(arguments.beta, call.beta) ||
      !read_factor(arguments.alpha, call.alpha)) {
    return false;
  }
  call.activation = activation_of(call.op, arguments);
  if (output.view != nullptr) {
    output.data = ThreadState::instance().memory_to_write(arguments.out);
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

// The implementations of a call's tensors, and handles on them. Made under
// Python's lock, which it may take to ask for them.
class BorrowedHandles {
 public:
  explicit BorrowedHandles(const ProductArguments& arguments)
      : implementations_{of(arguments.input), of(arguments.a), of(arguments.b),
                         of(arguments.out)} {}

  AtenTensorHandle input() { return at(0); }
  AtenTensorHandle a() { return at(1); }
  AtenTensorHandle b() { return at(2); }
  AtenTensorHandle out() { return at(3); }

 private:
  static void* of(PyObject* object) {
    return object != Py_None ? ThreadState::instance().implementation_of(object)
                             : nullptr;
  }
  AtenTensorHandle at(size_t i) {
    return reinterpret_cast<AtenTensorHandle>(&implementations_[i]);
  }

  std::array<void*, 4> implementations_;
};

// It makes the result itself; with `out` PyTorch's shim has none.
bool call_activation_shim(BorrowedHandles& handles, const AddmmCall& call,
                          AddmmOutput& output) {
  AtenTensorHandle made = nullptr;
  if (output.view != nullptr ||
      aoti_torch_cpu__addmm_activation(
          handles.input(), handles.a(), handles.b(), call.beta, call.alpha,
          call.activation == Activation::Gelu, &made) != TORCH_SUCCESS) {
    return false;
  }
  output.made = Tensor(made);
  return true;
}

// False where PyTorch is to be called by Python.
bool call_shim(BorrowedHandles& handles, const AddmmCall& call,
               AddmmOutput& output) {
  if (!may_call_shim) {
    return false;
  }
  if (call.op == AtenOperator::AddmmActivation) {
    return call_activation_shim(handles, call, output);
  }
  const Shim shim = call.op == AtenOperator::Addmm ? &aoti_torch_cpu_addmm_out
                    : call.op == AtenOperator::Baddbmm
                        ? &aoti_torch_cpu_baddbmm_out
                        : nullptr;
  if (shim == nullptr) {
    return false;
  }
  if (output.view == nullptr) {
    output.made = empty_contiguous(output.result_sizes(), call.a->dtype,
                                   {aoti_torch_device_type_cpu(), -1});
  }
  return shim(output.made ? output.made->get() : handles.out(), handles.input(),
              handles.a(), handles.b(), call.beta, call.alpha) == TORCH_SUCCESS;
}

// False where PyTorch is to be called by Python.
bool run_product(BorrowedHandles& handles, const AddmmCall& call,
                 AddmmOutput& output) {
  const Answer answer = accelerated_addmm(call, output);
  return answer == Answer::Taken ||
         (answer == Answer::Left && call_shim(handles, call, output));
}

PyObject* call_product(const ProductKernel& kernel, PyObject* const* values,
                       Py_ssize_t count, PyObject* names) {
  ProductArguments arguments;
  ReadTensors tensors;
  AddmmCall call{};
  call.op = kernel.op;
  AddmmOutput output;
  if (accelerated_addmm == nullptr ||
      !arguments.read(kernel, values, count, names) ||
      !read_call(arguments, tensors, call, output)) {
    return kernel.original.call(values, count, names);
  }
  BorrowedHandles handles(arguments);
  if (!run(tensors, [&] { return run_product(handles, call, output); })) {
    output.made.reset();  // PyTorch's kernel makes its own
    return kernel.original.call(values, count, names);
  }
  if (output.view != nullptr) {
    return Py_NewRef(arguments.out);
  }
  return TensorBridge::instance().object_of(output.made->get());
}

PyObject* product(PyObject* self, PyObject* const* values, Py_ssize_t count,
                  PyObject* names) {
  const auto& kernel = kernel_of<ProductKernel>(self);
  return guarded([&] { return call_product(kernel, values, count, names); });
}

// (query, key, value, attn_mask or None, is_causal, scale or None), and for the
// backward pass (grad_output, output, log_sum_exp) after these: a tuple of the
// operator's results, None where PyTorch's own kernel is to be called.
PyObject* call_attention(PyObject* const* values, Py_ssize_t count) {
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
      !run(tensors, [&] { return accelerated_attention(call, results); })) {
    Py_RETURN_NONE;
  }
  return TensorBridge::instance().tuple_of(results);
}

PyObject* attention(PyObject* /*module*/, PyObject* const* values,
                    Py_ssize_t count) {
  return guarded([&] { return call_attention(values, count); });
}

template <class Function>
PyMethodDef method(const char* name, Function* function, int flags) {
  return {name, as_c_function(function), flags,
          "See pkg/_accelerate_routes.py."};
}

PyMethodDef product_method =
    method("product", &product, METH_FASTCALL | METH_KEYWORDS);
PyMethodDef attention_method =
    method("_accelerated_attention", &attention, METH_FASTCALL);

py::object product_kernel(int32_t op, py::object original, py::object keys) {
  return function_of(product_method,
                     ProductKernel{static_cast<AtenOperator>(op),
                                   {std::move(original), std::move(keys)}});
}

void use_accelerated(uintptr_t addmm, uintptr_t attention) {
  if (ThreadState::instance().can_read_tensors()) {
    accelerated_addmm = reinterpret_cast<AcceleratedAddmm>(addmm);
    accelerated_attention = reinterpret_cast<AcceleratedAttention>(attention);
  }
}

}  // namespace

void define_accelerate_functions(py::module_& module) {
  module.attr(attention_method.ml_name) = py::reinterpret_steal<py::object>(
      PyCFunction_NewEx(&attention_method, nullptr, nullptr));
  module.def("_product_kernel", &product_kernel, py::arg("operator"),
             py::arg("original"), py::arg("keys"),
             "See pkg/_accelerate_routes.py.");
  module.def(
      "_finds_tensor_words",
      [] { return ThreadState::instance().finds_tensor_words(); },
      "Whether csrc/python/tensor_words.h has found both words of PyTorch's "
      "tensors: without them calls take longer.");
  module.def("_use_accelerated", &use_accelerated, py::arg("addmm"),
             py::arg("attention"), "Called by the loader.");
  module.def(
      "_let_products_call_shim",
      [](bool may) { may_call_shim = may && last_error_function() != nullptr; },
      py::arg("may"), "See pkg/_accelerate_routes.py.");
}

}  // namespace pkg::python
