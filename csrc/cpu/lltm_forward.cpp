// lltm, forward: the cell of PyTorch's tutorial on C++ extensions, and a
// sequence of them.
//
// gates = [h, x] W^T + b is computed for kTileColumns hidden units at a time, a
// panel of the product for each of their three gates; h and x are two operands
// and never laid side by side. The sums of a block, 100 KB at the most, are in
// the cache when the block's gates are activated and the new cells and states
// written: no pass over all gates follows.
//
// One cell packs a panel of W right before it is multiplied. A sequence packs W
// once, and multiplies the input of many steps at once (kRowsAtOnce rows): what
// is left for each step is the product with h, whose packed weights are read
// from the cache where they fit.
//
// Operations: 2 B 3H (H + F), and some 120 for each of the B H states. Bytes: W
// is read once. Bound by the multiply-add units for a batch of 32 and more, by
// reading W below.
#include <algorithm>
#include <cstdint>

#include "../namespace.h"
#include "linear_product.h"
#include "lltm.h"
#include "lltm_pointwise.h"
#include "lltm_product.h"
#include "pointwise.h"

namespace pkg::cpu {
namespace {

// Rows of the input, of several steps, whose product is made at once.
constexpr int64_t kRowsAtOnce = 256;

template <class T>
class Forward {
 public:
  Forward(const LltmPlan& plan, const LltmInputs& inputs, const Tensor& hidden,
          const Tensor& cells, const Tensor* gates)
      : plan_(plan),
        blocks_((plan.hidden + kColumns - 1) / kColumns),
        threads_(num_threads()),
        input_(view_of(inputs.input)),
        input_step_(lltm_strides(inputs.input).step),
        weights_(view_of(inputs.weights).transposed()),
        old_h_(view_of(inputs.old_h)),
        old_cell_(view_of(inputs.old_cell)),
        hidden_(static_cast<T*>(hidden.mutable_data_ptr())),
        cells_(static_cast<T*>(cells.mutable_data_ptr())),
        gates_(gates ? static_cast<T*>(gates->mutable_data_ptr()) : nullptr) {
    if (plan.batch == 1) {
      input_.row_stride = input_step_;  // one row's own means nothing
    }
    take_bias(inputs.bias);
  }

  void run() {
    if (plan_.rows() == 0 || plan_.hidden == 0) {
      return;
    }
    if (plan_.steps == 1) {
      run_cell();
    } else {
      run_sequence();
    }
  }

 private:
  using Left = LeftOperand<T>;
  using Arithmetic = typename Left::Arithmetic;
  using Lane = typename Left::Lane;
  using Sum = typename Left::Sum;
  static constexpr int kColumns = kTileColumns<Arithmetic>;
  static constexpr int kLanes = simd::kLanes<Sum>;
  // Columns of the sums of a block of hidden units: kColumns of each gate.
  static constexpr int64_t kBlock = kLltmGates * kColumns;
  // Workspaces; the products use others.
  static constexpr int kLeftSlot = 0;
  static constexpr int kPanelSlot = 2;
  static constexpr int kSumsSlot = 1;
  static constexpr int kBiasSlot = 8;
  static constexpr int kWeightsSlot = 9;
  static constexpr int kSequenceSumsSlot = 10;

  static MatrixView<T> view_of(const TensorView& tensor) {
    const LltmStrides strides = lltm_strides(tensor);
    return {static_cast<const T*>(tensor.const_data_ptr()), strides.row,
            strides.column};
  }

  // In the order of the blocks' sums.
  void take_bias(const TensorView& bias) {
    Sum* to = Workspace::of_this_thread<kBiasSlot>().template request<Sum>(
        blocks_ * kBlock);
    const T* from = static_cast<const T*>(bias.const_data_ptr());
    const int64_t stride = strides_of(bias).back();
    for (int64_t gate = 0; gate < kLltmGates; ++gate) {
      for (int64_t unit = 0; unit < blocks_ * kColumns; ++unit) {
        to[unit / kColumns * kBlock + gate * kColumns + unit % kColumns] =
            unit < plan_.hidden
                ? static_cast<Sum>(from[(gate * plan_.hidden + unit) * stride])
                : Sum(0);
      }
    }
    bias_ = to;
  }

