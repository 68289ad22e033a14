// Memory that is the device's: only kernels may touch it. Host code that reads
// a tensor would make a GPU's user wait for the device, or crash, and what it
// decides by the value would be missing in a CUDA graph.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pkg::emulation {

// Whole pages. Whoever touches them but a kernel is counted, and may go on.
void give_to_device(void* begin, size_t size);
// All of it is the host's again.
void take_from_device();
int64_t host_accesses();

// While it exists, kernels run.
class KernelAccess {
 public:
  KernelAccess();
  ~KernelAccess();
  KernelAccess(const KernelAccess&) = delete;
  KernelAccess& operator=(const KernelAccess&) = delete;
};

}  // namespace pkg::emulation
