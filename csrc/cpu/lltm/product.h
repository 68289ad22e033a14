// The products of lltm, over the core of cpu/gemm/gemm.h: of few rows with
// large weights, which are read once and not used again soon, and the gradient
// of these weights, which is written once. Sums are kept in the accumulator's
// type, and may be added to.
//
// The micro-kernel alone runs at 97 % of the limit with panels of 256 lanes; a
// product with 128 rows loses far more around it. Measured on Zen 4 (118
// GFLOP/s at most), one thread, float32, 128 x 3072 x 1536, 2026-11-21, in ms
// of 10.2 at the least:
//
//   weights by cpu/gemm/gemm.h: packed in blocks of 512 x 1024          15.4 (X
//   W^T) and                                                        13.4 (G W)
//   a panel of 128 lanes at a time, right before its product   13.8, 13.2
//   the same, the next one asked for into the L2 cache during  12.8, 12.1
//   the same, of 256 lanes                                     12.4, 11.8
//   no packing, a product with what lies there                 10.6, 10.7
//   W in place as left operand, the result transposed          11.7
//   the weights' gradient by cpu/gemm/gemm.h                            12.3
//   the same, the tile's lines of the result asked for         11.5
//
// Packing itself takes 0.9 ms for X W^T, whose weights are transposed on the
// way, and 0.4 for G W; the rest was waiting for memory in short runs that the
// processor's own prefetching does not follow. The transposed product packs no
// weights, and the processor prefetches its 12 long rows by itself; it wants
// registers filled with rows of X.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "cpu/gemm/gemm.h"
#include "cpu/runtime/workspace.h"

namespace pkg::cpu {

// Rows of a left operand that a thread packs at a time: at 1536 lanes each
// they fill 2 MiB. A right panel that is packed for them is used for as many.
inline constexpr int64_t kMostLeftRows = 32 * kTileRows;
// Where there are more rows: strips that are packed together.
inline constexpr int64_t kLeftBlockRows = 12 * kTileRows;

inline int64_t left_rows(int64_t rows) {
  return std::min(rows, detail::even_block(rows, kMostLeftRows, kTileRows));
}

// Lanes of a panel.
inline constexpr int64_t kPanelDepth = 256;
// Lanes of the inner dimension that are summed one after the other: a quarter
// of cpu/gemm/gemm.h's. A step's errors are carried through all later steps of
// a sequence, and those of a chain grow with its length: with kBlockDepth the
// gates at (128, 512, 1024) had 1.7 times PyTorch's error. The sums in between
// stay in the L1 cache; adding to them costs about 1 %.
inline constexpr int64_t kChain = 128;
// For the weights' gradient of a sequence: autograd sums each step's rows on
// their own and then these sums. Of n terms in chains of c the error's variance
// grows as n (c + n / c), least for c = sqrt(n); this is at most three times as
// much, so that the error is less than twice PyTorch's however long the steps.
inline int64_t sequence_chain(int64_t rows) { return rows <= 512 ? 32 : 64; }

// The inner dimension is multiplied in steps of so many values at the most.
template <class Arithmetic>
int64_t inner_step(int64_t inner) {
  return detail::even_block(inner, kPanelDepth * Arithmetic::kDepth,
                            kBlockUnit<Arithmetic>);
}

// The lanes of a step are summed in chains of so many at the most.
template <class Arithmetic>
int64_t chain_lanes(int64_t depth, int64_t chain) {
  return detail::even_block(depth, chain,
                            kBlockUnit<Arithmetic> / Arithmetic::kDepth);
}

// Calls body(k, values) for each step of the inner dimension.
template <class Arithmetic, class Body>
void for_each_step(int64_t inner, const Body& body) {
  const int64_t step = inner_step<Arithmetic>(inner);
  for (int64_t k = 0; k < inner; k += step) {
    body(k, std::min(step, inner - k));
  }
}

// Part of a matrix that is packed next, asked for some lines at a time between
// the tiles of the product before.
class Ahead {
 public:
  Ahead() = default;

