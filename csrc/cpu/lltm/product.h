// The products of lltm, over the core of cpu/gemm/gemm.h: of few rows with
// large weights, which are read once and not used again soon, and the gradient
// of these weights, which is written once. Sums are kept in the accumulator's
// type, and may be added to.
//
// The micro-kernel alone runs at 97 % of the peak with micro-panels of 256
// k-groups; a product with 128 rows loses far more around it, to memory that is
// read in runs too short for the processor's own prefetchers. 128 x 3072 x
// 1536, float32, Zen 4, one thread, at least 10.2 ms: 15.4 ms by
// cpu/gemm/gemm.h; 12.4 with a micro-panel packed right before its product
// while the next one is prefetched; 11.7 with W in place as left operand and
// the result transposed, which packs no weights, but wants registers filled
// with rows of X. The weights' gradient: 12.3, and 11.5 with each micro-tile of
// the result prefetched. docs/tuning/gemm.md has all of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "cpu/gemm/gemm.h"
#include "cpu/runtime/cache.h"
#include "cpu/runtime/workspace.h"
#include "host/integer_math.h"

namespace pkg::cpu {

// Rows of a left operand that a thread packs at a time: at 1536 k-groups each
// they fill 2 MiB. A micro-panel of the right one that is packed for them is
// used for as many.
inline constexpr int64_t kMostLeftRows = 32 * kMR;
// Where there are more rows: strips that are packed together.
inline constexpr int64_t kLeftBlockRows = 12 * kMR;

inline int64_t left_rows(int64_t rows) {
  return std::min(rows, detail::even_block(rows, kMostLeftRows, kMR));
}

// KC here, in k-groups: what fits L1 beside what is prefetched. 128 took 12.8
// ms where this takes 12.4 (docs/tuning/gemm.md).
inline constexpr int64_t kPanelDepth = 256;
// Accumulation length: k-groups that are summed one after the other, a quarter
// of gemm.h's. A step's errors are carried through all later steps of a
// sequence, and those of a sum grow with its length: with 512 the gates at
// (128, 512, 1024) had 1.7 times PyTorch's error. The sums in between stay in
// the L1 cache; adding to them costs about 1 %.
inline constexpr int64_t kCellAccumulationLength = 128;
// For the weights' gradient of a sequence: autograd sums each step's rows on
// their own and then these sums. Of n terms in parts of c the error's variance
// grows as n (c + n / c), least for c = sqrt(n); this is at most three times as
// much, so that the error is less than twice PyTorch's however long the steps.
inline int64_t sequence_accumulation_length(int64_t rows) {
  return rows <= 512 ? 32 : 64;
}

// Values of a block of K.
template <class Arithmetic>
int64_t inner_step(int64_t inner) {
  return detail::even_block(inner, kPanelDepth * Arithmetic::kKGroupSize,
                            kKCUnit<Arithmetic>);
}

// The depth of a block is summed in parts of up to `most` k-groups.
template <class Arithmetic>
int64_t accumulation_depth(int64_t depth, int64_t most) {
  return detail::even_block(depth, most,
                            kKCUnit<Arithmetic> / Arithmetic::kKGroupSize);
}

// Calls body(k, values) for each block of K: loop 4 of cpu/gemm/contract.h.
template <class Arithmetic, class Body>
void for_each_step(int64_t inner, const Body& body) {
  for_each_block(inner, inner_step<Arithmetic>(inner), body);
}

// Software prefetch of the part of a matrix that is packed next, some lines at
// a time between the micro-tiles of the product before.
class NextPanel {
 public:
  NextPanel() = default;

  // The lines of `values` x `columns` of a right operand from its (k, column)
  // on, divided among so many micro-tiles.
  template <class T>
  NextPanel(const MatrixView<T>& right, int64_t k, int64_t column,
            int64_t values, int64_t columns, int64_t tiles)
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

