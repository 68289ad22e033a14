// The launches of a product, whole or divided, that matmul and linear share.
#pragma once

#include <optional>
#include <type_traits>

#include "cuda/gemm/divided_host.h"
#include "cuda/gemm/few_rows.cuh"
#include "cuda/gemm/large_product.cuh"
#include "cuda/gemm/matmul.cuh"
#include "cuda/gemm/precision.h"
#include "cuda/gemm/six_products_host.h"
#include "cuda/gemm/tf32_products_host.h"
#include "cuda/gemm/warpgroup_matmul_host.h"
#include "cuda/gemm/wide_product.cuh"
#include "cuda/host/launch.h"
#include "host/integer_math.h"

namespace pkg::cuda {

// By tiles of a product's blocks, of so many panels a part. Elements are
// multiplied as those of the first type.
template <class Product, class Element, class Input, class Output,
          class Epilogue>
void launch_by_tiles(const MatmulProblem<Input, Output>& problem,
                     int64_t panels_each, const Epilogue& epilogue,
                     const Tensor& output) {
  using Sum = StoredSum<Input>;
  static_assert(std::is_same_v<Sum, StoredSum<Element>>);
  auto whole = multiplied_as<Element>(problem, problem.c);
  whole.wanted = problem.wanted;
  const int64_t tiles = whole.template count_tiles<Product>();
  const LaunchShape shape = launch_shape<Product>();
  const cudaStream_t stream = current_stream(output);
  const int64_t panels = tiles_of(problem.depth, Product::kDepth);
  if (panels_each >= panels || problem.batch.count == kMaxBatchDims) {
    launch(matmul_kernel<Element, Output, Epilogue, Product>, tiles, shape,
           stream, whole, epilogue);
    return;
  }
  const int64_t splits = ceil_div(panels, panels_each);
  const Tensor parts = allocate_parts(problem, splits, output);
  auto parts_of_product = divided(whole, panels_each * Product::kDepth,
                                  static_cast<Sum*>(parts.mutable_data_ptr()));
  const int64_t pieces = parts_of_product.template count_tiles<Product>();
  launch(matmul_kernel<Element, Sum, KeepSums, Product>, pieces, shape, stream,
         parts_of_product, KeepSums{});
  launch_sum(problem, parts, splits, epilogue, stream);
}

// By warps, whose operands are multiplied as elements of the first type.
template <class Element, class Input, class Output, class Epilogue>
void launch_by_warps(const MatmulProblem<Input, Output>& problem,
                     const Epilogue& epilogue, const Tensor& output) {
  using Product = BlockProduct<Element>;
  const int64_t multiprocessors = multiprocessor_count();
  const int64_t tiles = problem.batch_count *
                        tiles_of(problem.rows, Product::kRows) *
                        tiles_of(problem.columns, Product::kColumns);
  const int64_t panels = tiles_of(problem.depth, Product::kDepth);
  const int64_t panels_each =
      panels_of_split(tiles, panels, multiprocessors * Product::kBlocks);
  if constexpr (kHasWideProduct<Element>) {
    if (panels_each >= panels &&
        pays_wide_tiles<Element>(problem.batch_count, problem.rows,
                                 problem.columns, multiprocessors,
                                 most_shared_bytes())) {
      launch_by_tiles<WideProduct<Element>, Element>(problem, panels, epilogue,
                                                     output);
      return;
    }
  }
  launch_by_tiles<Product, Element>(problem, panels_each, epilogue, output);
}

// Of float32 by multiply-adds, and of float64: by the tiles that take the least
// time. Where the product may not be wanted it is not divided: its parts would
// be added up all the same.
template <class Input, class Output, class Epilogue>
void launch_by_panels(const MatmulProblem<Input, Output>& problem,
                      const Epilogue& epilogue, const Tensor& output) {
  const PanelPlan plan = plan_panels<Input>(
      problem.batch_count, problem.rows, problem.columns, problem.depth,
      multiprocessor_count(), most_shared_bytes(),
      problem.wanted == nullptr && problem.batch.count < kMaxBatchDims);
  const auto launch_tiles = [&]<class Product>() {
    launch_by_tiles<Product, Input>(problem, plan.panels_each, epilogue,
                                    output);
  };
  if (plan.tiles == PanelTiles::small) {
    launch_tiles.template operator()<SmallProduct<Input>>();
  } else if (plan.tiles == PanelTiles::large) {
    launch_tiles.template operator()<LargeProduct<Input>>();
  } else {
    launch_tiles.template operator()<BlockProduct<Input>>();
  }
}

template <class Layout, class Input, class Output, class Epilogue>
void launch_few_rows(const MatmulProblem<Input, Output>& problem,
                     const Epilogue& epilogue, const Tensor& output) {
  using Sum = StoredSum<Input>;
  const LaunchShape shape = {kFewRowsThreads, kFewRowsSharedBytes};
  const cudaStream_t stream = current_stream(output);
  const auto plan = plan_few_rows<FewRowsShape<Input, Layout>>(
      problem.batch_count, problem.columns, problem.depth,
      int64_t{multiprocessor_count()} * kFewRowsBlocks);
  if (plan.split_depth == 0 || problem.batch.count == kMaxBatchDims) {
    const auto whole = few_rows_problem<Layout>(problem, plan.share_shift);
    const auto chosen = epilogue.of_any_kind();
    using Chosen = std::remove_const_t<decltype(chosen)>;
    launch(matmul_few_rows_kernel<Input, Output, Layout, Chosen>, whole.pieces,
           shape, stream, whole, chosen);
    return;
  }
  const int64_t splits = ceil_div(problem.depth, plan.split_depth);
  const Tensor parts = allocate_parts(problem, splits, output);
  const auto pieces = few_rows_problem<Layout>(
      divided(problem, plan.split_depth,
              static_cast<Sum*>(parts.mutable_data_ptr())),
      plan.share_shift);
  launch(matmul_few_rows_kernel<Input, Sum, Layout>, pieces.pieces, shape,
         stream, pieces, KeepSums{});
  launch_sum(problem, parts, splits, epilogue, stream);
}

// By lanes that read the weight once, where the rows are few; returns whether.
template <class Input, class Output, class Epilogue>
bool launch_by_few_rows(const MatmulProblem<Input, Output>& problem,
                        const Epilogue& epilogue, const Tensor& output) {
  switch (few_rows_layout(problem)) {
    case FewRowsLayout::none:
      return false;
    case FewRowsLayout::along_depth:
      launch_few_rows<AlongDepth>(problem, epilogue, output);
      return true;
    case FewRowsLayout::along_columns:
      launch_few_rows<AlongColumns>(problem, epilogue, output);
      return true;
  }
  return false;
}

// The caller holds a DeviceGuard. The output is written whole.
template <class Input, class Output, class Epilogue>
void launch_product(MatmulProblem<Input, Output> problem,
                    const Epilogue& epilogue, const Tensor& output) {
  problem.count_tiles();
  if constexpr (!std::is_same_v<Input, int8_t>) {
    if (launch_by_few_rows(problem, epilogue, output)) {
      return;
    }
    // A matrix by a vector: its result is the same memory as a row.
    if (problem.columns == 1 &&
        launch_by_few_rows(exchanged(problem), epilogue.of_one_column(),
                           output)) {
      return;
    }
  }
  if constexpr (kHasWarpgroupProduct<Input>) {
    if (launch_by_warpgroups(problem, epilogue, output)) {
      return;
    }
  }
  if constexpr (std::is_same_v<Input, float>) {
    if (float32_products() == Float32Products::One) {
      if (!launch_tf32_by_warpgroups(problem, epilogue, output)) {
        launch_by_warps<Tf32>(problem, epilogue, output);
      }
      return;
    }
    const std::optional<Tensor> inexact =
        launch_by_six_products(problem, epilogue, output);
    if (inexact) {
      problem.wanted = static_cast<const int32_t*>(inexact->const_data_ptr());
      launch_by_panels(problem, epilogue, output);
      return;
    }
  }
  if constexpr (kHasLargeProduct<Input>) {
    launch_by_panels(problem, epilogue, output);
  } else {
    launch_by_warps<Input>(problem, epilogue, output);
  }
}

}  // namespace pkg::cuda
