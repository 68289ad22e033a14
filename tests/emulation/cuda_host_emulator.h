// What csrc/cuda/host/launch.h takes from CUDA and PyTorch, for operators that
// are registered for CPU tensors and run their kernels on the emulator.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda_emulator.h"

#define PKG_CUDA_DISPATCH_KEY CPU

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

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t pieces, int threads,
            cudaStream_t, const Arguments&... arguments) {
  // Fewer blocks than there often is work, so that they have to take more.
  constexpr int64_t kMostBlocks = 5;
  if (pieces > 0) {
    emulation::launch({static_cast<unsigned>(std::min(pieces, kMostBlocks))},
                      {static_cast<unsigned>(threads)}, 0,
                      [&] { kernel(arguments...); });
  }
}

}  // namespace pkg::cuda
