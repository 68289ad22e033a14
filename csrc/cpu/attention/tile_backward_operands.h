// The packed operands of the backward pass by tile registers. Its products, of
// P and dS as they lie, row by row, so that none of them is transposed:
//
//           left operand   right operand   inner dimension
//   S       Q              K^T             head size
//   dP      dO             V^T             value size
//   dQ      dS             K               keys of the block
//   dV^T    dO^T           P               rows of the block
//   dK^T    Q^T            dS              rows of the block
//
// S is made as by tile_forward_block.h, to the last bit.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/attention/backward_problem.h"
#include "cpu/attention/blocking.h"
#include "cpu/attention/row_statistics.h"
#include "cpu/attention/scratch.h"
#include "cpu/attention/tile_operands.h"
#include "cpu/attention/tile_products.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/runtime/workspace.h"
#include "cpu/tiles/micro_kernel.h"
#include "cpu/tiles/pack_tiles.h"
#include "cpu/tiles/range.h"
#include "cpu/tiles/scheme.h"
#include "host/integer_math.h"
#include "scaled_dot_product_attention.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::attention {

// Whether Q, K, V or dO may be multiplied with each other and with dS. Of
// float32: sums of products stay finite, also those of dS times
// kProbabilityScale (2^20 for each of three operands, 2^20 terms, two value
// sizes), and no part is lost of a value or of dS.
template <class Input>
bool is_fit_for_gradients(const tiles::Range& range) {
  constexpr int kMost = 20;
  return keeps_all_parts<Input>(range, kMost);
}

// What of one query head meets each of its keys, packed once for all blocks of
// keys, and D of its rows.
template <class Input>
struct TilePackedHead {
  using Element = std::byte;
  using Operands = typename TileSchemes<Input>::Scores;
  static_assert(std::is_same_v<Operands, typename TileSchemes<Input>::Values>);
  static constexpr int64_t kRows = 64;  // of a block
  static constexpr int64_t kUnits = kRows / Operands::kValues;
  static constexpr int64_t kUnitBytes = tiles::kUnitBytes<Operands>;
  static_assert(Operands::kValues == tiles::kStrip);

  int64_t query_units;        // of a query
  int64_t grad_output_units;  // of an output gradient
  int64_t key_stride;         // columns of the head size, filled up
  int64_t value_stride;       // columns of the value size, filled up
  int64_t block_size;         // bytes of a block of rows
  int64_t size;               // bytes of all
  // Whether an operand was met that tiles are not right for: then nothing that
  // came out is.
  mutable std::atomic<bool> is_refused = false;
  // The exponent of the least output gradient.
  mutable std::atomic<int> least_grad_output = 0;

  explicit TilePackedHead(const AttentionShape& shape)
      : query_units(tiles::units_of<Operands>(shape.head_size)),
        grad_output_units(tiles::units_of<Operands>(shape.value_size)),
        key_stride(round_up(shape.head_size, tiles::kStrip)),
        value_stride(round_up(shape.value_size, tiles::kStrip)),
        block_size(2 * kUnits * (query_units + grad_output_units) * kUnitBytes),
        size(ceil_div(shape.rows, kRows) * block_size) {}

  // Q and dO by rows, strip after strip, of the rows from `row` of the block.
  template <class Byte>
  Byte* queries(Byte* block, int64_t row) const {
    return block + row / tiles::kStrip * query_units * kUnitBytes;
  }
  template <class Byte>
  Byte* grad_outputs(Byte* block, int64_t row) const {
    return block +
           (kUnits * query_units + row / tiles::kStrip * grad_output_units) *
               kUnitBytes;
  }
  // Q^T and dO^T: a strip is one of columns and has kUnits units.
  template <class Byte>
  Byte* query_columns(Byte* block) const {
    return block + kUnits * (query_units + grad_output_units) * kUnitBytes;
  }
  template <class Byte>
  Byte* grad_output_columns(Byte* block) const {
    return query_columns(block) + kUnits * query_units * kUnitBytes;
  }

