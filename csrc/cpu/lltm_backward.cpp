// lltm, backward: one pass from the gradients of a step's results to that of
// its gates before their activations, which also sums that of the bias; then
// the products with it. The steps of a sequence are gone through backwards for
// the state's gradient alone, with recurrent weights packed once; those of the
// input and of the weights are one product each over all steps. h and x share
// the packed gradients of the gates (multiply_in_panels).
//
// With D = dc + dh o (1 - tanh(c)^2), the whole gradient of a cell:
//   dg_i = D elu(g_c) sigma'(g_i)   dg_o = dh tanh(c) sigma'(g_o)
//   dg_c = D sigma(g_i) elu'(g_c)   d old_cell = D
//   d [h, x] = dg W   dW = dg^T [h, x]
//
// Operations: 4 B 3H (H + F) a step; the pass moves 9 elements for each of the
// B H states. Bytes: W is read once and its gradient written once. Bound by the
// multiply-add units.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>

#include "cpu/gemm/matrix_product.h"
#include "cpu/lltm/gates.h"
#include "cpu/lltm/product.h"
#include "cpu/pointwise/pointwise.h"
#include "cpu/runtime/parallel.h"
#include "cpu/tiles/matrix_product.h"
#include "host/integer_math.h"
#include "host/namespace.h"
#include "lltm.h"

namespace pkg::cpu {
namespace {

using OptionalView = std::optional<TensorView>;

struct Saved {
  const OptionalView& grad_hidden;
  const OptionalView& grad_cells;
  const OptionalView& grad_gates;
  const TensorView& gates;
  const TensorView& hidden;
  const TensorView& cells;
  const TensorView& input;
  const TensorView& weights;
  const TensorView& old_h;
};

// A tensor with rows for each step, or none.
template <class T>
struct StepRows {
  const T* data = nullptr;
  LltmStrides strides{};

  StepRows() = default;
  explicit StepRows(const TensorView& tensor)
      : data(static_cast<const T*>(tensor.const_data_ptr())),
        strides(lltm_strides(tensor)) {}
  explicit StepRows(const OptionalView& tensor)
      : StepRows(tensor ? StepRows(*tensor) : StepRows()) {}

  bool exists() const { return data != nullptr; }
  MatrixView<T> at(int64_t step) const {
    return {data + step * strides.step, strides.row, strides.column};
  }
};

template <class T>
class Backward {
 public:
  Backward(const LltmPlan& plan, const LltmNeeds& needs, const Saved& saved,
           const LltmGradients& gradients)
      : plan_(plan),
        needs_(needs),
        threads_(num_threads()),
        grad_hidden_(saved.grad_hidden),
        grad_cells_(saved.grad_cells),
        grad_gates_(saved.grad_gates),
        gates_(saved.gates),
        hidden_(saved.hidden),
        cells_(saved.cells),
        input_(saved.input),
        weights_(StepRows<T>(saved.weights).at(0)),
        old_h_(StepRows<T>(saved.old_h).at(0)),
        grad_input_(static_cast<T*>(gradients.input.mutable_data_ptr())),
        grad_weights_(static_cast<T*>(gradients.weights.mutable_data_ptr())),
        grad_bias_(static_cast<T*>(gradients.bias.mutable_data_ptr())),
        grad_old_h_(static_cast<T*>(gradients.old_h.mutable_data_ptr())),
        grad_old_cell_(static_cast<T*>(gradients.old_cell.mutable_data_ptr())) {
  }

  void run() {
    auto& space = Workspace::of_this_thread<Slot::LltmGradients>();
    grad_sums_ = space.template request<T>(plan_.rows() * plan_.gates());
    bias_sums_ = Workspace::of_this_thread<Slot::Bias>().template request<Sum>(
        plan_.gates());
    std::fill_n(bias_sums_, plan_.gates(), Sum(0));
    go_back();
    for (int64_t i = 0; i < plan_.gates(); ++i) {
      grad_bias_[i] = static_cast<T>(bias_sums_[i]);
    }
    multiply_all_steps();
    space.release_excess();
  }