  // The three panels of a block, `panel_stride` apart.
  void pack_block(int64_t block, int64_t first_inner, int64_t k, int64_t values,
                  Lane* panels, int64_t panel_stride) const {
    const int64_t unit = block * kColumns;
    for (int64_t gate = 0; gate < kLltmGates; ++gate) {
      pack_panel<T>(weights_, gate * plan_.hidden + unit,
                    std::min<int64_t>(kColumns, plan_.hidden - unit),
                    first_inner + k, values, panels + gate * panel_stride);
    }
  }

  // Adds the product of the rows that `left` has taken to a block's sums, with
  // weights that are packed on the way.
  void add_packing(const Left& left, int64_t first_inner, int64_t inner,
                   int64_t block, Lane* panels, Sum* sums, bool first) const {
    for_each_step<Arithmetic>(inner, [&](int64_t k, int64_t values) {
      const int64_t stride = depth_of<Arithmetic>(values) * kColumns;
      pack_block(block, first_inner, k, values, panels, stride);
      left.multiply(k, values, {panels, kColumns, stride}, kBlock, sums, kBlock,
                    first && k == 0);
    });
  }

  void run_cell() {
    const int64_t inner = plan_.inner();
    detail::for_each_rectangle(
        plan_.batch, blocks_ * kBlock, kTileRows, kBlock,
        detail::useful_threads(plan_.batch, plan_.gates(), inner, threads_),
        [&](int64_t row, int64_t rows, int64_t column, int64_t columns) {
          run_cell_part(row, rows, column / kBlock,
                        (column + columns) / kBlock);
        });
  }

  void run_cell_part(int64_t row, int64_t rows, int64_t begin_block,
                     int64_t end_block) const {
    Left h(old_h_, plan_.hidden);
    Left x(input_, plan_.features);
    const int64_t most_rows = left_rows(rows);
    const int64_t depth =
        depth_of<Arithmetic>(std::max(inner_step<Arithmetic>(plan_.hidden),
                                      inner_step<Arithmetic>(plan_.features)));
    Lane* panels =
        Workspace::of_this_thread<kPanelSlot>().template request<Lane>(kBlock *
                                                                       depth);
    Lane* lanes = Workspace::of_this_thread<kLeftSlot>().template request<Lane>(
        h.lanes(most_rows) + x.lanes(most_rows));
    Sum* sums = Workspace::of_this_thread<kSumsSlot>().template request<Sum>(
        most_rows * kBlock);
    for (int64_t first = 0; first < rows; first += most_rows) {
      const int64_t count = std::min(most_rows, rows - first);
      h.take(row + first, count, lanes);
      x.take(row + first, count, lanes + h.lanes(most_rows));
      for (int64_t block = begin_block; block < end_block; ++block) {
        // A state has at least one element, so that the sums are written.
        add_packing(h, 0, plan_.hidden, block, panels, sums, true);
        add_packing(x, plan_.hidden, plan_.features, block, panels, sums,
                    false);
        finish(0, row + first, count, block, sums);
      }
    }
  }

  void run_sequence() {
    const int64_t hidden_depth = depth_of<Arithmetic>(plan_.hidden);
    const int64_t depth = hidden_depth + depth_of<Arithmetic>(plan_.features);
    const int64_t panel_stride = depth * kColumns;
    auto& weights_space = Workspace::of_this_thread<kWeightsSlot>();
    Lane* packed = weights_space.template request<Lane>(blocks_ * kLltmGates *
                                                        panel_stride);
    pack_weights(packed, panel_stride, hidden_depth);
    const int64_t chunk =
        std::clamp<int64_t>(kRowsAtOnce / plan_.batch, 1, plan_.steps);
    auto& sums_space = Workspace::of_this_thread<kSequenceSumsSlot>();
    Sum* sums = sums_space.template request<Sum>(chunk * plan_.batch * blocks_ *
                                                 kBlock);
    for (int64_t step = 0; step < plan_.steps; step += chunk) {
      const int64_t steps = std::min(chunk, plan_.steps - step);
      const int64_t rows = steps * plan_.batch;
      // A block's sums lie together.
      if (plan_.features > 0) {
        for_each_part(
            rows, plan_.features,
            [&](int64_t row, int64_t part_rows, int64_t begin, int64_t end) {
              add_inputs(step, row, part_rows, begin, end,
                         packed + hidden_depth * kColumns, panel_stride, sums,
                         rows);
            });
      }
      for (int64_t i = 0; i < steps; ++i) {
        for_each_part(
            plan_.batch, plan_.hidden,
            [&](int64_t row, int64_t part_rows, int64_t begin, int64_t end) {
              run_step(step + i, row, part_rows, begin, end, packed,
                       panel_stride, sums + i * plan_.batch * kBlock,
                       rows * kBlock);
            });
      }
    }
    weights_space.release_excess();
    sums_space.release_excess();
  }

