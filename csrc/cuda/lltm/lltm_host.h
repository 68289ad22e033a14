// The host side that lltm's operators share.
#pragma once

#include <array>

#include "cuda/gemm/matmul.cuh"
#include "cuda/host/launch.h"
#include "cuda/lltm/gradients.cuh"
#include "lltm.h"

namespace pkg::cuda {

// The rows of a step.
template <class Element>
MatrixOf<Element> matrix_of(const TensorView& tensor, int64_t step = 0) {
  const LltmStrides strides = lltm_strides(tensor);
  return {static_cast<const Element*>(tensor.const_data_ptr()) +
              step * strides.step,
          strides.row, strides.column};
}

// A row for each step and batch index, a stride apart; a copy where they are
// not.
inline Tensor with_uniform_rows(const LltmPlan& plan, const Tensor& tensor) {
  const LltmStrides strides = lltm_strides(tensor);
  const bool is_uniform = plan.steps <= 1 || plan.batch <= 1 ||
                          strides.step == plan.batch * strides.row;
  return is_uniform ? tensor : torch::stable::contiguous(tensor);
}

// The rows of all steps as one matrix.
template <class Element>
MatrixOf<Element> all_rows_of(const LltmPlan& plan, const TensorView& tensor) {
  MatrixOf<Element> rows = matrix_of<Element>(tensor);
  if (plan.is_sequence && plan.batch == 1) {
    rows.row_stride = lltm_strides(tensor).step;
  }
  return rows;
}

template <class Element>
PanelSource<Element> rows_as_panels(const MatrixOf<Element>& rows,
                                    int64_t count, int64_t depth) {
  return {rows.data, count, depth, rows.row_stride, rows.column_stride};
}

template <class Element>
PanelSource<Element> columns_as_panels(const MatrixOf<Element>& matrix,
                                       int64_t columns, int64_t depth) {
  return {matrix.data, columns, depth, matrix.column_stride, matrix.row_stride};
}

// [h, x] of all rows, as one matrix: the states before each step and the input.
// `hidden` are those of all steps, which is asked for where there are several.
inline Tensor join_rows(const LltmPlan& plan, const Tensor& old_h,
                        const Tensor* hidden, const Tensor& input) {
  Tensor joined = empty_contiguous(std::array{plan.rows(), plan.inner()},
                                   plan.type, device_of(input));
  const auto copy = [&](int64_t row, int64_t rows, int64_t column,
                        int64_t columns, const Tensor& from) {
    if (rows > 0 && columns > 0) {
      Tensor to = torch::stable::narrow(joined, 0, row, rows);
      to = torch::stable::narrow(to, 1, column, columns);
      torch::stable::copy_(to, torch::stable::reshape(from, {rows, columns}));
    }
  };
  const int64_t first = std::min(plan.rows(), plan.batch);
  copy(0, first, 0, plan.hidden, old_h);
  if (plan.rows() > first) {
    Tensor before = *hidden;
    copy(first, plan.rows() - first, 0, plan.hidden,
         torch::stable::narrow(before, 0, 0, plan.steps - 1));
  }
  copy(0, plan.rows(), plan.hidden, plan.features, input);
  return joined;
}

// Panels of the summed dimension that a block has of a product as `Product`
// computes it.
template <class Product>
int64_t panels_of_block(int64_t tiles, int64_t panels, int64_t least = 8) {
  return panels_of_split(
      tiles, panels, int64_t{multiprocessor_count()} * Product::kBlocks, least);
}

// `follows`: whether another kernel of the call comes right before, and no copy
// or other operator of PyTorch's.
template <class Element, class Output>
void launch_product(LltmProduct<Element, Output>& product, bool follows,
                    const Tensor& on_device) {
  using Number = Accumulator<Element>;
  using Product = BlockProduct<Element>;
  const LaunchShape shape = launch_shape<Product>().that_waits(follows);
  const cudaStream_t stream = current_stream(on_device);
  const int64_t tiles = product.tile_count();
  const int64_t panels = product.panel_count();
  if (tiles == 0) {
    return;
  }
  const int64_t each = panels_of_block<Product>(tiles, panels);
  if (each >= panels) {
    product.divide(panels);
    launch(lltm_product_kernel<Element, Output>, tiles, shape, stream, product);
    return;
  }
  const int64_t rows = product.a[0].outer_size;
  const int64_t columns = product.b[0].outer_size;
  auto parts_of_product =
      divided<Element, Output, Number>(product, each, nullptr);
  const Tensor parts =
      empty_contiguous(std::array{parts_of_product.splits, rows, columns},
                       number_type<Number>(), device_of(on_device));
  parts_of_product.c = static_cast<Number*>(parts.mutable_data_ptr());
  launch(lltm_product_kernel<Element, Number>, parts_of_product.pieces, shape,
         stream, parts_of_product);
  const auto sum = sum_of(product, parts_of_product);
  launch(lltm_sum_kernel<Number, Output>, tiles_of(sum.elements, kTileThreads),
         LaunchShape(kTileThreads).that_waits(), stream, sum);
}

// Writes hidden and cells, and the gates where they are kept.
void run_lltm_forward(const LltmPlan& plan, const Tensor& input,
                      const Tensor& weights, const Tensor& bias,
                      const Tensor& old_h, const Tensor& old_cell,
                      const Tensor& hidden, const Tensor& cells,
                      const Tensor* gates);

}  // namespace pkg::cuda