 private:
  using Left = LeftOperand<T>;
  using Arithmetic = typename Left::Arithmetic;
  using KGroup = typename Left::KGroup;
  using Sum = typename Left::Sum;
  static constexpr int kColumns = kNR<Arithmetic>;
  static constexpr int kLanes = simd::kLanes<Sum>;
  // Rows whose bias gradients are summed one after the other: a longer sum is
  // made of such parts, for its rounding error grows with their number.
  static constexpr int64_t kRun = 32;

  // From the last step to the first: the gradients of all gates, of the bias,
  // and of the first cell and state.
  void go_back() {
    const int64_t hidden = plan_.hidden;
    if (plan_.steps == 0) {
      std::fill_n(grad_old_cell_, plan_.batch * hidden, T(0));
      if (needs_.old_h) {
        std::fill_n(grad_old_h_, plan_.batch * hidden, T(0));
      }
      return;
    }
    const int64_t panels = ceil_div(hidden, kColumns);
    const int64_t stride = panels * kColumns;
    auto& weights_space = Workspace::of_this_thread<Slot::LltmWeights>();
    KGroup* packed = nullptr;
    Sum* carried = nullptr;
    if (plan_.steps > 1) {
      packed = weights_space.template request<KGroup>(
          stride * depth_of<Arithmetic>(plan_.gates()));
      pack_recurrent_weights(packed, panels);
      carried =
          Workspace::of_this_thread<Slot::LltmCarried>().template request<Sum>(
              plan_.batch * (stride + hidden));
    }
    grad_states_ = carried;
    states_stride_ = stride;
    grad_cells_carried_ = carried + (carried ? plan_.batch * stride : 0);
    for (int64_t step = plan_.steps; step-- > 0;) {
      differentiate(step);
      if (step > 0) {
        const MatrixView<T> rows{
            grad_sums_ + step * plan_.batch * plan_.gates(), plan_.gates(), 1};
        multiply_packed_panels<T>(Left(rows, plan_.gates()), plan_.batch,
                                  stride, plan_.gates(), packed, grad_states_,
                                  stride, threads_);
      }
    }
    weights_space.release_excess();
  }

  void pack_recurrent_weights(KGroup* packed, int64_t panels) const {
    const int64_t gates = plan_.gates();
    parallel_for(
        panels, threads_ > 1 ? 1 : panels, [&](int64_t begin, int64_t end) {
          for (int64_t panel = begin; panel < end; ++panel) {
            KGroup* to =
                packed + panel * kColumns * depth_of<Arithmetic>(gates);
            const int64_t column = panel * kColumns;
            pack_whole_panel<T>(
                weights_, column,
                std::min<int64_t>(kColumns, plan_.hidden - column), gates, to);
          }
        });
  }

  // One step's gradients of gates, and its part of the bias's; in columns, so
  // that each thread sums its own.
  void differentiate(int64_t step) {
    constexpr int64_t kFewest = 4096;  // states that are worth a thread
    const int64_t vectors = ceil_div(plan_.hidden, kLanes);
    const int64_t grain =
        kFewest / std::max<int64_t>(plan_.batch * kLanes, 1) + 1;
    parallel_for(vectors, threads_ > 1 ? grain : vectors,
                 [&](int64_t begin, int64_t end) {
                   differentiate(step, begin * kLanes,
                                 std::min(end * kLanes, plan_.hidden));
                 });
  }

  void differentiate(int64_t step, int64_t begin, int64_t end) const {
    // Of all three gates, each filled up to whole vectors.
    const int64_t width = round_up(end - begin, kLanes);
    Sum* run = Workspace::of_this_thread<Slot::LltmRun>().template request<Sum>(
        kLltmGates * width);
    for (int64_t row = 0; row < plan_.batch; row += kRun) {
      std::fill_n(run, kLltmGates * width, Sum(0));
      for (int64_t r = row; r < std::min(row + kRun, plan_.batch); ++r) {
        differentiate_row(step, r, begin, end, run, width);
      }
      for (int64_t gate = 0; gate < kLltmGates; ++gate) {
        for (int64_t unit = begin; unit < end; ++unit) {
          bias_sums_[gate * plan_.hidden + unit] +=
              run[gate * width + unit - begin];
        }
      }
    }
  }

