#include "python/generator_draws.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "host/tensor.h"
#include "python/guarded.h"
#include "python/kernel_function.h"
#include "python/thread_state.h"

namespace py = pybind11;

namespace pkg::python {
namespace {

using CountBytes = int64_t (*)(const void*, int64_t);
using Draw = int32_t (*)(void*, int64_t, uint32_t*);

// The bytes that a generator's state lies in, and the tensor that holds them.
struct SavedState {
  py::object tensor;
  char* bytes;
  size_t size;

  explicit SavedState(const py::object& generator)
      : tensor(generator.attr("get_state")()),
        bytes(reinterpret_cast<char*>(
            tensor.attr("data_ptr")().cast<uintptr_t>())),
        size(tensor.attr("numel")().cast<size_t>()) {}
};

// Moves a generator of the CPU on by a draw of so many elements. Returns what
// pkg_accelerate_bernoulli takes: `left`, and the states that the draw is made
// from.
//
// Python's lock is held, and no line of Python runs after which another thread
// could have it. One that is in C++ without the lock may draw meanwhile: the
// generator is then found changed, and all is done anew. What such a one draws
// between that look and set_state() is drawn once more by who comes next.
std::pair<int32_t, py::bytes> draw(const py::object& generator, int64_t count,
                                   uintptr_t count_bytes,
                                   uintptr_t draw_states) {
  for (;;) {
    const SavedState saved(generator);
    const std::vector<char> before(saved.bytes, saved.bytes + saved.size);
    const int64_t bytes =
        reinterpret_cast<CountBytes>(count_bytes)(saved.bytes, count);
    auto states = py::reinterpret_steal<py::bytes>(
        PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
    if (!states) {
      throw py::error_already_set();
    }
    const int32_t left = reinterpret_cast<Draw>(draw_states)(
        saved.bytes, count,
        reinterpret_cast<uint32_t*>(PyBytes_AS_STRING(states.ptr())));
    const SavedState now(generator);
    if (std::equal(before.begin(), before.end(), now.bytes)) {
      generator.attr("set_state")(saved.tensor);
      return {left, std::move(states)};
    }
  }
}

// What the dispatcher enters for bernoulli_: a function written in C, which
// spares what is small a frame of Python's.
struct BernoulliKernel {
  static constexpr const char* kCapsule = "pkg.BernoulliKernel";

  py::object ours;
  int64_t least;  // elements: fewer go to PyTorch's
  OriginalKernel theirs;
};

PyObject* call_bernoulli(const BernoulliKernel& kernel, PyObject* const* values,
                         Py_ssize_t count, PyObject* names) {
  const auto tensor = count > 0 && ThreadState::instance().can_read_tensors()
                          ? ThreadState::instance().memory_of(values[0])
                          : std::nullopt;
  if (!tensor || product(tensor->sizes) >= kernel.least) {
    return PyObject_Vectorcall(kernel.ours.ptr(), values,
                               static_cast<size_t>(count), names);
  }
  return kernel.theirs.call(values, count, names);
}

PyObject* bernoulli(PyObject* self, PyObject* const* values, Py_ssize_t count,
                    PyObject* names) {
  const auto& kernel = kernel_of<BernoulliKernel>(self);
  return guarded([&] { return call_bernoulli(kernel, values, count, names); });
}

PyMethodDef bernoulli_method = {"bernoulli", as_c_function(&bernoulli),
                                METH_FASTCALL | METH_KEYWORDS,
                                "See pkg/_accelerate_dropout.py."};

py::object bernoulli_kernel(py::object ours, py::object theirs, py::object keys,
                            int64_t least) {
  return function_of(
      bernoulli_method,
      BernoulliKernel{
          std::move(ours), least, {std::move(theirs), std::move(keys)}});
}

}  // namespace

void define_generator_draws(py::module_& module) {
  module.def("_draw", &draw, py::arg("generator"), py::arg("count"),
             py::arg("count_bytes"), py::arg("draw_states"),
             "See pkg/_accelerate_dropout.py.");
  module.def("_bernoulli_kernel", &bernoulli_kernel, py::arg("ours"),
             py::arg("theirs"), py::arg("keys"), py::arg("least"),
             "See pkg/_accelerate_dropout.py.");
}

}  // namespace pkg::python