  // Calls body(row, rows, begin, end) for parts of a product that all threads
  // share, the latter two of its blocks.
  template <class Body>
  void for_each_part(int64_t rows, int64_t inner, const Body& body) const {
    detail::for_each_rectangle(
        rows, blocks_ * kBlock, kTileRows, kBlock,
        detail::useful_threads(rows, plan_.gates(), inner, threads_),
        [&](int64_t row, int64_t part_rows, int64_t column, int64_t columns) {
          body(row, part_rows, column / kBlock, (column + columns) / kBlock);
        });
  }

  void pack_weights(Lane* packed, int64_t panel_stride,
                    int64_t hidden_depth) const {
    parallel_for(
        blocks_, threads_ > 1 ? 1 : blocks_, [&](int64_t begin, int64_t end) {
          for (int64_t block = begin; block < end; ++block) {
            Lane* panels = packed + block * kLltmGates * panel_stride;
            const auto pack = [&](int64_t first, int64_t inner, Lane* to) {
              for_each_step<Arithmetic>(inner, [&](int64_t k, int64_t values) {
                pack_block(block, first, k, values,
                           to + depth_of<Arithmetic>(k) * kColumns,
                           panel_stride);
              });
            };
            pack(0, plan_.hidden, panels);
            pack(plan_.hidden, plan_.features,
                 panels + hidden_depth * kColumns);
          }
        });
  }

  // Multiplies the rows that `left` has taken by a block's packed weights.
  void add_packed(const Left& left, int64_t inner, const Lane* panels,
                  int64_t panel_stride, Sum* sums, bool first) const {
    for_each_step<Arithmetic>(inner, [&](int64_t k, int64_t values) {
      left.multiply(
          k, values,
          {panels + depth_of<Arithmetic>(k) * kColumns, kColumns, panel_stride},
          kBlock, sums, kBlock, first && k == 0);
    });
  }

  // Rows count from the first of `step`.
  void add_inputs(int64_t step, int64_t row, int64_t rows, int64_t begin_block,
                  int64_t end_block, const Lane* packed, int64_t panel_stride,
                  Sum* sums, int64_t block_rows) const {
    const int64_t end = row + rows;
    for (int64_t first = row; first < end;) {
      // As many rows as lie a stride apart; or those of one step.
      const bool uniform = input_step_ == plan_.batch * input_.row_stride;
      const int64_t of_step = first / plan_.batch;
      const int64_t run_end =
          uniform ? end : std::min(end, (of_step + 1) * plan_.batch);
      const int64_t count = std::min(kMostLeftRows, run_end - first);
      const T* data = input_.data + (step + of_step) * input_step_ +
                      (first - of_step * plan_.batch) * input_.row_stride;
      Left x({data, input_.row_stride, input_.column_stride}, plan_.features);
      Lane* lanes =
          Workspace::of_this_thread<kLeftSlot>().template request<Lane>(
              x.lanes(count));
      x.take(0, count, lanes);
      for (int64_t block = begin_block; block < end_block; ++block) {
        add_packed(x, plan_.features,
                   packed + block * kLltmGates * panel_stride, panel_stride,
                   sums + (block * block_rows + first) * kBlock, true);
      }
      first += count;
    }
  }