  // The lines of `values` steps of `columns` columns of a right operand from
  // its (k, column) on, divided among so many tiles.
  template <class T>
  Ahead(const MatrixView<T>& right, int64_t k, int64_t column, int64_t values,
        int64_t columns, int64_t tiles)
      : at_(reinterpret_cast<const std::byte*>(right.at(k, column))) {
    constexpr int64_t kBytes = sizeof(T);
    const bool transposed = right.row_stride == 1;
    if (!transposed && right.column_stride != 1) {
      return;
    }
    runs_ = transposed ? columns : values;
    stride_ = (transposed ? right.column_stride : right.row_stride) * kBytes;
    bytes_ = (transposed ? values : columns) * kBytes;
    each_ = (runs_ + tiles - 1) / std::max<int64_t>(tiles, 1);
  }

  void ask() {
    constexpr int64_t kLine = 64;
    for (int64_t i = 0; i < each_ && runs_ > 0; ++i, --runs_) {
      for (int64_t byte = 0; byte < bytes_; byte += kLine) {
        __builtin_prefetch(at_ + byte, 0, 2);
      }
      at_ += stride_;
    }
  }

 private:
  const std::byte* at_ = nullptr;
  int64_t runs_ = 0;
  int64_t stride_ = 0;
  int64_t bytes_ = 0;
  int64_t each_ = 0;
};

// Where a panel's sums go: into `partial`, and with the last step to `output`.
template <class Sum, class Output>
struct PanelSums {
  Sum* partial;
  int64_t partial_stride;
  bool first;
  bool last = false;
  Output* output = nullptr;
  int64_t output_stride = 0;
};

// A result that is written once is in no cache: asks for the lines of a tile.
template <class Output>
void ask_for_tile(Output* to, int64_t stride, int rows) {
  constexpr int kLanes = simd::kLanes<simd::Compute<Output>>;
  for (int r = 0; r < rows; ++r, to += stride) {
    for (int v = 0; v < kTileVectors; ++v) {
      __builtin_prefetch(to + v * kLanes, 1);
    }
  }
}

// Some rows of a left operand, packed.
template <class T>
class LeftOperand {
 public:
  using Arithmetic = typename ArithmeticOf<T>::type;
  using Lane = typename Arithmetic::Lane;
  using Sum = typename Arithmetic::Accumulator;

  LeftOperand(const MatrixView<T>& view, int64_t inner, int64_t chain = kChain)
      : view_(view), inner_(inner), chain_(chain) {}

  // That take() packs into.
  int64_t lanes(int64_t rows) const {
    return rows * depth_of<Arithmetic>(inner_);
  }

  // Tiles of one panel's product.
  int64_t tiles() const { return (rows_ + kTileRows - 1) / kTileRows; }

  void take(int64_t row, int64_t rows, Lane* packed) {
    rows_ = rows;
    packed_ = packed;
    for_each_step<Arithmetic>(inner_, [&](int64_t k, int64_t values) {
      for_each_chain(values, [&](int64_t lane, int64_t count) {
        const int64_t first = lane * Arithmetic::kDepth;
        pack_rows<Arithmetic>(
            view_.from(row, k + first), rows,
            std::min(count * Arithmetic::kDepth, values - first),
            packed + rows * (depth_of<Arithmetic>(k) + lane));
      });
    });
  }

  // Adds the product of the rows taken and one panel for the step at k; where
  // to.first, writes it. `columns` of the panel exist.
  template <class Output>
  void multiply(int64_t k, int64_t values, const Lane* panel, int64_t columns,
                const PanelSums<Sum, Output>& to, Ahead& ahead) const {
    constexpr int kColumns = kTileColumns<Arithmetic>;
    const KeepSums keep;
    const int64_t depth = depth_of<Arithmetic>(values);
    for_each_strip(rows_, [&](int64_t row, int height) {
      if (to.last) {
        ask_for_tile(to.output + row * to.output_stride, to.output_stride,
                     height);
      }
      ahead.ask();
      for_each_chain(values, [&](int64_t lane, int64_t count) {
        const StoreSums<Sum, Output, KeepSums> store{
            to.partial,
            to.partial_stride,
            to.first && lane == 0,
            to.last && lane + count == depth,
            to.output,
            to.output_stride,
            keep};
        multiply_stored_tile<Arithmetic>(
            height, static_cast<int>(columns), count,
            packed_rows<Arithmetic>(
                packed_ + rows_ * (depth_of<Arithmetic>(k) + lane), count),
            panel + lane * kColumns, kColumns, row, 0, store);
      });
    });
  }