  void differentiate_row(int64_t step, int64_t row, int64_t begin, int64_t end,
                         Sum* run, int64_t width) const {
    const int64_t hidden = plan_.hidden;
    const bool is_last = step == plan_.steps - 1;
    const MatrixView<T> gates = gates_.at(step);
    const MatrixView<T> cells = cells_.at(step);
    T* to = grad_sums_ + (step * plan_.batch + row) * plan_.gates();
    for (int64_t unit = begin; unit < end; unit += kLanes) {
      const int count = static_cast<int>(std::min<int64_t>(kLanes, end - unit));
      const auto given = [&](const StepRows<T>& rows, int64_t column) {
        return rows.exists() ? load_columns(rows.at(step), row, column, count)
                             : Vector<Sum>{};
      };
      Vector<Sum> grad_h = given(grad_hidden_, unit);
      Vector<Sum> grad_cell = given(grad_cells_, unit);
      if (!is_last) {
        grad_h += simd::load_partial(grad_states_ + row * states_stride_ + unit,
                                     count);
        grad_cell += simd::load_partial(
            grad_cells_carried_ + row * hidden + unit, count);
      }
      const Sigmoid in(load_columns(gates, row, unit, count));
      const Sigmoid out(load_columns(gates, row, hidden + unit, count));
      const Elu candidate(load_columns(gates, row, 2 * hidden + unit, count));
      const Tanh squashed(load_columns(cells, row, unit, count));
      grad_cell += grad_h * out.value * squashed.slope;
      const Vector<Sum> gradients[kLltmGates] = {
          grad_cell * candidate.value * in.slope,
          grad_h * squashed.value * out.slope,
          grad_cell * in.value * candidate.slope};
      for (int64_t gate = 0; gate < kLltmGates; ++gate) {
        const auto gradient =
            gradients[gate] + given(grad_gates_, gate * hidden + unit);
        simd::store_up_to(to + gate * hidden + unit, gradient, count);
        Sum* sum = run + gate * width + unit - begin;
        simd::store(sum, simd::load(sum) + gradient);
      }
      if (step > 0) {
        simd::store_partial(grad_cells_carried_ + row * hidden + unit,
                            grad_cell, count);
      } else {
        simd::store_up_to(grad_old_cell_ + row * hidden + unit, grad_cell,
                          count);
      }
    }
  }

  MatrixView<T> all_gradients() const { return {grad_sums_, plan_.gates(), 1}; }

  // The rows of all steps as one matrix; copied where they do not lie a stride
  // apart.
  MatrixView<T> as_rows(const StepRows<T>& steps, int64_t columns, T* copy) {
    if (plan_.steps <= 1) {
      return steps.at(0);
    }
    if (plan_.batch == 1 ||
        steps.strides.step == plan_.batch * steps.strides.row) {
      return {steps.data,
              plan_.batch == 1 ? steps.strides.step : steps.strides.row,
              steps.strides.column};
    }
    for (int64_t step = 0; step < plan_.steps; ++step) {
      copy_rows(steps.at(step), columns, copy + step * plan_.batch * columns);
    }
    return {copy, columns, 1};
  }

  void copy_rows(const MatrixView<T>& from, int64_t columns, T* to) const {
    for (int64_t row = 0; row < plan_.batch; ++row, to += columns) {
      for (int64_t column = 0; column < columns; ++column) {
        to[column] = *from.at(row, column);
      }
    }
  }

  // The states that the steps began with.
  MatrixView<T> states_before(T* copy) const {
    if (plan_.steps <= 1) {
      return old_h_;
    }
    const int64_t elements = plan_.batch * plan_.hidden;
    copy_rows(old_h_, plan_.hidden, copy);
    for (int64_t step = 1; step < plan_.steps; ++step) {
      copy_rows(hidden_.at(step - 1), plan_.hidden, copy + step * elements);
    }
    return {copy, plan_.hidden, 1};
  }

  void multiply(const MatrixView<T>& left, int64_t rows, int64_t inner,
                std::initializer_list<Part<T>> parts,
                int64_t accumulation_length) const {
    if (rows > 2 * kMR && inner > 0) {
      if (!multiply_by_tiles(left, rows, inner, parts)) {
        multiply_in_panels<T>(left, rows, inner, parts, accumulation_length,
                              threads_);
      }
      return;
    }
    // cpu/gemm/gemm.h reads the right operand of few rows in place, and makes
    // zeros of sums of nothing.
    for (const Part<T>& part : parts) {
      matrix_product(left, part.right, rows, part.columns, inner, part.output,
                     part.output_stride, threads_);
    }
  }

