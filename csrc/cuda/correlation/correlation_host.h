// Which kernel computes the correlation of images of a type.
#pragma once

#include <type_traits>

#include "cuda/correlation/forward.cuh"
#include "cuda/correlation/forward_mma.cuh"

namespace pkg::cuda {

// Calls function(std::type_identity<block>, kernel).
template <class Element, class Function>
void with_correlation_kernel(Function&& function) {
  if constexpr (sizeof(Element) == 2) {
    function(std::type_identity<CorrelationMma<Element>>{},
             &spatial_correlation_mma_kernel<Element>);
  } else {
    function(std::type_identity<CorrelationBlock<Element>>{},
             &spatial_correlation_kernel<Element>);
  }
}

}  // namespace pkg::cuda
