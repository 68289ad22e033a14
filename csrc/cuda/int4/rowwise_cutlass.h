// The kernels on CUTLASS, in builds that have its headers (setup.py finds them,
// and defines PKG_WITH_CUTLASS then); each operator's is compiled in a file of
// its own.
#pragma once

#include "cuda/host/launch.h"
#include "cuda/int4/rowwise.cuh"

namespace pkg::cuda {

// Runs the problem where the device, the dtypes and the alignment are what
// tensor cores take, or returns false. The caller holds a DeviceGuard.
#if defined(PKG_WITH_CUTLASS)
bool launch_cutlass(const RowwiseScaledProblem<false>& problem,
                    cudaStream_t stream);
bool launch_cutlass(const RowwiseScaledProblem<true>& problem,
                    cudaStream_t stream);
#else
template <bool kPacked>
bool launch_cutlass(const RowwiseScaledProblem<kPacked>& /*problem*/,
                    cudaStream_t /*stream*/) {
  return false;
}
#endif

}  // namespace pkg::cuda
