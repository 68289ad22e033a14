// Host-side helpers on stable tensors, shared by the CPU and CUDA operators.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "host/check.h"
#include "host/last_error.h"
#include "host/strides.h"

namespace pkg {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The shim's numbering of dtypes may differ from that of the headers, and each
// of its constants is a call: translate through a table that is filled once.
inline ScalarType scalar_type_of_code(int32_t code) {
  static const auto table = [] {
    std::array<ScalarType, 64> types;
    types.fill(ScalarType::Undefined);
    const auto set = [&](int32_t key, ScalarType type) {
      types.at(static_cast<size_t>(key)) = type;
    };
    set(aoti_torch_dtype_bool(), ScalarType::Bool);
    set(aoti_torch_dtype_uint8(), ScalarType::Byte);
    set(aoti_torch_dtype_int8(), ScalarType::Char);
    set(aoti_torch_dtype_int16(), ScalarType::Short);
    set(aoti_torch_dtype_int32(), ScalarType::Int);
    set(aoti_torch_dtype_int64(), ScalarType::Long);
    set(aoti_torch_dtype_float16(), ScalarType::Half);
    set(aoti_torch_dtype_bfloat16(), ScalarType::BFloat16);
    set(aoti_torch_dtype_float32(), ScalarType::Float);
    set(aoti_torch_dtype_float64(), ScalarType::Double);
    set(aoti_torch_dtype_complex32(), ScalarType::ComplexHalf);
    set(aoti_torch_dtype_complex64(), ScalarType::ComplexFloat);
    set(aoti_torch_dtype_complex128(), ScalarType::ComplexDouble);
    set(aoti_torch_dtype_uint16(), ScalarType::UInt16);
    set(aoti_torch_dtype_uint32(), ScalarType::UInt32);
    set(aoti_torch_dtype_uint64(), ScalarType::UInt64);
    set(aoti_torch_dtype_float8_e5m2(), ScalarType::Float8_e5m2);
    set(aoti_torch_dtype_float8_e4m3fn(), ScalarType::Float8_e4m3fn);
    set(aoti_torch_dtype_float8_e5m2fnuz(), ScalarType::Float8_e5m2fnuz);
    set(aoti_torch_dtype_float8_e4m3fnuz(), ScalarType::Float8_e4m3fnuz);
    return types;
  }();
  return code >= 0 && code < static_cast<int32_t>(table.size())
             ? table[static_cast<size_t>(code)]
             : ScalarType::Undefined;
}

inline ScalarType dtype_of(AtenTensorHandle tensor) {
  int32_t code = -1;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &code));
  return scalar_type_of_code(code);
}

inline ScalarType dtype_of(const Tensor& tensor) {
  return dtype_of(tensor.get());
}

inline int32_t code_of_scalar_type(ScalarType type) {
  static const auto table = [] {
    std::array<int32_t, 64> codes;
    codes.fill(-1);
    for (int32_t code = 0; code < 64; ++code) {
      const ScalarType type = scalar_type_of_code(code);
      if (type != ScalarType::Undefined) {
        codes.at(static_cast<size_t>(type)) = code;
      }
    }
    return codes;
  }();
  return table[static_cast<size_t>(type)];
}

// The name that a Python user knows a dtype by.
inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Bool:
      return "torch.bool";
    case ScalarType::Byte:
      return "torch.uint8";
    case ScalarType::Char:
      return "torch.int8";
    case ScalarType::Short:
      return "torch.int16";
    case ScalarType::Int:
      return "torch.int32";
    case ScalarType::Long:
      return "torch.int64";
    case ScalarType::Half:
      return "torch.float16";
    case ScalarType::BFloat16:
      return "torch.bfloat16";
    case ScalarType::Float:
      return "torch.float32";
    case ScalarType::Double:
      return "torch.float64";
    case ScalarType::ComplexHalf:
      return "torch.complex32";
    case ScalarType::ComplexFloat:
      return "torch.complex64";
    case ScalarType::ComplexDouble:
      return "torch.complex128";
    case ScalarType::UInt16:
      return "torch.uint16";
    case ScalarType::UInt32:
      return "torch.uint32";
    case ScalarType::UInt64:
      return "torch.uint64";
    case ScalarType::Float8_e5m2:
      return "torch.float8_e5m2";
    case ScalarType::Float8_e4m3fn:
      return "torch.float8_e4m3fn";
    case ScalarType::Float8_e5m2fnuz:
      return "torch.float8_e5m2fnuz";
    case ScalarType::Float8_e4m3fnuz:
      return "torch.float8_e4m3fnuz";
    default:
      return "a dtype unknown to pkg";
  }
}

