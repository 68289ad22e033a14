// The launch of a product by warpgroups, as cuda/gemm/matmul_host.h makes it.
#pragma once

#include "cuda/gemm/warpgroup_matmul.cuh"
#include "program.h"

namespace pkg::emulation {

// Refuses operands that the copy engine does not take. Writes the parts of a
// product that is divided, of so many panels each, to `c`.
template <int kTileColumns, class Input, class Output, class Result,
          class Epilogue>
void launch_warpgroups(const Request& request,
                       const cuda::MatmulProblem<Input, Output>& problem,
                       int64_t panels_each, Result* c,
                       const Epilogue& epilogue) {
  using Product = cuda::WarpgroupProduct<Input, kTileColumns>;
  const auto operands = cuda::bulk_operands(problem);
  if (!operands) {
    fail("these operands cannot be copied in bulk");
  }
  const auto whole = cuda::warpgroup_problem<Product>(
      problem, *operands, encode_tensor_map(operands->a.tensor),
      encode_tensor_map(operands->b.tensor), panels_each, c);
  launch_blocks(
      request, whole.tiles, cuda::launch_shape<Product>(),
      cuda::matmul_warpgroup_kernel<Input, Result, kTileColumns, Epilogue>,
      whole, epilogue);
}

// The same by tiles as wide as the request says.
template <class Input, class Output, class Result, class Epilogue>
void launch_warpgroups(const Request& request,
                       const cuda::MatmulProblem<Input, Output>& problem,
                       int64_t panels_each, Result* c,
                       const Epilogue& epilogue) {
  if (request.integer("tile_columns") == 256) {
    launch_warpgroups<256>(request, problem, panels_each, c, epilogue);
  } else {
    launch_warpgroups<128>(request, problem, panels_each, c, epilogue);
  }
}

}  // namespace pkg::emulation
