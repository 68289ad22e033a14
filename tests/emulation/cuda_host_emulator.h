// What csrc/cuda/host/launch.h takes from CUDA and PyTorch, for operators that
// are registered for CPU tensors and run their kernels on the emulator.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "cuda/device/device.cuh"

#define PKG_CUDA_DISPATCH_KEY CPU
#define PKG_CUDA_90A

using cudaStream_t = void*;

namespace pkg::cuda {

class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t) {}
  ~DeviceGuard() {}
};

template <class Tensor>
cudaStream_t current_stream(const Tensor&) {
  return nullptr;
}

// That of compute capability 8.6, the least that there is from 8.0 on.
inline int most_shared_bytes() { return 99 * 1024; }

// 80 for 8.0: the least, unless a test asks for another.
inline int compute_capability() {
  const char* asked = std::getenv("PKG_EMULATED_CAPABILITY");
  return asked == nullptr ? 80 : std::atoi(asked);
}

// As many as leave long products of few tiles to be divided.
inline int multiprocessor_count() { return 3; }

// Of a block of the last launch: tests see by them which kernel that was.
inline int launched_threads = 0;

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t pieces, LaunchShape shape,
            cudaStream_t, const Arguments&... arguments) {
  // Fewer blocks than there often is work, so that they have to take more.
  constexpr int64_t kMostBlocks = 5;
  if (pieces > 0) {
    launched_threads = shape.threads;
    emulation::launch({static_cast<unsigned>(std::min(pieces, kMostBlocks))},
                      {static_cast<unsigned>(shape.threads)},
                      static_cast<size_t>(shape.shared_bytes),
                      [&] { kernel(arguments...); });
  }
}

}  // namespace pkg::cuda