// Bytes; of a dtype that has a name above.
inline int64_t element_size(ScalarType type) {
  return static_cast<int64_t>(
      aoti_torch_dtype_element_size(code_of_scalar_type(type)));
}

inline bool is_floating(ScalarType type) {
  return type == ScalarType::Double || type == ScalarType::Float ||
         type == ScalarType::Half || type == ScalarType::BFloat16;
}

inline bool is_half_precision(ScalarType type) {
  return type == ScalarType::Half || type == ScalarType::BFloat16;
}

inline bool is_integral(ScalarType type) {
  return type == ScalarType::Bool || type == ScalarType::Byte ||
         type == ScalarType::Char || type == ScalarType::Short ||
         type == ScalarType::Int || type == ScalarType::Long;
}

inline std::span<const int64_t> sizes_of(AtenTensorHandle tensor) {
  int64_t* sizes = nullptr;
  int64_t dim = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dim));
  return {sizes, static_cast<size_t>(dim)};
}

inline std::span<const int64_t> sizes_of(const Tensor& tensor) {
  return sizes_of(tensor.get());
}

inline std::span<const int64_t> strides_of(const Tensor& tensor) {
  int64_t* strides = nullptr;
  int64_t dim = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &dim));
  return {strides, static_cast<size_t>(dim)};
}

inline std::string shape_text(std::span<const int64_t> sizes) {
  std::ostringstream text;
  text << '(';
  for (size_t i = 0; i < sizes.size(); ++i) {
    text << sizes[i] << (i + 1 < sizes.size() ? ", " : "");
  }
  text << (sizes.size() == 1 ? ",)" : ")");
  return text.str();
}

inline int64_t product(std::span<const int64_t> values) {
  int64_t result = 1;
  for (const int64_t value : values) {
    result *= value;
  }
  return result;
}

struct DeviceId {
  int32_t type;
  int32_t index;

  bool operator==(const DeviceId&) const = default;
};

inline DeviceId device_of(AtenTensorHandle tensor) {
  DeviceId device{};
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &device.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &device.index));
  return device;
}

inline DeviceId device_of(const Tensor& tensor) {
  return device_of(tensor.get());
}

inline bool has_strided_layout(AtenTensorHandle tensor) {
  static const int32_t strided = aoti_torch_layout_strided();
  int32_t layout = strided;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor, &layout));
  return layout == strided;
}

inline bool is_defined_tensor(AtenTensorHandle tensor) {
  bool is_defined = true;
  TORCH_ERROR_CODE_CHECK(aoti_torch_is_defined(tensor, &is_defined));
  return is_defined;
}

// An operand as a kernel sees it, each property read once. It borrows from the
// tensor that it is made of.
class TensorView {
 public:
  // An undefined tensor, which is what None in a tensor's place becomes, has
  // no property: check_strided() refuses it.
  // NOLINTNEXTLINE(google-explicit-constructor): a tensor may always be viewed.
  TensorView(const Tensor& tensor) : TensorView(tensor.get()) {}

  explicit TensorView(AtenTensorHandle tensor)
      : is_defined(is_defined_tensor(tensor)), tensor_(tensor) {
    if (!is_defined) {
      return;
    }
    sizes = sizes_of(tensor);
    dtype = dtype_of(tensor);
    device = device_of(tensor);
    is_strided = has_strided_layout(tensor);
    if (is_strided) {
      int64_t* data = nullptr;
      TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &data));
      strides = {data, sizes.size()};
    }
  }

  // Dense memory on the CPU.
  TensorView(const void* data, std::span<const int64_t> sizes,
             std::span<const int64_t> strides, ScalarType dtype)
      : sizes(sizes),
        strides(strides),
        dtype(dtype),
        device{aoti_torch_device_type_cpu(), -1},
        is_strided(true),
        data_(data) {}

  // Only asked for when it is used: a tensor under tracing has none.
  const void* const_data_ptr() const {
    if (tensor_ == nullptr) {
      return data_;
    }
    const void* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(tensor_, &data));
    return data;
  }

  // False for a tensor whose storage was freed, as FSDP frees that of a
  // parameter between its uses: untyped_storage().resize_(0).
  bool has_memory() const {
    if (tensor_ == nullptr || product(sizes) == 0) {
      return true;
    }
    int64_t bytes = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor_, &bytes));
    return bytes > 0;
  }

  std::span<const int64_t> sizes;
  std::span<const int64_t> strides;
  ScalarType dtype = ScalarType::Undefined;
  DeviceId device{-1, -1};
  bool is_defined = true;
  bool is_strided = false;

 protected:
  AtenTensorHandle tensor_ = nullptr;
  const void* data_ = nullptr;
};