  // Whether tile registers have made all of them.
  bool multiply_by_tiles(const MatrixView<T>& left, int64_t rows, int64_t inner,
                         std::initializer_list<Part<T>> parts) const {
    return std::all_of(parts.begin(), parts.end(), [&](const Part<T>& part) {
      return part.columns == 0 ||
             tiles::multiply(
                 Product<T, T>{left, part.right, rows, part.columns, inner,
                               part.output, part.output_stride},
                 threads_, KeepSums{});
    });
  }

  void multiply_all_steps() {
    const int64_t rows = plan_.rows();
    const int64_t gates = plan_.gates();
    const auto gradients = all_gradients();
    const Part<T> state{weights_, needs_.old_h ? plan_.hidden : 0, grad_old_h_,
                        plan_.hidden};
    const Part<T> input{weights_.from(0, plan_.hidden),
                        needs_.input ? plan_.features : 0, grad_input_,
                        plan_.features};
    if (plan_.steps == 1) {
      multiply(gradients, rows, gates, {state, input}, kCellAccumulationLength);
    } else if (plan_.steps > 1) {
      multiply(gradients, plan_.batch, gates, {state}, kCellAccumulationLength);
      multiply(gradients, rows, gates, {input}, kCellAccumulationLength);
    }
    if (!needs_.weights) {
      return;
    }
    auto& space = Workspace::of_this_thread<Slot::LltmRows>();
    const int64_t copied = plan_.steps > 1 ? rows : 0;
    T* copy = space.template request<T>(copied * plan_.inner());
    const auto states = states_before(copy);
    const auto inputs =
        as_rows(input_, plan_.features, copy + copied * plan_.hidden);
    multiply(
        gradients.transposed(), gates, rows,
        {{states, plan_.hidden, grad_weights_, plan_.inner()},
         {inputs, plan_.features, grad_weights_ + plan_.hidden, plan_.inner()}},
        plan_.steps > 1 ? sequence_accumulation_length(rows)
                        : kCellAccumulationLength);
    space.release_excess();
  }

  const LltmPlan& plan_;
  LltmNeeds needs_;
  int64_t threads_;
  StepRows<T> grad_hidden_;
  StepRows<T> grad_cells_;
  StepRows<T> grad_gates_;
  StepRows<T> gates_;
  StepRows<T> hidden_;
  StepRows<T> cells_;
  StepRows<T> input_;
  MatrixView<T> weights_;  // of (gates, inner)
  MatrixView<T> old_h_;
  T* grad_input_;
  T* grad_weights_;
  T* grad_bias_;
  T* grad_old_h_;
  T* grad_old_cell_;
  T* grad_sums_ = nullptr;  // of the gates before their activations
  Sum* bias_sums_ = nullptr;
  // Of the state and the cell before the step that was done last.
  Sum* grad_states_ = nullptr;
  int64_t states_stride_ = 0;
  Sum* grad_cells_carried_ = nullptr;
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> lltm_backward(
    const OptionalView& grad_hidden, const OptionalView& grad_cells,
    const OptionalView& grad_gates, const TensorView& gates,
    const TensorView& hidden, const TensorView& cells, const TensorView& input,
    const TensorView& weights, const TensorView& old_h, bool needs_input,
    bool needs_weights, bool needs_old_h) {
  const LltmPlan plan =
      plan_lltm_backward(grad_hidden, grad_cells, grad_gates, gates, hidden,
                         cells, input, weights, old_h);
  const LltmNeeds needs{needs_input, needs_weights, needs_old_h};
  const LltmGradients gradients(plan, needs, device_of(input));
  const Saved saved{grad_hidden, grad_cells, grad_gates, gates, hidden,
                    cells,       input,      weights,    old_h};
  with_floating_type(plan.type, [&](auto example) {
    Backward<decltype(example)>(plan, needs, saved, gradients).run();
  });
  return gradients.all();
}

PKG_IMPLEMENT(CPU, library) { library.impl<&lltm_backward>("lltm_backward"); }

}  // namespace
}  // namespace pkg::cpu
