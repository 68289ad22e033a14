#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>

#include "cuda/gemm/matrix_product.h"
#include "cuda/lltm/lltm_host.h"
#include "host/namespace.h"

namespace pkg::cuda {
namespace {

using OptionalView = std::optional<TensorView>;
using OptionalTensor = std::optional<Tensor>;

struct Saved {
  const OptionalTensor& grad_hidden;
  const OptionalTensor& grad_cells;
  const OptionalTensor& grad_gates;
  const Tensor& gates;
  const Tensor& hidden;
  const Tensor& cells;
  const Tensor& input;
  const Tensor& weights;
  const Tensor& old_h;
};

inline OptionalView view_of(const OptionalTensor& tensor) {
  return tensor ? OptionalView(*tensor) : OptionalView();
}

template <class Element>
MatrixOf<Element> matrix_or_none(const OptionalTensor& tensor, int64_t step) {
  return tensor ? matrix_of<Element>(TensorView(*tensor), step)
                : MatrixOf<Element>{};
}

template <class Element>
class Backward {
 public:
  Backward(const LltmPlan& plan, const Saved& saved,
           const LltmGradients& gradients)
      : plan_(plan),
        saved_(saved),
        gradients_(gradients),
        weights_(matrix_of<Element>(saved.weights)),
        grad_sums_(allocate({plan.rows(), plan.gates()}, plan.type)) {}

  void run(const LltmNeeds& needs) {
    go_back();
    if (needs.old_h && plan_.steps > 0) {
      multiply_rows(plan_.batch, 0, plan_.hidden, gradients_.old_h);
    }
    if (needs.input) {
      multiply_rows(plan_.rows(), plan_.hidden, plan_.features,
                    gradients_.input);
    }
    if (needs.weights) {
      multiply_transposed();
    }
  }

 private:
  using Number = Accumulator<Element>;

  Tensor allocate(std::initializer_list<int64_t> sizes, ScalarType type) const {
    return empty_contiguous({sizes.begin(), sizes.size()}, type,
                            device_of(saved_.input));
  }

  Element* sums() const {
    return static_cast<Element*>(grad_sums_.mutable_data_ptr());
  }

  // From the last step to the first.
  void go_back() {
    constexpr ScalarType kNumber = number_type<Number>();
    Tensor bias_sums = allocate({plan_.gates()}, kNumber);
    torch::stable::zero_(bias_sums);
    if (plan_.steps == 0 || plan_.batch == 0) {
      for (Tensor each : {gradients_.bias, gradients_.old_cell,
                          gradients_.old_h, gradients_.weights}) {
        torch::stable::zero_(each);
      }
    }
    const bool carries = plan_.steps > 1;
    const std::initializer_list<int64_t> carried = {carries ? plan_.batch : 0,
                                                    plan_.hidden};
    const Tensor carried_h = allocate(carried, kNumber);
    const Tensor carried_cell = allocate(carried, kNumber);
    LltmGradientStep<Element> step = {};
    step.batch = plan_.batch;
    step.hidden = plan_.hidden;
    step.carried_cell = static_cast<Number*>(carried_cell.mutable_data_ptr());
    step.bias_sums = static_cast<Number*>(bias_sums.mutable_data_ptr());
    for (int64_t t = plan_.steps; t-- > 0;) {
      step.grad_hidden = matrix_or_none<Element>(saved_.grad_hidden, t);
      step.grad_cells = matrix_or_none<Element>(saved_.grad_cells, t);
      step.grad_gates = matrix_or_none<Element>(saved_.grad_gates, t);
      step.gates = matrix_of<Element>(saved_.gates, t);
      step.cells = matrix_of<Element>(saved_.cells, t);
      step.grad_sums = sums() + t * plan_.batch * plan_.gates();
      if (t == 0) {
        step.grad_old_cell =
            static_cast<Element*>(gradients_.old_cell.mutable_data_ptr());
        step.grad_bias =
            static_cast<Element*>(gradients_.bias.mutable_data_ptr());
      }
      launch(lltm_gradient_kernel<Element>, step.tile_count(),
             LaunchShape(kTileThreads).that_waits(t + 1 < plan_.steps),
             current_stream(grad_sums_), step);
      if (t > 0) {
        auto* to = static_cast<Number*>(carried_h.mutable_data_ptr());
        multiply(MatrixOf<Element>{step.grad_sums, plan_.gates(), 1},
                 plan_.batch, 0, plan_.hidden, to);
        step.carried_h = to;
      }
    }
  }

