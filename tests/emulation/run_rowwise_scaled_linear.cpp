#include <optional>
#include <vector>

#include "batches.h"
#include "cuda/int4/quantize_held_rows.cuh"
#include "cuda/int4/quantize_rowwise.cuh"
#include "cuda/int4/rowwise.cuh"
#include "cuda/int4/rowwise_few_rows.cuh"
#include "cuda/int4/rowwise_warpgroups.cuh"
#include "program.h"

namespace pkg::emulation {
namespace {

cuda::ElementType type_of(const std::string& name) {
  return name == "float64"    ? cuda::ElementType::float64
         : name == "float16"  ? cuda::ElementType::float16
         : name == "bfloat16" ? cuda::ElementType::bfloat16
                              : cuda::ElementType::float32;
}

void launch_scale(const Request& request, const cuda::RowwiseScaling& scaling) {
  launch_blocks(request, scaling.pieces(), cuda::kScaleThreads,
                scaling.in_double ? cuda::rowwise_scale_kernel<double>
                                  : cuda::rowwise_scale_kernel<float>,
                scaling);
}

template <int kTileRows>
void launch_tiles(const Request& request,
                  const cuda::RowwiseWarpgroupProblem& problem) {
  launch_blocks(request, problem.tiles.pieces,
                cuda::launch_shape<cuda::TurnedProduct<int8_t, kTileRows>>(),
                cuda::rowwise_warpgroups_kernel<kTileRows>, problem);
}

// By tiles of so many rows; refuses operands that they do not take.
template <bool kPacked>
void launch_warpgroups(const Request& request,
                       const cuda::RowwiseScaledProblem<kPacked>& problem,
                       int tile_rows, int64_t split_slices) {
  const int64_t inner = 2 * problem.bytes;
  std::vector<cuda::Packet<int8_t, 16>> widened;
  std::optional<cuda::BulkOperand<int8_t>> input;
  if constexpr (kPacked) {
    widened.resize(static_cast<size_t>(problem.rows * inner / 16));
    int8_t* const values = widened.data()->values;
    launch_blocks(
        request, problem.rows, cuda::kWidenThreads,
        cuda::rowwise_widen_kernel<cuda::RowwiseScaledProblem<kPacked>>,
        problem, values);
    input = cuda::rowwise_bulk_rows(values, problem.rows, inner, inner, 1);
  } else {
    input = cuda::rowwise_bulk_input(problem);
  }
  if (!input || !suits_warpgroups(problem)) {
    fail("warpgroups do not take these operands");
  }
  auto whole = cuda::rowwise_warpgroup_problem(
      problem, cuda::turned_tiles(1, problem.rows, problem.columns, inner,
                                  tile_rows, split_slices));
  whole.input = cuda::encode_tensor_map(input->tensor);
  std::vector<int32_t> parts;
  const bool has_parts = problem.in_double || whole.splits > 1;
  if (has_parts) {
    parts.resize(
        static_cast<size_t>(whole.splits * whole.rows * whole.columns));
    whole.parts = parts.data();
  }
  if (tile_rows == 256) {
    launch_tiles<256>(request, whole);
  } else {
    launch_tiles<128>(request, whole);
  }
  if (has_parts) {
    launch_scale(request, whole);
  }
}

// By the kernel that the test names, which is the one that the host would take
// or that of tiles.
template <bool kPacked>
void launch_linear(const Request& request,
                   cuda::RowwiseScaledProblem<kPacked>& problem) {
  const bool few_rows = request.text("way") == "few_rows";
  if (few_rows && !has_few_rows(problem)) {
    fail("the kernel of few rows does not take this problem");
  }
  problem.splits = few_rows ? 1 : problem.splits;
  std::vector<int32_t> parts;
  if (problem.has_parts()) {
    parts.resize(
        static_cast<size_t>(problem.splits * problem.rows * problem.columns));
    problem.parts = parts.data();
  }
  if (few_rows) {
    launch_blocks(request, cuda::tiles_of(problem.columns, cuda::kFewColumns),
                  cuda::kFewThreads, cuda::rowwise_few_rows_kernel<kPacked>,
                  problem);
  } else {
    launch_blocks(request, problem.tiles * problem.splits,
                  cuda::launch_shape<cuda::RowwiseProduct<kPacked>>(),
                  cuda::rowwise_scaled_linear_kernel<kPacked>, problem);
  }
  if (problem.has_parts()) {
    launch_scale(request, problem);
  }
}

template <bool kPacked>
void run_linear(const Request& request) {
  const cuda::ElementType type = type_of(request.text("type"));
  cuda::RowwiseScaledProblem<kPacked> problem = {};
  problem.input = request.buffer<int8_t>("input");
  problem.input_stride = request.integer("input_stride");
  problem.rows_of = batch_sizes(request.integers("rows_of"));
  problem.input_strides = batch_strides(request.integers("input_strides"));
  problem.scale_strides = batch_strides(request.integers("scale_strides"));
  problem.input_scale = {request.buffer<void>("input_scale"), type};
  problem.weight = request.buffer<int8_t>("weight");
  problem.weight_column_stride = request.integers("weight_strides").at(0);
  problem.weight_stride = request.integers("weight_strides").at(1);
  problem.weight_scale = {request.buffer<void>("weight_scale"), type};
  problem.weight_scale_stride = request.integer("weight_scale_stride");
  problem.bias = {request.buffer<void>("bias"), type};
  problem.bias_stride = request.integer("bias_stride");
  problem.output = request.buffer<void>("output");
  problem.output_type = type_of(request.text("out_type"));
  problem.in_double = problem.output_type == cuda::ElementType::float64 ||
                      type == cuda::ElementType::float64;
  problem.rows = count_of(request.integers("rows_of"));
  problem.columns = request.integer("columns");
  problem.bytes = request.integer("bytes");
  const int64_t split_slices = request.integer("split_slices");
  problem.divide(split_slices == 0 ? problem.slices() : split_slices);
  const int64_t tile_rows = request.integer("tile_rows");
  if (tile_rows > 0) {
    launch_warpgroups(request, problem, static_cast<int>(tile_rows),
                      split_slices);
  } else {
    launch_linear(request, problem);
  }
}

// By threads that hold the rows, or refuses them.
template <class Element>
void launch_held(const Request& request,
                 const cuda::QuantizeProblem<Element>& problem) {
  const bool is_held = cuda::with_held_group(problem, [&]<int kGroup>() {
    using Rows = cuda::HeldRows<Element, kGroup>;
    launch_blocks(request, cuda::tiles_of(problem.rows, Rows::kRows),
                  cuda::launch_shape<Rows>(),
                  cuda::quantize_held_rows_kernel<Element, kGroup>, problem);
  });
  if (!is_held) {
    fail("no group of threads holds these rows");
  }
}

template <class Element>
void run_quantize(const Request& request) {
  const cuda::QuantizeProblem<Element> problem = {
      .input = request.buffer<Element>("input"),
      .stride = request.integer("stride"),
      .rows_of = batch_sizes(request.integers("rows_of")),
      .row_strides = batch_strides(request.integers("row_strides")),
      .values = request.buffer<int8_t>("values"),
      .scales = request.buffer<Element>("scales"),
      .rows = count_of(request.integers("rows_of")),
      .inner = request.integer("inner"),
      .bits = static_cast<int>(request.integer("bits")),
  };
  if (request.integer("held") != 0) {
    launch_held(request, problem);
    return;
  }
  launch_blocks(request, problem.block_count(), cuda::kQuantizeThreads,
                cuda::quantize_rowwise_kernel<Element>, problem);
}

void run_quantize(const Request& request) {
  switch (type_of(request.text("type"))) {
    case cuda::ElementType::float64:
      return run_quantize<double>(request);
    case cuda::ElementType::float16:
      return run_quantize<cuda::float16>(request);
    case cuda::ElementType::bfloat16:
      return run_quantize<cuda::bfloat16>(request);
    default:
      return run_quantize<float>(request);
  }
}

}  // namespace

bool run_rowwise_scaled_linear(const Request& request) {
  const std::string& kernel = request.text("kernel");
  if (kernel == "rowwise_scaled_linear_s8s4") {
    run_linear<false>(request);
  } else if (kernel == "rowwise_scaled_linear_s4s4") {
    run_linear<true>(request);
  } else if (kernel == "quantize_rowwise") {
    run_quantize(request);
  } else {
    return false;
  }
  return true;
}

}  // namespace pkg::emulation
