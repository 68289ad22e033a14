// Reads a Python tensor in place: no reference is taken, and nothing of the
// tensor changes.
//
// A handle of the stable ABI points to an at::Tensor, which is one pointer to
// the tensor's implementation, and Python tells that pointer as Tensor._cdata.
// So the address of a copy of it is a handle, good for as long as the Python
// object lives. Whether this holds is tried on a handle that PyTorch made.
//
// DLPack's exchange interface reads tensors too, and as fast, but asks for
// memory to write to: a copy-on-write tensor would be copied by being read.
#pragma once

#include <optional>

#include "host/tensor.h"
#include "python/pybind_headers.h"
#include "python/tensor_bridge.h"
#include "python/tensor_words.h"

namespace pkg::python {

class BorrowedTensors {
 public:
  BorrowedTensors() {
    const py::object type = py::module_::import("torch._C").attr("TensorBase");
    const py::object descriptor = py::getattr(type, "_cdata", py::none());
    if (Py_IS_TYPE(descriptor.ptr(), &PyGetSetDescr_Type)) {
      getter_ =
          reinterpret_cast<PyGetSetDescrObject*>(descriptor.ptr())->d_getset;
    }
    const py::object empty = py::module_::import("torch").attr("empty")(0);
    const Tensor tensor(TensorBridge::instance().handle_of(empty.ptr()));
    const void* implementation = *reinterpret_cast<void**>(tensor.get());
    if (implementation != asked_implementation(empty.ptr())) {
      getter_ = nullptr;
    }
  }

  // False where this PyTorch has another idea of handles.
  bool can_be_read() const { return getter_ != nullptr; }

  bool finds_words() const { return words_.are_found(); }

  // Of a tensor of the type torch.Tensor or Parameter; null where there is
  // none.
  void* implementation_of(PyObject* tensor) const {
    return words_.tells_implementation() ? words_.implementation_of(tensor)
                                         : asked_implementation(tensor);
  }

  // Whether nothing is left to ask of where and how the tensor lies. Where this
  // is not known it is asked as follows.
  bool is_ordinary(const void* implementation) const {
    return words_.is_ordinary(implementation);
  }

  // Whether it is known to lie so on the device.
  bool is_ordinary(const void* implementation, const DeviceKeys& device) const {
    return words_.is_ordinary(implementation, device);
  }

  bool is_dense_on_cpu(void* implementation) const {
    const auto tensor = reinterpret_cast<AtenTensorHandle>(&implementation);
    int32_t device = -1;
    int32_t layout = -1;
    return aoti_torch_get_device_type(tensor, &device) == TORCH_SUCCESS &&
           aoti_torch_get_layout(tensor, &layout) == TORCH_SUCCESS &&
           device == cpu_ && layout == strided_;
  }

  // A tensor that is dense on the CPU, if it is of a dtype that kernels take
  // and has memory; otherwise nothing.
  std::optional<TensorView> read(void* implementation) const {
    const auto tensor = reinterpret_cast<AtenTensorHandle>(&implementation);
    int32_t code = -1;
    int64_t dims = 0;
    int64_t* sizes = nullptr;
    int64_t* strides = nullptr;
    const void* data = nullptr;
    if (aoti_torch_get_dtype(tensor, &code) != TORCH_SUCCESS) {
      return std::nullopt;
    }
    const ScalarType dtype = scalar_type_of_code(code);
    if (!(is_floating(dtype) || is_integral(dtype)) ||
        aoti_torch_get_dim(tensor, &dims) != TORCH_SUCCESS ||
        aoti_torch_get_sizes(tensor, &sizes) != TORCH_SUCCESS ||
        aoti_torch_get_strides(tensor, &strides) != TORCH_SUCCESS ||
        torch_get_const_data_ptr(tensor, &data) != TORCH_SUCCESS) {
      return std::nullopt;
    }
    const auto count = static_cast<size_t>(dims);
    const TensorView view(data, {sizes, count}, {strides, count}, dtype);
    const bool is_readable = has_memory(tensor, data, element_size(dtype)) ||
                             product(view.sizes) == 0;
    return is_readable ? std::optional(view) : std::nullopt;
  }

  // The same of a tensor that is to be written to.
  std::optional<WritableView> read_to_write(void* implementation) const {
    const auto view = read(implementation);
    void* data = nullptr;
    return view && finds_memory_to_write(implementation, data)
               ? std::optional(WritableView(data, view->sizes, view->strides,
                                            view->dtype))
               : std::nullopt;
  }

  // Where to write to such a tensor, or null. One that shares its memory until
  // it is written to gets its own.
  void* memory_to_write(PyObject* object) const {
    void* implementation = implementation_of(object);
    void* data = nullptr;
    return implementation != nullptr &&
                   finds_memory_to_write(implementation, data)
               ? data
               : nullptr;
  }

 private:
  static bool finds_memory_to_write(void* implementation, void*& data) {
    return aoti_torch_get_data_ptr(
               reinterpret_cast<AtenTensorHandle>(&implementation), &data) ==
           TORCH_SUCCESS;
  }

  // A storage that was freed, and one of zeros that are kept without memory,
  // leave their tensors with an offset for an address.
  static bool has_memory(AtenTensorHandle tensor, const void* data,
                         int64_t element_size) {
    int64_t offset = 0;
    int64_t bytes = 0;
    return aoti_torch_get_storage_offset(tensor, &offset) == TORCH_SUCCESS &&
           reinterpret_cast<int64_t>(data) != offset * element_size &&
           aoti_torch_get_storage_size(tensor, &bytes) == TORCH_SUCCESS &&
           bytes > 0;
  }

  void* asked_implementation(PyObject* object) const {
    PyObject* address =
        getter_ != nullptr ? getter_->get(object, getter_->closure) : nullptr;
    void* result = address != nullptr ? PyLong_AsVoidPtr(address) : nullptr;
    Py_XDECREF(address);
    PyErr_Clear();
    return result;
  }

  TensorWords words_;
  const PyGetSetDef* getter_ = nullptr;
  int32_t cpu_ = aoti_torch_device_type_cpu();
  int32_t strided_ = aoti_torch_layout_strided();
};

}  // namespace pkg::python
