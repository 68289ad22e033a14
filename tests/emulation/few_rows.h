// Launches of the kernel for few rows as a request describes them.
#pragma once

#include "cuda/gemm/few_rows.cuh"
#include "program.h"

namespace pkg::emulation {

template <class Layout, class Input, class Output, class Epilogue>
void launch_few_rows(const Request& request,
                     const cuda::MatmulProblem<Input, Output>& problem,
                     const Epilogue& epilogue) {
  const auto few = cuda::few_rows_problem<Layout>(
      problem, static_cast<int>(request.integer("share_shift")));
  const cuda::LaunchShape shape = {cuda::kFewRowsThreads,
                                   cuda::kFewRowsSharedBytes};
  launch_blocks(request, few.pieces, shape,
                cuda::matmul_few_rows_kernel<Input, Output, Layout, Epilogue>,
                few, epilogue);
}

// For a weight that lies as the request says.
template <class Input, class Output, class Epilogue>
void launch_few_rows(const Request& request,
                     const cuda::MatmulProblem<Input, Output>& problem,
                     const Epilogue& epilogue) {
  if (request.text("layout") == "along_depth") {
    launch_few_rows<cuda::AlongDepth>(request, problem, epilogue);
  } else {
    launch_few_rows<cuda::AlongColumns>(request, problem, epilogue);
  }
}

}  // namespace pkg::emulation