 private:
  // Calls body(lane, count) for each chain of a step.
  template <class Body>
  void for_each_chain(int64_t values, const Body& body) const {
    const int64_t depth = depth_of<Arithmetic>(values);
    const int64_t length = chain_lanes<Arithmetic>(depth, chain_);
    for (int64_t lane = 0; lane < depth; lane += length) {
      body(lane, std::min(length, depth - lane));
    }
  }

  MatrixView<T> view_;
  int64_t inner_;
  int64_t chain_;
  int64_t rows_ = 0;
  const Lane* packed_ = nullptr;
};

// Whether rows are better multiplied in place, as left operand of a product
// that is transposed by that: their lanes are contiguous and need no
// conversion, and rows of a tile do not all share sets of the L1 cache.
template <class Arithmetic, class T>
bool multiplies_in_place(const MatrixView<T>& left) {
  constexpr int64_t kWay = 4096;
  return sizeof(T) * Arithmetic::kDepth == sizeof(typename Arithmetic::Lane) &&
         left.column_stride == 1 &&
         left.row_stride * static_cast<int64_t>(sizeof(T)) % kWay != 0;
}

// Adds the product of rows that are read in place, `values` of each, with a
// right operand as pack_columns packs it; where `first`, writes it. The rows'
// values fill whole lanes.
template <class T>
void multiply_in_place(const MatrixView<T>& left, int64_t rows, int64_t values,
                       const typename ArithmeticOf<T>::type::Lane* packed,
                       int64_t columns,
                       typename ArithmeticOf<T>::type::Accumulator* sums,
                       int64_t stride, bool first) {
  using Arithmetic = typename ArithmeticOf<T>::type;
  using Lane = typename Arithmetic::Lane;
  using Sum = typename Arithmetic::Accumulator;
  constexpr int64_t kColumns = kTileColumns<Arithmetic>;
  const KeepSums keep;
  const int64_t depth = depth_of<Arithmetic>(values);
  const int64_t length = chain_lanes<Arithmetic>(depth, kChain);
  for_each_strip(rows, [&](int64_t row, int height) {
    for (int64_t column = 0; column < columns; column += kColumns) {
      for (int64_t lane = 0; lane < depth; lane += length) {
        const StoreSums<Sum, Sum, KeepSums> store{
            sums, stride, first && lane == 0, false, nullptr, 0, keep};
        multiply_stored_tile<Arithmetic>(
            height, static_cast<int>(std::min(kColumns, columns - column)),
            std::min(length, depth - lane),
            RowsInPlace<Lane>{
                reinterpret_cast<const std::byte*>(left.data) +
                    lane * static_cast<int64_t>(sizeof(Lane)),
                left.row_stride * static_cast<int64_t>(sizeof(T))},
            packed + column * depth + lane * kColumns, kColumns, row, column,
            store);
      }
    }
  });
}

// Packs `count` columns of a right operand, of the step at k, as one panel.
template <class T>
void pack_panel(const MatrixView<T>& right, int64_t column, int64_t count,
                int64_t k, int64_t values,
                typename ArithmeticOf<T>::type::Lane* panel) {
  using Arithmetic = typename ArithmeticOf<T>::type;
  pack_lines<typename Arithmetic::Right>(
      right.at(k, column), right.column_stride, right.row_stride,
      static_cast<int>(count), kTileColumns<Arithmetic>, values, panel);
}

// Packs all steps of a panel, one after the other.
template <class T>
void pack_whole_panel(const MatrixView<T>& right, int64_t column, int64_t count,
                      int64_t inner,
                      typename ArithmeticOf<T>::type::Lane* panel) {
  using Arithmetic = typename ArithmeticOf<T>::type;
  for_each_step<Arithmetic>(inner, [&](int64_t k, int64_t values) {
    pack_panel<T>(right, column, count, k, values,
                  panel + depth_of<Arithmetic>(k) * kTileColumns<Arithmetic>);
  });
}

// output (rows x columns, the columns filled up to whole panels) = left right,
// where right was packed beforehand: its panels, one after the other. Sums are
// not rounded; Output picks the instance that the caller's other products need.
template <class Output, class T>
void multiply_packed_panels(LeftOperand<T> left, int64_t rows, int64_t columns,
                            int64_t inner,
                            const typename LeftOperand<T>::Lane* packed,
                            typename LeftOperand<T>::Sum* output,
                            int64_t output_stride, int64_t threads) {
  using Arithmetic = typename LeftOperand<T>::Arithmetic;
  using Lane = typename LeftOperand<T>::Lane;
  constexpr int kColumns = kTileColumns<Arithmetic>;
  const int64_t panel_stride = depth_of<Arithmetic>(inner) * kColumns;
  if (columns == 0) {
    return;
  }
  detail::for_each_rectangle<Arithmetic>(
      rows, columns, kTileRows, kColumns,
      detail::useful_threads(rows, columns, inner, threads),
      [&](int64_t row, int64_t part_rows, int64_t column,
          int64_t part_columns) {
        LeftOperand<T> own = left;
        Ahead nothing;
        const int64_t block = left_rows(part_rows);
        Lane* lanes = Workspace::of_this_thread<0>().template request<Lane>(
            left.lanes(block));
        for (int64_t first = 0; first < part_rows; first += block) {
          own.take(row + first, std::min(block, part_rows - first), lanes);
          for (int64_t n = column; n < column + part_columns; n += kColumns) {
            auto* to = output + (row + first) * output_stride + n;
            for_each_step<Arithmetic>(inner, [&](int64_t k, int64_t values) {
              own.template multiply<Output>(
                  k, values,
                  packed + n / kColumns * panel_stride +
                      depth_of<Arithmetic>(k) * kColumns,
                  kColumns, {to, output_stride, k == 0}, nothing);
            });
          }
        }
      });
}

// Columns of a product that have a right operand and a result of their own.
template <class T>
struct Part {
  MatrixView<T> right;
  int64_t columns;
  T* output;
  int64_t output_stride;
};

// One left operand times the right operands of several parts, panel by panel.
template <class T>
class PanelProduct {
 public:
  PanelProduct(const MatrixView<T>& left, int64_t rows, int64_t inner,
               std::initializer_list<Part<T>> parts, int64_t chain)
      : left_(left), rows_(rows), inner_(inner), parts_(parts), chain_(chain) {
    for (const Part<T>& part : parts_) {
      panels_ += (part.columns + kColumns - 1) / kColumns;
    }
  }

