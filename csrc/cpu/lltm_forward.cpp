// lltm, forward: the cell of PyTorch's tutorial on C++ extensions, and a
// sequence of them.
//
// gates = [h, x] W^T + b is computed for kNR hidden units at a time, a
// micro-panel of the product for each of their three gates; h and x are two
// operands and never laid side by side. The sums of a block, 100 KB at the
// most, are in the cache when the block's gates are activated and the new cells
// and states written: no pass over all gates follows.
//
// One cell reads W in place and computes the gates transposed; of many rows it
// does so by tile registers, for all blocks at once. Where neither suits, it
// packs a micro-panel of W right before it is multiplied, and meanwhile
// prefetches the next (cpu/lltm/product.h has the figures). A sequence packs W
// once, and multiplies the input of many steps at once (kRowsAtOnce rows): what
// is left for each step is the product with h, whose packed weights are read
// from the cache where they fit.
//
// Operations: 2 B 3H (H + F), and some 120 for each of the B H states. Bytes: W
// is read once. Bound by the multiply-add units for a batch of 32 and more, by
// reading W below.
#include <algorithm>
#include <cstdint>

#include "cpu/gemm/linear_product.h"
#include "cpu/gemm/matrix_product.h"
#include "cpu/lltm/gates.h"
#include "cpu/lltm/passes.h"
#include "cpu/lltm/product.h"
#include "cpu/pointwise/pointwise.h"
#include "cpu/tiles/matrix_product.h"
#include "host/integer_math.h"
#include "host/namespace.h"

namespace pkg::cpu {
namespace {

// Rows of the input, of several steps, whose product is made at once.
constexpr int64_t kRowsAtOnce = 256;

// Rows from which a cell's gates are a product by tile registers, and up to how
// many it is one. Intel Xeon, microseconds by vectors and by tiles, features
// and states as named: float32 64 rows 256 to 256 381 and 425, 128 rows 750 and
// 590; bfloat16 123 and 160, 310 and 290; float16 32 rows 128 to 256 188 and
// 157. 512 rows of bfloat16 in one product 512 to 1024 take 8600, in two 6600.
template <class T>
inline constexpr int64_t kLeastTileRows = 128;
template <>
inline constexpr int64_t kLeastTileRows<simd::Half> = 32;
constexpr int64_t kMostTileRows = 256;

template <class T>
class Forward {
 public:
  Forward(const LltmPlan& plan, const LltmInputs& inputs, const Tensor& hidden,
          const Tensor& cells, const Tensor* gates)
      : plan_(plan),
        blocks_(ceil_div(plan.hidden, kColumns)),
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
      if (!run_cell_by_tiles()) {
        run_cell();
      }
    } else {
      run_sequence();
    }
  }

 private:
  using Left = LeftOperand<T>;
  using Arithmetic = typename Left::Arithmetic;
  using KGroup = typename Left::KGroup;
  using Sum = typename Left::Sum;
  static constexpr int kColumns = kNR<Arithmetic>;
  static constexpr int kLanes = simd::kLanes<Sum>;
  // Columns of the sums of a block of hidden units: kColumns of each gate.
  static constexpr int64_t kBlock = kLltmGates * kColumns;

  static MatrixView<T> view_of(const TensorView& tensor) {
    const LltmStrides strides = lltm_strides(tensor);
    return {static_cast<const T*>(tensor.const_data_ptr()), strides.row,
            strides.column};
  }