  void run_step(int64_t step, int64_t row, int64_t rows, int64_t begin_block,
                int64_t end_block, const Lane* packed, int64_t panel_stride,
                Sum* sums, int64_t block_stride) const {
    Left h(step == 0 ? old_h_ : state_before(hidden_, step), plan_.hidden);
    const int64_t most_rows = left_rows(rows);
    Lane* lanes = Workspace::of_this_thread<kLeftSlot>().template request<Lane>(
        h.lanes(most_rows));
    for (int64_t first = row; first < row + rows; first += most_rows) {
      const int64_t count = std::min(most_rows, row + rows - first);
      h.take(first, count, lanes);
      for (int64_t block = begin_block; block < end_block; ++block) {
        Sum* to = sums + block * block_stride + first * kBlock;
        add_packed(h, plan_.hidden, packed + block * kLltmGates * panel_stride,
                   panel_stride, to, plan_.features == 0);
        finish(step, first, count, block, to);
      }
    }
  }

  MatrixView<T> state_before(const T* states, int64_t step) const {
    return {states + (step - 1) * plan_.batch * plan_.hidden, plan_.hidden, 1};
  }

  // From a block's sums to its gates, cells and states.
  void finish(int64_t step, int64_t row, int64_t rows, int64_t block,
              const Sum* sums) const {
    const MatrixView<T> old_cell =
        step == 0 ? old_cell_ : state_before(cells_, step);
    const int64_t hidden = plan_.hidden;
    for (int64_t r = row; r < row + rows; ++r, sums += kBlock) {
      const int64_t to_row = step * plan_.batch + r;
      for (int v = 0; v < kTileVectors; ++v) {
        const int64_t unit = block * kColumns + v * kLanes;
        const int count =
            static_cast<int>(std::min<int64_t>(kLanes, hidden - unit));
        if (count <= 0) {
          break;
        }
        Vector<Sum> gates[kLltmGates];
        for (int64_t gate = 0; gate < kLltmGates; ++gate) {
          const int64_t place = gate * kColumns + v * kLanes;
          gates[gate] = simd::load(sums + place) +
                        simd::load(bias_ + block * kBlock + place);
          if (gates_ != nullptr) {
            store_columns(gates_ + (to_row * kLltmGates + gate) * hidden + unit,
                          gates[gate], count);
          }
        }
        const auto cell = load_columns(old_cell, r, unit, count) +
                          Elu(gates[2]).value * Sigmoid(gates[0]).value;
        store_columns(cells_ + to_row * hidden + unit, cell, count);
        store_columns(hidden_ + to_row * hidden + unit,
                      Tanh(cell).value * Sigmoid(gates[1]).value, count);
      }
    }
  }

  const LltmPlan& plan_;
  int64_t blocks_;
  int64_t threads_;
  MatrixView<T> input_;
  int64_t input_step_;
  MatrixView<T> weights_;  // of (inner, gates)
  MatrixView<T> old_h_;
  MatrixView<T> old_cell_;
  T* hidden_;
  T* cells_;
  T* gates_;
  const Sum* bias_ = nullptr;
};

std::tuple<Tensor, Tensor, Tensor> lltm_forward(const TensorView& input,
                                                const TensorView& weights,
                                                const TensorView& bias,
                                                const TensorView& old_h,
                                                const TensorView& old_cell) {
  const LltmPlan plan =
      plan_lltm_forward(input, weights, bias, old_h, old_cell);
  const DeviceId device = device_of(input);
  const Tensor hidden = allocate_lltm_rows(plan, plan.hidden, device);
  const Tensor cells = allocate_lltm_rows(plan, plan.hidden, device);
  const Tensor gates = allocate_lltm_rows(plan, plan.gates(), device);
  run_lltm_forward(plan, {input, weights, bias, old_h, old_cell}, hidden, cells,
                   &gates);
  return {hidden, cells, gates};
}

PKG_IMPLEMENT(CPU, library) { library.impl<&lltm_forward>("lltm_forward"); }

}  // namespace

void run_lltm_forward(const LltmPlan& plan, const LltmInputs& inputs,
                      const Tensor& hidden, const Tensor& cells,
                      const Tensor* gates) {
  with_floating_type(plan.type, [&](auto example) {
    Forward<decltype(example)>(plan, inputs, hidden, cells, gates).run();
  });
}

}  // namespace pkg::cpu
