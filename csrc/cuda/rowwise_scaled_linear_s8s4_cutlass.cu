#if defined(PKG_WITH_CUTLASS)

#include "cuda/int4/rowwise_cutlass.cuh"

namespace pkg::cuda {

bool launch_cutlass(const RowwiseScaledProblem<false>& problem,
                    cudaStream_t stream) {
  return launch_cutlass_of_type(problem, stream);
}

}  // namespace pkg::cuda

#endif
