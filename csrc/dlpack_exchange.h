// The part of DLPack's C exchange interface (version 1, dmlc/dlpack) that reads
// a Python tensor in place: PyTorch offers it since 2.10 as an attribute of
// torch.Tensor, and its layout is stable.
#pragma once

#include <Python.h>

#include <cstdint>

namespace pkg::dlpack {

inline constexpr const char* kAttribute = "__dlpack_c_exchange_api__";
inline constexpr const char* kCapsule = "dlpack_exchange_api";
inline constexpr uint32_t kMajorVersion = 1;
inline constexpr int32_t kCpu = 1;  // DLDeviceType

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;

  bool operator==(const DataType&) const = default;
};

// DLDataTypeCode
enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kBool = 6
};

// DLTensor
struct TensorDescription {
  void* data;
  int32_t device_type;
  int32_t device_index;
  int32_t dims;
  DataType dtype;
  int64_t* sizes;
  int64_t* strides;
  uint64_t byte_offset;
};

// DLPackExchangeAPI
struct ExchangeInterface {
  uint32_t major_version;
  uint32_t minor_version;
  ExchangeInterface* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  // Borrows from the object. Zero, or -1 with a Python error set.
  int (*describe)(void* object, TensorDescription* description);
  void* current_work_stream;
};

}  // namespace pkg::dlpack
