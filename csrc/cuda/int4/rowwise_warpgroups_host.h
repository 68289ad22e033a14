// The way of many rows (cuda/int4/rowwise_warpgroups.cuh); its kernels are
// compiled in rowwise_scaled_linear_s8s4.cu, for both operators.
#pragma once

#include "cuda/host/launch.h"
#include "cuda/int4/rowwise.cuh"

namespace pkg::cuda {

// Runs the problem where there are many rows, the device has products of
// warpgroups, and the operands can be copied, or returns false. The caller
// holds a DeviceGuard.
bool launch_by_warpgroups(const RowwiseScaledProblem<false>& problem,
                          const Tensor& output);
bool launch_by_warpgroups(const RowwiseScaledProblem<true>& problem,
                          const Tensor& output);

}  // namespace pkg::cuda