  void run(int64_t threads) const {
    if (panels_ == 0) {
      return;
    }
    detail::for_each_rectangle<Arithmetic>(
        rows_, panels_ * kColumns, kTileRows, kColumns,
        detail::useful_threads(rows_, panels_ * kColumns, inner_, threads),
        [&](int64_t row, int64_t rows, int64_t column, int64_t columns) {
          const int64_t end = (column + columns) / kColumns;
          if (rows <= kMostLeftRows) {
            run_few_rows(row, rows, column / kColumns, end);
          } else {
            run_many_rows(row, rows, column / kColumns, end);
          }
        });
  }

 private:
  using Arithmetic = typename LeftOperand<T>::Arithmetic;
  using Lane = typename LeftOperand<T>::Lane;
  using Sum = typename LeftOperand<T>::Sum;
  static constexpr int64_t kColumns = kTileColumns<Arithmetic>;
  static constexpr int64_t kPackedLanes = int64_t{1} << 21;  // of a shared L3

  struct Panel {
    const Part<T>* part;
    int64_t column;
    int64_t columns;
  };

  Panel panel(int64_t index) const {
    for (const Part<T>& part : parts_) {
      const int64_t panels = (part.columns + kColumns - 1) / kColumns;
      if (index < panels) {
        const int64_t column = index * kColumns;
        return {&part, column, std::min(kColumns, part.columns - column)};
      }
      index -= panels;
    }
    return {};
  }

