#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <optional>

#include "cuda/gemm/linear_host.h"
#include "cuda/gemm/matmul.cuh"
#include "cuda/gemm/precision.h"
#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"
#include "cuda/int4/int4_linear.cuh"
#include "cuda/int4/int4_linear_mma.cuh"
#include "cuda/int4/int4_linear_warpgroups.cuh"
#include "cuda/int4/int4_linear_wide.cuh"
#include "cuda/int4/int4_written_out.h"
#include "cuda/int4/tiled_layout_host.h"
#include "host/integer_math.h"
#include "host/namespace.h"
#include "int4_linear.h"

namespace pkg::cuda {
namespace {

template <class Element>
void launch_wide(Int4LinearProblem<Element>& problem, const Tensor& output) {
  const int64_t pieces = problem.template count_pieces<Int4Wide>();
  launch(int4_linear_wide_kernel<Element>, pieces, Int4Wide::kThreads,
         current_stream(output), problem);
}

// Memory for the sums of a divided product's parts, whose number is known.
template <class Element>
Tensor allocate_parts(Int4LinearProblem<Element>& problem,
                      const Tensor& output) {
  Tensor parts =
      empty_contiguous(std::array{problem.batch_count, problem.splits,
                                  problem.rows, problem.columns},
                       number_type<float>(), device_of(output));
  problem.parts = static_cast<float*>(parts.mutable_data_ptr());
  return parts;
}

// Adds the parts up, if the product is divided.
template <class Element>
void launch_sum(const Int4LinearProblem<Element>& problem,
                const Tensor& output) {
  if (problem.splits > 1) {
    launch(int4_linear_sum_kernel<Element>, problem.sum_pieces(),
           LaunchShape(kInt4SumThreads).that_waits(), current_stream(output),
           problem);
  }
}

template <class Block, class Element>
void launch_half(Int4LinearProblem<Element>& problem, const Tensor& output) {
  const int64_t turns = tiles_of(problem.depth, Block::kTurn);
  const int64_t each = panels_of_split(
      problem.template count_pieces<Block>(), turns,
      int64_t{multiprocessor_count()} * Block::kBlocks, Block::kLeastTurns);
  std::optional<Tensor> parts;
  if (each < turns) {
    problem.splits = ceil_div(turns, each);
    problem.split_depth = each * Block::kTurn;
    parts = allocate_parts(problem, output);
  }
  const LaunchShape shape = Block::prepare(problem);
  launch(int4_linear_half_kernel<Block, Element>, problem.pieces, shape,
         current_stream(output), problem);
  launch_sum(problem, output);
}

// Makes the sums of the activations, in memory that is returned.
template <class Element>
Tensor launch_row_sums(Int4WarpgroupProblem<Element>& problem,
                       const Tensor& output) {
  Tensor sums = empty_contiguous(std::array{problem.sum_elements()},
                                 ScalarType::BFloat16, device_of(output));
  problem.row_sums = static_cast<bfloat16*>(sums.mutable_data_ptr());
  problem.sums = encode_tensor_map(problem.mapped_sums());
  launch(int4_row_sums_kernel<Element>, problem.sum_rows(), kInt4RowThreads,
         current_stream(output), problem);
  return sums;
}

// By warpgroups, where there are many rows, the device has their products, and
// the input can be copied in bulk; returns whether.
template <class Element>
bool launch_by_warpgroups(Int4LinearProblem<Element>& problem,
                          const Tensor& output) {
  if (problem.rows <= kTurnedManyRows || !has_warpgroup_products()) {
    return false;
  }
  const std::optional<BulkOperand<Element>> input = int4_bulk_input(problem);
  if (!input) {
    return false;
  }
  const TurnedTiles tiles =
      plan_int4_warpgroups(problem, multiprocessor_count());
  if (tiles.pieces == 0) {
    return false;
  }
  auto whole = int4_warpgroup_problem(problem, *input, tiles);
  whole.input = encode_tensor_map(input->tensor);
  std::optional<Tensor> parts;
  if (tiles.splits > 1) {
    parts = allocate_parts(whole.call, output);
  }
  const Tensor sums = launch_row_sums(whole, output);
  with_int4_group(problem, [&]<int kGroup>() {
    using Product = typename Int4Warpgroups<Element, kGroup>::Product;
    launch(int4_linear_warpgroups_kernel<Element, kGroup>,
           std::min<int64_t>(tiles.pieces, multiprocessor_count()),
           launch_shape<Product>().that_waits(), current_stream(output), whole);
  });
  launch_sum(whole.call, output);
  return true;
}

template <class Element>
void launch_int4(Int4LinearProblem<Element>& problem, const Tensor& output) {
  if constexpr (sizeof(Element) > 2) {
    launch_wide(problem, output);
  } else if (!launch_by_warpgroups(problem, output)) {
    with_int4_block(
        problem, [&]<class Block>() { launch_half<Block>(problem, output); });
  }
}

// By the weight written out in the input's type, where that takes less time;
// returns whether. Not in half precision, whose weight would be rounded, nor in
// TF32, which multiplies rounded numbers.
template <class Element>
bool launch_written_out(const Int4LinearPlan& whole, const Tensor& input,
                        const Tensor& words, const Tensor& pairs,
                        const std::optional<Tensor>& bias,
                        const Tensor& output) {
  if constexpr (sizeof(Element) == 2) {
    return false;
  } else {
    const LinearPlan& plan = whole.linear;
    const bool is_rounded = std::is_same_v<Element, float> &&
                            float32_products() == Float32Products::One;
    if (is_rounded ||
        !pays_to_write_out<Element>(plan.batch(), plan.rows, plan.columns,
                                    plan.inner, multiprocessor_count())) {
      return false;
    }
    const Tensor weight = empty_contiguous(std::array{plan.columns, plan.inner},
                                           plan.type, device_of(output));
    launch_dequantize<Element>(tiled_words(whole.layout), whole.group_size,
                               words, pairs, weight);
    launch_linear("int4_linear", plan, input,
                  {weight.const_data_ptr(), 1, plan.inner}, bias, output,
                  nullptr);
    return true;
  }
}

Tensor int4_linear(const Tensor& input, const Tensor& packed_w,
                   const Tensor& scales_and_zeros, int64_t group_size,
                   int64_t inner_k_tiles, const std::optional<Tensor>& bias) {
  const Int4LinearPlan whole = plan_int4_linear(
      input, packed_w, scales_and_zeros, group_size, inner_k_tiles, bias);
  const LinearPlan& plan = whole.linear;
  check_batch_dims("int4_linear", static_cast<int64_t>(plan.batch_dims));
  const DeviceGuard guard(device_of(input).index);
  const Tensor output = allocate_linear_output(plan, input);
  const Tensor words = torch::stable::contiguous(packed_w);
  const Tensor pairs = torch::stable::contiguous(scales_and_zeros);
  with_floating_type(plan.type, [&](auto example) {
    using Element = decltype(example);
    if (launch_written_out<Element>(whole, input, words, pairs, bias, output)) {
      return;
    }
    Int4LinearProblem<Element> problem = {};
    problem.input = static_cast<const Element*>(input.const_data_ptr());
    problem.words = static_cast<const uint32_t*>(words.const_data_ptr());
    problem.scales_and_zeros =
        static_cast<const bfloat16*>(pairs.const_data_ptr());
    problem.bias =
        bias ? static_cast<const Element*>(bias->const_data_ptr()) : nullptr;
    problem.output = static_cast<Element*>(output.mutable_data_ptr());
    problem.rows = plan.rows;
    problem.columns = plan.columns;
    problem.depth = plan.inner;
    problem.row_stride = plan.row_stride;
    problem.depth_stride = plan.inner_stride;
    problem.bias_stride = bias ? stride_of_bias(*bias) : 0;
    problem.batch_count = plan.batch();
    problem.batch.count = static_cast<int>(plan.batch_dims);
    for (size_t d = 0; d < plan.batch_dims; ++d) {
      problem.batch.sizes[d] = plan.batch_sizes[d];
      problem.batch_strides.strides[d] = plan.batch_strides[d];
    }
    problem.group_shift = shift_of(group_size);
    problem.word_shift = shift_of(inner_k_tiles / 2);
    launch_int4(problem, output);
  });
  return output;
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&int4_linear>("int4_linear");
}

}  // namespace
}  // namespace pkg::cuda