  // In the order of the blocks' sums.
  void take_bias(const TensorView& bias) {
    Sum* to = Workspace::of_this_thread<Slot::Bias>().template request<Sum>(
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

  // Columns of W^T of a panel: those of a block's units for one gate.
  int64_t panel_column(int64_t block, int64_t gate) const {
    return gate * plan_.hidden + block * kColumns;
  }
  int64_t panel_columns(int64_t block) const {
    return std::min<int64_t>(kColumns, plan_.hidden - block * kColumns);
  }

  // A cell whose gates are products by tile registers, W [h, x]^T, which packs
  // W as it lies; false: it is not the way.
  bool run_cell_by_tiles() const {
    const int64_t most_rows =
        detail::even_block(plan_.batch, kMostTileRows, kLanes);
    const int64_t last_rows = (plan_.batch - 1) % most_rows + 1;
    if (plan_.batch < kLeastTileRows<T> ||
        !tiles::multiplies<T>(plan_.gates(), last_rows, plan_.inner())) {
      return false;
    }
    T* rows = Workspace::of_this_thread<Slot::LltmRows>().template request<T>(
        most_rows * plan_.inner());
    auto& sums_space = Workspace::of_this_thread<Slot::LltmSums>();
    // A block's units, some of which may not exist, are all turned.
    Sum* sums = sums_space.template request<Sum>((plan_.gates() + kColumns) *
                                                 most_rows);
    for_each_block(plan_.batch, most_rows, [&](int64_t row, int64_t count) {
      run_rows_by_tiles(row, count, rows, sums);
    });
    sums_space.release_excess();
    return true;
  }

  void run_rows_by_tiles(int64_t row, int64_t count, T* rows, Sum* sums) const {
    const int64_t inner = plan_.inner();
    const int64_t width = round_up(count, kLanes);
    copy_rows(old_h_.from(row, 0), count, plan_.hidden, rows);
    copy_rows(input_.from(row, 0), count, plan_.features, rows + plan_.hidden);
    // A last block of few rows may be one that tiles do not multiply.
    detail::multiply_many_rows(Product<T, Sum>{weights_.transposed(),
                                               {rows, 1, inner},
                                               plan_.gates(),
                                               count,
                                               inner,
                                               sums,
                                               width},
                               threads_, KeepSums{});
    parallel_for(blocks_, threads_ > 1 ? 1 : blocks_,
                 [&](int64_t begin, int64_t end) {
                   Sum* turned = Workspace::of_this_thread<Slot::PartialSums>()
                                     .template request<Sum>(width * kBlock);
                   for (int64_t block = begin; block < end; ++block) {
                     for (int64_t gate = 0; gate < kLltmGates; ++gate) {
                       turn(sums + panel_column(block, gate) * width, width,
                            count, turned + gate * kColumns);
                     }
                     finish(0, row, count, block, turned);
                   }
                 });
  }

  // To rows of plan_.inner() elements.
  void copy_rows(const MatrixView<T>& from, int64_t rows, int64_t columns,
                 T* to) const {
    for (int64_t row = 0; row < rows; ++row, to += plan_.inner()) {
      if (from.column_stride == 1) {
        std::copy_n(from.at(row, 0), columns, to);
        continue;
      }
      for (int64_t column = 0; column < columns; ++column) {
        to[column] = *from.at(row, column);
      }
    }
  }

  void run_cell() {
    const int64_t inner = plan_.inner();
    detail::for_each_rectangle<Arithmetic>(
        plan_.batch, blocks_ * kBlock, kMR, kBlock,
        detail::useful_threads(plan_.batch, plan_.gates(), inner, threads_),
        [&](int64_t row, int64_t rows, int64_t column, int64_t columns) {
          const int64_t begin = column / kBlock;
          const int64_t end = (column + columns) / kBlock;
          if (is_transposed(rows)) {
            run_transposed_part(row, rows, begin, end);
          } else {
            run_cell_part(row, rows, begin, end);
          }
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
    KGroup* panel =
        Workspace::of_this_thread<Slot::PackedRight>().template request<KGroup>(
            kColumns * depth);
    KGroup* packed_left =
        Workspace::of_this_thread<Slot::PackedLeft>().template request<KGroup>(
            h.size(most_rows) + x.size(most_rows));
    Sum* sums =
        Workspace::of_this_thread<Slot::PartialSums>().template request<Sum>(
            most_rows * kBlock);
    for (int64_t first = 0; first < rows; first += most_rows) {
      const int64_t count = std::min(most_rows, rows - first);
      h.take(row + first, count, packed_left);
      x.take(row + first, count, packed_left + h.size(most_rows));
      for (int64_t block = begin_block; block < end_block; ++block) {
        for (int64_t gate = 0; gate < kLltmGates; ++gate) {
          // A state has at least one element, so that the sums are written.
          add_packing(h, 0, plan_.hidden, block, gate, end_block, panel, sums);
          add_packing(x, plan_.hidden, plan_.features, block, gate, end_block,
                      panel, sums);
        }
        finish(0, row + first, count, block, sums);
      }
    }
  }

  // Adds the product of the rows that `left` has taken to a gate's sums, with
  // weights that are packed on the way: those of the inner dimension from
  // first_inner on.
  void add_packing(const Left& left, int64_t first_inner, int64_t inner,
                   int64_t block, int64_t gate, int64_t end_block,
                   KGroup* panel, Sum* sums) const {
    for_each_step<Arithmetic>(inner, [&](int64_t k, int64_t values) {
      pack_micro_panel<Arithmetic>(weights_.from(first_inner + k, 0),
                                   panel_column(block, gate),
                                   panel_columns(block), values, panel);
      NextPanel next = after(first_inner + k + values, values, block, gate,
                             end_block, left.tiles());
      left.template multiply<Sum>(
          k, values, panel, kColumns,
          {sums + gate * kColumns, kBlock, first_inner + k == 0}, next);
    });
  }

  // The weights that are packed after those of a gate up to `inner`.
  NextPanel after(int64_t inner, int64_t values, int64_t block, int64_t gate,
                  int64_t end_block, int64_t tiles) const {
    if (inner == plan_.inner()) {
      inner = 0;
      block += gate == kLltmGates - 1;
      gate = (gate + 1) % kLltmGates;
    }
    if (block == end_block) {
      return {};
    }
    return {weights_,
            inner,
            panel_column(block, gate),
            std::min(values, plan_.inner() - inner),
            panel_columns(block),
            tiles};
  }

  // Whether the gates are computed as W [h, x]^T, which reads W in place: where
  // rows fill the registers, or nearly.
  bool is_transposed(int64_t rows) const {
    constexpr int kKGroupSize = Arithmetic::kKGroupSize;
    return multiplies_in_place<Arithmetic>(weights_.transposed()) &&
           plan_.hidden % kKGroupSize == 0 &&
           plan_.features % kKGroupSize == 0 &&
           (rows % kLanes == 0 || rows > 8 * kLanes);
  }

  void run_transposed_part(int64_t row, int64_t rows, int64_t begin_block,
                           int64_t end_block) const {
    const int64_t most_rows =
        std::min(detail::even_block(rows, kMostLeftRows, kLanes),
                 round_up(rows, kLanes));
    const int64_t width = round_up(most_rows, kColumns);
    const int64_t hidden_depth = depth_of<Arithmetic>(plan_.hidden);
    KGroup* h =
        Workspace::of_this_thread<Slot::PackedLeft>().template request<KGroup>(
            width * (hidden_depth + depth_of<Arithmetic>(plan_.features)));
    KGroup* x = h + width * hidden_depth;
    // Of a gate, units x rows; and of a block, rows x units.
    Sum* turned =
        Workspace::of_this_thread<Slot::PackedRight>().template request<Sum>(
            kColumns * width);
    Sum* sums =
        Workspace::of_this_thread<Slot::PartialSums>().template request<Sum>(
            most_rows * kBlock);
    for (int64_t first = 0; first < rows; first += most_rows) {
      const int64_t count = std::min(most_rows, rows - first);
      pack_transposed(old_h_.from(row + first, 0), count, plan_.hidden, h);
      pack_transposed(input_.from(row + first, 0), count, plan_.features, x);
      for (int64_t block = begin_block; block < end_block; ++block) {
        for (int64_t gate = 0; gate < kLltmGates; ++gate) {
          const auto gate_weights =
              weights_.from(0, panel_column(block, gate)).transposed();
          add_transposed(gate_weights, block, plan_.hidden, h, count, turned,
                         width, true);
          add_transposed(gate_weights.from(0, plan_.hidden), block,
                         plan_.features, x, count, turned, width, false);
          turn(turned, width, count, sums + gate * kColumns);
        }
        finish(0, row + first, count, block, sums);
      }
    }
  }

  // Packs rows as the right operand that they are when transposed.
  void pack_transposed(const MatrixView<T>& from, int64_t rows, int64_t inner,
                       KGroup* to) const {
    const int64_t width = round_up(rows, kColumns);
    for_each_step<Arithmetic>(inner, [&](int64_t k, int64_t values) {
      pack_columns<Arithmetic>(from.from(0, k).transposed(), rows, values,
                               to + width * depth_of<Arithmetic>(k));
    });
  }

  void add_transposed(const MatrixView<T>& gate_weights, int64_t block,
                      int64_t inner, const KGroup* packed, int64_t rows,
                      Sum* sums, int64_t stride, bool first) const {
    const int64_t width = round_up(rows, kColumns);
    for_each_step<Arithmetic>(inner, [&](int64_t k, int64_t values) {
      multiply_in_place<T>(gate_weights.from(0, k), panel_columns(block),
                           values, packed + width * depth_of<Arithmetic>(k),
                           rows, sums, stride, first && k == 0);
    });
  }

  // From units x rows to rows x units, in whole registers both ways.
  static void turn(const Sum* from, int64_t stride, int64_t rows, Sum* to) {
    for (int64_t row = 0; row < rows; row += kLanes) {
      for (int unit = 0; unit < kColumns; unit += kLanes) {
        Vector<Sum> square[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          square[i] = simd::load(from + (unit + i) * stride + row);
        }
        simd::transpose(square);
        for (int i = 0; i < kLanes; ++i) {
          simd::store(to + (row + i) * kBlock + unit, square[i]);
        }
      }
    }
  }

  void run_sequence() {
    const int64_t hidden_depth = depth_of<Arithmetic>(plan_.hidden);
    const int64_t depth = hidden_depth + depth_of<Arithmetic>(plan_.features);
    const int64_t panel_stride = depth * kColumns;
    auto& weights_space = Workspace::of_this_thread<Slot::LltmWeights>();
    KGroup* packed = weights_space.template request<KGroup>(
        blocks_ * kLltmGates * panel_stride);
    pack_weights(packed, panel_stride, hidden_depth);
    const int64_t chunk = std::clamp<int64_t>(
        kRowsAtOnce / plan_.batch, 1, std::max<int64_t>(plan_.steps, 1));
    auto& sums_space = Workspace::of_this_thread<Slot::LltmSums>();
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
    detail::for_each_rectangle<Arithmetic>(
        rows, blocks_ * kBlock, kMR, kBlock,
        detail::useful_threads(rows, plan_.gates(), inner, threads_),
        [&](int64_t row, int64_t part_rows, int64_t column, int64_t columns) {
          body(row, part_rows, column / kBlock, (column + columns) / kBlock);
        });
  }

  void pack_weights(KGroup* packed, int64_t panel_stride,
                    int64_t hidden_depth) const {
    parallel_for(
        blocks_, threads_ > 1 ? 1 : blocks_, [&](int64_t begin, int64_t end) {
          for (int64_t block = begin; block < end; ++block) {
            KGroup* panels = packed + block * kLltmGates * panel_stride;
            for (int64_t gate = 0; gate < kLltmGates; ++gate) {
              KGroup* panel = panels + gate * panel_stride;
              const int64_t column = panel_column(block, gate);
              const int64_t columns = panel_columns(block);
              pack_whole_panel<T>(weights_, column, columns, plan_.hidden,
                                  panel);
              pack_whole_panel<T>(weights_.from(plan_.hidden, 0), column,
                                  columns, plan_.features,
                                  panel + hidden_depth * kColumns);
            }
          }
        });
  }

  // Multiplies the rows that `left` has taken by a block's packed weights.
  void add_packed(const Left& left, int64_t inner, const KGroup* panels,
                  int64_t panel_stride, Sum* sums, bool first) const {
    NextPanel nothing;
    for (int64_t gate = 0; gate < kLltmGates; ++gate) {
      for_each_step<Arithmetic>(inner, [&](int64_t k, int64_t values) {
        left.template multiply<Sum>(
            k, values,
            panels + gate * panel_stride + depth_of<Arithmetic>(k) * kColumns,
            kColumns, {sums + gate * kColumns, kBlock, first && k == 0},
            nothing);
      });
    }
  }

  // Rows count from the first of `step`.
  void add_inputs(int64_t step, int64_t row, int64_t rows, int64_t begin_block,
                  int64_t end_block, const KGroup* packed, int64_t panel_stride,
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
      KGroup* packed_left = Workspace::of_this_thread<Slot::PackedLeft>()
                                .template request<KGroup>(x.size(count));
      x.take(0, count, packed_left);
      for (int64_t block = begin_block; block < end_block; ++block) {
        add_packed(x, plan_.features,
                   packed + block * kLltmGates * panel_stride, panel_stride,
                   sums + (block * block_rows + first) * kBlock, true);
      }
      first += count;
    }
  }

  void run_step(int64_t step, int64_t row, int64_t rows, int64_t begin_block,
                int64_t end_block, const KGroup* packed, int64_t panel_stride,
                Sum* sums, int64_t block_stride) const {
    Left h(step == 0 ? old_h_ : state_before(hidden_, step), plan_.hidden);
    const int64_t most_rows = left_rows(rows);
    KGroup* packed_left =
        Workspace::of_this_thread<Slot::PackedLeft>().template request<KGroup>(
            h.size(most_rows));
    for (int64_t first = row; first < row + rows; first += most_rows) {
      const int64_t count = std::min(most_rows, row + rows - first);
      h.take(first, count, packed_left);
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
      for (int v = 0; v < kNRVectors; ++v) {
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
            simd::store_up_to(
                gates_ + (to_row * kLltmGates + gate) * hidden + unit,
                gates[gate], count);
          }
        }
        const auto cell = load_columns(old_cell, r, unit, count) +
                          Elu(gates[2]).value * Sigmoid(gates[0]).value;
        simd::store_up_to(cells_ + to_row * hidden + unit, cell, count);
        simd::store_up_to(hidden_ + to_row * hidden + unit,
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