// An operand that a kernel writes to. Borrowed too.
class WritableView : public TensorView {
 public:
  // NOLINTNEXTLINE(google-explicit-constructor): as above.
  WritableView(const Tensor& tensor) : TensorView(tensor) {}

  // Dense memory on the CPU.
  WritableView(void* data, std::span<const int64_t> sizes,
               std::span<const int64_t> strides, ScalarType dtype)
      : TensorView(data, sizes, strides, dtype) {}

  // A tensor that shares its memory until it is written to gets its own.
  void* mutable_data_ptr() const {
    if (tensor_ == nullptr) {
      return const_cast<void*>(data_);  // as the constructor was given it
    }
    void* data = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor_, &data));
    return data;
  }
};

inline std::span<const int64_t> sizes_of(const TensorView& view) {
  return view.sizes;
}

inline std::span<const int64_t> strides_of(const TensorView& view) {
  return view.strides;
}

inline ScalarType dtype_of(const TensorView& view) { return view.dtype; }

inline DeviceId device_of(const TensorView& view) { return view.device; }

// Of a tensor of at most kMaxDims dimensions.
inline bool is_contiguous(const TensorView& view) {
  return has_strides(view.sizes, view.strides, contiguous_strides(view.sizes));
}

inline std::string shape_text(const TensorView& tensor) {
  return shape_text(tensor.sizes);
}

// Every operand passes here before a kernel reads it: None, a sparse or
// otherwise exotic tensor, which has no strides, and one without memory.
inline void check_strided(const char* op, const char* name,
                          const TensorView& tensor) {
  PKG_CHECK(tensor.is_defined, op, ": ", name,
            " is None; it must be a torch.Tensor");
  PKG_CHECK(tensor.is_strided, op, ": ", name,
            " is not a strided (dense) tensor; convert it with .to_dense()");
  PKG_CHECK(tensor.has_memory(), op, ": ", name, " of shape ",
            shape_text(tensor),
            " has no memory: its storage was freed (resized to 0 bytes); "
            "restore it, as FSDP's unshard() does, before the call");
}

inline void check_floating(const char* op, const char* name,
                           const TensorView& tensor) {
  check_strided(op, name, tensor);
  const ScalarType type = dtype_of(tensor);
  PKG_CHECK(is_floating(type), op, ": ", name, " is ", dtype_name(type),
            "; supported are torch.float16, bfloat16, float32 and float64");
}

inline std::string device_text(DeviceId device) {
  if (device.type == aoti_torch_device_type_cpu()) {
    return "cpu";
  }
  const std::string name = device.type == aoti_torch_device_type_cuda() ? "cuda"
                           : device.type == aoti_torch_device_type_meta()
                               ? "meta"
                               : "another device";
  return device.index < 0 ? name : name + ":" + std::to_string(device.index);
}

// All tensors of one operator live on one device; PyTorch's dispatcher sends a
// call with a CPU and a CUDA tensor to the CUDA kernel, which must refuse it.
inline void check_same_device(const char* op, const char* first_name,
                              const TensorView& first, const char* name,
                              const TensorView& tensor) {
  const DeviceId expected = device_of(first);
  const DeviceId actual = device_of(tensor);
  PKG_CHECK(expected == actual, op, ": ", name, " is on ", device_text(actual),
            " but ", first_name, " is on ", device_text(expected),
            "; move them to one device");
}

[[noreturn]] [[gnu::cold]] inline void fail_to_allocate(
    std::span<const int64_t> sizes, ScalarType dtype) {
  const LastError last_error = last_error_function();
  fail("no memory for a result of shape ", shape_text(sizes), " and dtype ",
       dtype_name(dtype), ": ",
       last_error != nullptr ? last_error() : "PyTorch printed why on stderr");
}

inline Tensor empty_strided(std::span<const int64_t> sizes,
                            std::span<const int64_t> strides, ScalarType dtype,
                            DeviceId device) {
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                               strides.data(), code_of_scalar_type(dtype),
                               device.type, device.index,
                               &handle) != TORCH_SUCCESS) {
    fail_to_allocate(sizes, dtype);
  }
  return Tensor(handle);
}

inline Tensor empty_contiguous(std::span<const int64_t> sizes, ScalarType dtype,
                               DeviceId device) {
  PKG_CHECK(sizes.size() <= kMaxDims, "a tensor of ", sizes.size(),
            " dimensions is asked for; at most ", kMaxDims, " are supported");
  const Strides strides = contiguous_strides(sizes);
  return empty_strided(sizes, {strides.data(), sizes.size()}, dtype, device);
}

}  // namespace pkg
