#include <algorithm>

#include "cuda/host/tensor_map.h"
#include "cuda/int4/rowwise_host.h"
#include "cuda/int4/rowwise_warpgroups.cuh"
#include "host/namespace.h"

namespace pkg::cuda {
namespace {

Tensor rowwise_scaled_linear_s8s4(const Tensor& input,
                                  const Tensor& input_scale,
                                  const Tensor& weight,
                                  const Tensor& weight_scale,
                                  const std::optional<Tensor>& bias,
                                  std::optional<ScalarType> out_dtype) {
  return rowwise_scaled_linear<false>("rowwise_scaled_linear_s8s4", input,
                                      input_scale, weight, weight_scale, bias,
                                      out_dtype);
}

template <int kTileRows>
void launch_tiles(const RowwiseWarpgroupProblem& problem, bool follows,
                  cudaStream_t stream) {
  using Product = typename RowwiseWarpgroups<kTileRows>::Product;
  launch(rowwise_warpgroups_kernel<kTileRows>,
         std::min<int64_t>(problem.tiles.pieces, multiprocessor_count()),
         launch_shape<Product>().that_waits(follows), stream, problem);
}

// Of rows that can be copied in bulk; returns whether there are tiles. Packed
// ones have been widened, by a kernel of the same call.
template <bool kPacked>
bool launch_bulk(const RowwiseScaledProblem<kPacked>& problem,
                 const BulkOperand<int8_t>& input, const Tensor& output) {
  const TurnedTiles tiles = plan_rowwise_warpgroups(
      problem.rows, problem.columns, 2 * problem.bytes, multiprocessor_count());
  if (tiles.pieces == 0) {
    return false;
  }
  const cudaStream_t stream = current_stream(output);
  RowwiseWarpgroupProblem whole = rowwise_warpgroup_problem(problem, tiles);
  whole.input = encode_tensor_map(input.tensor);
  Tensor parts;
  const bool has_parts = problem.in_double || tiles.splits > 1;
  if (has_parts) {
    parts = allocate_parts(whole, output);
  }
  if (tiles.tile_rows == 256) {
    launch_tiles<256>(whole, kPacked, stream);
  } else {
    launch_tiles<128>(whole, kPacked, stream);
  }
  if (has_parts) {
    launch_scale(whole, stream);
  }
  return true;
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&rowwise_scaled_linear_s8s4>("rowwise_scaled_linear_s8s4");
}

}  // namespace

bool launch_by_warpgroups(const RowwiseScaledProblem<false>& problem,
                          const Tensor& output) {
  if (problem.rows <= kTurnedManyRows || !has_warpgroup_products() ||
      !suits_warpgroups(problem)) {
    return false;
  }
  const auto input = rowwise_bulk_input(problem);
  return input && launch_bulk(problem, *input, output);
}

bool launch_by_warpgroups(const RowwiseScaledProblem<true>& problem,
                          const Tensor& output) {
  if (problem.rows <= kTurnedManyRows || !has_warpgroup_products() ||
      !suits_warpgroups(problem) || !problem.input_is_dense) {
    return false;
  }
  const int64_t inner = 2 * problem.bytes;
  Tensor widened = empty_contiguous(std::array{problem.rows, inner},
                                    ScalarType::Char, device_of(output));
  auto* const values = static_cast<int8_t*>(widened.mutable_data_ptr());
  const auto input = rowwise_bulk_rows(values, problem.rows, inner, inner, 1);
  if (!input) {
    return false;
  }
  launch(rowwise_widen_kernel<RowwiseScaledProblem<true>>, problem.rows,
         kWidenThreads, current_stream(output), problem, values);
  return launch_bulk(problem, *input, output);
}

}  // namespace pkg::cuda