  // The gradients of gates of the first rows by columns of the weights.
  void multiply_rows(int64_t count, int64_t column, int64_t columns,
                     const Tensor& to) {
    if (is_large_product(plan_.type, count, columns)) {
      Tensor weights = saved_.weights;
      multiply_matrices(torch::stable::narrow(grad_sums_, 0, 0, count),
                        torch::stable::narrow(weights, 1, column, columns), to);
      return;
    }
    multiply({sums(), plan_.gates(), 1}, count, column, columns,
             static_cast<Element*>(to.mutable_data_ptr()));
  }

  // Gradients of gates by columns of the weights.
  template <class Output>
  void multiply(const MatrixOf<Element>& rows, int64_t count, int64_t column,
                int64_t columns, Output* to) const {
    MatrixOf<Element> right = weights_;
    right.data += column * right.column_stride;
    LltmProduct<Element, Output> product = {};
    product.a[0] = rows_as_panels(rows, count, plan_.gates());
    product.b[0] = columns_as_panels(right, columns, plan_.gates());
    product.c = to;
    product.c_row_stride = columns;
    // Without states there are no gates, and no kernel has gone before.
    launch_product(product, plan_.hidden > 0, grad_sums_);
  }

  void multiply_transposed() const {
    if (is_large_product(plan_.type, plan_.gates(), plan_.inner())) {
      multiply_matrices(
          torch::stable::transpose(grad_sums_, 0, 1),
          join_rows(plan_, saved_.old_h, &saved_.hidden, saved_.input),
          gradients_.weights);
      return;
    }
    auto* to = static_cast<Element*>(gradients_.weights.mutable_data_ptr());
    const Tensor input = with_uniform_rows(plan_, saved_.input);
    const Tensor hidden = with_uniform_rows(plan_, saved_.hidden);
    const int64_t first = std::min(plan_.rows(), plan_.batch);
    // The states before the first step, and before all others.
    const auto columns = [&](int64_t begin, int64_t rows) {
      return columns_as_panels(
          MatrixOf<Element>{sums() + begin * plan_.gates(), plan_.gates(), 1},
          plan_.gates(), rows);
    };
    LltmProduct<Element, Element> product = {};
    product.c_row_stride = plan_.inner();
    product.c = to;
    product.a[0] = columns(0, first);
    product.b[0] = columns_as_panels(matrix_of<Element>(saved_.old_h),
                                     plan_.hidden, first);
    product.a[1] = columns(first, plan_.rows() - first);
    product.b[1] = columns_as_panels(all_rows_of<Element>(plan_, hidden),
                                     plan_.hidden, plan_.rows() - first);
    launch_product(product, false, grad_sums_);
    product = {};
    product.c_row_stride = plan_.inner();
    product.c = to + plan_.hidden;
    product.a[0] = columns(0, plan_.rows());
    product.b[0] = columns_as_panels(all_rows_of<Element>(plan_, input),
                                     plan_.features, plan_.rows());
    launch_product(product, false, grad_sums_);
  }

  const LltmPlan& plan_;
  const Saved& saved_;
  const LltmGradients& gradients_;
  MatrixOf<Element> weights_;  // of (gates, inner)
  Tensor grad_sums_;           // of the gates before their activations
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> lltm_backward(
    const OptionalTensor& grad_hidden, const OptionalTensor& grad_cells,
    const OptionalTensor& grad_gates, const Tensor& gates, const Tensor& hidden,
    const Tensor& cells, const Tensor& input, const Tensor& weights,
    const Tensor& old_h, bool needs_input, bool needs_weights,
    bool needs_old_h) {
  const LltmPlan plan = plan_lltm_backward(
      view_of(grad_hidden), view_of(grad_cells), view_of(grad_gates), gates,
      hidden, cells, input, weights, old_h);
  const DeviceGuard guard(device_of(input).index);
  const LltmNeeds needs{needs_input, needs_weights, needs_old_h};
  const LltmGradients gradients(plan, needs, device_of(input));
  const Saved saved{grad_hidden, grad_cells, grad_gates, gates, hidden,
                    cells,       input,      weights,    old_h};
  with_floating_type(plan.type, [&](auto example) {
    Backward<decltype(example)>(plan, saved, gradients).run(needs);
  });
  return gradients.all();
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&lltm_backward>("lltm_backward");
}

}  // namespace
}  // namespace pkg::cuda
