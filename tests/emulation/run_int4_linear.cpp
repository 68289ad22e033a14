#include <vector>

#include "batches.h"
#include "cuda/int4/int4_linear.cuh"
#include "cuda/int4/int4_linear_mma.cuh"
#include "cuda/int4/int4_linear_warpgroups.cuh"
#include "cuda/int4/int4_linear_wide.cuh"
#include "cuda/int4/tiled_layout.cuh"
#include "elements.h"
#include "program.h"

namespace pkg::emulation {
namespace {

template <class Element>
void run_wide(const Request& request,
              cuda::Int4LinearProblem<Element>& problem) {
  const int64_t pieces = problem.template count_pieces<cuda::Int4Wide>();
  launch_blocks(request, pieces, cuda::Int4Wide::kThreads,
                cuda::int4_linear_wide_kernel<Element>, problem);
}

template <class Block, class Element>
void run_half(const Request& request,
              cuda::Int4LinearProblem<Element>& problem) {
  const int64_t turns = request.integer("split_turns");
  std::vector<float> parts;
  if (turns > 0) {
    problem.split_depth = turns * Block::kTurn;
    problem.splits =
        (problem.depth + problem.split_depth - 1) / problem.split_depth;
    parts.resize(static_cast<size_t>(problem.batch_count * problem.splits *
                                     problem.rows * problem.columns));
    problem.parts = parts.data();
  }
  const cuda::LaunchShape shape = Block::prepare(problem);
  launch_blocks(request, problem.pieces, shape,
                cuda::int4_linear_half_kernel<Block, Element>, problem);
  if (problem.splits > 1) {
    launch_blocks(request, problem.sum_pieces(), cuda::kInt4SumThreads,
                  cuda::int4_linear_sum_kernel<Element>, problem);
  }
}

// Refuses an input that the copy engine does not take.
template <class Element>
void run_warpgroups(const Request& request,
                    cuda::Int4LinearProblem<Element>& problem) {
  const auto input = cuda::int4_bulk_input(problem);
  if (!input) {
    fail("warpgroups do not take these operands");
  }
  const cuda::TurnedTiles tiles = cuda::turned_tiles(
      problem.batch_count, problem.rows, problem.columns, problem.depth,
      cuda::kInt4Rows, request.integer("split_turns"));
  auto whole = cuda::int4_warpgroup_problem(problem, *input, tiles);
  whole.input = cuda::encode_tensor_map(input->tensor);
  std::vector<float> parts;
  if (tiles.splits > 1) {
    parts.resize(static_cast<size_t>(problem.batch_count * tiles.splits *
                                     problem.rows * problem.columns));
    whole.call.parts = parts.data();
  }
  std::vector<cuda::Packet<cuda::bfloat16, 8>> sums(
      static_cast<size_t>(whole.sum_elements() / 8));
  whole.row_sums = sums.data()->values;
  whole.sums = cuda::encode_tensor_map(whole.mapped_sums());
  launch_blocks(request, whole.sum_rows(), cuda::kInt4RowThreads,
                cuda::int4_row_sums_kernel<Element>, whole);
  cuda::with_int4_group(problem, [&]<int kGroup>() {
    using Block = cuda::Int4Warpgroups<Element, kGroup>;
    launch_blocks(request, tiles.pieces,
                  cuda::launch_shape<typename Block::Product>(),
                  cuda::int4_linear_warpgroups_kernel<Element, kGroup>, whole);
  });
  if (tiles.splits > 1) {
    launch_blocks(request, whole.call.sum_pieces(), cuda::kInt4SumThreads,
                  cuda::int4_linear_sum_kernel<Element>, whole.call);
  }
}

template <class Element>
void run(const Request& request) {
  cuda::Int4LinearProblem<Element> problem = {};
  problem.input = request.buffer<Element>("input");
  problem.words = request.buffer<uint32_t>("words");
  problem.scales_and_zeros = request.buffer<cuda::bfloat16>("scales_and_zeros");
  problem.bias = request.buffer<Element>("bias");
  problem.output = request.buffer<Element>("output");
  problem.rows = request.integer("rows");
  problem.columns = request.integer("columns");
  problem.depth = request.integer("depth");
  problem.group_shift = cuda::shift_of(request.integer("group_size"));
  problem.word_shift = cuda::shift_of(request.integer("inner_k_tiles") / 2);
  problem.row_stride = request.integers("input_strides").at(0);
  problem.depth_stride = request.integers("input_strides").at(1);
  problem.bias_stride = request.integer("bias_stride");
  problem.batch_count = count_of(request.integers("batch"));
  problem.batch = batch_sizes(request.integers("batch"));
  problem.batch_strides = batch_strides(request.integers("batch_strides"));
  if constexpr (sizeof(Element) > 2) {
    run_wide(request, problem);
  } else if (request.integer("by_warpgroups") != 0) {
    run_warpgroups(request, problem);
  } else {
    cuda::with_int4_block(
        problem, [&]<class Block>() { run_half<Block>(request, problem); });
  }
}

cuda::TiledWords layout_of(const Request& request) {
  return {request.integer("rows"), request.integer("columns"),
          request.integer("inner_k_tiles")};
}

template <class Value>
void run_pack(const Request& request) {
  const cuda::PackTiled<Value> call = {layout_of(request),
                                       request.buffer<Value>("values"),
                                       request.integer("rows_of_values"),
                                       request.integers("strides").at(0),
                                       request.integers("strides").at(1),
                                       request.buffer<uint32_t>("words")};
  launch_blocks(request, call.layout.pieces(), cuda::kTiledThreads,
                cuda::pack_tiled_kernel<cuda::PackTiled<Value>>, call);
}

template <class Element>
void run_dequantize(const Request& request) {
  using Call = cuda::DequantizeTiled<Element>;
  const Call call = {layout_of(request), request.integer("group_size"),
                     request.buffer<uint32_t>("words"),
                     request.buffer<cuda::bfloat16>("scales_and_zeros"),
                     request.buffer<Element>("values")};
  launch_blocks(request, call.layout.pieces(), cuda::kTiledThreads,
                cuda::dequantize_tiled_kernel<Call>, call);
}

}  // namespace

bool run_int4_linear(const Request& request) {
  const std::string& kernel = request.text("kernel");
  if (kernel == "int4_linear") {
    const std::string& type = request.text("type");
    if (!with_type<double, float, cuda::float16, cuda::bfloat16>(
            type, [&]<class Element>() { run<Element>(request); })) {
      fail("int4_linear has no kernel for " + type);
    }
  } else if (kernel == "pack_tiled") {
    if (request.text("type") == "uint8") {
      run_pack<uint8_t>(request);
    } else {
      run_pack<int32_t>(request);
    }
  } else if (kernel == "unpack_tiled") {
    const cuda::UnpackTiled call = {layout_of(request),
                                    request.buffer<uint32_t>("words"),
                                    request.buffer<int32_t>("values")};
    launch_blocks(request, call.layout.pieces(), cuda::kTiledThreads,
                  cuda::unpack_tiled_kernel<cuda::UnpackTiled>, call);
  } else if (kernel == "dequantize_tiled") {
    const std::string& type = request.text("type");
    if (!with_type<double, float, cuda::bfloat16>(
            type, [&]<class Element>() { run_dequantize<Element>(request); })) {
      fail("no weight is written out in " + type);
    }
  } else {
    return false;
  }
  return true;
}

}  // namespace pkg::emulation
