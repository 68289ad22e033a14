// What csrc/cuda/host/launch.h takes from CUDA and PyTorch, for operators that
// are registered for CPU tensors and run their kernels on the emulator.
//
// There is one device, but host code must not rely on that: it is refused to
// launch a kernel, or to ask for a property of the device, without a guard that
// makes the tensors' device the current one, to launch on a stream that is not
// the current one, and to let a call's first kernel begin before the one ahead
// of it has ended (cuda/device/dependent_launch.cuh). What it reads of a tensor
// is seen where the test says which memory is the device's (device_memory.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <typeinfo>

#include "cuda/device/device.cuh"
#include "device_memory.h"
#include "host/check.h"

#define PKG_CUDA_DISPATCH_KEY CPU
#define PKG_CUDA_90A

using cudaStream_t = void*;

namespace pkg::cuda {

inline int device_guards = 0;

// Since the outermost guard was made, with which a call begins.
inline int64_t launched_kernels = 0;

class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t) {
    launched_kernels = device_guards++ == 0 ? 0 : launched_kernels;
  }
  ~DeviceGuard() { --device_guards; }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
};

inline void check_guarded(const char* what) {
  PKG_CHECK(device_guards > 0, "cuda emulator: ", what,
            " of whichever device is current: there is no DeviceGuard");
}

// Some address that is not the default stream's.
inline char emulated_stream = 0;

template <class Tensor>
cudaStream_t current_stream(const Tensor&) {
  return &emulated_stream;
}

// 80 for 8.0: the least, unless a test asks for another.
inline int emulated_capability() {
  const char* asked = std::getenv("PKG_EMULATED_CAPABILITY");
  return asked == nullptr ? 80 : std::atoi(asked);
}

inline int compute_capability() {
  check_guarded("the compute capability");
  return emulated_capability();
}

// Where it is not 9.0, that of 8.6, the least that there is from 8.0 on.
inline int emulated_shared_bytes() {
  return (emulated_capability() == 90 ? 227 : 99) * 1024;
}

inline int most_shared_bytes() {
  check_guarded("the shared memory");
  return emulated_shared_bytes();
}

// As many as leave long products of few tiles to be divided.
inline int multiprocessor_count() {
  check_guarded("the multiprocessors");
  return 3;
}

// Of a block of the last launch: tests see by them which kernel that was.
inline int launched_threads = 0;

// The type of the last launch's kernel, mangled: it names what a kernel is
// given.
inline const char* launched_kernel_type = "";

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t pieces, LaunchShape shape,
            cudaStream_t stream, const Arguments&... arguments) {
  static_assert(fits_parameters<Parameters...>);
  check_guarded("a kernel");
  PKG_CHECK(stream == &emulated_stream,
            "cuda emulator: a kernel on a stream that is not the current one");
  // Fewer blocks than there often is work, so that they have to take more.
  constexpr unsigned kFewBlocks = 5;
  if (pieces > 0) {
    PKG_CHECK(!shape.waits || launched_kernels > 0,
              "cuda emulator: a kernel that waits for the one before is the "
              "first of its call");
    ++launched_kernels;
    launched_threads = shape.threads;
    launched_kernel_type = typeid(kernel).name();
    emulation::set_most_shared_bytes(
        static_cast<size_t>(emulated_shared_bytes()));
    const emulation::KernelAccess access;
    emulation::launch(
        {std::min(grid_of(pieces), kFewBlocks)},
        {static_cast<unsigned>(shape.threads)},
        static_cast<size_t>(shape.shared_bytes), [&] { kernel(arguments...); },
        shape.asks_for_shared_memory());
    PKG_CHECK(emulation::have_stated_bounds(),
              "cuda emulator: a kernel without launch bounds");
    PKG_CHECK(!shape.waits || emulation::all_have_waited(),
              "cuda emulator: a kernel that does not wait for the one before");
  }
}

}  // namespace pkg::cuda