  // Returns whether keys are hidden: they may be left out, since what is not
  // finite is refused.
  bool pack(const BackwardProblem<Input>& problem, int64_t batch, int64_t row,
            std::byte* block) const {
    const AttentionShape& shape = problem.shape();
    const int64_t rows = std::min(kRows, shape.rows - row);
    const auto query = problem.forward.query.at(shape, batch).from(row, 0);
    const auto grad_output = problem.grad_output.at(shape, batch).from(row, 0);
    tiles::Range of_query;
    tiles::Range of_gradient;
    tiles::pack_strips<Operands, tiles::Side::Left>(
        rows_of(query), rows, shape.head_size, queries(block, 0), of_query);
    tiles::pack_strips<Operands, tiles::Side::Left>(
        rows_of(grad_output), rows, shape.value_size, grad_outputs(block, 0),
        of_gradient);
    tiles::pack_strips<Operands, tiles::Side::Left>(
        columns_of(query), shape.head_size, rows, query_columns(block),
        of_query, kUnits);
    tiles::pack_strips<Operands, tiles::Side::Left>(
        columns_of(grad_output), shape.value_size, rows,
        grad_output_columns(block), of_gradient, kUnits);
    if (!is_fit_for_gradients<Input>(of_query) ||
        !is_fit_for_gradients<Input>(of_gradient)) {
      is_refused = true;
      return false;
    }
    note_least_grad_output(of_gradient.least());
    // Of a NaN among the parts nothing may be left (tiles/split.h).
    if (!find_statistics(problem, batch, row, rows, block)) {
      is_refused = true;
    }
    return problem.forward.hides_keys();
  }

  // Whether no part of a product of output gradients and values of that range
  // is lost.
  bool allows_values(const tiles::Range& values) const {
    constexpr int kLeastProduct = -100;
    return std::is_same_v<Input, Half> ||
           least_grad_output.load(std::memory_order_relaxed) + values.least() >=
               kLeastProduct;
  }

 private:
  void note_least_grad_output(int least) const {
    int before = least_grad_output.load(std::memory_order_relaxed);
    while (least < before && !least_grad_output.compare_exchange_weak(
                                 before, least, std::memory_order_relaxed)) {
    }
  }

  // Of a packed block's rows. Returns whether they are numbers.
  bool find_statistics(const BackwardProblem<Input>& problem, int64_t batch,
                       int64_t row, int64_t rows,
                       const std::byte* block) const {
    const Scratch<std::byte> outputs{grad_output_units * kUnitBytes};
    const Scratch<float> products = TileProducts::scratch();
    const Scratch<float> sums{tiles::kSumsCount};
    std::byte* memory =
        Workspace::of_this_thread<Slot::AttentionTask>().request<std::byte>(
            outputs.size() + products.size() + sums.size());
    std::byte* const packed = outputs.take(memory);
    TileProducts multiplier(products.take(memory));
    float* const of_strip = sums.take(memory);
    bool are_numbers = true;
    for (int64_t strip = 0; strip < rows; strip += tiles::kStrip) {
      const int used =
          static_cast<int>(std::min<int64_t>(tiles::kStrip, rows - strip));
      float deltas[tiles::kStrip] = {};
      const auto add = [&](const Matrices<Input>& outputs_of) {
        return add_diagonal(
            outputs_of.at(problem.shape(), batch).from(row + strip, 0), used,
            problem.shape().value_size, grad_outputs(block, strip), packed,
            multiplier, of_strip, deltas);
      };
      if (!add(problem.output) || (problem.output_residual.data != nullptr &&
                                   !add(problem.output_residual))) {
        return compute_statistics(problem, batch, row, rows);
      }
      are_numbers &=
          store_statistics(problem, batch, row + strip, used, deltas);
    }
    return are_numbers;
  }

  // Adds dO * O of each row of a strip, which is the diagonal of dO O^T: in the
  // order in which dO V^T is added up, so that the difference of the two is
  // exactly 0 where one key has all the probability. False: an output is not
  // fit for it.
  static bool add_diagonal(const MatrixView<Input>& output, int rows,
                           int64_t columns, const std::byte* grad_outputs,
                           std::byte* packed, TileProducts& products,
                           float* sums, float* deltas) {
    constexpr int kMost = 60;
    tiles::Range range;
    tiles::pack_strips<Operands, tiles::Side::Right>(rows_of(output), rows,
                                                     columns, packed, range);
    if (!keeps_all_parts<Input>(range, kMost)) {
      return false;
    }
    const tiles::Registers registers;
    products.store<Operands>(
        {rows, rows},
        {grad_outputs, packed, tiles::units_of<Operands>(columns)}, sums,
        tiles::kSumsStride);
    products.finish();
    for (int i = 0; i < rows; ++i) {
      deltas[i] += sums[i * tiles::kSumsStride + i];
    }
    return true;
  }
};

}  // namespace pkg::cpu::attention

#endif
