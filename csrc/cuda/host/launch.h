// The steps that every CUDA operator takes after its checks: the device, the
// stream, the launch, the types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "cuda/device/batch.cuh"
#include "cuda/device/numeric.cuh"
#include "host/check.h"
#include "host/tensor.h"

namespace pkg::cuda {

// Whether a variable of the environment says 0, as of a way of kernels that is
// to be compared with another.
inline bool is_turned_off(const char* variable) {
  const char* const asked = std::getenv(variable);
  return asked != nullptr && std::strcmp(asked, "0") == 0;
}

}  // namespace pkg::cuda

#ifdef __CUDACC__

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#define PKG_CUDA_DISPATCH_KEY CUDA

namespace pkg::cuda {

using torch::stable::accelerator::DeviceGuard;

inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_get_current_cuda_stream(device_of(tensor).index, &stream));
  return static_cast<cudaStream_t>(stream);
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0;
  int value = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

// Of shared memory that a block of the device may ask for.
inline int most_shared_bytes() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

inline int multiprocessor_count() {
  return device_attribute(cudaDevAttrMultiProcessorCount);
}

// 80 for 8.0.
inline int compute_capability() {
  return 10 * device_attribute(cudaDevAttrComputeCapabilityMajor) +
         device_attribute(cudaDevAttrComputeCapabilityMinor);
}

// Whether kernels may begin while the one before still runs: those compiled for
// compute capability 9.0, the only ones that wait for it themselves.
// PKG_CUDA_EARLY_LAUNCHES=0 has them begin after it, to compare the two.
inline bool may_begin_early() {
#ifdef PKG_CUDA_90A
  return compute_capability() == 90 &&
         !is_turned_off("PKG_CUDA_EARLY_LAUNCHES");
#else
  return false;
#endif
}

// Runs a kernel whose blocks, walking in steps of the grid, share out `pieces`
// of work. The caller holds a DeviceGuard.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t pieces, LaunchShape shape,
            cudaStream_t stream, const Arguments&... arguments) {
  static_assert(fits_parameters<Parameters...>);
  if (pieces > 0) {
    if (shape.asks_for_shared_memory()) {
      // On every device.
      STD_CUDA_CHECK(cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
          shape.shared_bytes));
    }
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid_of(pieces);
    config.blockDim = static_cast<unsigned>(shape.threads);
    config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = shape.waits && may_begin_early() ? 1 : 0;
    STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

}  // namespace pkg::cuda

#else

// The same for CPU tensors, on which the emulator runs the kernels.
#include "cuda_host_emulator.h"

#endif

namespace pkg::cuda {

// Calls function(example) with a value of the device's type.
template <class Function>
void with_floating_type(ScalarType type, Function&& function) {
  switch (type) {
    case ScalarType::Double:
      return function(double{});
    case ScalarType::Float:
      return function(float{});
    case ScalarType::Half:
      return function(float16{});
    case ScalarType::BFloat16:
      return function(bfloat16{});
    default:
      fail("no CUDA kernel takes ", dtype_name(type));
  }
}

// The dtype of a tensor that holds sums between two kernels.
template <class Number>
constexpr ScalarType number_type() {
  if constexpr (std::is_same_v<Number, double>) {
    return ScalarType::Double;
  } else if constexpr (std::is_same_v<Number, int32_t>) {
    return ScalarType::Int;
  } else {
    static_assert(std::is_same_v<Number, float>);
    return ScalarType::Float;
  }
}

inline void check_batch_dims(const char* op, int64_t dims) {
  PKG_CHECK(dims <= kMaxBatchDims, op, ": the inputs have ", dims,
            " dimensions that cannot be merged; the CUDA kernels take ",
            kMaxBatchDims);
}

}  // namespace pkg::cuda
