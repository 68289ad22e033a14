// The host side of sums that are left in memory (cuda/int4/rowwise_scale.cuh).
#pragma once

#include <array>

#include "cuda/host/launch.h"
#include "cuda/int4/rowwise_scale.cuh"

namespace pkg::cuda {

// Memory for the sums of all parts, whose number is known.
inline Tensor allocate_parts(RowwiseScaling& scaling, const Tensor& output) {
  Tensor parts = empty_contiguous(
      std::array{scaling.splits, scaling.rows, scaling.columns},
      ScalarType::Int, device_of(output));
  scaling.parts = static_cast<int32_t*>(parts.mutable_data_ptr());
  return parts;
}

// Makes the output of the parts.
inline void launch_scale(const RowwiseScaling& scaling, cudaStream_t stream) {
  launch(scaling.in_double ? rowwise_scale_kernel<double>
                           : rowwise_scale_kernel<float>,
         scaling.pieces(), LaunchShape(kScaleThreads).that_waits(), stream,
         scaling);
}

}  // namespace pkg::cuda