  void prefetch_some() {
    for (int64_t i = 0; i < each_ && runs_ > 0; ++i, --runs_) {
      prefetch_bytes<PrefetchTo::L2>(at_, bytes_);
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

// Some rows of a left operand, packed.
template <class T>
class LeftOperand {
 public:
  using Arithmetic = typename ArithmeticOf<T>::type;
  using KGroup = typename Arithmetic::KGroup;
  using Sum = typename Arithmetic::Accumulator;

  LeftOperand(const MatrixView<T>& view, int64_t inner,
              int64_t accumulation_length = kCellAccumulationLength)
      : view_(view), inner_(inner), accumulation_length_(accumulation_length) {}

  // K-groups that take() packs `rows` rows into.
  int64_t size(int64_t rows) const {
    return rows * depth_of<Arithmetic>(inner_);
  }

  // Micro-tiles of one micro-panel's product.
  int64_t tiles() const { return ceil_div(rows_, kMR); }

  void take(int64_t row, int64_t rows, KGroup* packed) {
    rows_ = rows;
    packed_ = packed;
    for_each_step<Arithmetic>(inner_, [&](int64_t k, int64_t values) {
      for_each_part(values, [&](int64_t first, int64_t count) {
        const int64_t skipped = first * Arithmetic::kKGroupSize;
        pack_rows<Arithmetic>(
            view_.from(row, k + skipped), rows,
            std::min(count * Arithmetic::kKGroupSize, values - skipped),
            packed + rows * (depth_of<Arithmetic>(k) + first));
      });
    });
  }

  // Adds the product of the rows taken and one panel for the step at k; where
  // to.first, writes it. `columns` of the panel exist.
  template <class Output>
  void multiply(int64_t k, int64_t values, const KGroup* panel, int64_t columns,
                const PanelSums<Sum, Output>& to, NextPanel& next) const {
    constexpr int kColumns = kNR<Arithmetic>;
    const KeepSums keep;
    const int64_t depth = depth_of<Arithmetic>(values);
    for_each_strip(rows_, [&](int64_t row, int height) {
      if (to.last) {
        // A result that is written once is in no cache.
        prefetch_registers<PrefetchTo::Write, kNRVectors>(
            to.output + row * to.output_stride, to.output_stride, height);
      }
      next.prefetch_some();
      for_each_part(values, [&](int64_t first, int64_t count) {
        const StoreSums<Sum, Output, KeepSums> store{
            to.partial,
            to.partial_stride,
            to.first && first == 0,
            to.last && first + count == depth,
            to.output,
            to.output_stride,
            keep};
        multiply_micro_tile<Arithmetic>(
            height, static_cast<int>(columns), count,
            packed_rows<Arithmetic>(
                packed_ + rows_ * (depth_of<Arithmetic>(k) + first), count),
            panel + first * kColumns, kColumns, row, 0, store);
      });
    });
  }

 private:
  // Calls body(first, count) for the k-groups of each part of a block that is
  // summed on its own.
  template <class Body>
  void for_each_part(int64_t values, const Body& body) const {
    const int64_t depth = depth_of<Arithmetic>(values);
    for_each_block(depth,
                   accumulation_depth<Arithmetic>(depth, accumulation_length_),
                   body);
  }

  MatrixView<T> view_;
  int64_t inner_;
  int64_t accumulation_length_;
  int64_t rows_ = 0;
  const KGroup* packed_ = nullptr;
};

// Whether rows are better multiplied in place, as left operand of a product
// that is transposed by that: they need no conversion, and rows of a strip do
// not all share sets of the L1 cache.
template <class Arithmetic, class T>
bool multiplies_in_place(const MatrixView<T>& left) {
  return k_groups_are_contiguous<Arithmetic>(left) &&
         !rows_share_one_set(left.row_stride * static_cast<int64_t>(sizeof(T)));
}

// Adds the product of rows that are read in place, `values` of each, with a
// right operand as pack_columns packs it; where `first`, writes it. The rows'
// values fill whole k-groups.
template <class T>
void multiply_in_place(const MatrixView<T>& left, int64_t rows, int64_t values,
                       const typename ArithmeticOf<T>::type::KGroup* packed,
                       int64_t columns,
                       typename ArithmeticOf<T>::type::Accumulator* sums,
                       int64_t stride, bool first) {
  using Arithmetic = typename ArithmeticOf<T>::type;
  using Sum = typename Arithmetic::Accumulator;
  constexpr int64_t kColumns = kNR<Arithmetic>;
  const KeepSums keep;
  const int64_t depth = depth_of<Arithmetic>(values);
  const int64_t length =
      accumulation_depth<Arithmetic>(depth, kCellAccumulationLength);
  for_each_strip(rows, [&](int64_t row, int height) {
    for_each_block(columns, kColumns, [&](int64_t column, int64_t count) {
      for_each_block(depth, length, [&](int64_t from, int64_t part) {
        const StoreSums<Sum, Sum, KeepSums> store{
            sums, stride, first && from == 0, false, nullptr, 0, keep};
        multiply_micro_tile<Arithmetic>(
            height, static_cast<int>(count), part,
            rows_in_place<Arithmetic>(
                left.from(0, from * Arithmetic::kKGroupSize)),
            packed + column * depth + from * kColumns, kColumns, row, column,
            store);
      });
    });
  });
}

// Packs all blocks of K of a micro-panel, one after the other.
template <class T>
void pack_whole_panel(const MatrixView<T>& right, int64_t column, int64_t count,
                      int64_t inner,
                      typename ArithmeticOf<T>::type::KGroup* panel) {
  using Arithmetic = typename ArithmeticOf<T>::type;
  for_each_step<Arithmetic>(inner, [&](int64_t k, int64_t values) {
    pack_micro_panel<Arithmetic>(
        right.from(k, 0), column, count, values,
        panel + depth_of<Arithmetic>(k) * kNR<Arithmetic>);
  });
}

// output (rows x columns, the columns filled up to whole panels) = left right,
// where right was packed beforehand: its panels, one after the other. Sums are
// not rounded; Output picks the instance that the caller's other products need.
template <class Output, class T>
void multiply_packed_panels(LeftOperand<T> left, int64_t rows, int64_t columns,
                            int64_t inner,
                            const typename LeftOperand<T>::KGroup* packed,
                            typename LeftOperand<T>::Sum* output,
                            int64_t output_stride, int64_t threads) {
  using Arithmetic = typename LeftOperand<T>::Arithmetic;
  using KGroup = typename LeftOperand<T>::KGroup;
  constexpr int kColumns = kNR<Arithmetic>;
  const int64_t panel_stride = depth_of<Arithmetic>(inner) * kColumns;
  if (columns == 0) {
    return;
  }
  detail::for_each_rectangle<Arithmetic>(
      rows, columns, kMR, kColumns,
      detail::useful_threads(rows, columns, inner, threads),
      [&](int64_t row, int64_t part_rows, int64_t column,
          int64_t part_columns) {
        LeftOperand<T> own = left;
        NextPanel nothing;
        const int64_t block = left_rows(part_rows);
        KGroup* packed_left = Workspace::of_this_thread<Slot::PackedLeft>()
                                  .template request<KGroup>(left.size(block));
        for (int64_t first = 0; first < part_rows; first += block) {
          own.take(row + first, std::min(block, part_rows - first),
                   packed_left);
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
               std::initializer_list<Part<T>> parts,
               int64_t accumulation_length)
      : left_(left),
        rows_(rows),
        inner_(inner),
        parts_(parts),
        accumulation_length_(accumulation_length) {
    for (const Part<T>& part : parts_) {
      panels_ += ceil_div(part.columns, kColumns);
    }
  }

  void run(int64_t threads) const {
    if (panels_ == 0) {
      return;
    }
    detail::for_each_rectangle<Arithmetic>(
        rows_, panels_ * kColumns, kMR, kColumns,
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
  using KGroup = typename LeftOperand<T>::KGroup;
  using Sum = typename LeftOperand<T>::Sum;
  static constexpr int64_t kColumns = kNR<Arithmetic>;
  static constexpr int64_t kPackedKGroups = int64_t{1} << 21;  // of a shared L3

  struct Panel {
    const Part<T>* part;
    int64_t column;
    int64_t columns;
  };

  Panel panel(int64_t index) const {
    for (const Part<T>& part : parts_) {
      const int64_t panels = ceil_div(part.columns, kColumns);
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
    LeftOperand<T> left(left_, inner_, accumulation_length_);
    auto& left_space = Workspace::of_this_thread<Slot::PackedLeft>();
    KGroup* packed =
        Workspace::of_this_thread<Slot::PackedRight>().template request<KGroup>(
            depth_of<Arithmetic>(step) * kColumns);
    left.take(row, rows, left_space.template request<KGroup>(left.size(rows)));
    for (int64_t index = begin; index < end; ++index) {
      const Panel now = panel(index);
      for_each_step<Arithmetic>(inner_, [&](int64_t k, int64_t values) {
        pack_micro_panel<Arithmetic>(now.part->right.from(k, 0), now.column,
                                     now.columns, values, packed);
        const bool is_last = k + values == inner_;
        NextPanel after;
        if (!is_last || index + 1 < end) {
          const Panel next = is_last ? panel(index + 1) : now;
          const int64_t next_k = is_last ? 0 : k + values;
          after = NextPanel(next.part->right, next_k, next.column,
                            std::min(step, inner_ - next_k), next.columns,
                            left.tiles());
        }
        multiply(left, row, rows, now, k, values, packed, after);
      });
    }
    left_space.release_excess();
  }

  // A block of rows at a time, with panels that are packed for all of them.
  void run_many_rows(int64_t row, int64_t rows, int64_t begin,
                     int64_t end) const {
    const int64_t panel_size = depth_of<Arithmetic>(inner_) * kColumns;
    const int64_t block = detail::even_block(rows, kLeftBlockRows, kMR);
    const int64_t most = detail::even_block(
        end - begin, std::max<int64_t>(kPackedKGroups / panel_size, 1), 1);
    LeftOperand<T> left(left_, inner_, accumulation_length_);
    auto& left_space = Workspace::of_this_thread<Slot::PackedLeft>();
    auto& right_space = Workspace::of_this_thread<Slot::PackedRight>();
    KGroup* strips = left_space.template request<KGroup>(left.size(block));
    KGroup* packed = right_space.template request<KGroup>(most * panel_size);
    NextPanel nothing;
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
                const KGroup* packed, NextPanel& next) const {
    const Part<T>& part = *panel.part;
    Sum* partial =
        Workspace::of_this_thread<Slot::PartialSums>().template request<Sum>(
            rows * kColumns);
    left.template multiply<T>(
        k, values, packed, panel.columns,
        {partial, kColumns, k == 0, k + values == inner_,
         part.output + row * part.output_stride + panel.column,
         part.output_stride},
        next);
  }

  MatrixView<T> left_;
  int64_t rows_;
  int64_t inner_;
  std::initializer_list<Part<T>> parts_;
  int64_t accumulation_length_;
  int64_t panels_ = 0;
};

// The product of a left operand, rows x inner, with each part, for few rows or
// a short inner dimension. A part may have no columns; the rest is positive.
template <class T>
void multiply_in_panels(const MatrixView<T>& left, int64_t rows, int64_t inner,
                        std::initializer_list<Part<T>> parts,
                        int64_t accumulation_length, int64_t threads) {
  PanelProduct<T>(left, rows, inner, parts, accumulation_length).run(threads);
}

}  // namespace pkg::cpu
