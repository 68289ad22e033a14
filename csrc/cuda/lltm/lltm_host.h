// The host side that lltm's operators share.
#pragma once

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

template <class Element, class Output>
void launch_product(LltmProduct<Element, Output>& product,
                    const Tensor& on_device) {
  launch(lltm_product_kernel<Element, Output>, product.count_tiles(),
         launch_shape<BlockProduct<Element>>(), current_stream(on_device),
         product);
}

// Writes hidden and cells, and the gates where they are kept.
void run_lltm_forward(const LltmPlan& plan, const Tensor& input,
                      const Tensor& weights, const Tensor& bias,
                      const Tensor& old_h, const Tensor& old_cell,
                      const Tensor& hidden, const Tensor& cells,
                      const Tensor* gates);

}  // namespace pkg::cuda