  // All rows at once: a panel is packed right before it is used.
  void run_few_rows(int64_t row, int64_t rows, int64_t begin,
                    int64_t end) const {
    const int64_t step = inner_step<Arithmetic>(inner_);
    LeftOperand<T> left(left_, inner_, chain_);
    auto& left_space = Workspace::of_this_thread<0>();
    Lane* packed = Workspace::of_this_thread<2>().template request<Lane>(
        depth_of<Arithmetic>(step) * kColumns);
    left.take(row, rows, left_space.template request<Lane>(left.lanes(rows)));
    for (int64_t index = begin; index < end; ++index) {
      const Panel now = panel(index);
      for_each_step<Arithmetic>(inner_, [&](int64_t k, int64_t values) {
        pack_panel<T>(now.part->right, now.column, now.columns, k, values,
                      packed);
        const bool is_last = k + values == inner_;
        Ahead ahead;
        if (!is_last || index + 1 < end) {
          const Panel next = is_last ? panel(index + 1) : now;
          const int64_t next_k = is_last ? 0 : k + values;
          ahead = Ahead(next.part->right, next_k, next.column,
                        std::min(step, inner_ - next_k), next.columns,
                        left.tiles());
        }
        multiply(left, row, rows, now, k, values, packed, ahead);
      });
    }
    left_space.release_excess();
  }

  // A block of rows at a time, with panels that are packed for all of them.
  void run_many_rows(int64_t row, int64_t rows, int64_t begin,
                     int64_t end) const {
    const int64_t panel_size = depth_of<Arithmetic>(inner_) * kColumns;
    const int64_t block = detail::even_block(rows, kLeftBlockRows, kTileRows);
    const int64_t most = detail::even_block(
        end - begin, std::max<int64_t>(kPackedLanes / panel_size, 1), 1);
    LeftOperand<T> left(left_, inner_, chain_);
    auto& left_space = Workspace::of_this_thread<0>();
    auto& right_space = Workspace::of_this_thread<2>();
    Lane* strips = left_space.template request<Lane>(left.lanes(block));
    Lane* packed = right_space.template request<Lane>(most * panel_size);
    Ahead nothing;
    for (int64_t first = begin; first < end; first += most) {
      const int64_t count = std::min(most, end - first);
      for (int64_t i = 0; i < count; ++i) {
        const Panel now = panel(first + i);
        pack_whole_panel<T>(now.part->right, now.column, now.columns, inner_,
                            packed + i * panel_size);
      }
      for (int64_t done = 0; done < rows; done += block) {
        const int64_t block_rows = std::min(block, rows - done);
        left.take(row + done, block_rows, strips);
        for (int64_t i = 0; i < count; ++i) {
          const Panel now = panel(first + i);
          for_each_step<Arithmetic>(inner_, [&](int64_t k, int64_t values) {
            multiply(
                left, row + done, block_rows, now, k, values,
                packed + i * panel_size + depth_of<Arithmetic>(k) * kColumns,
                nothing);
          });
        }
      }
    }
    left_space.release_excess();
    right_space.release_excess();
  }

  void multiply(const LeftOperand<T>& left, int64_t row, int64_t rows,
                const Panel& panel, int64_t k, int64_t values,
                const Lane* packed, Ahead& ahead) const {
    const Part<T>& part = *panel.part;
    Sum* partial =
        Workspace::of_this_thread<1>().template request<Sum>(rows * kColumns);
    left.template multiply<T>(
        k, values, packed, panel.columns,
        {partial, kColumns, k == 0, k + values == inner_,
         part.output + row * part.output_stride + panel.column,
         part.output_stride},
        ahead);
  }

  MatrixView<T> left_;
  int64_t rows_;
  int64_t inner_;
  std::initializer_list<Part<T>> parts_;
  int64_t chain_;
  int64_t panels_ = 0;
};

// The product of a left operand, rows x inner, with each part, for few rows or
// a short inner dimension. A part may have no columns; the rest is positive.
template <class T>
void multiply_in_panels(const MatrixView<T>& left, int64_t rows, int64_t inner,
                        std::initializer_list<Part<T>> parts, int64_t chain,
                        int64_t threads) {
  PanelProduct<T>(left, rows, inner, parts, chain).run(threads);
}

}  // namespace pkg::cpu
